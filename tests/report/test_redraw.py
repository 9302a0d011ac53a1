"""Maps that are made again are those that were measured, on a machine that has nothing but the assets too."""

import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cells import NAMES, run

from dap_bench import UserError, config, load_method, runner
from dap_bench.data.sources import Shapes
from dap_bench.report.redraw import Redraw, sample_set
from dap_bench.report.rows import CellRows, load_rows

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another machine: an empty cache, and no assets."""
    monkeypatch.setenv("DAP_BENCH_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("DAP_BENCH_ASSETS", raising=False)


def test_maps_of_both_classes_are_those_of_the_rows(tmp_path, elsewhere):
    """The draw of as many classes as the source has, which only the config as a whole knows."""
    rows = [f"results_dir={tmp_path / 'rows'}", f"cache_dir={tmp_path / 'cache'}", "keep_maps=true", "device=cpu"]
    cfg = config.compose("method=gradcam", "sampler=balanced", "sampler.per_class=1", "metric=[afs]", *rows)
    runner.run(cfg, {**NAMES, "method": "gradcam", "sampler": "balanced"})
    (cell,) = load_rows(tmp_path / "rows")
    redraw = Redraw([cell], "cpu")
    assert len(redraw.samples) == 12
    row = cell.rows.iloc[5]
    (predicted, _), (second, _) = redraw.maps(row["sample_id"], ["gradcam"])["gradcam"]
    assert predicted.ravel() == pytest.approx(row["map"], abs=1e-4)
    image = redraw.vit.transform(redraw.photo(row["sample_id"]))[None]
    direct = load_method("gradcam")(redraw.vit, image, torch.tensor([int(row["alternative"])]))
    assert second.ravel() == pytest.approx(direct.maps[0].detach().numpy(), abs=1e-4)
    assert not np.allclose(predicted, second)


def parquet(folder):
    """Twelve images as local files in the Hub's form."""
    folder.mkdir(parents=True)
    records = list(Shapes(size=12).fetch(range(12)))
    images = pa.array([{"bytes": record.data, "path": record.id} for record in records], IMAGE)
    table = pa.table({"image": images, "label": [record.label for record in records]})
    pq.write_table(table, folder / "train-00000-of-00001.parquet")


def test_images_are_found_in_the_assets_and_nowhere_else(tmp_path, elsewhere, monkeypatch):
    here = tmp_path / "here"
    parquet(here / "imagenet")
    source = ["data=parquet", f"data.path={here / 'imagenet'}", "data.split=train", "sampler.n=4"]
    run(tmp_path / "rows", tmp_path / "cache", *source)
    (cell,) = load_rows(tmp_path / "rows")
    with pytest.raises(UserError, match=r"not in the cache .*DAP_BENCH_ASSETS=FOLDER"):
        sample_set(cell)  # the path that the row names is not looked at, though the files are there
    shutil.move(here, tmp_path / "there")
    monkeypatch.setenv("DAP_BENCH_ASSETS", str(tmp_path / "there"))
    assert set(sample_set(cell).ids) == set(cell.rows["sample_id"])


def test_other_images_of_the_same_names_are_refused(tmp_path, elsewhere, monkeypatch):
    parquet(tmp_path / "here" / "imagenet")
    parquet(tmp_path / "there" / "imagenet")
    source = ["data=parquet", f"data.path={tmp_path / 'here' / 'imagenet'}", "data.split=train", "sampler.n=4"]
    run(tmp_path / "rows", tmp_path / "cache", *source)
    file = tmp_path / "there" / "imagenet" / "train-00000-of-00001.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(0, "image", table["image"].take(list(range(11, -1, -1)))), file)
    monkeypatch.setenv("DAP_BENCH_ASSETS", str(tmp_path / "there"))
    (cell,) = load_rows(tmp_path / "rows")
    with pytest.raises(UserError, match="gives other images than the rows were measured on"):
        sample_set(cell)


@pytest.mark.parametrize(
    "data",
    [
        {"_target_": "evil.explain"},
        {"_target_": "dap_bench.data.sources.Parquet", "path": "evil", "split": "../evil"},
        {"_target_": "dap_bench.data.sources.Parquet", "path": "evil"},
        {"_target_": "dap_bench.data.sources.Shapes", "size": 10**15, "seed": 0},
        {"_target_": "dap_bench.data.sources.Shapes", "size": "many", "seed": 0},
        {"_target_": "dap_bench.data.sources.Shapes", "size": 12, "seed": {"_target_": "evil.explain"}},
        {"_target_": "dap_bench.data.sources.Hub", "repo": "evil/evil"},
        {"_target_": ["evil.explain"]},
        None,
    ],
)
def test_a_foreign_source_is_not_made(data, tmp_path, elsewhere, monkeypatch):
    monkeypatch.setenv("DAP_BENCH_ASSETS", str(tmp_path))
    names = {"model": "vit_t", "method": "dap", "sampler": "non_balanced", "data": "../evil"}
    info = {"config": {"data": data, "sampler": None}, "identity": {"samples": "0" * 64}}
    with pytest.raises(UserError, match=r"not in the cache|do not say which split|none of your configs makes"):
        sample_set(CellRows(names, info, pd.DataFrame(), tmp_path))


@pytest.mark.parametrize("folder", ["reference/train", "reference/validation"])
def test_committed_rows_are_drawn_again_from_the_assets(folder, assets, elsewhere, monkeypatch):
    """The model says of the images what the rows say."""
    rows = config.CONF.parent / "results" / folder
    monkeypatch.setenv("DAP_BENCH_ASSETS", str(assets))
    cells = [cell for cell in load_rows(rows) if cell.names["method"] == "gradcam"]
    redraw = Redraw(cells[:1], "cpu")
    for name in redraw.samples.ids[:2]:
        image = redraw.vit.transform(redraw.photo(name))[None].to(redraw.vit.dtype)
        probabilities = redraw.vit.model(image).softmax(-1)[0]
        row = redraw.rows.loc[name]
        assert probabilities.argsort(descending=True)[:2].tolist() == [row["predicted"], row["alternative"]]
        assert float(probabilities.max()) == pytest.approx(row["confidence"], abs=1e-4)
    assert [len(maps) for maps in redraw.maps(name, ["gradcam"]).values()] == [2]
