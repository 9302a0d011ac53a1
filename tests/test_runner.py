"""From config to rows on the bundled default: resume, failures, shards, fingerprints."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import helpers
import pytest
import torch
from cells import FAST, NAMES, close, run, values

from dap_bench import UserError, config, runner, store
from dap_bench.evaluation import Evaluation


@pytest.fixture
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "cache"


def test_rows_say_everything(tmp_path, cache):
    cell = run(tmp_path, cache)
    rows = cell.rows()
    assert len(rows) == 12
    first = rows[0]
    assert set(store.COLUMNS.names) | {"cs", "afs"} == set(first)
    assert (first["model"], first["method"], first["sampler"], first["data"]) == (
        "vit_shapes",
        "gradcam",
        "non_balanced",
        "shapes",
    )
    assert first["fingerprint"] == cell.folder.name
    assert all(row["status"] == "ok" and row["predicted"] != row["alternative"] for row in rows)
    assert cell.info["metrics"] == {"cs": "higher", "afs": "higher"}
    assert cell.info["config"]["sampler"]["n"] == 12
    digest = cell.info["identity"]["samples"]
    manifest = (tmp_path / "samples" / f"{digest}.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in manifest[1:]] == [row["sample_id"] for row in rows]


def test_rows_are_what_the_library_gives(tmp_path, cache):
    from dap_bench import load_method, load_metrics, load_vit
    from dap_bench.data.images import decode
    from dap_bench.metrics.base import Batch

    cell = run(tmp_path, cache)
    samples = runner.sample_set(config.compose(*FAST, f"cache_dir={cache}"))
    vit, explain = load_vit("vit_shapes", device="cpu"), load_method("gradcam")
    images = torch.stack([vit.transform(decode(data)) for data, _ in samples.read(range(3))])
    probabilities, classes = vit.score(images).double().softmax(1).topk(2)
    batch = Batch.of(vit, explain, images)
    expected = {name: metric(batch).tolist() for name, metric in load_metrics("cs", "afs").items()}
    for at, row in enumerate(cell.rows()[:3]):
        assert (row["predicted"], row["alternative"]) == tuple(classes[at].tolist())
        assert row["confidence"] == pytest.approx(probabilities[at, 0].item(), rel=1e-6)
        assert row["cs"] == pytest.approx(expected["cs"][at], rel=1e-6, nan_ok=True)
        assert row["afs"] == pytest.approx(expected["afs"][at], rel=1e-6)


OTHER_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}


@pytest.mark.slow
def test_rows_do_not_hang_on_the_instructions_of_the_cpu(tmp_path, cache):
    """With explanations in double precision pixels have the same order everywhere: only scores differ, by rounding."""
    arguments = ["method=dap", "metric=[deletion,insertion,cs]", "sampler.n=6", "device=cpu", "explain_precision=fp64"]
    found = []
    for name, environment in (("here", {}), ("there", OTHER_CPU)):
        folders = [f"results_dir={tmp_path / name}", f"cache_dir={cache}"]
        command = [sys.executable, "-m", "dap_bench", *arguments, *folders]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
        (cell,) = store.cells(tmp_path / name)
        found.append({row["sample_id"]: row for row in cell.rows()})
    here, there = found
    assert here.keys() == there.keys()
    assert len(here) == 6
    for sample, row in here.items():
        for metric, tolerance in (("deletion", 1e-6), ("insertion", 1e-6), ("cs", 1e-9)):  # CS in single: 1e-8 to 1e-6
            assert there[sample][metric] == pytest.approx(row[metric], abs=tolerance), (sample, metric)


def test_a_finished_cell_loads_nothing(tmp_path, cache, monkeypatch):
    cell = run(tmp_path, cache)
    monkeypatch.setattr(runner, "_Work", lambda *_: pytest.fail("a finished cell was computed again"))
    before = cell.parts()
    assert run(tmp_path, cache).parts() == before


def test_a_finished_cell_does_not_import_torch(tmp_path, cache):
    arguments = ["method=gradcam", *FAST, f"results_dir={tmp_path}", f"cache_dir={cache}"]
    # named as the command line names it, so that the second process finds the cell
    subprocess.run([sys.executable, "-m", "dap_bench", *arguments], check=True, capture_output=True)
    code = (
        "import sys; sys.argv[1:] = " + repr(arguments) + "; from dap_bench.__main__ import main; main();"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules; print('light')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "light", out.stderr


def test_resume_computes_what_is_missing_and_nothing_else(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(store.Cell, "compact", lambda *_: None)  # leave the parts as they were written
    cell = run(tmp_path, cache)
    whole, parts = values(cell), cell.parts()
    kept = {part: part.stat().st_mtime_ns for part in (parts[0], parts[2])}
    parts[1].unlink()
    parts[3].write_bytes(b"garbage")
    assert values(run(tmp_path, cache)) == whole
    assert {part: part.stat().st_mtime_ns for part in kept} == kept
    assert len(cell.parts()) == 4


def test_kill_9_loses_at_most_a_batch(tmp_path, cache):
    common = [*FAST, "method=gradcam", f"cache_dir={cache}"]
    whole = [sys.executable, "-m", "dap_bench", *common, f"results_dir={tmp_path / 'whole'}"]
    subprocess.run(whole, check=True, capture_output=True)
    (undisturbed,) = store.cells(tmp_path / "whole")
    arguments = [*common, f"results_dir={tmp_path / 'killed'}"]
    deaths = 0
    for wanted in (1, 3):
        process = subprocess.Popen(
            [sys.executable, "-m", "dap_bench", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "killed").rglob("part-*.parquet"))) < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        deaths += process.wait() == -signal.SIGKILL
    assert deaths >= 1
    subprocess.run([sys.executable, "-m", "dap_bench", *arguments], check=True, capture_output=True)
    (cell,) = store.cells(tmp_path / "killed")
    ids = [row["sample_id"] for part in cell.parts() for row in store.pq.read_table(part).to_pylist()]
    assert len(ids) == len(set(ids)) == 12
    assert values(cell) == values(undisturbed)


def test_a_changed_option_never_mixes_with_old_rows(tmp_path, cache):
    first = run(tmp_path, cache)
    second = run(tmp_path, cache, "method.relu=false")
    assert first.folder != second.folder
    assert first.folder.parent == second.folder.parent
    assert values(first).keys() == values(second).keys()


def test_a_metric_cannot_have_the_name_of_another_column(tmp_path, cache):
    cfg = config.compose(*FAST, f"results_dir={tmp_path}", f"cache_dir={cache}")
    cfg.metric = {"confidence": cfg.metric.cs}
    with pytest.raises(UserError, match="a metric cannot be called confidence"):
        runner.run(cfg, {**NAMES, "method": "dap"})


def test_shards_merge_into_the_undivided_cell(tmp_path, cache):
    whole = values(run(tmp_path / "whole", cache, "batch_size=12"))
    for number in (3, 1, 2):
        cell = run(tmp_path / "shards", cache, f"shard={number}/3")
    merged = values(cell)
    assert merged.keys() == whole.keys()
    for sample, row in merged.items():
        assert close(row["cs"], whole[sample]["cs"])
        assert row["afs"] == pytest.approx(whole[sample]["afs"], abs=1e-4)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_wrong_shard_is_one_sentence(text):
    with pytest.raises(UserError, match="must be i/n"):
        runner.shard(10, text)


def test_overwrite_replaces_rows_only_when_the_new_ones_are_there(tmp_path, cache, monkeypatch):
    cell = run(tmp_path, cache)
    whole, before = values(cell), cell.parts()
    with pytest.raises(UserError, match="no CUDA|CUDA devices"):
        run(tmp_path, cache, "overwrite=true", "device=cuda:77")
    assert cell.parts() == before
    run(tmp_path, cache, "overwrite=true", "shard=1/2")
    assert values(cell).keys() == whole.keys()  # the other shard's rows are still there
    run(tmp_path, cache, "overwrite=true")
    assert len(cell.parts()) == 1
    assert not set(before) & set(cell.parts())
    assert values(cell).keys() == whole.keys()


def test_curves_and_maps_can_be_asked_for_later(tmp_path, cache):
    cell = run(tmp_path, cache, "metric=[cs]")
    assert "map" not in cell.rows()[0]
    run(tmp_path, cache, "metric=[cs]", "keep_maps=true", "keep_curves=true")
    rows = cell.rows()
    assert len(rows) == 12
    assert all(len(row["map"]) == 196 and row["kept"] == "curves,maps" for row in rows)
    parts = cell.parts()
    assert run(tmp_path, cache, "metric=[cs]", "keep_maps=true").parts() == parts  # they have it
    assert len(parts) == 1  # what was superseded is gone


def test_what_is_kept_later_loses_nothing_and_computes_nothing_twice(tmp_path, cache, monkeypatch):
    from dap_bench.metrics.deletion import Deletion

    options = ["sampler.n=4", "metric=[deletion]", "metric.deletion.steps=4"]
    before = values(run(tmp_path, cache, *options, "keep_curves=true"))
    monkeypatch.setattr(Deletion, "with_curve", lambda *_: pytest.fail("a metric was computed again"))
    after = values(run(tmp_path, cache, *options, "keep_maps=true"))
    for sample, row in after.items():
        assert len(row.pop("map")) == 196
        assert row == before[sample] | {"kept": "curves,maps"}


def test_an_image_that_fails_when_it_is_computed_again_keeps_its_row(tmp_path, cache, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    target = ["method._target_=helpers.picky"]
    monkeypatch.setattr("helpers.TOO_DARK", -9.0)
    before = values(run(tmp_path, cache, *target))
    monkeypatch.setattr("helpers.TOO_DARK", 0.0)
    after = values(run(tmp_path, cache, *target, "overwrite=true"))
    assert after == before
    assert all(row["status"] == "ok" for row in after.values())


def test_curves_are_stored_with_their_rows(tmp_path, cache):
    cell = run(tmp_path, cache, "sampler.n=3", "metric=[deletion,lda]", "metric.deletion.steps=4", "keep_curves=true")
    for row in cell.rows():
        curve = row["deletion_curve"]
        assert len(curve) == 5
        assert curve[0] == pytest.approx(row["confidence"], rel=1e-5)
        area = (sum(curve) - curve[0] / 2 - curve[-1] / 2) / 4
        assert row["deletion"] == pytest.approx(area, rel=1e-5)
        assert sum(row["lda_curve"]) / 5 == pytest.approx(row["lda"], rel=1e-5, nan_ok=True)


@pytest.mark.slow
def test_two_processes_on_one_cell(tmp_path, cache):
    arguments = [*FAST, "method=gradcam", f"cache_dir={cache}"]
    start = [sys.executable, "-m", "dap_bench", *arguments]
    subprocess.run([*start, f"results_dir={tmp_path / 'alone'}"], check=True, capture_output=True)
    both = [subprocess.Popen([*start, f"results_dir={tmp_path / 'both'}"], stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate() and process.returncode for process in both] == [0, 0]
    (alone,), (shared,) = store.cells(tmp_path / "alone"), store.cells(tmp_path / "both")
    assert values(shared) == values(alone)
    shared.compact()
    assert [store.pq.read_table(part).num_rows for part in shared.parts()] == [12]


# ---------------------------------------------------------------------- failures


def corrupt_source(folder):
    """An image folder with nine pictures and three files that are none."""
    from dap_bench.data.sources import Shapes

    for at, record in enumerate(Shapes(size=12).fetch(range(12))):
        path = folder / f"class{at % 2}" / f"{at:02d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record.data[:500] if at in (1, 5, 6) else record.data)
    return folder


def test_a_corrupt_image_is_a_row_and_not_the_end(tmp_path, cache, capsys):
    source = corrupt_source(tmp_path / "images")
    cell = run(tmp_path / "results", cache, "data=imagefolder", f"data.path={source}")
    rows = values(cell)
    failed = {sample for sample, row in rows.items() if row["status"] == "failed"}
    assert failed == {"class1/01.ppm", "class1/05.ppm", "class0/06.ppm"}
    assert all("cannot be decoded" in rows[sample]["reason"] for sample in failed)
    assert all(rows[sample]["cs"] is None for sample in failed)
    assert "vit_shapes gradcam non_balanced: 9 of 12 images, 3 failed, " in capsys.readouterr().out


def test_a_first_batch_of_corrupt_images_is_not_the_end(tmp_path, cache):
    source = corrupt_source(tmp_path / "images")
    for at in (0, 2, 4):
        (source / "class0" / f"{at:02d}.ppm").write_bytes(b"nothing")
    rows = run(tmp_path / "results", cache, "data=imagefolder", f"data.path={source}").rows()
    assert len(rows) == 12
    assert sum(row["status"] == "failed" for row in rows) == 6


def test_an_explainer_that_raises_on_some_images_fails_only_those(tmp_path, cache, monkeypatch):
    whole = values(run(tmp_path / "whole", cache))
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    target = ["method._target_=helpers.picky"]
    cell = run(tmp_path / "picky", cache, *target)
    rows = values(cell)
    failed = [sample for sample, row in rows.items() if row["status"] == "failed"]
    assert 0 < len(failed) < 12
    code = inspect.getsource(helpers).splitlines()
    line = 1 + next(at for at, text in enumerate(code) if "raise ValueError" in text)
    for sample, row in rows.items():
        if sample in failed:
            assert row["reason"] == f"ValueError: this picture is too dark (helpers.py, line {line})"
        else:
            assert close(row["cs"], whole[sample]["cs"])
    # failed rows count as done, until they are asked for again
    parts = cell.parts()
    assert run(tmp_path / "picky", cache, *target).parts() == parts
    monkeypatch.setattr("helpers.TOO_DARK", -9.0)
    again = values(run(tmp_path / "picky", cache, *target, "overwrite=failed"))
    assert all(row["status"] == "ok" for row in again.values())


def test_an_explainer_that_always_raises_ends_the_run_at_once(tmp_path, cache, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setattr("helpers.TOO_DARK", 9.0)
    with pytest.raises(UserError, match="none of the first 3 images could be measured: ValueError: this picture"):
        run(tmp_path, cache, "method._target_=helpers.picky")
    assert not list(tmp_path.rglob("part-*"))


def test_the_model_and_the_pictures_stay_loaded_between_cells(tmp_path, cache, monkeypatch):
    from dap_bench.data.samples import SampleSet

    run(tmp_path, cache)
    monkeypatch.setattr("dap_bench.vit.load", lambda *_, **__: pytest.fail("the model was loaded again"))
    monkeypatch.setattr(SampleSet, "read", lambda *_: pytest.fail("the pictures were decoded again"))
    assert len(run(tmp_path, cache, method="ar").rows()) == 12


# ---------------------------------------------------------------------- the real thing


def test_real_vit_on_real_images(tmp_path, assets):
    cfg = config.compose(
        "model=vit_t",
        f"model.checkpoint={assets}/weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
        "data=parquet",
        f"data.path={assets}/imagenet/validation-00000-of-00004.parquet",
        "sampler.n=16",
        "method=dap",
        "metric=[cs,afs]",
        "device=cpu",
        f"results_dir={tmp_path}/results",
        f"cache_dir={tmp_path}/cache",
    )
    cell = runner.run(cfg, {"model": "vit_t", "method": "dap", "sampler": "non_balanced", "data": "parquet"})
    rows = cell.rows()
    assert len(rows) == 16
    # 800 images of the paper have 0.39 and 0.53, with standard deviations of 0.17 and 0.15 per image
    assert 0.2 < sum(row["cs"] for row in rows) / 16 < 0.6
    assert 0.4 < sum(row["afs"] for row in rows) / 16 < 0.7


def test_top_1_of_the_real_vit(assets):
    from dap_bench import load_vit
    from dap_bench.data.images import decode
    from dap_bench.data.sources import Parquet

    vit = load_vit(
        "vit_t", device="cpu", checkpoint=f"{assets}/weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    )
    source = Parquet(f"{assets}/imagenet", split="validation")
    records = list(source.fetch(range(200)))
    right = 0
    for at in range(0, 200, 50):
        images = torch.stack([vit.transform(decode(record.data)) for record in records[at : at + 50]])
        labels = torch.tensor([record.label for record in records[at : at + 50]])
        right += (vit.score(images).argmax(1) == labels).sum().item()
    assert 0.68 <= right / 200 <= 0.82


def test_the_batch_that_fits(tmp_path, cache):
    """ViT-B with Chefer in single precision: measured, an image takes 200 to 340 MiB of a batch."""
    vit = SimpleNamespace(
        blocks=[SimpleNamespace(attn=SimpleNamespace(num_heads=12))],
        model=SimpleNamespace(embed_dim=768),
        patches=196,
        depth=12,
        layout=SimpleNamespace(prefix=1),
        device=torch.device("cpu"),
    )
    assert runner.bytes_per_image(vit) == 4 * 12 * 197 * (8 * 12 * 197 + 24 * 768)
    assert 200 * 2**20 < runner.bytes_per_image(vit) < 340 * 2**20
    assert [runner.batch_size_of(vit, False, gigabytes * 2**30) for gigabytes in (0, 8, 16, 80)] == [1, 19, 38, 64]
    assert runner.batch_size_of(vit, True, 8 * 2**30) == 9
    assert runner.batch_size_of(vit, False) == 32  # on a CPU
    rows = values(run(tmp_path / "auto", cache, "batch_size=auto"))
    assert rows == values(run(tmp_path / "32", cache, "batch_size=32"))


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (50, ""),
        (60, ", Del 0.125"),
        (70, ", Del 0.125, Ins 0.250"),
        (80, ", Del 0.125, Ins 0.250, CS 0.375"),
        (200, ", Del 0.125, Ins 0.250, CS 0.375"),
    ],
)
def test_the_progress_line_has_as_many_means_as_fit(columns, shown):
    with open(os.devnull, "w") as nowhere:
        bar = runner.Bar(total=800, desc="vit_t ar balanced", unit="img", ncols=columns, file=nowhere)
        bar.means = ("Del 0.125", "Ins 0.250", "CS 0.375", "TCC 0.500")
        line = str(bar)
        bar.close()
    assert len(line) == columns
    assert line.startswith("vit_t ar balanced | ")
    assert line.endswith(f"| 0/800 [00:00<?, ?img/s{shown}]")


def test_the_next_batch_is_loaded_and_the_last_one_written_beside_the_model(tmp_path, monkeypatch):
    """The first batch is not measured before the second is being loaded, and rows are written by another thread."""
    second, writers = threading.Event(), []
    load, measure, write = runner._Work._load, Evaluation.__call__, store.Cell.write

    def loading(work, batch):
        if batch[0] > 0:
            second.set()
        return load(work, batch)

    def measuring(evaluation, *arguments):
        assert second.wait(60)
        return measure(evaluation, *arguments)

    def writing(cell, *arguments):
        writers.append(threading.current_thread())
        return write(cell, *arguments)

    monkeypatch.setattr(runner._Work, "_load", loading)
    monkeypatch.setattr(Evaluation, "__call__", measuring)
    monkeypatch.setattr(store.Cell, "write", writing)
    cell = run(tmp_path / "rows", tmp_path / "cache", "sampler.n=4", "batch_size=2", "metric=[afs]")
    assert [row["status"] for row in cell.rows()] == ["ok"] * 4
    assert len(writers) == 2
    assert threading.main_thread() not in writers
