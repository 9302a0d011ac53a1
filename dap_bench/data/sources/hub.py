"""A dataset on the Hugging Face Hub, of which only what was drawn travels."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dap_bench import files, hub
from dap_bench.data.sources.parquet import Group, Parquet
from dap_bench.errors import UserError

INSTEAD = (
    "Or use images you have: data=parquet data.path=FOLDER (shards of the same schema), "
    "data=imagefolder data.path=FOLDER (one folder per class), or model=vit_shapes data=shapes (needs no download)."
)


class Hub(Parquet):
    """A dataset on the Hugging Face Hub, streamed: label columns first, then only the row groups drawn.

    The labels are read once and kept in `cache_dir`.
    """

    def __init__(self, repo: str, split: str, revision: str | None = None, cache_dir: str | None = None) -> None:
        super().__init__(repo, split)
        self.repo, self.revision, self.cache_dir = repo, revision, cache_dir

    @cached_property
    def files(self) -> list[str]:
        hub.require(self.repo, "dataset", INSTEAD)
        from datasets import load_dataset_builder

        try:
            builder = hub.retry(lambda: load_dataset_builder(self.repo, revision=self.revision), hub.passing)
            data_files = builder.config.data_files or {}
        except Exception as error:  # datasets and the Hub's client raise many kinds
            raise UserError(
                f"{self.repo} cannot be opened ({hub.one_line(error)}); repeat the same command, "
                f"or choose another data.revision=COMMIT. {INSTEAD}"
            ) from error
        if self.split not in data_files:
            raise UserError(f"{self.repo} has no split {self.split!r}; it has {', '.join(data_files)}.")
        return sorted(data_files[self.split])

    def identity(self) -> dict[str, Any]:
        return {"kind": "hub", "repo": self.repo, "split": self.split, "revision": self.revision}

    def _open(self, file: str) -> pq.ParquetFile:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(file)
        # without a read-ahead cache exactly the asked-for byte ranges travel
        stream = hub.retry(lambda: filesystem.open(path, "rb", cache_type="none"), hub.passing)
        return pq.ParquetFile(stream, pre_buffer=True)

    def _index(self, file: str) -> list[Group]:
        return _from_the_hub(file, lambda: Parquet._index(self, file))

    def _read(self, group: Group, rows: list[int]) -> list[dict[str, Any]]:
        return _from_the_hub(group.file, lambda: Parquet._read(self, group, rows))

    @cached_property
    def _groups(self) -> list[Group]:
        # the addresses name the dataset's commit, so an index cannot outlive what it describes
        key = sha256("\n".join(self.files).encode()).hexdigest()[:20]
        kept = Path(self.cache_dir).expanduser() / "labels" / f"{key}.parquet" if self.cache_dir else None
        try:
            if kept is not None and kept.exists():
                return [Group(**row) for row in pq.read_table(kept).to_pylist()]
        except (pa.ArrowException, OSError, TypeError):
            pass  # a damaged index is read again from the source
        with ThreadPoolExecutor(16) as pool:
            progress = tqdm(pool.map(self._index, self.files), "reading labels", len(self.files), unit=" files")
            groups = [group for found in progress for group in found]
        if kept is not None:
            with files.replacing(kept) as draft:
                pq.write_table(pa.Table.from_pylist([asdict(group) for group in groups]), draft)
        return groups

    def _announce(self, groups: list[Group]) -> None:
        size = sum(group.bytes for group in groups)
        print(f"{self.repo}: downloading {len(groups)} row groups, {size / 2**20:,.1f} MiB, once")


def _from_the_hub(file: str, read: Callable[[], Any]) -> Any:
    """What `read` gives; whatever goes wrong on the way from the Hub is a sentence, and nothing half-read is kept."""
    try:
        return hub.retry(read, _damaged)
    except Exception as error:  # the client's transport errors are not OSErrors
        reason = error.__cause__ if isinstance(error, UserError) else error
        if reason is None:
            raise  # it arrived well, and is not what it should be
        problem, remedy = "cannot be read from the Hugging Face Hub", "repeat the same command"
        if _damaged(error):
            problem = "arrived damaged or cut short"
            remedy += ", or take another commit of the dataset: data.revision=COMMIT"
        raise UserError(f"{file} {problem} ({hub.one_line(reason)}); {remedy}.") from error


def _damaged(error: Exception) -> bool:
    """Whether bytes came but made no sense; the Hub's client repeats a request that fails, not one that ends early."""
    reason = error.__cause__ if isinstance(error, UserError) else None
    return isinstance(reason, pa.ArrowException) or type(reason) is OSError
