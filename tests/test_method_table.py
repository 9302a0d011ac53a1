"""The table of methods in conf/method/README.md says what the YAML files say."""

import re

import pytest
from helpers import PIXELS
from omegaconf import OmegaConf

from dap_bench import config, load_method
from dap_bench.config import CONF
from dap_bench.report.layouts import label, paper_methods
from dap_bench.report.rows import load_rows

TEXT = (CONF / "method" / "README.md").read_text()
FIRST, SECOND = TEXT.split("## Chefer in single precision")
LINES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in FIRST.splitlines() if line.startswith("| ")]
COLUMNS, ROWS = LINES[0], {cells[0].strip("`"): cells for cells in LINES[1:]}


def cell(method, column):
    return ROWS[method][COLUMNS.index(column)]


def test_every_method_has_a_line_and_every_line_a_method():
    assert len(ROWS) == len(LINES) - 1
    assert set(ROWS) == set(config.choices("method"))
    assert all(len(cells) == len(COLUMNS) and all(cells) for cells in ROWS.values())


@pytest.mark.parametrize("method", ROWS)
def test_label_and_group_are_those_of_the_yaml(method):
    node = config.compose(f"method={method}").method
    assert cell(method, "label") == node._label_
    assert cell(method, "in words") == node._title_
    assert cell(method, "group") == node.get("_group_", "-")
    year = re.search(r"\((?:.*, )?(\d{4})\)$", (CONF / "method" / f"{method}.yaml").read_text().splitlines()[0])
    if year:
        assert year[1] in re.findall(r"\d{4}", cell(method, "paper")), method


def test_the_level_is_that_of_the_maps():
    assert {name for name in ROWS if cell(name, "level") == "pixel"} == {*PIXELS, "random_pixels"}


def test_costs_are_those_of_the_defaults():
    """Steps, samples and masks as the YAML files have them; a forward and a backward pass are two (test_cost.py)."""
    options = {name: load_method(name).keywords for name in ("integrated_gradients", "smoothgrad", "rise")}
    assert int(cell("integrated_gradients", "cost")) == 2 * options["integrated_gradients"]["steps"]
    assert int(cell("smoothgrad", "cost")) == 2 * options["smoothgrad"]["samples"]
    assert int(cell("rise", "cost").replace(",", "")) == options["rise"]["samples"]
    assert int(cell("beyond_intuition", "cost")) == load_method("beyond_intuition").keywords["steps"] + 1


def test_chefer_in_both_precisions_is_what_the_rows_say():
    cells = {cell.names["method"]: cell for cell in load_rows(CONF.parent / "results" / "reference" / "precision")}
    for metric in ("deletion", "insertion", "cs", "tcc", "afs", "lda"):
        single, double = (cells[f"chefer_{precision}"].values(metric) for precision in ("fp32", "fp64"))
        change = (single - double).abs()
        assert len(change) == 200
        numbers = [f"{value:.3f}" for value in (single.mean(), double.mean(), change.mean(), change.max())]
        assert f"| {label(metric)} | {' | '.join(numbers)} |" in SECOND


def test_experiments_name_the_methods_that_the_table_has():
    """The zoo runs the paper's methods; the others leave out what takes 50 forward passes or more."""
    asked = {part for cell in config.sweep("experiment=zoo") for part in cell if part.startswith("method=")}
    assert asked == {f"method={name}" for name in paper_methods()}
    costs = {name: re.match(r"[\d,.]+", cell(name, "cost")) for name in ROWS}
    slow = {name for name, found in costs.items() if found and float(found[0].replace(",", "")) >= 50}
    for name in ("demo", "breadth", "breadth_zoo"):
        methods = OmegaConf.load(CONF / "experiment" / f"{name}.yaml").hydra.sweeper.params.method
        left_out = set(re.search(r"exclude=\[(.*?)\]", methods)[1].split(","))
        assert left_out - {"maps", "oracle", "dap_*"} == slow, name
