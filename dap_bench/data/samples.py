"""The frozen sample set: drawn once, then shared by every model, method and process.

    CACHE/samples/<digest>/samples.parquet    id, label, sha256, mask_sha256, data, mask
    CACHE/draws/<key>.json                    which set a draw from a source gave, when it was last made

A set is known by its content: `digest` is the SHA-256 over all ids, labels and hashes. A draw is remembered by what
the source and the sampler say they are, so that a source which has not changed need not be read again. Both are
written under a temporary name and moved into place: they are either whole or not there.
"""

import csv
import io
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from dap_bench import files
from dap_bench.data.sources.base import Source
from dap_bench.errors import UserError

VERSION = 3
ROWS = 16  # images per row group: the least that is read at a time
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("label", pa.int64()),
        ("sha256", pa.string()),
        ("mask_sha256", pa.string()),  # empty where no mask is known
        ("data", pa.binary()),
        ("mask", pa.binary()),
    ]
)
LISTED = ["id", "label", "sha256", "mask_sha256"]  # what the digest covers
log = logging.getLogger(__name__)


def _hash(data: bytes | None) -> str:
    return "" if data is None else sha256(data).hexdigest()


@dataclass(frozen=True)
class SampleSet:
    """The images of a run."""

    folder: Path
    ids: list[str]
    labels: list[int]
    hashes: list[str]
    mask_hashes: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 over all ids, labels and contents."""
        return sha256(self.manifest().encode()).hexdigest()

    def manifest(self) -> str:
        """The set as CSV text."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["sample_id", "label", "sha256", "mask_sha256"])
        writer.writerows(zip(self.ids, self.labels, self.hashes, self.mask_hashes, strict=True))
        return text.getvalue()

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, bytes | None]]:
        """The encoded images and object masks of some samples, checked against the manifest.

        Args:
            indices: Positions of the samples in the set.

        Returns:
            For each sample the image's file, and the mask's or None.

        Raises:
            UserError: If the cache was removed or damaged.
        """
        found: dict[int, tuple[bytes, bytes | None]] = {}
        try:
            with pq.ParquetFile(self.folder / "samples.parquet") as parquet:
                for number in sorted({index // ROWS for index in indices}):
                    group = parquet.read_row_group(number, columns=["data", "mask"])
                    for index in indices:
                        if index // ROWS == number:
                            data, mask = (group.column(name)[index % ROWS].as_py() for name in ("data", "mask"))
                            if (_hash(data), _hash(mask)) != (self.hashes[index], self.mask_hashes[index]):
                                raise ValueError(f"{self.ids[index]} is not what was drawn")
                            found[index] = data, mask
        except (OSError, ValueError, IndexError, KeyError, pa.ArrowException) as error:
            if not isinstance(error, OSError):  # so that the next start draws it again
                shutil.rmtree(self.folder, ignore_errors=True)
            raise UserError(
                f"the sample cache {self.folder} was removed or damaged ({str(error).splitlines()[0]}); "
                "repeat the same command to draw it again."
            ) from error
        return [found[index] for index in indices]


def frozen(
    source: Source, draw: Callable[[Sequence[int]], list[int]], sampler: dict[str, Any], cache: Path
) -> SampleSet:
    """The sample set that a sampler draws from a source; from the cache if it was drawn before.

    Args:
        source: The source of the images.
        draw: The sampler: from all labels to the positions drawn.
        sampler: What describes the draw, as `source.identity()` does the source: both make the cache's key.
        cache: The cache folder.

    Returns:
        The sample set.

    Raises:
        UserError: If the source cannot be read, the draw is impossible, or the cache cannot be written.
    """
    identity = {"version": VERSION, "source": source.identity(), "sampler": sampler}
    key = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    samples = _remembered(cache, key)
    if samples is not None:
        return samples
    try:
        cache.mkdir(parents=True, exist_ok=True)
        files.sweep(cache / "samples")
        with _held(FileLock(cache / f".{key}.lock")):  # of processes that start together one draws, the others wait
            samples = _remembered(cache, key)
            if samples is None:
                samples = _freeze(cache, source, draw)
                files.write_text(cache / "draws" / f"{key}.json", json.dumps({"digest": samples.digest}))
        (cache / f".{key}.lock").unlink(missing_ok=True)  # who waited for it holds it still, and finds the set
        return samples
    except OSError as error:
        # somebody else's cache may have the set all the same
        with tempfile.TemporaryDirectory() as folder:
            digest = _freeze(Path(folder), source, draw).digest
        samples = load(cache, digest)
        if samples is None:
            raise UserError(f"the sample cache {cache} cannot be written ({error}); set cache_dir=FOLDER.") from error
        return samples


def _held(lock: FileLock) -> AbstractContextManager[Any]:
    """A lock that is held for a block; until it is free may be long, so that is said."""
    try:
        return lock.acquire(timeout=1)
    except Timeout:
        log.warning("another process is drawing these images into %s; waiting for it", Path(lock.lock_file).parent)
        return lock.acquire()


def _remembered(cache: Path, key: str) -> SampleSet | None:
    """The set of a draw that was made before, from a source that has not changed since."""
    try:
        return load(cache, json.loads((cache / "draws" / f"{key}.json").read_text())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(cache: Path, digest: str) -> SampleSet | None:
    """The set with this digest from the cache.

    Args:
        cache: The cache folder.
        digest: The set's digest.

    Returns:
        The set, or None where there is none or it is not what it should be.
    """
    if not (isinstance(digest, str) and digest.isalnum()):
        return None
    folder = cache / "samples" / digest
    if not folder.is_dir():
        return None
    try:
        table = pq.read_table(folder / "samples.parquet", columns=LISTED)
        samples = SampleSet(folder, *(table.column(name).to_pylist() for name in LISTED))
        if samples.digest == digest:
            return samples
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        pass
    log.warning("the sample cache %s is damaged and is drawn again", folder)
    return None


def _freeze(cache: Path, source: Source, draw: Callable[[Sequence[int]], list[int]]) -> SampleSet:
    """Draw, and write the set under its digest."""
    draft = files.draft_in(cache / "samples")
    draft.mkdir(parents=True)
    try:
        positions = draw(source.labels())
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        listed: dict[str, list[Any]] = {name: [] for name in LISTED}
        seen: set[str] = set()
        with pq.ParquetWriter(draft / "samples.parquet", SCHEMA, compression="none") as writer:
            for count, (position, record) in enumerate(zip(positions, source.fetch(positions), strict=True), 1):
                identifier = record.id
                while identifier in seen:
                    identifier += f"#{position}"
                seen.add(identifier)
                row = (identifier, record.label, _hash(record.data), _hash(record.mask), record.data, record.mask)
                for name, value in zip(SCHEMA.names, row, strict=True):
                    columns[name].append(value)
                if count % ROWS == 0 or count == len(positions):
                    writer.write_table(pa.table(columns, SCHEMA), row_group_size=ROWS)
                    for name, values in columns.items():
                        if name in listed:
                            listed[name] += values
                        values.clear()
        samples = SampleSet(draft, *(listed[name] for name in LISTED))
        folder = draft.with_name(samples.digest)
        if load(cache, samples.digest) is None:
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        return replace(samples, folder=folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
