"""The committed rows of the real ViT-T: whole, described, and the same when they are computed again."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dap_bench import config, runner
from dap_bench.data.images import decode
from dap_bench.metrics.base import Batch
from dap_bench.report.summary import load_rows

REFERENCE = Path(__file__).parents[1] / "results" / "reference" / "vit_t"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference rows in this tree")


@pytest.fixture(scope="module")
def cells():
    return load_rows(REFERENCE)


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
    """The first row of one cell, the second of the next, and so on: each from the images, by the cell's own config."""
    picked = [cells[at % len(cells)] for at in range(10)]
    for at, cell in enumerate(picked):
        found = _compute(cell, at * 71 % 800, assets, tmp_path_factory.getbasetemp() / "cache")
        stored = cell.rows.set_index("sample_id").loc[found.pop("sample_id")]
        for name, value in found.items():
            assert value == pytest.approx(stored[name], abs=1e-4, nan_ok=True), (cell.names, name)


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
