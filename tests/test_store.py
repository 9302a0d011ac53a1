"""Rows on disk: whole parts only, of each sample the newest row that is ok, nothing outside the results folder."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dap_bench import UserError, store
from dap_bench.store import Cell

NAMES = {"model": "m", "method": "e", "sampler": "s", "data": "d"}
INFO = {**NAMES, "n": 3, "fingerprint": "f", "metrics": {"cs": "higher"}, "identity": {}, "config": {}}


def row(sample, value=0.5, status="ok"):
    return {"sample_id": sample, "label": 1, **NAMES, "status": status, "fingerprint": "f", "cs": value}


def found(cell):
    return {r["sample_id"]: r["cs"] for r in cell.rows()}


@pytest.fixture
def cell(tmp_path):
    cell = Cell.at(tmp_path, NAMES, "f")
    cell.describe(INFO)
    return cell


def test_rows_come_back_as_they_were(cell):
    cell.write([{**row("a", 0.25), "deletion_curve": [1.0, 0.5]}, row("b", float("nan"))], ["cs"])
    first, second = cell.rows()
    assert (first["sample_id"], first["cs"], first["deletion_curve"]) == ("a", 0.25, [1.0, 0.5])
    assert second["cs"] != second["cs"]  # NaN stays NaN and does not become null
    assert second["deletion_curve"] is None
    assert cell.info == INFO
    assert cell.table(["cs"]).column_names == ["sample_id", "status", "cs"]


def test_a_failed_row_has_no_values(cell):
    cell.write([{k: v for k, v in row("a", status="failed").items() if k != "cs"}], ["cs"])
    assert cell.rows()[0]["cs"] is None


def test_the_newest_row_of_a_sample_counts_and_a_failure_hides_nothing(cell):
    cell.write([row("a", 0.1), row("b", 0.2), row("c", status="failed")], ["cs"])
    cell.write([row("a", 0.9), row("b", 0.7, status="failed"), row("c", 0.3, status="failed")], ["cs"])
    assert found(cell) == {"a": 0.9, "b": 0.2, "c": 0.3}
    cell.compact()
    assert found(cell) == {"a": 0.9, "b": 0.2, "c": 0.3}


def test_the_order_does_not_hang_on_clocks(cell, monkeypatch):
    """An hour back, or rows of an earlier version whose parts were named by the time."""
    cell.write([row("a", 0.1)], ["cs"])
    os.replace(cell.parts()[0], cell.folder / "part-1763420000000000000-0a1b2c3d.parquet")
    monkeypatch.setattr("time.time_ns", lambda: 5)
    monkeypatch.setattr("time.time", lambda: 5.0)
    cell.write([row("a", 0.9)], ["cs"])
    assert found(cell) == {"a": 0.9}


def test_parts_are_merged_into_one(cell):
    cell.write([row("a", 0.1), {**row("b", 0.2), "deletion_curve": [1.0, 0.0]}], ["cs"])
    cell.write([row("c", 0.3)], ["cs"])
    cell.write([row("a", 0.5)], ["cs"])
    before = sorted(cell.rows(), key=lambda row: row["sample_id"])
    cell.compact()
    assert len(cell.parts()) == 1
    assert cell.rows() == before
    assert found(cell) == {"a": 0.5, "b": 0.2, "c": 0.3}


def test_a_number_that_became_free_again_is_not_taken_for_a_late_part(cell, monkeypatch):
    """A writer that looked for the last number long ago must not end up before rows that were merged meanwhile."""
    for value in (0.1, 0.2, 0.3):
        cell.write([row("a", value)], ["cs"])
    monkeypatch.setattr(cell, "_last", iter([0, 3, 4]).__next__)
    cell.compact()
    cell.write([row("a", 0.9)], ["cs"])
    assert found(Cell(cell.folder)) == {"a": 0.9}
    assert [part.name for part in cell.parts()] == ["part-0000003.parquet", "part-0000004.parquet"]


def test_a_file_system_without_hard_links(cell, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    cell.write([row("a", 0.1)], ["cs"])
    cell.write([row("a", 0.2)], ["cs"])
    assert found(cell) == {"a": 0.2}
    assert len(cell.parts()) == 2


def test_a_part_that_vanishes_while_reading_is_looked_for_again(cell, monkeypatch):
    cell.write([row("a", 0.1)], ["cs"])
    cell.write([row("b", 0.2)], ["cs"])
    read, calls = store._read_part, []

    def merged_meanwhile(part, columns):
        calls.append(part)
        if len(calls) == 1:
            Cell(cell.folder).compact()
        return read(part, columns)

    monkeypatch.setattr(store, "_read_part", merged_meanwhile)
    assert found(cell) == {"a": 0.1, "b": 0.2}
    monkeypatch.setattr(store, "_read_part", lambda *_: Path("nowhere").read_bytes())
    with pytest.raises(UserError, match="vanish while they are read"):
        cell.rows()


HARMS = {
    "empty": lambda part: part.write_bytes(b""),
    "garbage": lambda part: part.write_bytes(b"PAR1 garbage PAR1"),
    "cut": lambda part: part.write_bytes(part.read_bytes()[:-30]),
    "other columns": lambda part: pq.write_table(pa.table({"x": [1]}), part),
    "no samples": lambda part: pq.write_table(
        pa.table({"sample_id": pa.nulls(1, pa.string()), "status": ["ok"]}), part
    ),
    "text for numbers": lambda part: pq.write_table(
        pa.table({"sample_id": ["a"], "status": ["ok"], "cs": ["high"]}), part
    ),
    "dangling": lambda part: (part.unlink(), part.symlink_to("nowhere")),
    "folder": lambda part: (part.unlink(), part.mkdir()),
    "fifo": lambda part: (part.unlink(), os.mkfifo(part)),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_part_is_set_aside_and_named(cell, harm, caplog):
    cell.write([row("a")], ["cs"])
    cell.write([row("b")], ["cs"])
    part = cell.parts()[0]
    HARMS[harm](part)
    assert [r["sample_id"] for r in cell.rows()] == ["b"]
    assert f"{part} is damaged" in caplog.text
    assert os.path.lexists(part)  # who only reads does not move anything
    cell.rows(set_aside=True)
    assert [path.name for path in cell.folder.glob("*.damaged")] == [f"{part.stem}.damaged"]
    caplog.clear()
    cell.write([row("a", 0.9)], ["cs"])
    assert found(cell) == {"b": 0.5, "a": 0.9}
    assert not caplog.text


def test_parts_of_an_earlier_version_have_fewer_columns(cell, caplog):
    cell.write([row("a", 0.1)], ["cs"])
    part = cell.parts()[0]
    pq.write_table(pq.read_table(part).drop_columns(["grid", "upsample", "kept"]), part)
    cell.write([row("b", 0.2)], ["cs"])
    assert found(cell) == {"a": 0.1, "b": 0.2}
    assert cell.rows()[0]["upsample"] is None
    assert not caplog.text


def test_two_processes_set_the_same_part_aside(cell, monkeypatch):
    cell.write([row("a")], ["cs"])
    cell.parts()[0].write_bytes(b"garbage")
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (replace(a, b), replace(a, b)))  # the other one was first
    assert cell.rows(set_aside=True) == []


def test_a_part_that_may_not_be_read_is_a_sentence(cell, monkeypatch):
    cell.write([row("a")], ["cs"])

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "_read_part", refuse)
    with pytest.raises(UserError, match="cannot be read \\(Permission denied\\); change its permissions"):
        cell.rows()


def test_a_full_disk_leaves_no_half_part(cell, monkeypatch):
    cell.write([row("a")], ["cs"])

    def full(table, path, **_):
        path.write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(UserError, match="the disk is full .* rows so far are safe"):
        cell.write([row("b")], ["cs"])
    monkeypatch.undo()
    assert sorted(path.name.split("-")[0] for path in cell.folder.iterdir()) == ["cell.json", "part"]
    assert [r["sample_id"] for r in cell.rows()] == ["a"]


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_are_not(cell):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    names = {f".{host}.{dead.pid}.0a.tmp": False, f".{host}.{os.getpid()}.0b.tmp": True, ".elsewhere.1.0c.tmp": True}
    old = cell.folder / ".elsewhere.2.0d.tmp"
    for name in (*names, old.name):
        (cell.folder / name).write_bytes(b"half")
    os.utime(old, (0, 0))
    cell.compact()
    assert {name: (cell.folder / name).exists() for name in names} == names
    assert not old.exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\0b", "x" * 200])
def test_names_cannot_leave_the_results_folder(tmp_path, name):
    with pytest.raises(UserError, match="cannot be part of a path"):
        Cell.at(tmp_path, {**NAMES, "method": name}, "f")


def test_a_results_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written .*choose another folder"):
        Cell.at(tmp_path / "file", NAMES, "f").describe({})


EDITS = [
    ("", "cannot be read"),
    ("{", "cannot be read"),
    ("[" * 100000, "cannot be read"),
    ("[]", "not an object"),
    ("null", "not an object"),
    *(({"n": value}, "n is") for value in (-1, 1.5, "3", None, True, 10**30)),
    *(({"method": value}, "method is") for value in ("../x", "", 3, None, ["a"])),
    *(({"metrics": value}, "metrics is") for value in (None, ["cs"], {"cs": "best"}, {"cs": None}, "cs")),
    *(({key: value}, f"{key} is") for key in ("identity", "config") for value in (None, [], "x")),
    *(({"grid": value}, "grid is") for value in (14, [14], [0, 14], ["14", "14"], [10**9, 1])),
    *(({"crop": value}, "crop is") for value in (0, -1, "1", 2.0)),
    ({"class_names": [1]}, "class_names is"),
    ({"command": 5}, "command is"),
    *((key, f"{key} is missing") for key in ("n", "model", "metrics", "identity", "config", "fingerprint")),
]


@pytest.mark.parametrize(("edit", "words"), EDITS, ids=[str(edit)[:30] for edit, _ in EDITS])
def test_a_cell_json_that_somebody_edited_is_a_sentence(cell, edit, words):
    file = cell.folder / "cell.json"
    if isinstance(edit, dict):
        file.write_text(json.dumps(INFO | edit))
    elif edit in INFO:
        file.write_text(json.dumps({key: value for key, value in INFO.items() if key != edit}))
    else:
        file.write_text(edit)
    with pytest.raises(UserError, match=words):
        _ = cell.info


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_in_a_part_is_survived(tmp_path_factory, data):
    cell = Cell.at(tmp_path_factory.mktemp("fuzz"), NAMES, "f")
    cell.write([row("a", 0.25), row("b", 0.5)], ["cs"])
    part = cell.parts()[0]
    content = bytearray(part.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    garbage = data.draw(st.binary(min_size=1, max_size=40))
    content[at : at + len(garbage)] = garbage
    part.write_bytes(bytes(content))
    assert found(cell) in ({}, {"a": 0.25, "b": 0.5})  # all of it or nothing, never a wrong value


# ---------------------------------------------------------------------- a model of the store


class Killed(BaseException):
    """The process is gone: nothing of it is executed any more."""


class Disk:
    """The calls that change the disk. One of them can be where the process dies, or where others come in between."""

    def __init__(self, monkeypatch):
        self.left, self.event, self.dead = None, None, False
        for name in ("link", "replace"):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))
        monkeypatch.setattr(Path, "unlink", self.watched(Path.unlink))
        monkeypatch.setattr(store, "_write_part", self.watched(store._write_part))

    def watched(self, call):
        def watching(*arguments, **options):
            if self.dead:
                raise Killed
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    event, self.left = self.event, None
                    event()
            return call(*arguments, **options)

        return watching

    def die(self):
        self.dead = True
        raise Killed


class Store(RuleBasedStateMachine):
    """Writers, mergers, deaths and interruptions, in any order; every finished row is there once, the newest ok one."""

    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.disk = Disk(self.patches)
        self.expected, self.counter, self.unsure = {}, 0, {}
        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)

    def teardown(self):
        self.patches.undo()
        self.place.cleanup()

    def rows(self, samples, ok):
        self.counter += 1
        return [row(sample, float(self.counter), "ok" if ok else "failed") for sample in samples]

    def finished(self, rows):
        for each in rows:
            old = self.expected.get(each["sample_id"])
            if each["status"] == "ok" or old is None or old[0] != "ok":
                self.expected[each["sample_id"]] = each["status"], each["cs"]

    samples = st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True)

    def write(self, samples, ok):
        rows = self.rows(samples, ok)
        Cell(self.folder).write(rows, ["cs"])
        self.finished(rows)

    @rule(samples=samples, ok=st.booleans())
    def a_writer(self, samples, ok):
        self.write(samples, ok)

    @rule()
    def a_merger(self):
        Cell(self.folder).compact()

    @rule(samples=samples, ok=st.booleans(), after=st.integers(0, 5))
    def a_merger_with_others_coming_in_between(self, samples, ok, after):
        def others():
            Cell(self.folder).compact()
            self.write(samples, ok)

        self.disk.left, self.disk.event = after, others
        Cell(self.folder).compact()
        self.disk.left = None

    @rule(samples=samples, more=samples, after=st.integers(0, 3), merge=st.booleans())
    def a_writer_with_others_coming_in_between(self, samples, more, after, merge):
        rows = self.rows(samples, True)

        def others():
            self.write(more, True)
            if merge:
                Cell(self.folder).compact()

        self.disk.left, self.disk.event = after, others
        Cell(self.folder).write(rows, ["cs"])
        self.disk.left = None
        # whoever became visible last counts: where the two overlap it may have been either
        before = {sample: self.expected.get(sample) for sample in set(samples) & set(more)}
        self.finished(rows)
        self.unsure = {sample: {old, self.expected[sample]} for sample, old in before.items()}

    @rule(samples=samples, after=st.integers(0, 5), merge=st.booleans())
    def a_death(self, samples, after, merge):
        rows = self.rows(samples, True)
        self.disk.left, self.disk.event = after, self.disk.die
        try:
            if merge:
                Cell(self.folder).compact()
            else:
                Cell(self.folder).write(rows, ["cs"])
                self.finished(rows)
        except Killed:
            self.disk.dead = False
            if not merge:  # it may have become visible or not
                for each in rows:
                    old = self.expected.get(each["sample_id"])
                    self.unsure[each["sample_id"]] = {old, (each["status"], each["cs"])}
        self.disk.left = None

    @invariant()
    def every_finished_row_is_there_once(self):
        found = Cell(self.folder).rows()
        seen = {each["sample_id"]: (each["status"], each["cs"]) for each in found}
        assert len(seen) == len(found)
        for sample, either in self.unsure.items():
            assert seen.get(sample) in either, sample
            if seen.get(sample) is not None:
                self.expected[sample] = seen[sample]
        self.unsure.clear()
        assert seen == self.expected


Store.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_store_by_its_model = Store.TestCase


# ---------------------------------------------------------------------- size

MEASURE = """
import re, sys, time
from pathlib import Path
from dap_bench.report.rows import load_rows
start = time.process_time()
(cell,) = load_rows(Path(sys.argv[1]), columns=["fallback"])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(len(cell.rows), time.process_time() - start, int(peak) / 2**10)
"""


@pytest.mark.slow
def test_a_million_rows(cell):
    """Five seconds and 1.4 GB as dictionaries; here what tables need of them."""
    count = 1_000_000
    columns = {name: pa.nulls(count, kind) for name, kind in zip(store.COLUMNS.names, store.COLUMNS.types, strict=True)}
    columns |= {
        "sample_id": pa.array([f"ILSVRC2012_val_{at:08d}.JPEG" for at in range(count)]),
        "status": pa.array(["ok"] * count),
        **{name: pa.array(["x"] * count) for name in store.CONSTANT},
        **{name: pa.array(range(count)).cast(pa.int64()) for name in ("label", "predicted", "alternative")},
        **{name: pa.array(range(count)).cast(pa.float64()) for name in ("confidence", "seconds", "cs", "afs", "tcc")},
    }
    store._write_part(pa.table(columns), cell.folder / "part-0000001.parquet")
    cell.describe(INFO | {"metrics": dict.fromkeys(("cs", "afs", "tcc"), "higher")})
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(cell.folder.parents[3])], check=True, capture_output=True, text=True
    )
    rows, seconds, memory = map(float, out.stdout.split())
    assert rows == count
    assert seconds < 5 / 5
    assert memory < 1400 / 5
