"""A results folder from somebody else is data: nothing in it is run, opened or written."""

import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest
from cells import run

from dap_bench import store
from dap_bench.config import restored
from dap_bench.data.samples import load

EVIL = "import pathlib\npathlib.Path('executed').touch()\ndef explain(*_, **__): ...\n"


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Rows of Grad-CAM without maps, so that pictures would have to be made again."""
    place = tmp_path_factory.mktemp("theirs")
    cell = run(place / "rows", place / "cache", "sampler.n=3", method="gradcam")
    return place, cell.folder.relative_to(place)


METHODS = [
    {"_target_": "evil.explain", "_partial_": True},
    {"_target_": "os.system", "command": "touch executed"},
    {"_target_": "hydra.utils.get_method", "path": "evil.explain"},
    {"_target_": "dap_bench.explainers.gradcam.gradcam", "_partial_": True, "at": {"_target_": "evil.explain"}},
    None,
]
MODELS = [
    {"_target_": "evil.explain"},
    {"_target_": "torch.load", "f": "evil.pth", "weights_only": False},
    {"_target_": "dap_bench.vit.load", "tag": "../evil", "checkpoint": "evil.pth"},
    3,
]


def test_nothing_of_a_foreign_folder_is_run(theirs, tmp_path):
    """One report of many cells, each of which tries something else; one is honest, with an option of its own."""
    place, folder = theirs
    here = tmp_path / "here"
    shutil.copytree(place / "cache", here / "cache")
    (here / "evil.py").write_text(EVIL)
    (here / "evil.pth").write_bytes(pickle.dumps(Evil()))
    info = json.loads((place / folder / "cell.json").read_text())

    def cell(model, method, config):
        made = store.Cell.at(here / "rows", {**info, "model": model, "method": method}, "f")
        shutil.copytree(place / folder, made.folder)
        made.describe({**info, "model": model, "method": method, "config": {**info["config"], **config}})

    own = {"method": {**info["config"]["method"], "relu": False}, "cache_dir": "/proc/self"}
    cell("vit_shapes", "honest", own)
    for at, method in enumerate(METHODS):
        cell("vit_shapes", f"m{at}", {"method": method, "shard": "1/99999999999999"})
    for at, model in enumerate(MODELS):
        cell(f"v{at}", "gradcam", {"model": model})
    before = set(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "dap_bench.report", "results=rows", "out=page/index.html", "device=cpu", "pictures=3"],
        cwd=here,
        env={**os.environ, "DAP_BENCH_CACHE": str(here / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    new = {path.relative_to(here).parts[0] for path in set(tmp_path.rglob("*")) - before}
    assert new == {"page"}
    for at in range(len(METHODS)):
        assert f"m{at} is left out of pictures" in done.stderr
    assert done.stderr.count("single images are not explained again") == len(MODELS)
    page = (here / "page" / "index.html").read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert {method for group in data["groups"] for one in group["samples"] for method in one["maps"]} == {"honest"}
    said = [note["text"] for group in data["groups"] for note in group["notes"]]
    assert sum("none of your configs makes the method" in text for text in said) == len(METHODS)
    assert sum("none of your configs makes the model" in text for text in said) == len(MODELS)


@pytest.mark.parametrize("digest", ["../../here", ["x"], None, "0" * 64])
def test_a_sample_set_is_looked_for_in_the_cache_and_nowhere_else(tmp_path, digest):
    (tmp_path / "here").mkdir()
    assert load(tmp_path / "cache", digest) is None


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            {"_target_": "dap_bench.explainers.gradcam.gradcam", "relu": False, "layer": -2},
            {"relu": False, "layer": -2},
        ),
        ({"_target_": "dap_bench.explainers.gradcam.gradcam", "at": "output"}, {"at": "output"}),
        ({"_target_": "dap_bench.explainers.gradcam.gradcam", "at": "/etc/passwd"}, None),
        ({"_target_": "dap_bench.explainers.gradcam.gradcam", "at": {"_target_": "evil.explain"}}, None),
        ({"_target_": "dap_bench.explainers.gradcam.gradcam", "unknown": 1}, None),
        (
            {
                "_target_": "dap_bench.explainers.dap.dap",
                "prior": {"_target_": "dap_bench.explainers.legrad.legrad", "readout": "mean"},
            },
            {"variant": "pairwise"},
        ),
        ({"_target_": "dap_bench.explainers.dap.dap", "prior": {"_target_": "evil.explain"}}, None),
        ("gradcam", None),
    ],
)
def test_only_plain_options_are_taken_from_what_is_stored(stored, expected):
    node = restored("method", stored)
    if expected is None:
        assert node is None
    else:
        assert node._target_ == stored["_target_"]
        assert {key: node[key] for key in expected} == expected


def test_status_of_a_foreign_folder(theirs, caplog):
    from dap_bench.report.status import progress

    place, _ = theirs
    with caplog.at_level(logging.WARNING):
        (cell,) = progress(place / "rows")
    assert (cell.n, cell.done, cell.failed) == (3, 3, 0)
    assert len(store.cells(place / "rows")) == 1
