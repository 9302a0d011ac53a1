"""Rows -> figures: python -m dap_bench.figures [results=FOLDER] [out=FOLDER] [data=NAME] [model=NAME] [images=ID,ID]

`model` and `sampler` say whose rows are drawn (default: the first that has rows of the reference, reference=NAME).
Pictures of single images need the images in the cache, and the model: they show the ids in `images`, or the best and
worst TCC of the reference.
"""

import sys
from pathlib import Path

from tqdm import tqdm

from dap_bench.errors import UserError
from dap_bench.report import figures
from dap_bench.report.command import command
from dap_bench.report.layouts import group as kind_of
from dap_bench.report.layouts import is_ours, ordered
from dap_bench.report.redraw import Redraw
from dap_bench.report.rows import load_rows, require_like
from dap_bench.report.summary import REFERENCE

LAYERED = ("ar", "gmar", "gradcam")  # whose maps by layer are shown beside the reference's and one's own


@command(
    results="results/runs",
    out="results/figures",
    data="",
    model="",
    sampler="",
    images="",
    device="auto",
    reference=REFERENCE,
)
def main(results: str, out: str, data: str, model: str, sampler: str, images: str, device: str, reference: str) -> None:
    cells = load_rows(results, data)
    asked = {"model": model, "sampler": sampler, "data": data}
    cells = [c for c in cells if all(not name or c.names[key] == name for key, name in asked.items())]
    if not cells:
        raise UserError(f"{results} has no rows of {' '.join(name for name in asked.values() if name)}.")
    shown = next((c.names for c in cells if c.names["method"] == reference), cells[0].names)
    group = [c for c in cells if all(c.names[key] == shown[key] for key in asked)]
    require_like(group)
    folder, stem = Path(out), f"{shown['model']}-{shown['sampler']}"
    main_cells = [cell for cell in group if kind_of(cell.names["method"]) not in ("ablation", "control")]
    written = figures.curves(main_cells, folder / f"curves-{stem}", reference)
    written += figures.ranks(main_cells, folder / f"ranks-{stem}")
    group.sort(key=lambda cell: cell.names["method"] != reference)  # its rows say which images are shown
    redraw = Redraw.of(group, device) if group[0].names["method"] == reference else None
    if redraw is not None and "tcc" in group[0].info["metrics"]:
        best, worst = figures.best_and_worst(group[0])
        methods = ordered({cell.names["method"] for cell in main_cells})
        layered = [*LAYERED, reference, *(method for method in methods if not is_ours(method) and method != reference)]
        for name in images.split(",") if images else [best[0], worst[0]]:
            photo, maps = redraw.layers(name, layered)
            written += figures.layer_maps(
                photo, maps, redraw.title(name), folder / f"layers-{stem}-{name.replace('/', '_')}"
            )
        for kind, picked in (("best", best), ("worst", worst)):
            named = tqdm(picked, f"explaining the {kind} again", disable=not sys.stderr.isatty())
            rows = [(redraw.title(name), *redraw.heatmaps(name, methods)) for name in named]
            written += figures.cases(rows, folder / f"cases-{kind}-{stem}")
    else:
        print(
            f"no pictures of single images: they need rows of {reference} with tcc, the images in the cache and weights"
        )
    for path in written:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
