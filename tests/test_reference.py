"""The committed rows of the real ViT-T: whole, described, and the same when they are computed again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dap_bench import config, runner
from dap_bench.data.images import decode
from dap_bench.metrics.base import Batch
from dap_bench.report.summary import load_rows

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference" / "vit_t"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference rows in this tree")


@pytest.fixture(scope="module")
def cells():
    return load_rows(REFERENCE)


def test_every_cell_of_the_experiment_is_there(cells):
    params = OmegaConf.load(ROOT / "conf" / "experiment" / "reference.yaml").hydra.sweeper.params
    asked = {(sampler, method) for sampler in params.sampler.split(",") for method in params.method.split(",")}
    missing = asked - {(cell.names["sampler"], cell.names["method"]) for cell in cells}
    assert missing <= {("non_balanced", "dap_target"), ("non_balanced", "dap_final")}  # no table of the paper has them


def test_cells_are_whole_small_and_say_how_they_were_made(cells):
    for cell in cells:
        assert len(cell.rows) == cell.info["n"] == 800, cell.folder
        assert (cell.rows["status"] == "ok").all()
        assert "map" not in cell.rows  # no maps and no images
        choices = {f"sampler={cell.names['sampler']}", f"method={cell.names['method']}", "experiment=reference"}
        assert set(cell.info["command"].split()) == {"python", "-m", "dap_bench", *choices}
        assert (REFERENCE / "samples" / f"{cell.info['identity']['samples']}.csv").is_file()
        assert not cell.info["config"]["data"]["path"].startswith("/")
    assert sum(file.stat().st_size for file in REFERENCE.rglob("*") if file.is_file()) < 20 * 2**20


def test_ten_rows_computed_again(cells, assets, tmp_path_factory):
    """One row each of ten cells, from the images, by the cell's own config."""
    differences = []
    for at in range(10):
        cell = cells[at * 7 % len(cells)]
        found = _compute(cell, at * 71 % 800, assets, tmp_path_factory.getbasetemp() / "cache")
        stored = cell.rows.set_index("sample_id").loc[found.pop("sample_id")]
        for name, value in found.items():
            # of nearly equal pixels another one may come first on another CPU, and one pixel can move p(y) by 0.01
            tolerance = 5e-3 if name in ("deletion", "insertion") else 1e-4
            assert value == pytest.approx(stored[name], abs=tolerance, nan_ok=True), (cell.names, name)
        differences += [abs(found[name] - stored[name]) for name in ("deletion", "insertion")]
    assert np.median(differences) < 1e-5


def test_pages_are_what_the_rows_say(tmp_path):
    for script, page, *options in (
        ("protocol", "PROTOCOL.md", f"out={tmp_path / 'PROTOCOL.md'}"),
        ("compare", "compare.md", "results=results/reference/vit_t", f"out={tmp_path}"),
    ):
        subprocess.run([sys.executable, f"scripts/{script}.py", *options], cwd=ROOT, check=True, capture_output=True)
        committed = REFERENCE.parent / page
        assert (tmp_path / page).read_text() == committed.read_text(), f"make {committed} again"


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
    image = torch.stack([vit.transform(decode(data))])
    batch = Batch.of(vit, config.instantiate(cfg.method), image, layers=True, masks=masks)
    metrics = config.instantiate_metrics(cfg.metric)
    row = {"sample_id": samples.ids[at], "predicted": batch.predicted.item(), "confidence": batch.confidence.item()}
    return row | {name: metric(batch).item() for name, metric in metrics.items()}
