"""A dataset on the Hugging Face Hub, of which only what was drawn travels, and only once.

    CACHE/hub/<file>-labels      the row groups of a file, with their labels
    CACHE/hub/<file>-<row>       an image that was drawn

<file> is the SHA-256 of a file's address, which names the dataset's commit: what is kept cannot outlive what it is of.
Each entry begins with its own SHA-256, and a damaged one is fetched again.
"""

import io
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dap_bench import files, hub
from dap_bench.data.sources.parquet import Group, Parquet
from dap_bench.errors import UserError, path

INSTEAD = (
    "Or use images you have: data=parquet data.path=FOLDER (shards of the same schema), "
    "data=imagefolder data.path=FOLDER (one folder per class), or model=vit_shapes data=shapes (needs no download)."
)
THREADS = 12  # requests at a time
MEMORY = 2**27  # bytes of row groups at a time, unless one alone has more; ImageNet's have about 10 MB
AHEAD = 4 * THREADS  # row groups of which the drawn images may wait for an earlier one
FOOTER = 2**16  # bytes of a file's end in which its footer is looked for
IN_MIB: dict[str, Any] = {"unit": "iB", "unit_scale": True, "unit_divisor": 1024}


class Hub(Parquet):
    """A dataset on the Hugging Face Hub, streamed: label columns first, then only the row groups drawn.

    What has arrived is kept in `cache_dir`: an interrupted download resumes, and samplings share downloads.
    """

    masks = False

    def __init__(self, repo: str, split: str, revision: str | None = None, cache_dir: str | None = None) -> None:
        super().__init__(repo, split)
        self.repo, self.revision = repo, revision
        self._temporary = None if cache_dir else TemporaryDirectory()
        self._kept = Kept(path("data.cache_dir", self._temporary.name if self._temporary else cache_dir) / "hub")
        self._footers: dict[str, pq.FileMetaData] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._places: dict[str, str] = {}  # of files, in the storage behind the Hub

    @cached_property
    def files(self) -> list[str]:
        """The addresses of the split's Parquet files."""
        hub.require(self.repo, "dataset", INSTEAD)
        from datasets import load_dataset_builder

        try:
            builder = hub.retry(lambda: load_dataset_builder(self.repo, revision=self.revision), hub.passing)
            data_files = builder.config.data_files or {}
        except Exception as error:  # datasets and the Hub's client raise many kinds
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.repo} cannot be opened ({hub.one_line(error)}); repeat the same command, "
                f"or choose another data.revision=COMMIT. {INSTEAD}"
            ) from error
        if self.split not in data_files:
            raise UserError(f"{self.repo} has no split {self.split!r}; it has {', '.join(data_files)}.")
        return sorted(data_files[self.split])

    def identity(self) -> dict[str, Any]:
        return {"kind": "hub", "repo": self.repo, "split": self.split, "revision": self.revision}

    @cached_property
    def _filesystem(self) -> Any:
        from huggingface_hub import HfFileSystem

        filesystem = HfFileSystem()
        hub.retry(lambda: filesystem.info(self.files[0]), hub.passing)  # lists the others of its folder too
        return filesystem

    @cached_property
    def _groups(self) -> list[Group]:
        files.sweep(self._kept.folder)
        found = _in_order(self._index, self.files, THREADS)
        bar = tqdm(found, "reading labels", len(self.files), unit=" files", dynamic_ncols=True)
        return [group for groups in bar for group in groups]

    def _index(self, file: str) -> list[Group]:
        rows = self._kept.get(file, "labels")
        if rows is None:
            rows = [asdict(group) for group in self._from_the_hub(file, lambda: Parquet._index(self, file))]
            self._kept.put(file, "labels", rows)
        return [Group(**row) for row in rows]

    def _images(self, wanted: list[tuple[Group, list[int]]]) -> Iterator[list[dict[str, Any]]]:
        missing = [
            group for group, rows in wanted if not all(self._kept.entry(*_name(group, row)).exists() for row in rows)
        ]
        sizes, here = [group.bytes for group in missing], len(wanted) - len(missing)
        print(
            f"{self.repo}: {len(sizes)} row groups to download, {sum(sizes) / 2**20:,.1f} MiB; {here} are here already"
        )
        threads = min(THREADS, MEMORY // max([1, *sizes])) or 1
        bar = tqdm(total=sum(sizes), desc="downloading", disable=not sizes, dynamic_ncols=True, **IN_MIB)
        with bar:
            yield from _in_order(lambda item: self._obtain(item[0], item[1], bar), wanted, threads)

    def _obtain(self, group: Group, rows: list[int], bar: Any) -> list[dict[str, Any]]:
        """The images at some rows of a group: those that are kept, and from the Hub the others."""
        found = {row: self._kept.get(*_name(group, row)) or [] for row in rows}
        missing = [row for row, images in found.items() if not images]
        if missing:
            count = _part(bar, group.bytes)

            def read() -> list[dict[str, Any]]:
                with hub.counting(count):
                    return self._read(group, missing)

            for row, image in zip(missing, self._from_the_hub(group.file, read), strict=True):
                found[row] = [{"bytes": image.get("bytes"), "path": image.get("path")}]
                self._kept.put(*_name(group, row), found[row])
            count(group.bytes)
        return [image for images in found.values() for image in images]

    def _open(self, file: str, column: str, group: int | None = None) -> pq.ParquetFile:
        remote = _Remote(self._filesystem.url(file), self._filesystem.info(file)["size"], self._places)
        with self._locks[file]:  # who reads the same file waits for its footer
            footer = self._footers.get(file)
            if footer is None:
                remote.hold_footer()
                footer = self._footers[file] = pq.read_metadata(remote)
        for number in range(footer.num_row_groups) if group is None else [group]:
            remote.hold(*_span(footer.row_group(number), column))
        return pq.ParquetFile(remote, metadata=footer)

    def _from_the_hub(self, file: str, read: Callable[[], Any]) -> Any:
        """What `read` gives; whatever goes wrong on the way is a sentence, and nothing half-read is kept."""

        def again(error: Exception) -> bool:
            self._footers.pop(file, None)
            return _damaged(error)

        try:
            return hub.retry(read, again)
        except Exception as error:  # the client's transport errors are not OSErrors
            reason = error.__cause__ if isinstance(error, UserError) else error
            if reason is None:
                raise  # it arrived well, and is not what it should be; or the Hub fell silent
            problem, remedy = "cannot be read from the Hugging Face Hub", "repeat the same command"
            if _damaged(error):
                problem = "arrived damaged or cut short"
                remedy += ", or take another commit of the dataset: data.revision=COMMIT"
            raise UserError(f"{file} {problem} ({hub.one_line(reason)}); {remedy}.") from error


class Kept:
    """What has arrived of files on the Hub, by the name of each piece. Any number of processes may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry(self, file: str, name: str) -> Path:
        """The file of a piece.

        Args:
            file: The address of the file on the Hub.
            name: The piece's name: labels, or the number of a row.

        Returns:
            Its path in the cache.
        """
        return self.folder / f"{sha256(file.encode()).hexdigest()[:20]}-{name}"

    def get(self, file: str, name: str) -> list[dict[str, Any]] | None:
        """The rows of a piece.

        Args:
            file: The address of the file on the Hub.
            name: The piece's name: labels, or the number of a row.

        Returns:
            The rows, or None where the piece is not there or not what was put there.
        """
        try:
            content = self.entry(file, name).read_bytes()
        except OSError:
            return None
        digest, data = content[:32], content[32:]
        return pq.read_table(pa.BufferReader(data)).to_pylist() if digest == _digest(file, name, data) else None

    def put(self, file: str, name: str, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a piece, whole or not at all.

        Args:
            file: The address of the file on the Hub.
            name: The piece's name: labels, or the number of a row.
            rows: The rows.

        Raises:
            UserError: If the cache cannot be written.
        """
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), buffer)
        with files.replacing(self.entry(file, name)) as draft:
            draft.write_bytes(_digest(file, name, buffer.getvalue()) + buffer.getvalue())


def _digest(file: str, name: str, data: bytes) -> bytes:
    return sha256(f"{file} {name} ".encode() + data).digest()


class _Remote(io.RawIOBase):
    """The parts of a file on the Hub that were fetched: whoever parses the file waits for no network.

    The Hub limits how often it may be asked where the bytes of a file lie. That is remembered in `places`, for all
    who read the file, and asked again when the place is no longer valid.
    """

    def __init__(self, url: str, size: int, places: dict[str, str]) -> None:
        self._url, self._size, self._places = url, size, places
        self._at, self._held = 0, {0: b""}

    def hold(self, start: int, end: int) -> None:
        """Fetch a part."""
        self._held[start] = self._get(start, end)

    def hold_footer(self) -> None:
        """Fetch the end of a Parquet file; its last bytes say how long the footer is, and then PAR1."""
        start = max(0, self._size - FOOTER)
        self.hold(start, self._size)
        length = int.from_bytes(self._held[start][-8:-4], "little") + 8
        if FOOTER < length < min(self._size, 2**10 * FOOTER):
            self.hold(self._size - length, self._size)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        start, end = self._at, self._size if size < 0 else min(self._at + size, self._size)
        for first, part in self._held.items():
            if first <= start and end <= first + len(part):
                self._at = end
                return part[start - first : end - first]
        raise OSError(f"bytes {start} to {end} are not where the footer says")

    def _get(self, start: int, end: int) -> bytes:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        ask = partial(http_backoff, "GET", timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        if start >= end:  # a column that is not there
            return b""
        bounds = {"Range": f"bytes={start}-{end - 1}"}
        place = self._places.get(self._url)
        response = ask(place, headers=bounds) if place else None
        if response is None or response.status_code in (401, 403, 404):
            response = ask(self._url, headers={**build_hf_headers(), **bounds})
            if response.history:
                self._places[self._url] = str(response.url)
        hf_raise_for_status(response)
        if len(response.content) != end - start:
            raise OSError(f"{len(response.content)} bytes came instead of {end - start}")
        return response.content


def _span(group: Any, column: str) -> tuple[int, int]:
    """The first byte and the end of a column in a row group: its parts lie side by side."""
    every = [group.column(number) for number in range(group.num_columns)]
    parts = [part for part in every if part.path_in_schema.split(".")[0] == column]
    starts = [part.dictionary_page_offset or part.data_page_offset for part in parts]
    ends = [start + part.total_compressed_size for start, part in zip(starts, parts, strict=True)]
    return min(starts, default=0), max(ends, default=0)


def _name(group: Group, row: int) -> tuple[str, str]:
    """What the image at a row of a group is kept as."""
    return group.file, str(group.first + row)


def _part(bar: Any, size: int) -> Callable[[int], None]:
    """A function that moves a bar as bytes arrive, by no more than `size` in all: some come twice."""

    def count(arrived: int) -> None:
        nonlocal size
        step = min(arrived, size)
        size -= step
        with bar.get_lock():
            bar.update(step)

    return count


def _in_order(work: Callable[[Any], Any], items: Sequence[Any], threads: int) -> Iterator[Any]:
    """What `work` gives for each item, in their order, by several threads that are not too far ahead."""
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) == AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _damaged(error: Exception) -> bool:
    """Whether bytes came but made no sense; the Hub's client repeats a request that fails, not one that ends early."""
    reason = error.__cause__ if isinstance(error, UserError) else None
    return isinstance(reason, pa.ArrowException) or type(reason) is OSError
