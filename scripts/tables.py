"""Rows -> tables: python scripts/tables.py [results=FOLDER] [tables=FOLDER] [summary=FILE] [data=NAME] [ci=true]"""

from pathlib import Path

import pandas as pd

from dap_bench import summarize
from dap_bench.errors import one_of
from dap_bench.report.command import command
from dap_bench.report.status import progress
from dap_bench.report.tables import write_tables


@command(results="results/runs", tables="results/tables", summary="results/summary.csv", data="", ci="false")
def main(results: str, tables: str, summary: str, data: str, ci: str) -> None:
    one_of("ci", ci, ("true", "false"))
    table = summarize(results, data)
    keys = ["data", "sampler", "model", "method", "n", "failed", "missing"]
    values = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in table[["mean", "low", "high"]].to_numpy()]
    shown = table.assign(value=values).pivot(index=keys, columns="metric", values="value")
    with pd.option_context("display.width", 250, "display.max_columns", None, "display.max_rows", None):
        print(shown.reset_index().to_string(index=False))
    for cell in progress(results):
        if cell.done < cell.n:
            print(f"marked with *: {cell}")
    Path(summary).parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(summary, index=False, float_format="%.6f")
    print(f"wrote {summary}")
    for path in write_tables(table, Path(tables), ci == "true"):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
