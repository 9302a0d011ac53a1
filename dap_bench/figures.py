"""Draw figures: curves, ranks, maps by layer, best and worst cases.

Pictures of single images show the ids in `images`, or the best and worst TCC of the reference. Like those of
`dap-bench report`, they need the images and the weights.
"""

import sys
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from dap_bench.command import Data, Device, Reference, Results, command
from dap_bench.errors import UserError
from dap_bench.report import figures
from dap_bench.report.layouts import group as kind_of
from dap_bench.report.layouts import is_ours, ordered
from dap_bench.report.redraw import Redraw
from dap_bench.report.rows import load_rows, require_like
from dap_bench.report.summary import REFERENCE

LAYERED = ("ar", "gmar", "gradcam")  # whose maps by layer are shown beside the reference's and one's own


@command()
def main(
    results: Results = "results/runs",
    out: Annotated[Path, "folder to write to"] = Path("results/figures"),
    data: Data = "",
    model: Annotated[str, "model to draw; by default the first with rows of the reference"] = "",
    sampler: Annotated[str, "sampler to draw, likewise"] = "",
    images: Annotated[str, "ids A,B of images to show; by default the best and worst TCC of the reference"] = "",
    device: Device = "auto",
    reference: Reference = REFERENCE,
) -> None:
    cells = load_rows(results, data)
    asked = {"model": model, "sampler": sampler, "data": data}
    cells = [c for c in cells if all(not name or c.names[key] == name for key, name in asked.items())]
    if not cells:
        raise UserError(f"{results} has no rows of {' '.join(name for name in asked.values() if name)}.")
    shown = next((c.names for c in cells if c.names["method"] == reference), cells[0].names)
    group = [c for c in cells if all(c.names[key] == shown[key] for key in asked)]
    require_like(group)
    folder, stem = out, f"{shown['model']}-{shown['sampler']}"
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
        print(f"no pictures of single images: they need rows of {reference} with tcc, the images and the weights")
    for path in written:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
