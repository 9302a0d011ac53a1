"""Which reading of the paper's protocol fits its numbers? python scripts/protocol.py [results=FOLDER] [out=FILE]

Every table is made from rows: the same images, one question at a time. The criterion is the mean absolute difference
(MAD) from the published ViT-T numbers over the cells that a question touches, with its standard error by bootstrap over
images (1,000 draws of the images, seeded).
"""

from pathlib import Path

import numpy as np
import pandas as pd

from dap_bench.report.command import command
from dap_bench.report.compare import published
from dap_bench.report.layouts import label
from dap_bench.report.summary import CellRows, load_rows

Reading = tuple[str, str]  # the cell that holds it, and the metric's name there


def readings(metric: str, names: dict[str, str], methods: tuple[str, ...]) -> dict[str, dict[tuple[str, str], Reading]]:
    """A question about a metric: each answer is a column of the protocol cells of `methods`."""
    return {answer: {(m, metric): (m, column) for m in methods} for answer, column in names.items()}


def variants(method: str, names: dict[str, str], metrics: dict[str, str]) -> dict[str, dict[tuple[str, str], Reading]]:
    """A question about a method: each answer is a cell of its own."""
    return {answer: {(method, m): (cell, column) for m, column in metrics.items()} for answer, cell in names.items()}


def beside(method: str, original: str, others: dict[str, str]) -> dict[str, dict[tuple[str, str], Reading]]:
    """A question about a method whose original is one of the cells with every reading of the metrics."""
    return variants(method, {original: method}, BASE) | variants(method, others, PLAIN)


ALL = ("ar", "attr", "chefer", "gmar", "gradcam", "cdam", "agcam", "legrad", "dap")
THREE = ("ar", "gradcam", "legrad")
PLAIN = {"deletion": "deletion", "cs": "cs", "tcc": "tcc", "afs": "afs"}
BASE = {"deletion": "deletion_grey", "cs": "cs_pixel", "tcc": "tcc_20", "afs": "afs_pixel"}

QUESTIONS = {
    "What do removed pixels become?": [
        readings("deletion", {"grey": "deletion_grey", "black": "deletion_black"}, ALL),
        readings("deletion", {"grey": "deletion_grey", "blur": "deletion_blur"}, THREE),
    ],
    "What does insertion begin with?": [
        readings(
            "insertion",
            {"blur 51, sigma 10": "insertion_blur", "blur 11, sigma 5": "insertion_mild", "grey": "insertion_grey"},
            THREE,
        )
        | {"blur 51, sigma 8": {(m, "insertion"): (f"{m}_blur8", "insertion") for m in THREE}}
    ],
    "How many steps?": [
        variants(
            m, {f"{n} steps": f"{m}_steps{n}" for n in (10, 20, 50)}, {"deletion": "deletion", "insertion": "insertion"}
        )
        for m in ("gradcam", "dap")
    ],
    "How many patches does TCC keep, and what is around them?": [
        readings("tcc", {"20, grey": "tcc_20", "19, grey": "tcc_19", "20, black": "tcc_black"}, ALL),
        readings("tcc", {"20, grey": "tcc_20", "10 % of pixels, grey": "tcc_pixel"}, THREE),
    ],
    "CS over pixels or patches?": [readings("cs", {"pixels": "cs_pixel", "patches": "cs_patch"}, ALL)],
    "AFS over pixels or patches?": [readings("afs", {"pixels": "afs_pixel", "patches": "afs_patch"}, ALL)],
    "AttR": [
        variants(
            "attr",
            {
                "original: layer readout, max": "attr_original",
                "layer readout, mean": "attr_mean",
                "layer readout, max, clamped": "attr_clamp",
                "path integral, max": "attr_path",
                "final logit, max": "attr_final",
                "final logit, max, clamped": "attr_final_clamp",
            },
            PLAIN,
        )
    ],
    "Grad-CAM: ReLU, and who goes first among equals": [
        beside("gradcam", "ReLU, raster order", {"ReLU, random order": "gradcam_ties", "signed": "gradcam_signed"})
    ],
    "CDAM: negative values, and who goes first among equals": [
        beside(
            "cdam",
            "clamped, raster order",
            {"clamped, random order": "cdam_ties", "signed": "cdam_keep", "absolute values": "cdam_abs"},
        )
    ],
    "LeGrad: where the layers are read": [
        beside("legrad", "class token", {"mean of all tokens": "legrad_mean", "final logit": "legrad_final"})
    ],
    "GMAR: whose gradients weigh the heads": [
        beside("gmar", "norm1 of the last block", {"attention of each layer": "gmar_attention"})
    ],
    "DAP: Grad-CAM prior with or without ReLU": [beside("dap", "ReLU", {"signed": "dap_signed"})],
}


INTRODUCTION = """# What the paper's numbers were computed with

The paper leaves open how several of its numbers were computed. Here each open question is put to the rows: the same 400
ImageNet validation images (`sampler=non_balanced sampler.n=400`), the real ViT-T, curves in 10 steps, ours beside the
published ViT-T numbers of the balanced setting. MAD is the mean absolute difference from the published numbers over
the lines of a table, with its standard error by bootstrap over images. The paper used training images, which the model
knows better, so what moves all methods alike (Ins, TCC) cannot be expected to vanish. The rows are in
`results/reference/protocol`, and `python scripts/protocol.py` makes this page from them. `cell.json` beside the rows
holds each config; a cell is made by, for example,

```sh
python -m dap_bench experiment=reference hydra.mode=RUN results_dir=results/reference/protocol keep_curves=false \\
    sampler=non_balanced sampler.n=400 metric=protocol method=gradcam
python -m dap_bench experiment=reference hydra.mode=RUN results_dir=results/reference/protocol keep_curves=false \\
    sampler=non_balanced sampler.n=400 metric=[deletion,cs,tcc,afs] metric.deletion.steps=10 \\
    method=attr method.readout=final name=attr_final
```

One protocol was chosen for all methods, and each method is its original; the choices are the defaults of
`metric=paper` and of `conf/method/`."""

ANSWERS = {
    "What do removed pixels become?": "Grey (zero after normalisation). With it three methods come within 0.006.",
    "What does insertion begin with?": "A strong blur. Sigma 8, torchvision's own choice for a kernel of 51, comes "
    "nearer than 10; a weaker blur or grey is far off.",
    "How many patches does TCC keep, and what is around them?": "20 of 196 patches on grey. 19 are lower still, and "
    "pixels instead of patches give half.",
    "CS over pixels or patches?": "Pixels of the heatmap, by a little.",
    "AFS over pixels or patches?": "Pixels of the heatmap: patches do not fit.",
    "AttR": "The original stays. The final logit fits AFS and misses CS, the original the other way round, and over "
    "all four numbers no variant is nearer by more than its error.",
    "Target-only": "Algebraically it equals Uniform after row normalisation, yet Table 2 shows a difference. Two "
    "readings do differ: rows of zero weight left empty (`zero_rows`, the default) or weights applied after "
    "normalisation (`no_renorm`).",
    "LDA": "No reading gives Table 1's numbers. The nearest takes Grad-CAM at the output of each block as that layer's "
    "reference: it meets AttR and nearly DAP, but AR and GMAR come out at zero where the paper has 0.06. It is the "
    "default. As printed all values are far too high. Table 2's LDA is another quantity: there DAP has 0.87 and "
    "Uniform is negative, as against the prior.",
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


@command(results="results/reference/protocol", paper="results/paper", out="results/reference/PROTOCOL.md")
def main(results: str, paper: str, out: str) -> None:
    cells = {cell.names["method"]: cell for cell in load_rows(results)}
    numbers = published(paper).query("model == 'vit_t' and sampler == 'balanced'")
    theirs = numbers.drop_duplicates(["method", "metric"]).set_index(["method", "metric"])["published"]
    parts = [INTRODUCTION]
    for title, questions in QUESTIONS.items():
        tables = "\n\n".join(table(question, cells, theirs) for question in questions)
        parts.append(f"## {title}\n\n{ANSWERS[title] + chr(10) * 2 if title in ANSWERS else ''}{tables}")
    parts.append(f"## Target-only\n\n{ANSWERS['Target-only']}\n\n{target_table(cells, published(paper))}")
    parts.append(f"## LDA\n\n{ANSWERS['LDA']}\n\n{lda_table(cells, theirs)}")
    Path(out).write_text("\n\n".join(parts) + "\n")
    print(f"wrote {out}")


def table(question: dict[str, dict[tuple[str, str], Reading]], cells: dict[str, CellRows], theirs: pd.Series) -> str:
    """One column per answer, one line per published number that all of them have, and the criterion below."""
    columns = {answer: _values(places, cells) for answer, places in question.items()}
    absent = [answer for answer, found in columns.items() if found.empty]
    columns = {answer: found for answer, found in columns.items() if not found.empty}
    keys = [key for key in next(iter(question.values())) if all(key in found for found in columns.values())]
    if len(columns) < 2 or not keys:
        return "Not measured yet."
    images = sorted(set.intersection(*(set(found[keys].dropna().index) for found in columns.values())))
    columns = {answer: found.loc[images, keys] for answer, found in columns.items()}
    lines = [f"| {len(images)} images | paper | " + " | ".join(columns) + " |", "|---" * (2 + len(columns)) + "|"]
    for method, metric in keys:
        ours = " | ".join(f"{found[method, metric].mean():.3f}" for found in columns.values())
        lines.append(f"| {label(method)} {label(metric)} | {theirs[method, metric]:.3f} | {ours} |")
    fits = [_fit(found, theirs[keys].to_numpy()) for found in columns.values()]
    best = min(mad for mad, _ in fits)
    marked = [f"**{mad:.3f}** ± {error:.3f}" if mad == best else f"{mad:.3f} ± {error:.3f}" for mad, error in fits]
    lines.append("| MAD | | " + " | ".join(marked) + " |")
    return "\n".join([*lines, *(["", f"Not measured yet: {', '.join(absent)}."] if absent else [])])


def lda_table(cells: dict[str, CellRows], theirs: pd.Series) -> str:
    """One line per reading: Table 1's four values for ViT-T, by the readings that metric=lda_readings has."""
    methods = ("ar", "attr", "gmar", "dap")
    if not all(f"{method}_lda" in cells for method in methods):
        return "Not measured yet."
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


def target_table(cells: dict[str, CellRows], paper: pd.DataFrame) -> str:
    """Target-only relative to DAP: Table 2 has it for ViT-B and ViT-L, the rows for ViT-T."""
    columns = {"zero_rows": "dap_target_zero_rows", "no_renorm": "dap_target_no_renorm"}
    if "dap" not in cells or not set(columns.values()) <= set(cells):
        return "Not measured yet."
    printed = paper.query("table == 'table2'").set_index(["model", "method", "metric"])["published"]
    lines = ["| Target-only / DAP | paper, ViT-B | paper, ViT-L | " + " | ".join(columns) + " |", "|---" * 5 + "|"]
    for metric, base in (("cs", "cs_pixel"), ("tcc", "tcc_20"), ("afs", "afs_pixel")):
        theirs = [printed[model, "dap_target", metric] / printed[model, "dap", metric] for model in ("vit_b", "vit_l")]
        ours = [cells[cell].values(metric).mean() / cells["dap"].values(base).mean() for cell in columns.values()]
        lines.append(f"| {label(metric)} | " + " | ".join(f"{ratio:.2f}" for ratio in [*theirs, *ours]) + " |")
    return "\n".join(lines)


def _values(places: dict[tuple[str, str], Reading], cells: dict[str, CellRows]) -> pd.DataFrame:
    """One line per image, one column per published number."""
    found = {
        key: cells[cell].values(column)
        for key, (cell, column) in places.items()
        if cell in cells and column in cells[cell].info["metrics"]
    }
    return pd.DataFrame(found)


def _fit(values: pd.DataFrame, theirs: np.ndarray) -> tuple[float, float]:
    """The mean absolute difference of the means from the published numbers, and its standard error."""
    ours, random = values.to_numpy(), np.random.default_rng(0)
    draws = [ours[random.integers(0, len(ours), len(ours))].mean(0) for _ in range(1000)]
    error = np.std([np.abs(draw - theirs).mean() for draw in draws])
    return float(np.abs(ours.mean(0) - theirs).mean()), float(error)


if __name__ == "__main__":
    main()
