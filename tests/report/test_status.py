"""What is done, what is not, and what is left to do, with cells known by hand."""

import os
import re
from itertools import product

from dap_bench.config import sweep
from dap_bench.files import write_text
from dap_bench.report.layouts import paper_methods, tables
from dap_bench.report.status import Progress, grid, progress
from dap_bench.store import Cell

NAMES = {"model": "vit_t", "method": "ar", "sampler": "balanced", "data": "toy"}


def cell(folder, done, n=4, failed=0, shard="1/1", fingerprint="f", **names):
    names = {**NAMES, **names}
    made = Cell.at(folder, names, fingerprint)
    info = {"n": n, "fingerprint": fingerprint, "metrics": {}, "identity": {"samples": "set"}}
    made.describe({**names, **info, "config": {"shard": shard}})
    rows = [{"sample_id": f"s{at}", "status": "ok", "seconds": 3600.0, **names} for at in done]
    rows += [{"sample_id": f"f{at}", "status": "failed", **names} for at in range(failed)]
    made.write(rows, [])
    write_text(folder / "samples" / "set.csv", "sample_id,label\n" + "".join(f"s{at},0\n" for at in range(n)))


def test_states(tmp_path):
    cell(tmp_path, range(4))
    cell(tmp_path, [0, 2], shard="1/2", method="dap")
    cell(tmp_path, range(3), failed=1, method="gmar")
    cell(tmp_path, range(4), method="cdam")
    cell(tmp_path, range(4), method="cdam", fingerprint="g")
    assert Progress(NAMES, 800, 800, 0, 1.0).state == "done"
    found = {each.names["method"]: each for each in progress(tmp_path) if each.names["method"] != "cdam"}
    assert {method: each.state for method, each in found.items()} == {
        "ar": "done, n=4",
        "dap": "2/4",
        "gmar": "1 failed",
    }
    assert found["dap"].shards == ("2/2",)
    text = grid(progress(tmp_path), {("vit_t", "balanced", m) for m in ("ar", "dap", "legrad")})
    text = re.sub(r"last change \d+ seconds ago", "last change N seconds ago", text)
    assert text.splitlines() == [
        "Balanced  ViT-T",
        "AR        done, n=4",
        "GMAR      1 failed",
        "CDAM      2 settings",
        "LeGrad    missing",
        "DAP       2/4",
        "",
        "4 cells done, 1 partly done, 1 missing; 1 images failed.",
        "  vit_t dap balanced toy: 2 of 4 images are missing (shard 2/2), last change N seconds ago",
        "About 802.0 hours left in one process, at the speed of the rows so far.",  # 2 images, and a cell of 800
    ]


def test_a_cell_that_has_begun_tells_when_it_was_last_written(tmp_path):
    cell(tmp_path, [])
    for file in tmp_path.rglob("f/*"):
        os.utime(file, (0, 0))
    (begun,) = progress(tmp_path)
    assert begun.state == "0/4"
    assert re.fullmatch(r".*: 4 of 4 images are missing, last change \d+\.\d hours ago", str(begun))


def test_a_model_without_rows_has_no_estimate():
    text = grid([Progress(NAMES, 4, 4, 0, 1.0)], {("vit_l", "balanced", "ar")})
    assert text.endswith("No estimate for 1 of the missing cells.")
    assert "left in one process" not in text


def test_the_papers_cells_are_those_of_its_experiment():
    cells = [dict(part.split("=") for part in cell) for cell in sweep("experiment=paper")]
    first, methods = tables()["table1"], {name for table in tables().values() for name in table.methods}
    asked = [(cell["model"], cell["sampler"], cell["method"]) for cell in cells]
    assert sorted(asked) == sorted(product(first.models, first.samplers, methods))
    assert list(dict.fromkeys(model for model, _, _ in asked)) == list(first.models)  # small models first
    assert len([method for _, _, method in asked if method in paper_methods()]) == 72


def test_a_damaged_cell_counts_as_missing(tmp_path):
    cell(tmp_path, range(4))
    next(tmp_path.rglob("cell.json")).write_text("{")
    assert progress(tmp_path) == []
