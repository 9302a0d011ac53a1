"""Write the paper's tables in LaTeX, and a summary of all cells.

Tables are defined in conf/report, and in the folder report of your --config-dir.
"""

from pathlib import Path
from typing import Annotated, Literal

from dap_bench import files, summarize
from dap_bench.command import Data, Reference, Results, command
from dap_bench.report.rows import settings as every_setting
from dap_bench.report.status import progress
from dap_bench.report.summary import REFERENCE
from dap_bench.report.tables import write_tables
from dap_bench.report.terminal import means


@command()
def main(
    results: Results = "results/runs",
    tables: Annotated[Path, "folder to write the LaTeX to"] = Path("results/tables"),
    summary: Annotated[Path, "CSV file to write the summary to"] = Path("results/summary.csv"),
    data: Data = "",
    ci: Annotated[bool, "show half the 95 % interval beside every mean"] = False,
    reference: Reference = REFERENCE,
    controls: Annotated[bool, "add the controls to every table"] = False,
    booktabs: Annotated[bool, "use booktabs rules instead of a full grid"] = False,
    settings: Annotated[Literal["newest", "all"], "all: list every setting that cells were run with"] = "newest",
) -> None:
    if settings == "all":
        print("\n".join(map(str, every_setting(results))))
    table = summarize(results, data, reference)
    print(means(table))
    for folder in results.split(","):
        for cell in progress(folder):
            if cell.done < cell.n:
                print(f"marked with *: {cell}")
    files.write_text(summary, table.to_csv(index=False, float_format="%.6f"))
    print(f"\nwrote {summary}")
    for path in write_tables(table, tables, ci, controls, booktabs):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
