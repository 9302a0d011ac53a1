"""How far are the cells of experiment=paper, and others? python -m dap_bench.status [results=FOLDER]"""

from itertools import product

from dap_bench.report.command import command
from dap_bench.report.layouts import tables
from dap_bench.report.status import grid, progress


@command(results="results/runs")
def main(results: str) -> None:
    main_table, methods = tables()["table1"], {name for table in tables().values() for name in table.methods}
    print(grid(progress(results), set(product(main_table.models, main_table.samplers, methods))))


if __name__ == "__main__":
    main()
