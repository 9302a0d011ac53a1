"""What the figures show, by hand."""

from math import sqrt

import numpy as np
import pandas as pd
import pytest
from rows import cell

from dap_bench import store, summarize
from dap_bench.report import figures
from dap_bench.report.compare import compare, published
from dap_bench.report.layouts import tables
from dap_bench.report.rows import load_rows
from dap_bench.report.summary import holm, interval, paired


@pytest.fixture
def results(tmp_path):
    """Three images, three methods: DAP is best, second and best; AR second, best and second; mine always last."""
    maps = [[0.0, 1.0, 2.0, 1.0]] * 3
    curves = [[1.0, 0.5, 0.0]] * 3
    cell(tmp_path, "dap", [0.1, 0.3, 0.2], map=maps, deletion_curve=curves)
    cell(tmp_path, "ar", [0.2, 0.2, 0.4], map=maps, deletion_curve=curves)
    cell(tmp_path, "mine", [0.9, 0.9, 0.9], map=maps, deletion_curve=curves)
    return tmp_path


def test_mean_ranks_and_the_critical_difference(results):
    found, difference, count = figures.mean_ranks(load_rows(results), "deletion")
    assert found.to_dict() == pytest.approx({"dap": 4 / 3, "ar": 5 / 3, "mine": 3.0})
    assert count == 3
    assert difference == pytest.approx(2.343 * sqrt(3 * 4 / (6 * 3)), abs=1e-3)  # Demsar 2006, q for three methods


def test_cases_are_picked_by_rule(results):
    dap = next(cell for cell in load_rows(results) if cell.names["method"] == "dap")
    assert figures.best_and_worst(dap, "deletion", 2) == (["s0", "s2"], ["s1", "s2"])


def test_every_method_has_its_own_look_and_every_figure_its_own_file(results, tmp_path):
    names = [*{*tables()["table1"].methods, *tables()["table3"].methods}, "mine", "another"]
    looks = [(figures.style(names, name)["color"], figures.style(names, name)["linestyle"]) for name in names]
    assert len(set(looks)) == len(names)
    written = figures.ranks(load_rows(results), tmp_path / "ranks-deit_small.fb_in1k-balanced")
    assert [path.name for path in written] == [f"ranks-deit_small.fb_in1k-balanced.{kind}" for kind in ("pdf", "png")]


def test_bands_are_the_intervals_of_the_means():
    """As `interval` has them, up to the luck of resampling; a point that an image lacks does not count."""
    values = np.random.default_rng(0).random((200, 3))
    values[:50, 2] = np.nan
    mean, low, high = figures.band(values)
    for at in range(3):
        known = values[~np.isnan(values[:, at]), at]
        assert mean[at] == pytest.approx(known.mean())
        assert (low[at], high[at]) == pytest.approx(interval(known), abs=0.005)


def test_without_curves_there_is_no_figure_of_them(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3, 0.2])
    assert figures.curves(load_rows(tmp_path), tmp_path / "figure") == []
    assert figures.ranks(load_rows(tmp_path), tmp_path / "figure") == []  # nor ranks of one method


def test_figures_are_written_and_repeatable(results, tmp_path):
    group = load_rows(results)
    for make in (figures.curves, figures.ranks):
        first = [path.read_bytes() for path in make(group, tmp_path / "a" / "figure")]
        again = [path.read_bytes() for path in make(group, tmp_path / "b" / "figure")]
        assert first == again
        assert first[0].startswith(b"%PDF")
        assert first[1].startswith(b"\x89PNG")


def test_paired_tests_by_hand(results):
    """Gains of DAP over AR are .1, -.1, .2: ranks 1.5, 1.5, 3; (1.5 + 3 - 1.5)/6 = 0.5."""
    assert paired(pd.Series([0.1, -0.1, 0.2]).round(6))["effect"] == pytest.approx(0.5)
    assert paired(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))["p"] == 2 / 2**6  # all of six signs alike, either way
    assert paired(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0, -6.0]))["p"] == pytest.approx(28 / 2**6)  # sum of ranks 6 or less
    assert holm([0.01, 0.04, 0.03, float("nan")])[:3] == pytest.approx([0.03, 0.06, 0.06])
    table = summarize(results).set_index("method")
    assert table.loc["mine", "effect"] == 1.0
    assert table.loc["mine", "p"] == 0.5  # 2 / 2**3, of two methods
    assert np.isnan(table.loc["dap", "p"])
    assert table.loc["ar", "pairs"] == 3


def test_a_damaged_cell_is_named(results):
    from dap_bench import UserError

    (store.cells(results)[0].folder / "cell.json").write_text("{}")
    with pytest.raises(UserError, match=r"cell.json is damaged or of another version"):
        load_rows(results)


def test_ours_beside_the_papers(tmp_path, monkeypatch):
    """Where the dots, the diamonds and the lines of the controls are."""
    for method, values in {"dap": [0.1, 0.3, 0.2], "ar": [0.2, 0.2, 0.5], "random": [0.4, 0.4, 0.4]}.items():
        cell(tmp_path, method, values)
    table = summarize(tmp_path)
    compared = compare(table, published())
    monkeypatch.setattr(figures, "save", lambda figure, path: figure)
    (axes,) = figures.beside_the_paper(table, compared, tmp_path / "figure").axes
    ours, theirs, control = (line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata()) > 1)
    assert ours == [[pytest.approx(0.2), 0], [pytest.approx(0.3), 1]]  # from below: DAP, AR
    numbers = compared.dropna(subset=["mean", "published"]).set_index("method")["published"]
    assert sorted(theirs) == sorted([number, ["dap", "ar"].index(method)] for method, number in numbers.items())
    assert control == [[pytest.approx(0.4), 0], [pytest.approx(0.4), 1]]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["DAP", "AR"]
    assert axes.get_title() == "Del ↓"
