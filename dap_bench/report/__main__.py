"""Write one HTML page with all results.

The page is made from rows, quickly. `pictures=N` adds photos of N images per model and sampling, evenly spread, with
every method's maps of the predicted class and the runner-up. This needs the images and the weights: from the cache and
the Hub, or from DAP_BENCH_ASSETS=FOLDER with imagenet/ and weights/, as for the committed rows. Maps stored with rows
(keep_maps=true) are always shown.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import pandas as pd

from dap_bench.command import Data, Device, OneSet, Published, Reference, Results, command
from dap_bench.errors import require_int
from dap_bench.report.compare import PAPER, compare, published
from dap_bench.report.layouts import label
from dap_bench.report.page import Options, write_page
from dap_bench.report.rows import load_rows
from dap_bench.report.summary import REFERENCE, summarize
from dap_bench.vit.devices import choose_device

KINDS = {"layers": "Maps by layer", "cases-best": "The best cases", "cases-worst": "The worst cases"}


@command()
def main(
    results: Results = "results/runs",
    paper: Published = PAPER,
    figures: Annotated[Path, "folder with figures of single images to show"] = Path("results/figures"),
    out: Annotated[Path, "the page to write"] = Path("results/report/index.html"),
    data: Data = "",
    images: Annotated[int, "number of images per model and sampling to browse"] = 1000,
    pictures: Annotated[int, "number of them to show with photo and every method's maps"] = 0,
    device: Device = "auto",
    reference: Reference = REFERENCE,
    one_set: OneSet = False,
) -> None:
    require_int("images", images, least=1)
    choose_device(device)  # a mistake is said before anything is read
    summary = summarize(results, data, reference)
    compared = compare(summary, published(paper), one_set) if paper.is_dir() else None
    asked = [argument for argument in sys.argv[1:] if not argument.startswith("pictures=")]
    again = shlex.join(["python", "-m", "dap_bench.report", *asked, "pictures=24"])
    options = Options(images, pictures, device, reference, again)
    path = write_page(out, load_rows(results, data), summary, compared, drawn(figures, summary), options)
    print(f"wrote {path}, {path.stat().st_size / 2**20:.1f} MiB: open it in a browser")


def drawn(folder: Path, summary: pd.DataFrame) -> dict[str, Path]:
    """Pictures of single images that are in a folder of figures, by their titles in words.

    Args:
        folder: The folder with figures.
        summary: The table from `summarize`, which says what models and samplings there are.

    Returns:
        The PNGs by title.
    """
    found = {}
    for model, sampler in summary[["model", "sampler"]].drop_duplicates().to_numpy():
        for kind, words in KINDS.items():
            stem = f"{kind}-{model}-{sampler}"
            for file in sorted(folder.glob("*.png")):
                if file.stem == stem or file.stem.startswith(f"{stem}-"):
                    parts = [words, label(model), label(sampler).lower(), file.stem.removeprefix(stem).lstrip("-")]
                    found[", ".join(part for part in parts if part)] = file
    return found


if __name__ == "__main__":
    main()
