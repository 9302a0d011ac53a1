"""Bad luck of every kind, and then the same rows as without it."""

import contextlib
import errno
import random
import signal
import subprocess
import time

import pytest
import torch
from cells import NAMES, close, command, run, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dap_bench import UserError, config, runner, store
from dap_bench.evaluation import Evaluation
from dap_bench.vit import ViT

SCORED = ["metric=[deletion,tcc]", "metric.deletion.steps=6"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "cache"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    return values(run(tmp_path_factory.mktemp("undisturbed"), cache))


def test_a_disk_that_fills_up_while_rows_are_written(tmp_path, cache, undisturbed, monkeypatch):
    write, calls = store.pq.write_table, []

    def full(table, path, **options):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half a fi")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(table, path, **options)

    monkeypatch.setattr(store.pq, "write_table", full)
    with pytest.raises(UserError, match="the disk is full at .*free some space and repeat the same command"):
        run(tmp_path, cache)
    (cell,) = store.cells(tmp_path)
    assert values(cell) == {sample: undisturbed[sample] for sample in values(cell)}
    assert len(cell.rows()) == 6
    assert not list(tmp_path.rglob("*.tmp"))
    assert values(run(tmp_path, cache)) == undisturbed


@pytest.mark.parametrize("harm", [b"", b"PAR1 garbage PAR1", "cut"])
def test_a_damaged_part_is_computed_again(tmp_path, cache, undisturbed, harm, monkeypatch):
    monkeypatch.setattr(store.Cell, "compact", lambda *_: None)
    parts = run(tmp_path, cache).parts()
    parts[2].write_bytes(parts[2].read_bytes()[:-20] if harm == "cut" else harm)
    assert values(run(tmp_path, cache)) == undisturbed


def test_a_corrupt_image_among_good_ones_changes_no_other(tmp_path, cache):
    from dap_bench.data.sources import Shapes

    for folder, corrupt in (("good", ()), ("bad", (1, 5, 6))):
        for at, record in enumerate(Shapes(size=12).fetch(range(12))):
            path = tmp_path / folder / f"class{at % 2}" / f"{at:02d}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record.data[:500] if at in corrupt else record.data)
    found = {
        kind: values(run(tmp_path / f"rows-{kind}", cache, "data=imagefolder", f"data.path={tmp_path / kind}"))
        for kind in ("good", "bad")
    }
    ok = [sample for sample, row in found["bad"].items() if row["status"] == "ok"]
    assert len(ok) == 9
    assert all(close(found["bad"][sample][key], found["good"][sample][key]) for sample in ok for key in ("cs", "afs"))


STOPS = [
    pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    (signal.SIGTERM, 143),
    pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_signal_to_stop_and_then_the_same_command(tmp_path, cache, number, code):
    """Ctrl-C, a scheduler's preemption, a closed terminal: the batch is finished, and the next start goes on."""
    many = ["sampler.n=60", "batch_size=2"]  # 30 batches: the signal comes long before the last
    arguments = command(tmp_path / "stopped", cache, *many)
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.rglob("part-*.parquet")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    error = process.communicate()[1]
    assert process.returncode == code
    assert "repeat the same command to resume" in error
    assert "Traceback" not in error
    (cell,) = store.cells(tmp_path)
    assert all(store.pq.read_table(part).num_rows == 2 for part in cell.parts())  # whole batches
    if number == signal.SIGTERM:
        subprocess.run(arguments, check=True, capture_output=True)
        assert values(cell) == values(run(tmp_path / "undisturbed", cache, *many))


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no SIGUSR2 here")
def test_a_handler_that_a_launcher_made_acts_between_batches(tmp_path, cache, undisturbed, monkeypatch):
    """submitit's raises an exception, which in the middle of a batch would be taken for a failure of the method."""
    measure, calls = Evaluation._measure, []

    def signalled(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGUSR2)
        return measure(self, *arguments)

    def handler(number, frame):
        raise RuntimeError("not queued again")

    monkeypatch.setattr(Evaluation, "_measure", signalled)
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(RuntimeError, match="not queued again"):
            run(tmp_path, cache)
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)
    (cell,) = store.cells(tmp_path)
    assert len(cell.rows()) == 6  # with the second batch
    assert values(cell) == {sample: undisturbed[sample] for sample in values(cell)}
    assert values(run(tmp_path, cache)) == undisturbed


def test_running_out_of_memory_while_scoring(tmp_path, cache, monkeypatch, caplog):
    whole = values(run(tmp_path / "whole", cache, *SCORED))
    score = ViT.score

    def little_memory(self, images, full=False):
        if len(images) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(self, images, full)

    monkeypatch.setattr(ViT, "score", little_memory)
    runner.SWEEP.forget()
    tight = values(run(tmp_path / "tight", cache, *SCORED))
    assert "out of memory" in caplog.text
    assert tight.keys() == whole.keys()
    for sample, row in tight.items():
        assert row["status"] == "ok"
        assert row["deletion"] == pytest.approx(whole[sample]["deletion"], abs=1e-6)
        assert row["tcc"] == pytest.approx(whole[sample]["tcc"], abs=1e-6)


@pytest.mark.slow
def test_thirty_deaths_at_random(tmp_path, cache, undisturbed):
    """kill -9 at any moment of a run, from its start to its end, thirty times."""
    seed = random.Random(0)
    start = time.monotonic()
    subprocess.run(command(tmp_path / "timed", cache), check=True, capture_output=True)
    length = time.monotonic() - start
    deaths, life = 0, 0
    while deaths < 30:
        folder = tmp_path / str(life)
        process = subprocess.Popen(command(folder, cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(seed.uniform(0.5, 1) * length)  # the first half is imports
            life += 1  # it got through: the next one begins anew
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            deaths += process.wait() == -signal.SIGKILL
        for cell in store.cells(folder):
            assert values(cell) == {sample: undisturbed[sample] for sample in values(cell)}
    for folder in map(tmp_path.joinpath, map(str, range(life + 1))):
        subprocess.run(command(folder, cache), check=True, capture_output=True)
        (cell,) = store.cells(folder)
        assert values(cell) == undisturbed


RUN_KEYS = ["batch_size", "chunk_size", "workers", "shard", "overwrite", "precision", "explain_precision", "device"]
RUN_KEYS += ["keep_maps"]
PLACE_KEYS = ["results_dir", "cache_dir", "model.tag", "model.checkpoint"]
VALUE_KEYS = ["sampler.n", "sampler.seed", "data.size", "data.seed", "method.layer", "method.at", "metric.cs.formula"]
VALUE_KEYS += ["metric.afs.fraction", "metric.afs.unit", "metric.afs.upsample"]
VALUES = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=12))


@given(key=st.sampled_from([*RUN_KEYS, *PLACE_KEYS, *VALUE_KEYS]), value=VALUES)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_any_key_is_a_run_or_a_sentence(tmp_path_factory, cache, key, value, monkeypatch):
    """Whatever is written after the = of a key, no other exception than a UserError comes out."""
    folder = tmp_path_factory.mktemp("fuzz") / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    small = ["sampler.n=2", "batch_size=2", "metric=[cs,afs]", "method=gradcam", "device=cpu"]
    cfg = config.compose(*small, "results_dir=rows", f"cache_dir={cache}")
    config.OmegaConf.update(cfg, key, value)
    if key in ("sampler.n", "data.size") and isinstance(value, int) and value > 100:
        return  # only a long run
    with contextlib.suppress(UserError):
        runner.run(cfg, {**NAMES, "method": "gradcam"})
    assert list(folder.parent.iterdir()) == [folder]
