"""Which reading of the paper's protocol fits its numbers? python scripts/protocol.py

Every table is made from rows, and so is every number in the text around it: the same images, one question at a time.
The criterion is the mean absolute difference (MAD) from the published ViT-T numbers over the lines of a table, with its
standard error by bootstrap over images (1,000 draws of the images, seeded).
"""

import itertools
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd

from dap_bench import files
from dap_bench.command import Published, command
from dap_bench.errors import UserError
from dap_bench.report.compare import PAPER, published
from dap_bench.report.layouts import label, ordered, paper
from dap_bench.report.markdown import table as markdown
from dap_bench.report.rows import CellRows, load_rows, require_like

Reading = tuple[str, str]  # the cell that holds it, and the metric's name there
Question = dict[str, dict[Reading, Reading]]  # answer -> where each published (method, metric) is read
RESULTS = Path("results/reference")
DRAWS = 1000  # of the bootstrap
TEN = {"deletion": "deletion_10", "insertion": "insertion_10"}  # curves in ten steps, as the readings have them


def readings(metric: str, names: dict[str, str]) -> Question:
    """A question about a metric: each answer is a column of the cells of three methods, the first is metric=paper's."""
    return {answer: {(m, metric): (m, column) for m in ("ar", "gradcam", "legrad")} for answer, column in names.items()}


def variants(method: str, original: str, others: dict[str, str]) -> Question:
    """A question about a method: the original is one of the reference, every other answer a cell of its own."""
    asked = ("deletion", "cs", "tcc", "afs")
    first = {original: {(method, metric): (method, TEN.get(metric, metric)) for metric in asked}}
    return first | {answer: {(method, metric): (cell, metric) for metric in asked} for answer, cell in others.items()}


def by_all_metrics(method: str, original: str, other: str, cell: str) -> Question:
    """A question about a method by all of metric=paper, curves in 20 steps."""
    metrics = paper("table1").metrics
    return {answer: {(method, m): (name, m) for m in metrics} for answer, name in ((original, method), (other, cell))}


# title -> the question, whose first answer is the default, and what the numbers do not say by themselves
QUESTIONS: dict[str, tuple[Question, str]] = {
    "What do removed pixels become?": (
        readings("deletion", {"grey": TEN["deletion"], "black": "deletion_black", "blur": "deletion_blur"}),
        "Grey is zero after normalisation, black zero before it.",
    ),
    "What does insertion begin with?": (
        readings(
            "insertion",
            {
                "blur 51, sigma 8": TEN["insertion"],
                "blur 51, sigma 10": "insertion_blur",
                "blur 11, sigma 5": "insertion_mild",
                "grey": "insertion_grey",
            },
        ),
        "Sigma 8 is torchvision's own choice for a kernel of 51.",
    ),
    "How many patches does TCC keep, and what is around them?": (
        readings(
            "tcc",
            {"20, grey": "tcc", "19, grey": "tcc_19", "20, black": "tcc_black", "10 % of pixels, grey": "tcc_pixel"},
        ),
        "20 of 196 patches is 10 % rounded up.",
    ),
    "CS over pixels or patches?": (readings("cs", {"pixels": "cs", "patches": "cs_patch"}), ""),
    "AFS over pixels or patches?": (readings("afs", {"pixels": "afs", "patches": "afs_patch"}), ""),
    "AttR without row normalisation": (
        by_all_metrics("attr", "original", "final logit, max, W + I as it is", "attr_raw"),
        "`method.readout=final method.normalise=false`: the product of W + I whose rows are not made to sum to one.",
    ),
    "AttR: readout and head fusion": (
        variants(
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
        "",
    ),
    "DAP with a smoothed prior": (
        by_all_metrics("dap", "as published", "smoothed", "dap_smooth"),
        "`method.smooth=true`: Grad-CAM enlarged to 224 pixels and averaged over each patch again.",
    ),
    "Grad-CAM: ReLU and tie-breaking": (
        variants("gradcam", "ReLU, raster order", {"ReLU, random order": "gradcam_ties", "signed": "gradcam_signed"}),
        "",
    ),
    "CDAM: negative values and tie-breaking": (
        variants("cdam", "clamped, raster order", {"clamped, random order": "cdam_ties", "signed": "cdam_keep"}),
        "Most of a clamped map is zero, so the order of ties decides when most pixels go.",
    ),
    "LeGrad: where the layers are read": (
        variants("legrad", "class token", {"mean of all tokens": "legrad_mean", "final logit": "legrad_final"}),
        "The original reads the class token.",
    ),
    "GMAR: whose gradients weight the heads": (
        variants("gmar", "norm1 of the last block", {"attention of each layer": "gmar_attention"}),
        "Both are rollout in all but name.",
    ),
}

INTRODUCTION = """# What the paper's numbers were computed with

The paper leaves open how several of its numbers were computed. Here each open question is put to rows: ImageNet
training images, the real ViT-T, explanations in double precision, beside the published ViT-T numbers (the mean of the
paper's two draws). MAD is the mean absolute difference from them over the lines of a table, with its standard error by
bootstrap over images; the smallest is in bold. Curves are in 10 steps, where a table has no LDA, else in 20.

One protocol was chosen for all methods, and each method is its original: the first column of every table, and the
default of `metric=paper` and `conf/method/`. The other columns are options.

`python scripts/protocol.py` makes this page, its sentences with numbers included. The first columns come from
`train`, the others from `readings`, a part of the same images. The commands are at the end."""

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


@command()
def main(
    reference: Annotated[Path, "rows of the reproduction"] = RESULTS / "train",
    tried: Annotated[Path, "rows of the other readings"] = RESULTS / "readings",
    validation: Annotated[Path, "rows on validation images"] = RESULTS / "validation",
    paper: Published = PAPER,
    out: Annotated[Path, "page to write"] = RESULTS / "PROTOCOL.md",
) -> None:
    cells, readings, held_out = map(load_rows, (reference, tried, validation))
    differ = [f"metric {name}" for name in ("deletion", "insertion", "tcc")]  # in steps and ties, as asked
    require_like([*cells, *readings], apart_from=("samples", *differ))
    try:
        page = _page(cells, readings, held_out, published(paper))
    except KeyError as error:
        raise UserError(f"{reference}, {tried} and {validation} do not hold {error}, which the page needs.") from error
    files.write_text(out, page)
    print(f"wrote {out}")


def _page(reference: list[CellRows], tried: list[CellRows], validation: list[CellRows], printed: pd.DataFrame) -> str:
    own, cells, held_out = ({cell.names["method"]: cell for cell in some} for some in (reference, tried, validation))
    values = {
        (name, m): cell.values(m) for some in (cells, own) for name, cell in some.items() for m in cell.info["metrics"]
    }
    values |= {
        (name, TEN[metric]): pd.Series(_areas(cell, metric, 10), cell.rows["sample_id"])
        for name, cell in own.items()
        for metric in TEN
    }
    numbers = printed[(printed["model"] == "vit_t") & printed["table"].isin(["table1", "table3"])]
    theirs = numbers.drop_duplicates(["sampler", "method", "metric"]).groupby(["method", "metric"])["published"].mean()
    sections = {title: _answer(question, note, values, theirs) for title, (question, note) in QUESTIONS.items()}
    sections["How many steps?"] = _steps(own, cells["dap_steps"])
    targets = {"no_renorm": own["dap_target"], "zero_rows": cells["dap_target_zero_rows"]}
    sections["Target-only"] = _target(targets, own["dap"], printed)
    sections["LDA"] = _lda(cells, theirs)
    sections["What the split does"] = _split(own, held_out, theirs)
    commands = sorted({cell.info["command"] for cell in (*tried, *validation)})
    sections["Commands"] = "```sh\n" + "\n".join(commands) + "\n```\n"
    return "\n\n".join([INTRODUCTION, *(f"## {title}\n\n{text.strip()}" for title, text in sections.items())]) + "\n"


def _answer(question: Question, note: str, values: dict[Reading, pd.Series], theirs: pd.Series) -> str:
    """One column per answer, one line per published number, the criterion below, and what it says in words."""
    keys = [key for key in next(iter(question.values())) if pd.notna(theirs.get(key))]
    columns = {a: pd.DataFrame({key: values[places[key]] for key in keys}) for a, places in question.items()}
    images = sorted(set.intersection(*(set(found.dropna().index) for found in columns.values())))
    numbers = theirs[keys].to_numpy()
    mads = {answer: _mads(found.loc[images].to_numpy(), numbers) for answer, found in columns.items()}
    rows: list[list[object]] = [
        [
            f"{label(m)} {label(k)}",
            f"{theirs[m, k]:.3f}",
            *(f"{c.loc[images, (m, k)].mean():.3f}" for c in columns.values()),
        ]
        for m, k in keys
    ]
    rows.append(["MAD", "", *_marked([(mad[0], mad[1:].std()) for mad in mads.values()], 3)])
    best, second, *_ = sorted(mads, key=lambda answer: mads[answer][0])
    gap, error = mads[second][0] - mads[best][0], (mads[second] - mads[best])[1:].std()
    decided = "" if gap > 2 * error else ", so these images do not decide between the two"
    default = "" if next(iter(mads)) == best else f" The default is “{next(iter(mads))}”."
    text = f"“{best}” comes nearest; “{second}” is farther by {gap:.3f} ± {error:.3f}{decided}.{default} {note}"
    return f"{text.strip()}\n\n{markdown([f'{len(images)} images', 'paper', *columns], rows)}"


def _steps(own: dict[str, CellRows], finer: CellRows) -> str:
    """Areas under the curves that were kept, from every point of them, every second and every fourth."""
    rows, moved = [], []
    methods = ordered({*paper("table1").methods, *paper("table3").methods})
    for metric in TEN:
        for cell, counts in (*((own[method], (10, 20)) for method in methods), (finer, (10, 20, 40))):
            areas = [_areas(cell, metric, steps) for steps in counts]
            moved.append([abs(new.mean() - old.mean()) for old, new in itertools.pairwise(areas)])
            means = [f"{area.mean():.4f}" for area in areas] + [""] * (3 - len(areas))
            change = np.abs(areas[-1] - areas[-2]).mean()
            name = f"{label(cell.names['method'].removesuffix('_steps'))} {label(metric)}"
            rows.append([name, len(cell.rows), *means, f"{change:.4f}"])
    first, then = max(each[0] for each in moved), max(each[1] for each in moved if len(each) > 1)
    text = (
        f"20. From 10 steps to 20 the means move by at most {first:.4f}, from 20 to 40 by {then:.4f}. The areas come "
        "from the kept curves. The last column is the mean change of an image from the number of steps before."
    )
    return f"{text}\n\n{markdown(['', 'images', '10 steps', '20 steps', '40 steps', 'change per image'], rows)}"


def _target(found: dict[str, CellRows], dap: CellRows, printed: pd.DataFrame) -> str:
    """Target-only relative to DAP: Table 2 has it for ViT-B and ViT-L, the rows for ViT-T."""
    table2 = printed.query("table == 'table2'").set_index(["method", "metric", "model"])["published"]
    metrics = ["cs", "tcc", "lda_prior", "afs"]
    theirs = (table2["dap_target"] / table2["dap"]).unstack().loc[metrics, ["vit_b", "vit_l"]].to_numpy()
    images = sorted(set.intersection(*(set(cell.rows["sample_id"]) for cell in (*found.values(), dap))))
    ratios, fits = [], []
    for cell in found.values():
        pairs = np.column_stack([part.values(m).loc[images] for part in (cell, dap) for m in metrics])
        shares = [mean[: len(metrics)] / mean[len(metrics) :] for mean in _means(pairs)]
        mads = [np.abs(share[:, None] - theirs).mean() for share in shares]
        ratios.append(shares[0])
        fits.append((mads[0], float(np.std(mads[1:]))))
    rows: list[list[object]] = [
        [label(metric), *(f"{ratio:.2f}" for ratio in line)]
        for metric, line in zip(metrics, np.column_stack([theirs, *ratios]), strict=True)
    ]
    rows.append(["MAD", "", "", *_marked(fits, 2)])
    text = (
        "Algebraically it equals Uniform after row normalisation, yet Table 2 shows a difference. Two readings do "
        "differ: weights applied after normalisation (`no_renorm`, the default) or rows of zero weight left empty "
        "(`zero_rows`). Table 2 has no ViT-T, so what is compared is the share of DAP's value that Target-only has."
    )
    header = [f"Target-only / DAP, {len(images)} images", "paper, ViT-B", "paper, ViT-L", *found]
    return f"{text}\n\n{markdown(header, rows)}"


def _lda(cells: dict[str, CellRows], theirs: pd.Series) -> str:
    """One line per reading: Table 1's four values for ViT-T, by the readings that metric=lda_readings has."""
    methods = ("ar", "attr", "gmar", "dap")
    numbers = np.array([theirs[method, "lda"] for method in methods])
    found = []
    for reading, text in LDA.items():
        values = pd.DataFrame({m: cells[f"{m}_lda"].values(reading) for m in methods}).dropna()
        mads = _mads(values.to_numpy(), numbers)
        found.append(
            (
                mads[0],
                [
                    text,
                    len(values),
                    *(f"{mean:.3f}" for mean in values.mean()),
                    _marked([(mads[0], mads[1:].std())], 3, bold=False)[0],
                ],
            )
        )
    found.sort(key=lambda line: line[0])
    rows = [["paper, Table 1", "", *(f"{number:.3f}" for number in numbers), ""], *(line for _, line in found)]
    text = (
        f"No reading gives Table 1's numbers: the nearest, “{found[0][1][0]}”, is off by {found[0][0]:.3f} on average. "
        "The default is Grad-CAM at the output of each block as that layer's reference. Some three hundred references "
        "(Grad-CAM, gradient x input, logit lens, activations at five places, of each layer) were tried besides, and "
        "for Chefer some ninety products of gradient, attention and relevance, without a fit; their rows were not kept."
    )
    return f"{text}\n\n{markdown(['reading', 'images', *map(label, methods), 'MAD'], rows)}"


def _split(own: dict[str, CellRows], held_out: dict[str, CellRows], theirs: pd.Series) -> str:
    """The same methods on training and on validation images."""
    require_like(list(held_out.values()))
    asked = [(method, metric) for method in ordered(set(held_out)) for metric in paper("table1").metrics]
    keys = [key for key in asked if pd.notna(theirs.get(key))]
    sides = {"training": own, "validation": held_out}
    values = {name: pd.DataFrame({key: cells[key[0]].values(key[1]) for key in keys}) for name, cells in sides.items()}
    mads = {name: _mads(found.to_numpy(), theirs[keys].to_numpy()) for name, found in values.items()}
    rows: list[list[object]] = [
        [f"{label(m)} {label(k)}", f"{theirs[m, k]:.3f}", *(f"{found[m, k].mean():.3f}" for found in values.values())]
        for m, k in keys
    ]
    rows.append(["MAD", "", *_marked([(mad[0], mad[1:].std()) for mad in mads.values()], 3)])
    right = [f"{(cells['ar'].rows['predicted'] == cells['ar'].rows['label']).mean():.1%}" for cells in sides.values()]
    gap = mads["validation"][0] - mads["training"][0]
    error = float(np.hypot(*(mad[1:].std() for mad in mads.values())))
    differences = " and ".join(f"{mad[0]:.3f} ± {mad[1:].std():.3f} on {name} images" for name, mad in mads.items())
    verdict = "explains part of" if gap > 2 * error else "does not explain"
    text = (
        f"The paper used training images, on which the model is right more often: on {right[0]} of ours, and on "
        f"{right[1]} of the validation images. The mean absolute difference from the paper is {differences}, "
        f"so the split {verdict} what does not fit."
    )
    counts = [f"{name}, {len(found)} images" for name, found in values.items()]
    return f"{text}\n\n{markdown(['', 'paper', *counts], rows)}"


def _areas(cell: CellRows, metric: str, steps: int) -> np.ndarray:
    """Areas under the stored curves, from as many of their points as these steps need."""
    points = np.stack(cell.rows[f"{metric}_curve"].to_list())
    return np.trapezoid(points[:, :: (points.shape[1] - 1) // steps], dx=1 / steps)


def _mads(values: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The mean absolute difference of column means from the published numbers: of all images, then of each draw."""
    return np.array([np.abs(mean - theirs).mean() for mean in _means(values)])


def _means(values: np.ndarray) -> list[np.ndarray]:
    """Column means: of all images, then of images drawn with replacement, the same for every table of a size."""
    random = np.random.default_rng(0)
    draws = [random.integers(0, len(values), len(values)) for _ in range(DRAWS)]
    return [np.nanmean(values, axis=0), *(np.nanmean(values[draw], axis=0) for draw in draws)]


def _marked(fits: list[tuple[float, float]], digits: int, bold: bool = True) -> list[str]:
    """MADs with their errors, the smallest in bold."""
    best = min(mad for mad, _ in fits)
    stars = ["**" if bold and mad == best else "" for mad, _ in fits]
    return [f"{s}{mad:.{digits}f}{s} ± {error:.{digits}f}" for s, (mad, error) in zip(stars, fits, strict=True)]


if __name__ == "__main__":
    main()
