"""scripts/tour.ipynb: it runs from its first cell to its last, and what it prints is what the rows say."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from dap_bench import load_method, load_vit, store
from dap_bench.data.shapes import CLASSES

TOUR = Path(__file__).parents[1] / "scripts" / "tour.ipynb"
CELLS = json.loads(TOUR.read_text())["cells"]


def test_it_is_a_notebook_without_outputs():
    notebook = json.loads(TOUR.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)
    assert {cell["cell_type"] for cell in CELLS} == {"markdown", "code"}
    assert "attachments" not in TOUR.read_text()
    assert 'load_vit("vit_t"' in "".join(CELLS[0]["source"])


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """The names that its cells leave behind, and what they print, cell by cell."""
    import matplotlib.pyplot as plt

    names, printed, path = {"__name__": "tour"}, [], list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAP_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tour")))
        patch.setattr("tempfile.tempdir", None)
        patch.setattr(sys, "path", path)
        patch.chdir(tmp_path_factory.mktemp("here"))
        matplotlib.use("Agg")
        for number, cell in enumerate(CELLS):
            if cell["cell_type"] == "code":
                said = StringIO()
                with redirect_stdout(said):
                    exec(compile("".join(cell["source"]), f"tour.ipynb, cell {number}", "exec"), names)
                printed.append(said.getvalue())
        names["figures"] = [plt.figure(number) for number in plt.get_fignums()]
        yield names, printed
        plt.close("all")
        sys.modules.pop("my_method", None)


def test_a_picture_by_nine_methods(tour):
    names, printed = tour
    assert printed[0].startswith(f"{CLASSES[15 % 12]} ")
    vit = load_vit("vit_shapes", device="cpu")
    assert len(names["of_first"]) == 9
    for name, heatmap in zip(names["NINE"], names["of_first"], strict=True):
        found = load_method(name)(vit, names["images"].cpu(), names["torch"].tensor([15 % 12]))
        np.testing.assert_allclose(heatmap, found.heatmaps((224, 224))[0].float(), atol=1e-4)
    shown = [[axes.get_title() for axes in figure.axes if axes.get_visible()] for figure in names["figures"]]
    assert shown[0] == ["photo", *names["NINE"]]
    assert [len(titles) for titles in shown] == [10, 6]


def test_two_classes(tour):
    names, printed = tour
    assert names["first"] == 15 % 12
    assert names["second"] != names["first"]
    lines = dict(line.split() for line in printed[2].splitlines())
    assert list(lines) == names["NINE"]
    assert float(lines["ar"]) == 0
    assert float(lines["dap"]) > 0.05
    np.testing.assert_array_equal(names["of_first"][0], names["of_second"][0])  # of AR


def test_the_printed_means_are_those_of_the_rows(tour):
    names, printed = tour
    cells = {cell.info["method"]: cell.rows() for cell in store.cells(names["folder"] / "results" / "runs")}
    assert set(cells) == {"norms", "dap", "random"}
    heading, _, *lines = printed[4].splitlines()
    metrics = heading.split()[1:]
    assert metrics == ["cs", "deletion", "insertion"]
    for line in lines:
        method, *values = line.split()
        assert len(cells[method]) == 12
        for metric, value in zip(metrics, values, strict=True):
            assert value == f"{np.mean([row[metric] for row in cells[method]]):.4f}"
    assert [line.split()[0] for line in lines] == ["dap", "norms", "random"]


def test_a_row_is_what_one_computes_by_hand(tour):
    names, _ = tour
    for metric, value in names["by_hand"].items():
        assert value == pytest.approx(names["row"][metric], abs=1e-5)
    assert names["scores"].loc["cs", "norms"] == 0  # it does not look at the class
    assert names["scores"].loc["cs", "dap"] == pytest.approx(names["sensitivity"]["dap"])
