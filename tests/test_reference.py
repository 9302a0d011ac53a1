"""The committed rows of the real ViT-T: whole, described, and the same when they are computed again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dap_bench import config, runner
from dap_bench.data.images import decode
from dap_bench.metrics.base import Batch
from dap_bench.report.layouts import label
from dap_bench.report.rows import load_rows
from dap_bench.report.summary import summarize

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference" / "vit_t"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference rows in this tree")


@pytest.fixture(scope="module")
def cells():
    return load_rows(REFERENCE)


def test_every_cell_of_the_experiment_is_there(cells):
    params = OmegaConf.load(ROOT / "conf" / "experiment" / "reference.yaml").hydra.sweeper.params
    methods = set(params.method.split(",")) - {"random", "centre"}
    asked = {(sampler, method) for sampler in ("balanced", "non_balanced") for method in methods}
    assert {(cell.names["sampler"], cell.names["method"]) for cell in cells} == asked


def test_cells_are_whole_small_and_say_how_they_were_made(cells):
    for cell in cells:
        assert len(cell.rows) == cell.info["n"] == 800, cell.folder
        assert (cell.rows["status"] == "ok").all()
        assert "map" not in cell.rows  # no maps and no images
        assert cell.info["config"]["explain_precision"] == "fp64"
        choices = {f"sampler={cell.names['sampler']}", f"method={cell.names['method']}", "experiment=reference"}
        assert set(cell.info["command"].split()) == {"python", "-m", "dap_bench", *choices}
        assert (REFERENCE / "samples" / f"{cell.info['identity']['samples']}.csv").is_file()
        assert not cell.info["config"]["data"]["path"].startswith("/")
    assert sum(file.stat().st_size for file in REFERENCE.rglob("*") if file.is_file()) < 20 * 2**20


def test_ten_rows_computed_again(cells, assets, tmp_path_factory):
    """One row each of ten cells, from the images, by the cell's own config."""
    for at in range(10):
        cell = cells[at * 7 % len(cells)]
        found = _compute(cell, at * 71 % 800, assets, tmp_path_factory.getbasetemp() / "cache")
        stored = cell.rows.set_index("sample_id").loc[found.pop("sample_id")]
        for name, value in found.items():
            assert value == pytest.approx(stored[name], abs=1e-4, nan_ok=True), (cell.names, name)


def test_pages_are_what_the_rows_say(tmp_path):
    for script, page, *options in (
        (["scripts/protocol.py"], "PROTOCOL.md", f"out={tmp_path / 'PROTOCOL.md'}"),
        (["-m", "dap_bench.compare"], "compare.md", "results=results/reference/vit_t", f"out={tmp_path}"),
    ):
        subprocess.run([sys.executable, *script, *options], cwd=ROOT, check=True, capture_output=True)
        committed = REFERENCE.parent / page
        assert (tmp_path / page).read_text() == committed.read_text(), f"make {committed} again"


def test_the_readme_says_what_the_rows_say():
    section = (ROOT / "README.md").read_text().split("## Does it reproduce?")[1].split("\n## ")[0]
    shown, pages = _tables(section), _tables((REFERENCE.parent / "compare.md").read_text())
    for metric in ("Del", "Ins", "CS", "TCC", "AFS", "LDA"):
        (line,) = (rest for first, *rest in shown if first == metric)
        halves = [
            [*cells[3:5], cells[-1]]
            for draw in ("Non-balanced", "Balanced")
            for cells in pages
            if cells[1:3] == [draw, metric]
        ]
        assert line == [cell for half in halves for cell in half], metric
    table = summarize(REFERENCE).query("sampler == 'balanced'").set_index(["method", "metric"])
    numbers = {(label(method), label(metric)): line for (method, metric), line in table.iterrows()}
    claims = re.findall(r"(\w+) (-?\d\.\d+)\s+\[(-?\d\.\d+),\s+(-?\d\.\d+)\]", section)
    assert {metric for metric, *_ in claims} == {"Del", "Ins", "CS", "TCC", "AFS", "LDA"}
    for metric, *numerals in claims:  # DAP's, with their intervals
        assert numerals == [f"{numbers['DAP', metric][key]:.3f}" for key in ("mean", "low", "high")], metric
    (methods,) = (rest for first, *rest in shown if first == "true boxes")
    assert len(methods) == 9
    for metric in ("Pointing", "Mass inside"):
        assert [metric, *(f"{numbers[method, metric]['mean']:.3f}" for method in methods)] in shown


def _tables(text):
    """The lines of Markdown tables as lists of their cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def _compute(cell, at, assets, cache):
    cfg = OmegaConf.create(cell.info["config"])
    cfg.model.checkpoint = str(assets / "weights" / f"{cfg.model.tag}.safetensors")
    cfg.data.path, cfg.data.boxes = str(assets / "imagenet"), str(assets / "imagenet" / "validation_boxes.csv")
    cfg.cache_dir = str(cache)
    samples = runner.sample_set(cfg)
    assert samples.digest == cell.info["identity"]["samples"]
    vit = config.load_vit("vit_t", device="cpu", checkpoint=cfg.model.checkpoint)
    ((data, mask),) = samples.read([at])
    masks = [vit.mask(decode(mask))] if mask else [None]
    image, double = torch.stack([vit.transform(decode(data))]), cfg.explain_precision == "fp64"
    batch = Batch.of(vit, config.instantiate(cfg.method), image, layers=True, double=double, masks=masks)
    metrics = config.instantiate_metrics(cfg.metric)
    row = {"sample_id": samples.ids[at], "predicted": batch.predicted.item(), "confidence": batch.confidence.item()}
    return row | {name: metric(batch).item() for name, metric in metrics.items()}
