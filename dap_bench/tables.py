"""Rows -> tables: python -m dap_bench.tables [results=FOLDER,...] [tables=FOLDER] [summary=FILE] [data=NAME] [ci=true]

`reference` is the method that the others are tested against, `controls=true` adds the controls to every table, and
`settings=all` lists every setting that cells were run with. The tables are in conf/report, and in your --config-dir.
"""

from pathlib import Path

import pandas as pd

from dap_bench import files, summarize
from dap_bench.errors import one_of
from dap_bench.report.command import command
from dap_bench.report.rows import settings as every_setting
from dap_bench.report.status import progress
from dap_bench.report.summary import REFERENCE
from dap_bench.report.tables import write_tables


@command(
    results="results/runs",
    tables="results/tables",
    summary="results/summary.csv",
    data="",
    ci="false",
    reference=REFERENCE,
    controls="false",
    settings="newest",
)
def main(
    results: str, tables: str, summary: str, data: str, ci: str, reference: str, controls: str, settings: str
) -> None:
    one_of("ci", ci, ("true", "false"))
    one_of("controls", controls, ("true", "false"))
    one_of("settings", settings, ("newest", "all"))
    if settings == "all":
        print("\n".join(map(str, every_setting(results))))
    table = summarize(results, data, reference)
    keys = ["data", "sampler", "model", "method", "n", "failed", "missing"]
    values = [f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in table[["mean", "low", "high"]].to_numpy()]
    shown = table.assign(value=values).pivot(index=keys, columns="metric", values="value")
    with pd.option_context("display.width", 250, "display.max_columns", None, "display.max_rows", None):
        print(shown.reset_index().to_string(index=False))
    for folder in results.split(","):
        for cell in progress(folder):
            if cell.done < cell.n:
                print(f"marked with *: {cell}")
    files.write_text(Path(summary), table.to_csv(index=False, float_format="%.6f"))
    print(f"wrote {summary}")
    for path in write_tables(table, Path(tables), ci == "true", controls == "true"):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
