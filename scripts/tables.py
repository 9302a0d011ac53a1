"""Rows -> tables: python scripts/tables.py [results=FOLDER] [tables=FOLDER] [data=NAME] [ci=true]"""

from pathlib import Path

import pandas as pd

from dap_bench import summarize
from dap_bench.report.command import command
from dap_bench.report.tables import write_tables


@command(results="results/runs", tables="results/tables", data="", ci="false")
def main(results: str, tables: str, data: str, ci: str) -> None:
    summary = summarize(results, data)
    keys = ["data", "sampler", "model", "method", "n", "failed", "missing"]
    values = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in summary[["mean", "low", "high"]].to_numpy()]
    shown = summary.assign(value=values).pivot(index=keys, columns="metric", values="value")
    with pd.option_context("display.width", 250, "display.max_columns", None, "display.max_rows", None):
        print(shown.reset_index().to_string(index=False))
    for path in write_tables(summary, Path(tables), ci == "true"):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
