"""Rows on disk: whole parts only, the newest row of a sample, nothing outside the results folder."""

import errno
import os

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dap_bench import UserError, store
from dap_bench.store import Cell

NAMES = {"model": "m", "method": "e", "sampler": "s", "data": "d"}


def row(sample, value=0.5, status="ok"):
    return {"sample_id": sample, "label": 1, **NAMES, "status": status, "fingerprint": "f", "cs": value}


@pytest.fixture
def cell(tmp_path):
    cell = Cell.at(tmp_path, NAMES, "f")
    cell.describe({**NAMES, "n": 3})
    return cell


def test_rows_come_back_as_they_were(cell):
    cell.write([{**row("a", 0.25), "deletion_curve": [1.0, 0.5]}, row("b", float("nan"))], ["cs"])
    first, second = cell.rows()
    assert (first["sample_id"], first["cs"], first["deletion_curve"]) == ("a", 0.25, [1.0, 0.5])
    assert second["cs"] != second["cs"]  # NaN stays NaN and does not become null
    assert second["deletion_curve"] is None
    assert cell.info == {**NAMES, "n": 3}


def test_a_failed_row_has_no_values(cell):
    cell.write([{k: v for k, v in row("a", status="failed").items() if k != "cs"}], ["cs"])
    assert cell.rows()[0]["cs"] is None


def test_the_newest_row_of_a_sample_counts(cell):
    cell.write([row("a", 0.1), row("b", 0.2)], ["cs"])
    cell.write([row("a", 0.9)], ["cs"])
    assert {r["sample_id"]: r["cs"] for r in cell.rows()} == {"a": 0.9, "b": 0.2}


def test_parts_are_merged_into_one(cell):
    cell.write([row("a", 0.1), {**row("b", 0.2), "deletion_curve": [1.0, 0.0]}], ["cs"])
    cell.write([row("c", 0.3)], ["cs"])
    cell.write([row("a", 0.5)], ["cs"])
    before = cell.rows()
    cell.compact(["cs"])
    assert len(cell.parts()) == 1
    assert cell.rows() == [{"deletion_curve": None, **r} for r in before]
    assert {r["sample_id"]: r["cs"] for r in before} == {"a": 0.5, "b": 0.2, "c": 0.3}


def test_merging_does_not_hide_rows_that_are_written_meanwhile(cell, monkeypatch):
    """Another process replaces a row and merges parts while we are merging; a damaged part stays where it is."""
    cell.write([row("a", 0.1)], ["cs"])
    cell.write([row("b", 0.2)], ["cs"])
    (cell.folder / "part-0-0.parquet").write_bytes(b"garbage")
    write = cell.write

    def late(*args, **kwargs):
        monkeypatch.setattr(cell, "write", write)
        Cell(cell.folder).compact(["cs"])
        Cell(cell.folder).write([row("a", 0.9)], ["cs"])
        write(*args, **kwargs)

    monkeypatch.setattr(cell, "write", late)
    cell.compact(["cs"])
    assert {r["sample_id"]: r["cs"] for r in cell.rows()} == {"a": 0.9, "b": 0.2}
    assert (cell.folder / "part-0-0.parquet").exists()


def test_a_part_that_vanishes_while_reading_is_looked_for_again(cell, monkeypatch):
    cell.write([row("a", 0.1)], ["cs"])
    cell.write([row("b", 0.2)], ["cs"])
    read, calls = pq.read_table, []

    def merged_meanwhile(part, **options):
        calls.append(part)
        if len(calls) == 1:
            Cell(cell.folder).compact(["cs"])
        return read(part, **options)

    monkeypatch.setattr(store.pq, "read_table", merged_meanwhile)
    assert {r["sample_id"]: r["cs"] for r in cell.rows()} == {"a": 0.1, "b": 0.2}


@pytest.mark.parametrize("harm", [b"", b"garbage", "cut"])
def test_a_damaged_part_is_set_aside_and_named(cell, harm, caplog):
    cell.write([row("a")], ["cs"])
    cell.write([row("b")], ["cs"])
    part = cell.parts()[0]
    part.write_bytes(part.read_bytes()[:-30] if harm == "cut" else harm)
    assert [r["sample_id"] for r in cell.rows()] == ["b"]
    assert f"{part} is damaged" in caplog.text
    assert part.exists()  # who only reads does not move anything
    cell.rows(set_aside=True)
    assert [path.suffix for path in sorted(cell.folder.glob("part-*"))].count(".damaged") == 1


def test_a_part_of_another_kind_is_damaged_too(cell):
    import pyarrow as pa

    pq.write_table(pa.table({"x": [1]}), cell.folder / "part-1-1.parquet")
    assert cell.rows() == []


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


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\0b", "x" * 200])
def test_names_cannot_leave_the_results_folder(tmp_path, name):
    with pytest.raises(UserError, match="cannot be part of a path"):
        Cell.at(tmp_path, {**NAMES, "method": name}, "f")


def test_a_results_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written .* set results_dir=FOLDER"):
        Cell.at(tmp_path / "file", NAMES, "f").describe({})


def test_a_fingerprint_depends_on_values_not_on_their_order():
    assert store.fingerprint({"a": 1, "b": [2]}) == store.fingerprint({"b": [2], "a": 1})
    assert store.fingerprint({"a": 1, "b": [2]}) != store.fingerprint({"a": 1, "b": [3]})


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
    found = {r["sample_id"]: r["cs"] for r in cell.rows()}
    assert found in ({}, {"a": 0.25, "b": 0.5})  # all of it or nothing, never a wrong value
