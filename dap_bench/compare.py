"""Compare our numbers with the published ones, with a verdict on each: compare.md, compare.tex and pictures.

For example: dap-bench compare results=results/reference/train
"""

from pathlib import Path
from typing import Annotated

from dap_bench import files
from dap_bench.command import Data, OneSet, Published, Results, command
from dap_bench.report import figures
from dap_bench.report.compare import PAPER, compare, count_verdicts, latex, markdown, published
from dap_bench.report.summary import summarize


@command()
def main(
    results: Results = "results/runs",
    paper: Published = PAPER,
    out: Annotated[Path, "folder to write to"] = Path("results/tables"),
    data: Data = "",
    one_set: OneSet = False,
) -> None:
    summary = summarize(results, data)
    compared = compare(summary, published(paper), one_set)
    for name, text in (("compare.md", markdown(compared)), ("compare.tex", latex(compared))):
        files.write_text(out / name, text)
        print(f"wrote {out / name}")
    for (model, sampler), block in summary.groupby(["model", "sampler"]):
        beside = compared[(compared["model"] == model) & (one_set | (compared["sampler"] == sampler))]
        for path in figures.beside_the_paper(block, beside, out / f"compare-{model}-{sampler}"):
            print(f"wrote {path}")
    print(count_verdicts(compared))


if __name__ == "__main__":
    main()
