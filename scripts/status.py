"""How far are the cells of experiment=paper, and others? python scripts/status.py [results=FOLDER]"""

from itertools import product

from dap_bench.report.command import command
from dap_bench.report.layouts import ABLATION, METHODS, MODELS, SAMPLERS
from dap_bench.report.status import grid, progress


@command(results="results/runs")
def main(results: str) -> None:
    print(grid(progress(results), set(product(MODELS, SAMPLERS, {*METHODS, *ABLATION}))))


if __name__ == "__main__":
    main()
