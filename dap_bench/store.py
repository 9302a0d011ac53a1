"""Rows on disk: Parquet, atomic, resumable, self-describing.

    RESULTS/<model>/<method>/<data>-<sampler>/<fingerprint>/cell.json       what produced the rows
                                                            part-*.parquet  the rows, some images each
    RESULTS/samples/<digest>.csv                                            the sample sets: id, label, sha256

A part is written under a temporary name, flushed and moved into place: a killed run loses the batch it was in and
nothing else. At the end of a run the parts are merged into one. Each fingerprint has a folder of its own, so rows of
different settings never mix, and processes or shards that work on one cell at the same time only ever add parts. The
newest row of a sample counts.
"""

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from dap_bench.errors import UserError

COLUMNS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("label", pa.int64()),
        ("predicted", pa.int64()),
        ("alternative", pa.int64()),
        ("confidence", pa.float64()),
        ("model", pa.string()),
        ("method", pa.string()),
        ("sampler", pa.string()),
        ("data", pa.string()),
        ("status", pa.string()),  # "ok" or "failed"
        ("reason", pa.string()),  # why it failed
        ("fallback", pa.bool_()),  # the explainer fell back to another rule
        ("kept", pa.string()),  # what else was stored: curves, maps
        ("seconds", pa.float64()),  # per image, of explaining and measuring
        ("fingerprint", pa.string()),
    ]
)
NAMES = ("model", "method", "sampler", "data")
log = logging.getLogger(__name__)


def fingerprint(identity: dict[str, Any]) -> str:
    """The hash of everything that decides a row's values."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class Cell:
    """The rows of one model x method x sampler x data under one fingerprint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def at(cls, results: Path, names: dict[str, str], fingerprint: str) -> "Cell":
        for name in NAMES:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}", names[name]):
                raise UserError(
                    f"{name} name {names[name]!r} cannot be part of a path; use letters, digits, _ . + and -."
                )
        return cls(results / names["model"] / names["method"] / f"{names['data']}-{names['sampler']}" / fingerprint)

    def describe(self, info: dict[str, Any]) -> None:
        write_text(self.folder / "cell.json", json.dumps(info, indent=1, sort_keys=True))

    @property
    def info(self) -> dict[str, Any]:
        return json.loads((self.folder / "cell.json").read_text())

    def parts(self) -> list[Path]:
        """Oldest first: their names begin with the time of writing."""
        return sorted(self.folder.glob("part-*.parquet"))

    def rows(self, set_aside: bool = False) -> list[dict[str, Any]]:
        """One row per sample, the newest. A damaged part is named and its rows are missing; it can be set aside."""
        return list(self._read(set_aside)[0].values())

    def _read(self, set_aside: bool = False) -> tuple[dict[str, dict[str, Any]], list[Path]]:
        """The newest row of each sample, and the parts they were read from."""
        rows: dict[str, dict[str, Any]] = {}
        parts = self.parts()
        whole = []
        for part in parts:
            try:
                found = pq.read_table(part, page_checksum_verification=True).to_pylist()
                rows.update((row["sample_id"], row) for row in found)
                whole.append(part)
            except FileNotFoundError:
                return self._read(set_aside)  # another process has just merged it with others: look again
            except (PermissionError, MemoryError):
                raise
            except Exception as error:  # Arrow raises many kinds for damaged bytes
                log.warning("%s is damaged (%s); its rows are missing", part, str(error).splitlines()[0])
                if set_aside:
                    os.replace(part, part.with_suffix(".damaged"))
        return rows, whole

    def write(self, rows: list[dict[str, Any]], metrics: Iterable[str], stamp: str | None = None) -> None:
        """Add a part with these rows; `stamp` says when they were computed, if that was not just now."""
        known = set(COLUMNS.names)
        fields = [*COLUMNS, *(pa.field(name, pa.float64()) for name in metrics)]
        known.update(field.name for field in fields)
        extra = sorted({name for row in rows for name in row} - known)  # curves
        fields += [pa.field(name, pa.list_(pa.float32())) for name in extra]
        part = self.folder / f"part-{stamp or time.time_ns()}-{uuid4().hex[:8]}.parquet"
        with _replacing(part) as draft:
            pq.write_table(pa.Table.from_pylist(rows, pa.schema(fields)), draft, write_page_checksum=True)

    def compact(self, metrics: Iterable[str]) -> None:
        """Merge the parts into one, leaving out rows that have a newer one. Other processes may be adding parts."""
        rows, parts = self._read()
        if len(parts) > 1:
            self.write(list(rows.values()), metrics, stamp=parts[-1].name.split("-")[1])
            for part in parts:
                part.unlink(missing_ok=True)


def cells(results: Path) -> list[Cell]:
    """Every cell below a results folder, in order of path."""
    return [Cell(file.parent) for file in sorted(results.rglob("cell.json"))]


def write_text(path: Path, text: str) -> None:
    with _replacing(path) as draft:
        draft.write_text(text)


class _replacing:
    """A temporary path that becomes `path` in one step when the block ends well, and is gone when it does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")

    def __enter__(self) -> Path:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _explained(self.path.parent, error) from error
        return self.draft

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                with self.draft.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(self.draft, self.path)
        except OSError as failure:
            raise _explained(self.path, failure) from failure
        finally:
            self.draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _explained(self.path, error) from error


def _explained(path: Path, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(
            f"the disk is full at {path}; rows so far are safe: free some space and repeat the same command."
        )
    return UserError(f"{path} cannot be written ({error.strerror or error}); set results_dir=FOLDER.")
