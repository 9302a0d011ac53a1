"""Show the progress of all cells, including those of experiment=paper: done, partly done, failed or missing."""

from itertools import product

from dap_bench.command import Results, command
from dap_bench.report.layouts import tables
from dap_bench.report.status import grid, progress


@command()
def main(results: Results = "results/runs") -> None:
    main_table, methods = tables()["table1"], {name for table in tables().values() for name in table.methods}
    cells = [cell for folder in results.split(",") for cell in progress(folder)]
    print(grid(cells, set(product(main_table.models, main_table.samplers, methods))))


if __name__ == "__main__":
    main()
