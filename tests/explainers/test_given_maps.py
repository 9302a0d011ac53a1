"""Maps of pixels, and maps that another program has made, scored like any others."""

import csv
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cells import close, run, values

from dap_bench import UserError, load_method, load_metrics, load_vit, store
from dap_bench.data.shapes import draw
from dap_bench.explainers.base import Explanation
from dap_bench.isolation import explained
from dap_bench.metrics.base import Batch


@pytest.fixture(scope="module")
def shapes():
    vit = load_vit("vit_shapes", device="cpu")
    return vit, torch.stack([vit.transform(draw(index)[0]) for index in range(2)])


def patches(vit, images, classes, layers=False):
    return load_method("gradcam", relu=False)(vit, images, classes).maps


def pixels(vit, images, classes, layers=False):
    """The same map, each patch as its 16 x 16 equal pixels."""
    maps = patches(vit, images, classes).unflatten(1, vit.grid)
    return maps.repeat_interleave(16, 1).repeat_interleave(16, 2)


def test_a_map_of_pixels_is_scored_as_its_map_of_patches_where_patches_count(shapes):
    vit, images = shapes
    small, large = (Batch.of(vit, explain, images) for explain in (patches, pixels))
    assert large.explanation.grid == (224, 224)
    for name, metric in load_metrics("tcc", "lda").items():
        torch.testing.assert_close(metric(large), metric(small), rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)
    for name, options in (("deletion", {"unit": "patch"}), ("afs", {"unit": "patch"}), ("cs", {"unit": "patch"})):
        metric = type(load_metrics(name)[name])(**options)
        torch.testing.assert_close(metric(large), metric(small), rtol=1e-5, atol=1e-6, msg=name)
    nearest = type(load_metrics("afs")["afs"])(upsample="nearest")
    torch.testing.assert_close(load_metrics("afs")["afs"](large), nearest(small))  # pixels as they are


def test_the_mean_over_each_patch(shapes):
    values = torch.arange(16.0).view(1, 16)  # 4 x 4 pixels, 2 x 2 patches
    assert Explanation(values, (4, 4)).on((2, 2)).tolist() == [[2.5, 4.5, 10.5, 12.5]]
    assert Explanation(values, (4, 4)).on((4, 4)) is values


@pytest.mark.parametrize(
    ("shape", "grid"), [((2, 196), (14, 14)), ((2, 14, 14), (14, 14)), ((2, 224, 224), (224, 224))]
)
def test_maps_may_come_alone_in_three_shapes(shapes, shape, grid):
    vit, images = shapes
    found = explained(lambda *_: torch.ones(shape), vit, images, torch.tensor([0, 1]))
    assert (found.grid, tuple(found.maps.shape)) == (grid, (2, grid[0] * grid[1]))


def test_a_grid_of_another_size_is_a_sentence(shapes):
    vit, images = shapes
    with pytest.raises(UserError, match="on a grid of 7 x 7, expected 14 x 14 or 224 x 224"):
        explained(lambda *_: torch.ones(2, 7, 7), vit, images, torch.tensor([0, 1]))


def test_rows_say_how_maps_are_enlarged(tmp_path, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "cache"
    for method, upsample in (("cdam", "nearest"), ("ar", "bilinear")):
        rows = run(tmp_path, cache, "sampler.n=2", "keep_maps=true", method=method).rows()
        assert {(row["grid"], row["upsample"]) for row in rows} == {("14x14", upsample)}


# ---------------------------------------------------------------------- maps made elsewhere

ARGUMENTS = ["sampler.n=4", "batch_size=2", "metric=[cs,afs]", "device=cpu"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What the export command writes, and Grad-CAM's maps made from it by another program."""
    place, cache = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.getbasetemp() / "cache"
    environment = {**os.environ, "DAP_BENCH_CACHE": str(cache)}
    command = [sys.executable, "-m", "dap_bench.export", *ARGUMENTS, "out=out"]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (place / "out" / "samples.csv").open(newline="") as file:
        samples = list(csv.DictReader(file))
    vit, explain = load_vit("vit_shapes", device="cpu"), load_method("gradcam")
    made = {}
    for sample in samples:
        image = torch.from_numpy(np.load(place / "out" / sample["tensor"]))[None]
        maps = [explain(vit, image, torch.tensor([int(sample[key])])).maps[0] for key in ("predicted", "alternative")]
        made[sample["id"]] = [each.numpy() for each in maps]
    return place, cache, made


def folder_of(place, made):
    for name, (predicted, alternative) in made.items():
        np.savez(place / f"{name}.npz", predicted=predicted, alternative=alternative)
    return place


def one_file(place, made):
    np.savez(
        place / "all.npz",
        ids=list(made),
        predicted=[a for a, _ in made.values()],
        alternative=[b for _, b in made.values()],
    )
    return place / "all.npz"


def parquet(place, made):
    columns = {
        "id": list(made),
        "predicted": [a for a, _ in made.values()],
        "alternative": [b for _, b in made.values()],
    }
    pq.write_table(pa.table(columns), place / "all.parquet")
    return place / "all.parquet"


@pytest.mark.parametrize("write", [folder_of, one_file, parquet])
def test_maps_made_elsewhere_score_as_the_method_itself(tmp_path, exported, write):
    _, cache, made = exported
    expected = values(run(tmp_path / "own", cache, *ARGUMENTS, method="gradcam"))
    cell = run(tmp_path / "maps", cache, *ARGUMENTS, f"method.path={write(tmp_path, made)}", method="maps")
    found = values(cell)
    assert found.keys() == expected.keys()
    for sample, row in found.items():
        assert close(row["cs"], expected[sample]["cs"])
        assert close(row["afs"], expected[sample]["afs"])


def test_missing_maps_are_failed_rows_and_a_missing_runner_up_has_no_cs(tmp_path, exported):
    _, cache, made = exported
    names = list(made)
    np.save(tmp_path / f"{names[0]}.npy", made[names[0]][0])
    np.save(tmp_path / f"{names[1]}.npy", made[names[1]][0].reshape(14, 14))
    rows = values(run(tmp_path / "rows", cache, *ARGUMENTS, f"method.path={tmp_path}", method="maps"))
    assert [rows[name]["status"] for name in names] == ["ok", "ok", "failed", "failed"]
    assert f"has no map of {names[2]}" in rows[names[2]]["reason"]
    assert rows[names[0]]["cs"] == "nan"
    assert rows[names[0]]["afs"] > 0


def test_other_maps_are_other_rows(tmp_path, exported):
    _, cache, made = exported
    for scale in (1, 2):
        one_file(tmp_path, {name: (a**scale, b**scale) for name, (a, b) in made.items()})
        run(tmp_path / "rows", cache, *ARGUMENTS, f"method.path={tmp_path / 'all.npz'}", method="maps")
    assert len(store.cells(tmp_path / "rows")) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "neither a folder of maps nor a file"),
        ({"ids": ["x"]}, "none of the first"),
        ({"predicted": [[1.0]]}, "holds no maps by id"),
    ],
)
def test_files_that_hold_no_maps_are_a_sentence(tmp_path, exported, content, words):
    _, cache, made = exported
    file = tmp_path / "all.npz"
    if content is not None:
        np.savez(file, **content)
    with pytest.raises(UserError, match=words):
        run(tmp_path / "rows", cache, *ARGUMENTS, f"method.path={file}", method="maps")


def test_a_map_of_another_size_is_a_sentence(tmp_path, exported):
    _, cache, made = exported
    one_file(tmp_path, {name: (a[:100], b[:100]) for name, (a, b) in made.items()})
    with pytest.raises(UserError, match="has 100 numbers, expected 196 .patches. or 50176 .pixels."):
        run(tmp_path / "rows", cache, *ARGUMENTS, f"method.path={tmp_path / 'all.npz'}", method="maps")


def test_maps_as_a_library(tmp_path):
    """`path` has no default, which OmegaConf does not count among a config's keys."""
    assert load_method("maps", path=str(tmp_path)).keywords["path"] == str(tmp_path)
