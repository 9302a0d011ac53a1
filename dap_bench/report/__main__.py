"""Rows -> one HTML page: python -m dap_bench.report [results=FOLDER] [paper=FOLDER] [figures=FOLDER] [out=FILE]

`images` is how many images of each model and sampling can be browsed. Their maps come from rows of keep_maps=true, or
are made again where the images and the weights are on this machine.
"""

from pathlib import Path

from dap_bench.errors import UserError
from dap_bench.report.command import command
from dap_bench.report.compare import compare, published
from dap_bench.report.page import write_page
from dap_bench.report.rows import load_rows
from dap_bench.report.summary import REFERENCE, summarize


@command(
    results="results/runs",
    paper="results/paper",
    figures="results/figures",
    out="results/report/index.html",
    data="",
    images="48",
    device="auto",
    reference=REFERENCE,
)
def main(results: str, paper: str, figures: str, out: str, data: str, images: str, device: str, reference: str) -> None:
    if not images.isdecimal():
        raise UserError(f"images={images} must be a whole number.")
    summary = summarize(results, data, reference)
    compared = compare(summary, published(paper)) if Path(paper).is_dir() else None
    groups = {f"-{model}-{sampler}" for model, sampler in summary[["model", "sampler"]].to_numpy()}
    files = [file for file in sorted(Path(figures).glob("*.png")) if any(group in file.stem for group in groups)]
    pictures = {file.stem.replace("-", " "): file for file in files}
    path = write_page(Path(out), load_rows(results, data), summary, compared, pictures, int(images), device, reference)
    print(f"wrote {path}, {path.stat().st_size / 2**20:.1f} MiB: open it in a browser")


if __name__ == "__main__":
    main()
