"""Which reading of the paper's protocol fits its numbers? python scripts/protocol.py [rows=FOLDER] [out=FILE]

Every table is made from rows: the same images, one question at a time. The criterion is the mean absolute difference
(MAD) from the published ViT-T numbers over the cells that a question touches, with its standard error by bootstrap over
images (1,000 draws of the images, seeded).
"""

from pathlib import Path

import numpy as np
import pandas as pd

from dap_bench.command import command
from dap_bench.errors import UserError
from dap_bench.report.compare import published
from dap_bench.report.layouts import label, ordered, paper
from dap_bench.report.rows import CellRows, load_rows

Reading = tuple[str, str]  # the cell that holds it, and the metric's name there
Question = dict[str, dict[tuple[str, str], Reading]]  # answer -> where each published (method, metric) is read


def readings(metric: str, names: dict[str, str]) -> Question:
    """A question about a metric: each answer is a column of the protocol cells of three methods."""
    return {answer: {(m, metric): (m, column) for m in ("ar", "gradcam", "legrad")} for answer, column in names.items()}


def variants(method: str, original: str, others: dict[str, str]) -> Question:
    """A question about a method: the original is in the whole experiment, every other answer a cell of its own."""
    asked = ("deletion", "cs", "tcc", "afs")
    first = {original: {(method, metric): (method, CHOSEN[metric]) for metric in asked}}
    return first | {answer: {(method, metric): (cell, metric) for metric in asked} for answer, cell in others.items()}


DRAWS = 1000  # of the bootstrap
CHOSEN = {  # what metric=paper has become, by its names in metric=protocol
    "deletion": "deletion_grey",
    "insertion": "insertion_blur8",
    "cs": "cs_pixel",
    "tcc": "tcc_20",
    "afs": "afs_pixel",
}

QUESTIONS = {
    "What do removed pixels become?": readings(
        "deletion", {"grey": "deletion_grey", "black": "deletion_black", "blur": "deletion_blur"}
    ),
    "What does insertion begin with?": readings(
        "insertion",
        {
            "blur 51, sigma 8": "insertion_blur8",
            "blur 51, sigma 10": "insertion_blur",
            "blur 11, sigma 5": "insertion_mild",
            "grey": "insertion_grey",
        },
    ),
    "How many patches does TCC keep, and what is around them?": readings(
        "tcc",
        {"20, grey": "tcc_20", "19, grey": "tcc_19", "20, black": "tcc_black", "10 % of pixels, grey": "tcc_pixel"},
    ),
    "CS over pixels or patches?": readings("cs", {"pixels": "cs_pixel", "patches": "cs_patch"}),
    "AFS over pixels or patches?": readings("afs", {"pixels": "afs_pixel", "patches": "afs_patch"}),
    "AttR": variants(
        "attr",
        "original: layer readout, max",
        {
            "layer readout, mean": "attr_mean",
            "layer readout, max, clamped": "attr_clamp",
            "path integral, max": "attr_path",
            "final logit, max": "attr_final",
            "final logit, max, clamped": "attr_final_clamp",
        },
    ),
    "Grad-CAM: ReLU, and who goes first among equals": variants(
        "gradcam", "ReLU, raster order", {"ReLU, random order": "gradcam_ties", "signed": "gradcam_signed"}
    ),
    "CDAM: negative values, and who goes first among equals": variants(
        "cdam",
        "clamped, raster order",
        {"clamped, random order": "cdam_ties", "signed": "cdam_keep"},
    ),
    "LeGrad: where the layers are read": variants(
        "legrad", "class token", {"mean of all tokens": "legrad_mean", "final logit": "legrad_final"}
    ),
    "GMAR: whose gradients weigh the heads": variants(
        "gmar", "norm1 of the last block", {"attention of each layer": "gmar_attention"}
    ),
}


INTRODUCTION = """# What the paper's numbers were computed with

The paper leaves open how several of its numbers were computed. Here each open question is put to rows: of 400 ImageNet
validation images drawn at random, by the real ViT-T, with curves in 10 steps, beside the published ViT-T numbers of
the non-balanced setting. MAD is the mean absolute difference from the published numbers over the lines of a table, with
its standard error by bootstrap over images; the smallest is in bold. The paper used training images, which a model
knows better, so the last line has the MAD over the images that the model gets right: an answer that wins both does not
hang on which images were taken.

One protocol was chosen for all methods, the one with the smallest MAD, and each method is its original. Since an option
of a metric touches only that metric's numbers and a variant only its own method's, the best answers together are the
best joint setting. They are the defaults of `metric=paper` and of `conf/method/`; all the others are options.

`python scripts/protocol.py` makes this page. What is chosen comes from `results/reference/vit_t`, of whose 800 random
images the 400 are a part; everything else from `results/reference/protocol`, where `cell.json` holds each config and
command. But for Target-only, what was only tried was explained in single precision, where of nearly equal pixels
another may come first on another CPU: between single and double precision one image's Del or Ins in 20 moves by more
than 1e-4, none by more than 0.006, and no mean over 800 by more than 2e-5. For example (what the commands need is in
the README):

```sh
only_tried='experiment=reference explain_precision=fp32 sampler=non_balanced sampler.n=400'
python -m dap_bench $only_tried metric=protocol method=gradcam
python -m dap_bench $only_tried 'metric=[deletion,cs,tcc,afs]' metric.deletion.steps=10 \\
    method=attr method.readout=final name=attr_final
```"""

ANSWERS = {
    "What do removed pixels become?": "Grey (zero after normalisation). Black comes nearer on the images that the "
    "model gets right, but it loses what sets the methods apart: the paper has Grad-CAM 0.026 above AR, grey 0.021, "
    "black nothing.",
    "What does insertion begin with?": "A strong blur. Sigma 8, torchvision's own choice for a kernel of 51, and "
    "sigma 10 cannot be told apart, since images that the model knows better would move both up; a weaker blur or "
    "grey is far off.",
    "How many patches does TCC keep, and what is around them?": "20 of 196 patches on grey. 19 are lower still, "
    "black is as far above as grey is below, and pixels instead of patches give half.",
    "CS over pixels or patches?": "Pixels of the heatmap, by a little.",
    "AFS over pixels or patches?": "Pixels of the heatmap: patches do not fit.",
    "AttR": "The original stays. The final logit fits AFS and misses CS, the original the other way round, and over "
    "all four numbers no variant is nearer by more than its error.",
    "Grad-CAM: ReLU, and who goes first among equals": "ReLU: with negative values AFS has less than half of the "
    "paper's. The order of the equals, half of the map, hardly matters.",
    "CDAM: negative values, and who goes first among equals": "Clamped: with negative values AFS does not fit at "
    "all. Most of the map is zero then, and raster order is nearer than a random one.",
    "LeGrad: where the layers are read": "At the class token or over all tokens: nearest on all images is the one, "
    "on those that the model gets right the other. The original, the class token, stays. The final logit does not "
    "fit.",
    "GMAR: whose gradients weigh the heads": "The numbers cannot tell; both are rollout in all but name. The "
    "published weights stay.",
    "How many steps?": "20. From 10 steps to 20 the means move by at most 0.005, from 20 to 40 by 0.001, where half "
    "a 95 % interval of 800 images is 0.012 for Del and 0.017 for Ins. The areas come from the kept curves: every "
    "point of them, every second, every fourth. The last column is the mean change of an image from the number of "
    "steps before.",
    "Target-only": "Algebraically it equals Uniform after row normalisation, yet Table 2 shows a difference. Two "
    "readings do differ: weights applied after normalisation (`no_renorm`) or rows of zero weight left empty "
    "(`zero_rows`). Table 2 has no ViT-T, so what is compared is the share of DAP's value that Target-only has. The "
    "first is nearer and the default, though it misses AFS, which the second meets.",
    "LDA": "No reading gives Table 1's numbers. The nearest takes Grad-CAM at the output of each block as that "
    "layer's reference: it meets AttR and nearly DAP, but AR and GMAR come out at zero where the paper has 0.06. It "
    "is the default. As printed all values are far too high. Table 2's LDA is another quantity: there DAP has 0.87 "
    "and Uniform is negative, as against the prior.",
    "All of it": "The chosen protocol against every ViT-T number of Tables 1 and 3, both draws of 800 images, curves "
    "in 20 steps: on all images, and on those that the model gets right, three quarters of them. Del and Ins lie "
    "below the paper on the former and above on the latter; training images would lie between.",
}

LDA = {
    "own_final": "as printed: accumulated map, own final map",
    "own_single": "single layer, own final map",
    "own_added": "what a layer adds, own final map",
    "own_pearson": "as printed, Pearson",
    "own_cosine": "as printed, cosine",
    "own_overlap": "as printed, overlap of the top 20 patches",
    "own_raw_attention": "raw attention of layer l, own final map",
    "own_gradcam_norm1": "Grad-CAM at norm1 of layer l, own final map",
    "own_gradcam_output": "Grad-CAM at the output of layer l, own final map",
    "last_attention": "accumulated map, last layer's attention",
    "prior": "accumulated map, Grad-CAM prior (fits Table 2)",
    "prior_single": "single layer, Grad-CAM prior",
    "prior_overlap": "accumulated map, Grad-CAM prior, overlap",
    "layers_norm1": "accumulated map, Grad-CAM at norm1 of layer l",
    "layers_output": "accumulated map, Grad-CAM at the output of layer l",
    "layers_output_relu": "the same with ReLU",
    "layers_output_pixel": "the same over pixels",
    "layers_output_single": "single layer, Grad-CAM at the output of layer l",
    "layers_output_pearson": "the same accumulated, Pearson",
    "layers_output_cosine": "the same accumulated, cosine",
}

SAMPLERS, METRICS = paper("table1").samplers, paper("table1").metrics
METHODS = ordered({*paper("table1").methods, *paper("table3").methods})


@command()
def main(
    rows: str = "results/reference/protocol",
    reference: str = "results/reference/vit_t",
    paper: str = "results/paper",
    out: str = "results/reference/PROTOCOL.md",
) -> None:
    try:
        sections = _sections(load_rows(rows), load_rows(reference), published(paper))
    except KeyError as error:
        raise UserError(f"{rows} and {reference} do not hold {error}, which the page needs.") from error
    texts = [f"## {title}\n\n{ANSWERS[title]}\n\n{section}" for title, section in sections.items()]
    Path(out).write_text("\n\n".join([INTRODUCTION, *texts]) + "\n")
    print(f"wrote {out}")


def _sections(tried: list[CellRows], whole: list[CellRows], printed: pd.DataFrame) -> dict[str, str]:
    """The tables by their titles."""
    cells = {cell.names["method"]: cell for cell in tried}
    random = {cell.names["method"]: cell for cell in whole if cell.names["sampler"] == "non_balanced"}
    values = {(name, metric): cell.values(metric) for name, cell in cells.items() for metric in cell.info["metrics"]}
    for method, cell in random.items():  # on all 800 images; a table is of those that its columns share
        values |= {(method, column): in_ten_steps(cell, metric) for metric, column in CHOSEN.items()}
    numbers = printed.query("model == 'vit_t'").drop_duplicates(["sampler", "method", "metric"])
    numbers = numbers.set_index(["sampler", "method", "metric"])["published"]
    theirs = numbers["non_balanced"]
    known = random["ar"].rows
    right = set(known.loc[known["predicted"] == known["label"], "sample_id"])
    sections = {title: table(question, values, theirs, right) for title, question in QUESTIONS.items()}
    sections["How many steps?"] = steps_table(random, cells["dap_steps"])
    targets = {"no_renorm": random["dap_target"], "zero_rows": cells["dap_target_zero_rows"]}
    sections["Target-only"] = target_table(targets, random["dap"], printed)
    sections["LDA"] = lda_table(cells, theirs)
    sections["All of it"] = joint_table(whole, numbers)
    return sections


def table(question: Question, values: dict[Reading, pd.Series], theirs: pd.Series, right: set[str]) -> str:
    """One column per answer, one line per published number, and the criterion below."""
    columns = {
        answer: pd.DataFrame({key: values[place] for key, place in places.items()})
        for answer, places in question.items()
    }
    keys = list(next(iter(question.values())))
    images = sorted(set.intersection(*(set(found.dropna().index) for found in columns.values())))
    columns = {answer: found.loc[images] for answer, found in columns.items()}
    lines = [f"| {len(images)} images | paper | " + " | ".join(columns) + " |", "|---" * (2 + len(columns)) + "|"]
    for method, metric in keys:
        ours = " | ".join(f"{found[method, metric].mean():.3f}" for found in columns.values())
        lines.append(f"| {label(method)} {label(metric)} | {theirs[method, metric]:.3f} | {ours} |")
    for title, of in (("MAD", images), ("MAD, right", [image for image in images if image in right])):
        fits = [_fit(found.loc[of], theirs[keys].to_numpy()) for found in columns.values()]
        lines.append(f"| {title} | | " + " | ".join(_marked(fits, 3)) + " |")
    return "\n".join(lines)


def in_ten_steps(cell: CellRows, metric: str) -> pd.Series:
    """A metric's values as metric=protocol has them: of a curve in 20 steps every second point."""
    if metric not in ("deletion", "insertion"):
        return cell.values(metric)
    return pd.Series(_areas(cell.rows, metric, 10), cell.rows["sample_id"])


def steps_table(random: dict[str, CellRows], finer: CellRows) -> str:
    """Areas under the curves that were kept, from every point of them, every second and every fourth."""
    lines = ["| | images | 10 steps | 20 steps | 40 steps | change per image |", "|---" * 6 + "|"]
    for metric in ("deletion", "insertion"):
        for cell in (*(random[method] for method in METHODS), finer):
            areas = [_areas(cell.rows, metric, steps) for steps in ((10, 20) if cell is not finer else (10, 20, 40))]
            means = [f"{area.mean():.4f}" for area in areas] + [""] * (3 - len(areas))
            change = np.abs(areas[-1] - areas[-2]).mean()
            name = f"{label(cell.names['method'].removesuffix('_steps'))} {label(metric)}"
            lines.append(f"| {name} | {len(cell.rows)} | " + " | ".join(means) + f" | {change:.4f} |")
    return "\n".join(lines)


def joint_table(whole: list[CellRows], numbers: pd.Series) -> str:
    """The chosen protocol against all published ViT-T numbers of Tables 1 and 3, on all images and on easy ones."""
    lines = [
        "| | numbers | MAD, all images | mean difference | MAD, predicted class is the label | mean difference |",
        "|---" * 6 + "|",
    ]
    fits = [_differences(whole, numbers, right) for right in (False, True)]
    metrics = fits[0][0].index.get_level_values("metric")
    for metric in (*METRICS, "together"):
        of = (metrics == metric) | (metric == "together")
        cells = [label(metric), str(of.sum())]
        for difference, drawn in fits:
            error = np.abs(drawn[:, of]).mean(1).std()
            cells += [f"{difference[of].abs().mean():.3f} ± {error:.3f}", f"{difference[of].mean():+.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _differences(whole: list[CellRows], numbers: pd.Series, right: bool) -> tuple[pd.Series, np.ndarray]:
    """Ours minus theirs, once and for images drawn with replacement; `right`: of the images the model gets right."""
    random = np.random.default_rng(0)
    means, draws = [], []
    for sampler in SAMPLERS:
        cells = {cell.names["method"]: cell for cell in whole if cell.names["sampler"] == sampler}
        rows = cells["ar"].rows.set_index("sample_id")
        images = rows.index[(rows["predicted"] == rows["label"]) | (not right)]
        keys = [key for key in numbers.dropna().index if key[0] == sampler and key[1] in cells]
        values = pd.DataFrame({key: cells[key[1]].values(key[2]).reindex(images) for key in keys})
        means.append(values.mean().rename_axis(numbers.index.names))
        draws.append(np.stack([_draw(values.to_numpy(), random) for _ in range(DRAWS)]))
    ours = pd.concat(means)
    theirs = numbers[ours.index]
    return ours - theirs, np.hstack(draws) - theirs.to_numpy()


def lda_table(cells: dict[str, CellRows], theirs: pd.Series) -> str:
    """One line per reading: Table 1's four values for ViT-T, by the readings that metric=lda_readings has."""
    methods = ("ar", "attr", "gmar", "dap")
    numbers = np.array([theirs[method, "lda"] for method in methods])
    found = []
    for reading, text in LDA.items():
        values = pd.DataFrame({m: cells[f"{m}_lda"].values(reading) for m in methods}).dropna()
        found.append((text, len(values), values.mean(), *_fit(values, numbers)))
    lines = ["| reading | images | " + " | ".join(map(label, methods)) + " | MAD |", "|---" * 7 + "|"]
    lines.append("| paper, Table 1 | | " + " | ".join(f"{number:.3f}" for number in numbers) + " | |")
    for text, count, means, mad, error in sorted(found, key=lambda line: line[3]):
        lines.append(
            f"| {text} | {count} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {mad:.3f} ± {error:.3f} |"
        )
    return "\n".join(lines)


def target_table(readings: dict[str, CellRows], dap: CellRows, paper: pd.DataFrame) -> str:
    """Target-only relative to DAP: Table 2 has it for ViT-B and ViT-L, the rows for ViT-T."""
    printed = paper.query("table == 'table2'").set_index(["method", "metric", "model"])["published"]
    metrics = ["cs", "tcc", "lda_prior", "afs"]
    theirs = (printed["dap_target"] / printed["dap"]).unstack().loc[metrics, ["vit_b", "vit_l"]].to_numpy()
    ratios, mads = [], []
    for cell in readings.values():
        pairs = [part.values(metric) for part in (cell, dap) for metric in metrics]
        values, random = pd.concat(pairs, axis=1, join="inner").to_numpy(), np.random.default_rng(0)
        means = [np.nanmean(values, axis=0), *(_draw(values, random) for _ in range(DRAWS))]
        shares = [mean[: len(metrics)] / mean[len(metrics) :] for mean in means]
        fits = [np.abs(share[:, None] - theirs).mean() for share in shares]
        ratios.append(shares[0])
        mads.append((fits[0], np.std(fits[1:])))
    lines = [
        f"| Target-only / DAP, {len(values)} images | paper, ViT-B | paper, ViT-L | " + " | ".join(readings) + " |",
        "|---" * (3 + len(readings)) + "|",
    ]
    for metric, line in zip(metrics, np.column_stack([theirs, *ratios]), strict=True):
        lines.append(f"| {label(metric)} | " + " | ".join(f"{ratio:.2f}" for ratio in line) + " |")
    return "\n".join([*lines, "| MAD | | | " + " | ".join(_marked(mads, 2)) + " |"])


def _areas(rows: pd.DataFrame, metric: str, steps: int) -> np.ndarray:
    """Areas under the stored curves, from as many of their points as these steps need."""
    points = np.stack(rows[f"{metric}_curve"].to_list())
    return np.trapezoid(points[:, :: (points.shape[1] - 1) // steps], dx=1 / steps)


def _fit(values: pd.DataFrame, theirs: np.ndarray) -> tuple[float, float]:
    """The mean absolute difference of the means from the published numbers, and its standard error."""
    ours, random = values.to_numpy(), np.random.default_rng(0)
    error = np.std([np.abs(_draw(ours, random) - theirs).mean() for _ in range(DRAWS)])
    return float(np.abs(ours.mean(0) - theirs).mean()), float(error)


def _marked(fits: list[tuple[float, float]], digits: int) -> list[str]:
    """MADs with their errors, the smallest in bold."""
    best = min(mad for mad, _ in fits)
    stars = ["**" if mad == best else "" for mad, _ in fits]
    return [f"{s}{mad:.{digits}f}{s} ± {error:.{digits}f}" for s, (mad, error) in zip(stars, fits, strict=True)]


def _draw(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Column means over images drawn with replacement, the same images for all columns."""
    return np.nanmean(values[random.integers(0, len(values), len(values))], axis=0)


if __name__ == "__main__":
    main()
