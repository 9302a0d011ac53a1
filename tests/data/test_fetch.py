"""python -m dap_bench.fetch: everything that needs the network, so that the run itself does not."""

import io
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
from hub_server import TOKEN, HubServer
from PIL import Image
from safetensors.torch import save
from test_hub import environment

from dap_bench import config, store

TAG = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
SHARDS, ROWS = 2, 12
ARGUMENTS = ["model=vit_t", "data.repo=some/pictures", "device=cpu"]
NON_BALANCED = [*ARGUMENTS, "sampler=non_balanced", "sampler.n=3"]
BALANCED = [*ARGUMENTS, "sampler=balanced", "sampler.classes=2", "sampler.per_class=2"]


def picture(position):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (position * 10, 100, 200)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": f"img{position}.png"}


def shard(first):
    rows, buffer = range(first, first + ROWS), io.BytesIO()
    table = pa.table({"image": [picture(row) for row in rows], "label": [row % 3 for row in rows]})
    pq.write_table(table, buffer, row_group_size=4)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        names = [f"data/train-{number:05d}-of-{SHARDS:05d}.parquet" for number in range(SHARDS)]
        shards = {name: shard(number * ROWS) for number, name in enumerate(names)}
        server.publish("some/pictures", {"README.md": b"---\nlicense: other\n---\n", **shards})
        weights = timm.create_model(TAG.split(".")[0], pretrained=False).state_dict()
        server.publish(f"timm/{TAG}", {"model.safetensors": save(weights)})
        yield server


@pytest.fixture
def run(server, tmp_path):
    """Run a module of the package; its exit code and what it says."""

    def call(module, *arguments, **variables):
        places = {"HF_TOKEN": TOKEN, "DAP_BENCH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tmp_path,
            env={**environment(server.endpoint, tmp_path / "home"), **places, **variables},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    yield call
    server.recover()


def test_after_it_the_same_arguments_run_without_the_hub(run, server, tmp_path):
    code, said, errors = run("dap_bench.fetch", *NON_BALANCED, "method=ar,dap")
    assert code == 0, errors
    assert f"the weights of {TAG} are here" in said
    assert f"3 images are in {tmp_path}/cache/samples/" in said
    server.recover()
    code, _, errors = run("dap_bench", *NON_BALANCED, "method=ar", "metric=[afs]", HF_HUB_OFFLINE="1")
    assert code == 0, errors
    assert server.log == []
    (cell,) = store.cells(tmp_path / "results" / "runs")
    assert [row["status"] for row in cell.rows()] == ["ok"] * 3
    code, _, errors = run("dap_bench.fetch", *BALANCED, HF_HUB_OFFLINE="1")
    assert code == 2
    assert "offline mode is enabled" in errors.splitlines()[-1]
    assert server.log == []


@pytest.mark.parametrize("kind", ["auth-check", "storage"])
def test_a_hub_that_drips_ends_it_with_a_sentence(run, server, kind):
    server.fail(kind, "drip head" if kind == "auth-check" else "drip")
    start = time.monotonic()
    code, _, errors = run("dap_bench.fetch", *NON_BALANCED, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert code == 2
    assert time.monotonic() - start < 40
    assert errors.splitlines()[-1].startswith("fetch: The Hugging Face Hub has sent next to nothing for 3 seconds; ")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_weights_that_drip_end_it_with_a_sentence(run, server):
    server.fail("resolve", "drip", file="model.safetensors")
    code, _, errors = run("dap_bench.fetch", "model=vit_t", "data=shapes", "sampler.n=1", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert code == 2
    assert "has sent next to nothing" in errors.splitlines()[-1]
    assert "model.checkpoint=FILE.safetensors" in errors.splitlines()[-1]


def test_what_cannot_be_composed_is_a_sentence(run):
    for arguments, words in (
        (["sampler=nobody"], "there is no sampler=nobody; there are balanced, non_balanced."),
        (["sampler.m=1"], "there is no key sampler.m"),
        (["model=vit_t,"], "ends in a comma"),
    ):
        code, _, errors = run("dap_bench.fetch", *arguments)
        assert (code, errors.count("\n")) == (2, 1)
        assert words in errors


def test_the_cells_of_a_sweep():
    assert config.sweep("model=vit_t,vit_b", "sampler=balanced,non_balanced", "method=ar,dap", aside=["method"]) == [
        ["model=vit_t", "sampler=balanced"],
        ["model=vit_t", "sampler=non_balanced"],
        ["model=vit_b", "sampler=balanced"],
        ["model=vit_b", "sampler=non_balanced"],
    ]
    paper = config.sweep("experiment=paper", "model=vit_s", aside=["method"])
    assert paper == [["model=vit_s", f"sampler={name}", "experiment=paper"] for name in ("balanced", "non_balanced")]
    assert len(config.sweep("experiment=paper")) == 96
    assert config.sweep() == [[]]
