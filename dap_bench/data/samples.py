"""The frozen sample set: drawn once, then shared by every model, method and process.

One folder per set in the cache: `samples.parquet` (id, label, sha256, data, mask) and `manifest.json`. The folder is
written under a temporary name and moved into place, so it is either whole or not there.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from dap_bench.data.sources import Source
from dap_bench.errors import UserError

VERSION = 2
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
LISTED = ["id", "label", "sha256", "mask_sha256"]  # what the manifest and its digest cover
log = logging.getLogger(__name__)


def _hash(data: bytes | None) -> str:
    return "" if data is None else sha256(data).hexdigest()


@dataclass(frozen=True)
class SampleSet:
    """The images of a run. `digest` is the SHA-256 over all ids, labels and contents."""

    folder: Path
    ids: list[str]
    labels: list[int]
    hashes: list[str]
    mask_hashes: list[str]
    digest: str

    def __len__(self) -> int:
        return len(self.ids)

    def manifest(self) -> str:
        """The set as CSV text."""
        columns = zip(self.ids, self.labels, self.hashes, self.mask_hashes, strict=True)
        return "sample_id,label,sha256,mask_sha256\n" + "".join(f"{','.join(map(str, row))}\n" for row in columns)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, bytes | None]]:
        """The encoded images and object masks of some samples, checked against the manifest."""
        found: dict[int, tuple[bytes, bytes | None]] = {}
        with pq.ParquetFile(self.folder / "samples.parquet") as parquet:
            for number in sorted({index // ROWS for index in indices}):
                group = parquet.read_row_group(number, columns=["data", "mask"])
                for index in indices:
                    if index // ROWS == number:
                        data, mask = (group.column(name)[index % ROWS].as_py() for name in ("data", "mask"))
                        if (_hash(data), _hash(mask)) != (self.hashes[index], self.mask_hashes[index]):
                            raise UserError(
                                f"the sample cache {self.folder} is damaged at {self.ids[index]}; "
                                "delete that folder and run again."
                            )
                        found[index] = data, mask
        return [found[index] for index in indices]


def frozen(
    source: Source, draw: Callable[[Sequence[int]], list[int]], identity: dict[str, Any], cache: Path
) -> SampleSet:
    """The sample set that `draw` takes from `source`; from the cache if it was drawn before.

    `identity` describes the sampler, as `source.identity()` does the source: both make the key.
    """
    whole = {"version": VERSION, "source": source.identity(), "sampler": identity}
    key = sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:20]
    folder = cache / "samples" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # of processes that start together one draws, the others wait
            samples = load(folder)
            if samples is None:
                _freeze(folder, source, draw, whole)
                samples = load(folder)
    except OSError as error:
        raise UserError(f"the sample cache {cache} cannot be written ({error}); set cache_dir=FOLDER.") from error
    if samples is None:
        raise UserError(f"the sample cache {folder} cannot be read back; check the disk.")
    return samples


def load(folder: Path) -> SampleSet | None:
    """The set in `folder`, or None where there is none or its manifest does not fit its content."""
    if not folder.exists():
        return None
    try:
        digest = json.loads((folder / "manifest.json").read_text())["digest"]
        table = pq.read_table(folder / "samples.parquet", columns=LISTED)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        table, digest = None, None
    if table is not None:
        ids, labels, hashes, mask_hashes = (table.column(name).to_pylist() for name in LISTED)
        samples = SampleSet(folder, ids, labels, hashes, mask_hashes, digest)
        if sha256(samples.manifest().encode()).hexdigest() == digest:
            return samples
    log.warning("the sample cache %s is damaged and is drawn again", folder)
    return None


def _freeze(folder: Path, source: Source, draw: Callable[[Sequence[int]], list[int]], whole: dict[str, Any]) -> None:
    positions = draw(source.labels())
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        listed: dict[str, list[Any]] = {name: [] for name in LISTED}
        seen: set[str] = set()
        with pq.ParquetWriter(draft / "samples.parquet", SCHEMA, compression="none") as writer:
            for count, (position, record) in enumerate(zip(positions, source.fetch(positions), strict=True), 1):
                identifier = record.id if record.id not in seen else f"{record.id}#{position}"
                seen.add(identifier)
                both = _hash(record.data), _hash(record.mask)
                row = (identifier, record.label, *both, record.data, record.mask)
                for name, value in zip(SCHEMA.names, row, strict=True):
                    columns[name].append(value)
                if count % ROWS == 0 or count == len(positions):
                    writer.write_table(pa.table(columns, SCHEMA), row_group_size=ROWS)
                    for name, values in columns.items():
                        if name in listed:
                            listed[name] += values
                        values.clear()
        ids, labels, hashes, mask_hashes = (listed[name] for name in LISTED)
        samples = SampleSet(draft, ids, labels, hashes, mask_hashes, "")
        digest = sha256(samples.manifest().encode()).hexdigest()
        (draft / "manifest.json").write_text(json.dumps({"digest": digest, "n": len(samples), **whole}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
