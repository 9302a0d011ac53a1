"""Ours beside theirs: python -m dap_bench.compare [results=FOLDER] [paper=FOLDER] [out=FOLDER] [data=NAME]

`one_set=true` puts rows of one set of images beside both of the paper's draws.
"""

from pathlib import Path

from dap_bench.errors import one_of
from dap_bench.report.command import command
from dap_bench.report.compare import compare, count_verdicts, latex, markdown, published
from dap_bench.report.summary import summarize


@command(results="results/runs", paper="results/paper", out="results/tables", data="", one_set="false")
def main(results: str, paper: str, out: str, data: str, one_set: str) -> None:
    one_of("one_set", one_set, ("true", "false"))
    compared = compare(summarize(results, data), published(paper), one_set == "true")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("compare.md", markdown(compared)), ("compare.tex", latex(compared))):
        (folder / name).write_text(text)
        print(f"wrote {folder / name}")
    print(count_verdicts(compared))


if __name__ == "__main__":
    main()
