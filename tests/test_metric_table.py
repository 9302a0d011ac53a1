"""The table of metrics in conf/metric/README.md says what the YAML files say."""

import re

import pytest

from dap_bench import config, load_metrics
from dap_bench.config import CONF

TEXT = (CONF / "metric" / "README.md").read_text()
LINES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| ")]
COLUMNS, ROWS = LINES[0], {cells[0].strip("`"): cells for cells in LINES[1:] if len(cells) == len(LINES[0])}
PRESETS = {name for cells in LINES if len(cells) == 2 for name in re.findall(r"`(\w+)`", cells[0])}


def test_every_metric_and_every_preset_has_a_line():
    assert set(ROWS) == set(load_metrics("all"))
    assert ROWS.keys() | PRESETS == set(config.choices("metric"))
    assert not ROWS.keys() & PRESETS


@pytest.mark.parametrize("metric", ROWS)
def test_label_and_direction_are_those_of_the_metric(metric):
    node = config.compose(f"metric=[{metric}]").metric[metric]
    assert ROWS[metric][COLUMNS.index("label")] == node._label_
    assert ROWS[metric][COLUMNS.index("in words")] == node._title_
    assert ROWS[metric][COLUMNS.index("better")] == load_metrics(metric)[metric].better


def test_presets_say_what_they_cost():
    """Forward passes and explanations of the metrics, counted from the table, and one of each for the class."""

    def counted(names):
        cells = [ROWS[name][COLUMNS.index("cost")] for name in names]
        passes = [int(found[1]) for found in (re.match(r"(\d+)\b(?! E)", cell) for cell in cells) if found]
        again = 19 if "abpc" in names else 0  # beside deletion
        explanations = [(found[1], int(found[2])) for cell in cells for found in re.finditer(r"(L \+ )?(\d+) E", cell)]
        layers = "L + " if any(each for each, _ in explanations) else ""
        return str(1 + sum(passes) - again), f"{layers}{1 + sum(number for _, number in explanations)}"

    for preset in ("faithfulness", "localisation", "sanity", "all"):
        first = (CONF / "metric" / f"{preset}.yaml").read_text().splitlines()[0]
        told = re.search(r"(\d+) forward pass(?:es)? and ((?:L \+ )?\d+) explanations", first).groups()
        assert told == counted(list(load_metrics(preset))), preset
