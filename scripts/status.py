"""How far are the cells? python scripts/status.py [results=FOLDER]"""

from itertools import product

from dap_bench.report.command import command
from dap_bench.report.layouts import ABLATION, METHODS, MODELS, SAMPLERS
from dap_bench.report.status import grid, progress


@command(results="results/runs")
def main(results: str) -> None:
    main_cells = set(product(MODELS, SAMPLERS, METHODS))
    ablation = set(product(("vit_b", "vit_l"), ("balanced",), ABLATION))
    print(grid(progress(results), main_cells | ablation))


if __name__ == "__main__":
    main()
