"""Rows on disk: Parquet, atomic, resumable, self-describing.

    RESULTS/<model>/<method>/<data>-<sampler>/<fingerprint>/cell.json             what produced the rows
                                                            part-0000001.parquet  the rows, some images each
    RESULTS/samples/<digest>.csv                                                  the sample sets: id, label, sha256

A part is written under a temporary name, flushed, and linked to the next free number: it becomes visible and gets its
place in the order in one step, which clocks have no say in. A killed run loses the batch it was in and nothing else.
At the end of a run the parts are merged into the newest of them. Each fingerprint has a folder of its own, so rows of
different settings never mix, and processes or shards that work on one cell at the same time only ever add parts.

Of a sample the newest row that is `ok` counts, or else the newest that failed: a failure never hides a result.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dap_bench import files
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
        ("grid", pa.string()),  # of the map: rows x columns
        ("upsample", pa.string()),  # how the method enlarges its maps
        ("seconds", pa.float64()),  # per image, of explaining and measuring
        ("fingerprint", pa.string()),
    ]
)
NAMES = ("model", "method", "sampler", "data")
CONSTANT = [*NAMES, "fingerprint"]  # the same in all rows of a cell
REPEATED = [*CONSTANT, "status", "reason", "kept", "grid", "upsample"]  # few different texts: held once each
KEYS = ("sample_id", "status")  # without these a row is none
CURVE = pa.list_(pa.float32())
ROWS_PER_GROUP = 2**16  # a reader needs memory for the rows and a group of them
ATTEMPTS = 100  # at reading parts that other processes merge meanwhile
log = logging.getLogger(__name__)


class Cell:
    """The rows of one model x method x sampler x data under one fingerprint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def at(cls, results: Path, names: dict[str, str], fingerprint: str) -> "Cell":
        """The cell's place below a results folder.

        Args:
            results: The results folder.
            names: The names of model, method, sampler and data.
            fingerprint: The fingerprint of the rows.

        Returns:
            The cell; nothing is read or written.

        Raises:
            UserError: If a name cannot be part of a path.
        """
        for name in NAMES:
            if not is_name(names[name]):
                raise UserError(
                    f"{name} name {names[name]!r} cannot be part of a path; use letters, digits, _ . + and -."
                )
        return cls(results / names["model"] / names["method"] / f"{names['data']}-{names['sampler']}" / fingerprint)

    # ------------------------------------------------------------------ what produced the rows

    def describe(self, info: dict[str, Any]) -> None:
        """Write cell.json.

        Args:
            info: What produced the rows, as plain data.

        Raises:
            UserError: If the file cannot be written.
        """
        files.write_text(self.folder / "cell.json", json.dumps(info, indent=1, sort_keys=True))

    @property
    def info(self) -> dict[str, Any]:
        """What cell.json says, checked: it may come from anybody."""
        file = self.folder / "cell.json"
        try:
            info: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file} cannot be read ({type(error).__name__}); remove that folder.") from error
        problem = _problem(info)
        if problem:
            raise UserError(f"{file} is damaged or of another version ({problem}); remove that folder.")
        return info

    # ------------------------------------------------------------------ reading

    def parts(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("part-*.parquet"), key=lambda part: (_number(part), part.name))

    def table(self, columns: Sequence[str] | None = None, set_aside: bool = False) -> pa.Table:
        """One row per sample.

        A damaged part is named in a warning, and its rows are missing.

        Args:
            columns: The columns to read besides `sample_id` and `status`; None reads all. Defaults to None.
            set_aside: Rename damaged parts, so that they are named once. Defaults to False.

        Returns:
            The rows.

        Raises:
            UserError: If a part cannot be read for other reasons than damage.
        """
        return self._read(columns, set_aside)[0]

    def rows(self, set_aside: bool = False) -> list[dict[str, Any]]:
        """The table as dictionaries: for few rows.

        Args:
            set_aside: Rename damaged parts, so that they are named once. Defaults to False.

        Returns:
            A dictionary for each sample.
        """
        return self.table(set_aside=set_aside).to_pylist()

    @property
    def columns(self) -> list[str]:
        """The names of all columns that parts have."""
        found = {name: None for part in self.parts() for name in _columns_of(part)}
        return list(found)

    def _read(self, columns: Sequence[str] | None = None, set_aside: bool = False) -> tuple[pa.Table, list[Path]]:
        """The rows that count, and the parts that could be read.

        Two passes, so that what has a newer row is never in memory: which rows count, then what they hold.
        """
        damaged: set[Path] = set()
        for _ in range(ATTEMPTS):
            listed = [part for part in self.parts() if part not in damaged]
            keys = self._each(dict.fromkeys(listed), KEYS if len(listed) > 1 else columns, set_aside)
            if keys is None:
                continue  # another process has just merged parts: look again
            counting = _newest([table for table, _ in keys.values()])
            versions = {part: version for part, (_, version) in keys.items()}
            tables = self._each(versions, columns, set_aside) if len(listed) > 1 else keys
            if tables is None or len(tables) < len(versions):
                damaged |= versions.keys() - tables.keys() if tables is not None else set()
                continue
            parts = zip(tables.values(), counting, strict=True)
            kept = [piece for (table, _), counts in parts for piece in _pieces(table, counts)]
            return pa.concat_tables(kept or [COLUMNS.empty_table()], promote_options="default"), list(tables)
        raise UserError(f"the parts in {self.folder} vanish while they are read; is something removing them?")

    def _each(
        self, parts: dict[Path, Any], columns: Sequence[str] | None, set_aside: bool
    ) -> dict[Path, tuple[pa.Table, Any]] | None:
        """The tables of some parts and their versions, or None where one is no longer there or not that version."""
        found = {}
        for part, version in parts.items():
            try:
                table, now = _read_part(part, columns), _version(part)
                if version not in (None, now):
                    return None
                found[part] = table, now
            except FileNotFoundError as error:
                if not part.is_symlink():
                    return None
                self._damaged(part, error, set_aside)
            except PermissionError as error:
                raise UserError(f"{part} cannot be read ({error.strerror}); change its permissions.") from error
            except MemoryError:
                raise
            except Exception as error:  # Arrow raises many kinds for damaged bytes
                self._damaged(part, error, set_aside)
        return found

    def _damaged(self, part: Path, error: Exception, set_aside: bool) -> None:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        log.warning("%s is damaged (%s); its rows are missing", part, reason)
        if set_aside:
            with suppress(FileNotFoundError):  # another process has set it aside
                os.replace(part, part.with_suffix(".damaged"))

    # ------------------------------------------------------------------ writing

    def write(self, rows: list[dict[str, Any]], metrics: Iterable[str]) -> None:
        """Add a part with these rows.

        Args:
            rows: The rows, a dictionary for each sample.
            metrics: The names of the metrics among their keys.

        Raises:
            UserError: If they cannot be written.
        """
        fields = [*COLUMNS, *(pa.field(name, pa.float64()) for name in metrics)]
        known = {field.name for field in fields}
        extra = sorted({name for row in rows for name in row} - known)  # curves and maps
        fields += [pa.field(name, CURVE) for name in extra]
        with files.drafting(self.folder) as draft:
            _write_part(pa.Table.from_pylist(rows, pa.schema(fields)), draft)
            self._publish(draft)

    def _publish(self, draft: Path) -> None:
        """Give a draft the next number. Where a number was taken from us in the meantime, take a later one."""
        number = self._last()
        while True:
            number += 1
            part = self.folder / f"part-{number:07d}.parquet"
            try:
                os.link(draft, part)
            except FileExistsError:
                continue
            except OSError:  # a file system without hard links: reserve the name, then fill it
                if not _reserve(part):
                    continue
                os.replace(draft, part)
                return
            last = self._last()
            if last == number:
                return
            part.unlink(missing_ok=True)  # the number was free again because later parts had been merged
            number = last

    def _last(self) -> int:
        """The largest number in use, damaged parts included."""
        return max(map(_number, self.folder.glob("part-*")), default=0)

    def compact(self) -> None:
        """Merge the parts into the newest of them, leaving out rows that have a newer one.

        Other processes may be adding or merging parts: whatever they add is newer than the part that is replaced.
        """
        files.sweep(self.folder)
        table, parts = self._read()
        if len(parts) > 1:
            with files.replacing(parts[-1]) as draft:
                _write_part(table.sort_by("sample_id"), draft)
            for part in parts[:-1]:
                with files.explained(part):
                    part.unlink(missing_ok=True)


def cells(results: Path) -> list[Cell]:
    """Every cell below a results folder, in order of path.

    Args:
        results: The results folder.

    Returns:
        The cells; nothing but their paths is read.
    """
    return [Cell(file.parent) for file in sorted(results.rglob("cell.json"))]


def is_name(text: object) -> bool:
    """Whether a text can be a folder's name without leading anywhere else.

    Args:
        text: The text.

    Returns:
        True if it can.
    """
    return isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}", text) is not None


def _number(part: Path) -> int:
    found = re.match(r"part-(\d+)", part.name)
    return int(found[1]) if found else 0


def _reserve(part: Path) -> bool:
    try:
        part.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _write_part(table: pa.Table, draft: Path) -> None:
    pq.write_table(table, draft, row_group_size=ROWS_PER_GROUP, write_page_checksum=True)
    files.flush(draft)


def _read_part(part: Path, columns: Sequence[str] | None) -> pa.Table:
    """A part's rows in the types that rows have, or an exception."""
    if part.exists() and not part.is_file():
        raise ValueError("it is not a file")
    metadata = pq.read_metadata(part)
    repeated = [name for name in REPEATED if name in metadata.schema.names]  # older parts have fewer columns
    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": 2**16}  # a page at a time, not a whole file
    options |= {"metadata": metadata, "read_dictionary": repeated}
    with pq.ParquetFile(part, page_checksum_verification=True, **options) as parquet:
        schema = parquet.schema_arrow
        wanted = schema.names if columns is None else [name for name in schema.names if name in {*columns, *KEYS}]
        table = parquet.read(columns=wanted, use_threads=False)
    fields = []
    for field in table.schema:
        expected = COLUMNS.field(field.name).type if field.name in COLUMNS.names else field.type
        if field.name in REPEATED:
            expected = pa.dictionary(pa.int32(), pa.string())
        elif field.name not in COLUMNS.names and field.type not in (pa.float64(), CURVE):
            raise ValueError(f"column {field.name} holds {field.type}")
        fields.append(pa.field(field.name, expected))
    table = table.cast(pa.schema(fields))
    if any(table.column(name).null_count for name in KEYS):
        raise ValueError("rows without a sample or a status")
    return table


def _version(part: Path) -> tuple[int, int]:
    found = part.stat()
    return found.st_ino, found.st_size


def _columns_of(part: Path) -> list[str]:
    try:
        return pq.read_schema(part).names if part.is_file() else []
    except (OSError, pa.ArrowException):
        return []  # whoever reads its rows names it


def _newest(tables: list[pa.Table]) -> list[np.ndarray]:
    """Which rows of each table count: of a sample the last that is ok, or else the last; tables come oldest first."""
    if len(tables) < 2:  # nobody writes a sample twice in one part
        return [np.ones(len(table), dtype=bool) for table in tables]
    keys = pa.concat_tables(tables)
    samples = keys.column("sample_id").combine_chunks().dictionary_encode()
    codes = samples.indices.to_numpy(zero_copy_only=False)
    counts = np.ones(len(codes), dtype=bool)
    if len(samples.dictionary) < len(codes):
        ok = pc.equal(keys.column("status"), "ok").to_numpy()
        order = np.argsort(ok, kind="stable")  # failed rows first, then ok ones, each oldest first
        chosen = np.empty(len(samples.dictionary), dtype=np.int64)
        chosen[codes[order]] = order  # of equal indices the last assignment stays
        counts = np.zeros(len(codes), dtype=bool)
        counts[chosen] = True
    return np.split(counts, np.cumsum([len(table) for table in tables])[:-1])


def _pieces(table: pa.Table, counts: np.ndarray) -> list[pa.Table]:
    """The rows that count: as slices, which copy nothing, unless they are many."""
    edges = np.flatnonzero(np.diff(counts, prepend=False, append=False)).reshape(-1, 2)
    if len(edges) > 100:
        return [table.filter(counts)]
    return [table.slice(first, end - first) for first, end in edges] or [table.slice(0, 0)]


def _problem(info: Any) -> str | None:
    """What is wrong with the content of a cell.json."""
    if not isinstance(info, dict):
        return "it is not an object"
    for key, (fits, required) in INFO.items():
        if key not in info:
            if required:
                return f"{key} is missing"
        elif not fits(info[key]):
            return f"{key} is {str(info[key])[:40]!r}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(better in ("higher", "lower") for better in value.values())


def _is_grid(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_count(side) and 0 < side < 2**14 for side in value)


def _are_class_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


# what cell.json holds: how each value is told to be right, and whether it must be there
INFO: dict[str, tuple[Any, bool]] = {
    **dict.fromkeys(NAMES, (is_name, True)),
    "n": (_is_count, True),
    "fingerprint": (is_name, True),
    "metrics": (_are_metrics, True),
    "identity": (_is_object, True),
    "config": (_is_object, True),
    "command": (_is_text, False),
    "class_names": (_are_class_names, False),
    "grid": (_is_grid, False),
    "crop": (_is_share, False),
    "versions": (_is_object, False),
    "turn": (_is_count, False),
}
