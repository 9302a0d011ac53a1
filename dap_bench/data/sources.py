"""Where images come from. A source knows the label of every position and fetches the positions asked for.

source.identity()            what the images are, as plain data: part of the sample set's cache key
source.labels()              one label per position, read without touching an image
source.fetch(positions)      the records at increasing positions, in that order
"""

import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

from dap_bench import hub
from dap_bench.data import shapes
from dap_bench.errors import UserError, whole

ORIENTATION = 0x0112  # the EXIF tag
PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
INSTEAD = (
    "Or use images you have: data=parquet data.path=FOLDER (shards of the same schema), "
    "data=imagefolder data.path=FOLDER (one folder per class), or model=vit_shapes data=shapes (needs no download)."
)


@dataclass(frozen=True)
class Record:
    """One image as it is stored at its source; `mask` is a PNG of where the object is, if known."""

    id: str
    label: int
    data: bytes
    mask: bytes | None = None


class Source(Protocol):
    def identity(self) -> dict[str, Any]: ...
    def labels(self) -> Sequence[int]: ...
    def fetch(self, positions: Sequence[int]) -> Iterator[Record]: ...


class Shapes:
    """The embedded source: objects drawn by the project itself, with their true masks."""

    def __init__(self, size: int = 12_000, seed: int = 0) -> None:
        whole("data.size", size)
        whole("data.seed", seed, least=0)
        self.size, self.seed = size, seed

    def identity(self) -> dict[str, Any]:
        drawing = sha256(Path(shapes.__file__).read_bytes()).hexdigest()  # another drawing makes other pictures
        return {"kind": "shapes", "size": self.size, "seed": self.seed, "drawing": drawing}

    def labels(self) -> Sequence[int]:
        return [shapes.label_of(index) for index in range(self.size)]

    def fetch(self, positions: Sequence[int]) -> Iterator[Record]:
        for index in positions:
            picture, mask = shapes.draw(index, self.seed)
            # PPM has no compressor in it: the bytes, and so their hash, are the same on every machine
            yield Record(
                f"shapes-{self.seed}-{index:06d}", shapes.label_of(index), _encode(picture, "PPM"), _encode(mask, "PNG")
            )


@dataclass(frozen=True)
class _Group:
    """A row group: the smallest piece of a Parquet file that can be read."""

    file: str
    number: int
    first: int  # row within the file
    bytes: int
    labels: list[int]


class Parquet:
    """Parquet shards of the Hugging Face image schema: `image {bytes, path}` and an integer `label`.

    `path` is a folder, a file or a glob pattern; `split` keeps the files named `<split>-...`;
    `boxes` is a CSV (path,x0,y0,x1,y1 in pixels of the stored image) from which object masks are drawn.
    """

    def __init__(self, path: str, split: str | None = None, boxes: str | None = None) -> None:
        self.path, self.split, self.boxes = path, split, boxes

    @cached_property
    def files(self) -> list[str]:
        path = Path(self.path).expanduser()
        if path.is_dir():
            files = sorted(str(file) for file in path.rglob("*.parquet"))
        else:
            files = sorted(glob(str(path))) if has_magic(str(path)) else [str(path)] * path.is_file()
        if not files:
            raise UserError(f"data.path={self.path} holds no Parquet file; name a folder, a file or a pattern of them.")
        splits = sorted({_split_of(file) for file in files})
        if self.split is not None:
            files = [file for file in files if _split_of(file) == self.split]
            if not files:
                raise UserError(f"data.split={self.split} is not in {self.path}; it has {', '.join(splits)}.")
        elif len(splits) > 1 and path.is_dir():
            raise UserError(f"{self.path} holds several splits; choose one with data.split={'|'.join(splits)}.")
        return files

    def identity(self) -> dict[str, Any]:
        files = [[Path(file).name, Path(file).stat().st_size, _tail_hash(file)] for file in self.files]
        boxes = sha256(repr(sorted(self._boxes.items())).encode()).hexdigest() if self.boxes else None
        return {"kind": "parquet", "files": files, "boxes": boxes}

    def labels(self) -> Sequence[int]:
        return [label for group in self._groups for label in group.labels]

    def fetch(self, positions: Sequence[int]) -> Iterator[Record]:
        wanted: dict[int, list[int]] = defaultdict(list)
        starts, total = [], 0
        for group in self._groups:
            starts.append(total)
            total += len(group.labels)
        at = 0
        for position in positions:
            while at + 1 < len(starts) and starts[at + 1] <= position:
                at += 1
            wanted[at].append(position - starts[at])
        self._announce([self._groups[at] for at in wanted])
        for at, rows in wanted.items():
            group = self._groups[at]
            images = self._read(group).column("image")
            for row in rows:
                image = images[row].as_py() or {}
                identifier = image.get("path") or f"{Path(group.file).name}:{group.first + row}"
                data = image.get("bytes") or b""
                yield Record(identifier, group.labels[row], data, self._mask(identifier, data))

    def _announce(self, groups: list[_Group]) -> None:
        """A local disk needs no announcement."""

    def _open(self, file: str) -> pq.ParquetFile:
        return pq.ParquetFile(file)

    def _read(self, group: _Group) -> pa.Table:
        try:
            with self._open(group.file) as parquet:
                return parquet.read_row_group(group.number, columns=["image"])
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{group.file} cannot be read: it is damaged or cut short ({error}); fetch it again."
            ) from error

    @cached_property
    def _groups(self) -> list[_Group]:
        """The row groups of all files with their labels; no image is read."""
        return [group for file in self.files for group in self._index(file)]

    def _index(self, file: str) -> list[_Group]:
        try:
            with self._open(file) as parquet:
                schema, metadata = parquet.schema_arrow, parquet.metadata
                _check_schema(file, schema)
                groups, first = [], 0
                for number in range(metadata.num_row_groups):
                    labels = parquet.read_row_group(number, columns=["label"]).column("label").to_pylist()
                    info = metadata.row_group(number)
                    size = sum(info.column(column).total_compressed_size for column in range(info.num_columns))
                    groups.append(_Group(file, number, first, size, labels))
                    first += len(labels)
                return groups
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{file} cannot be read as Parquet: it is damaged or cut short ({error}); fetch it again."
            ) from error

    @cached_property
    def _boxes(self) -> dict[str, list[tuple[float, ...]]]:
        if self.boxes is None:
            return {}
        boxes: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        try:
            with Path(self.boxes).expanduser().open(newline="") as file:
                for row in csv.DictReader(file):
                    boxes[row["path"]].append(tuple(float(row[edge]) for edge in ("x0", "y0", "x1", "y1")))
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"data.boxes={self.boxes} is not a CSV with path,x0,y0,x1,y1 ({error}).") from error
        return boxes

    def _mask(self, identifier: str, data: bytes) -> bytes | None:
        boxes = self._boxes.get(identifier)
        if not boxes:
            return None
        try:
            with Image.open(io.BytesIO(data)) as image:
                mask, orientation = Image.new("L", image.size), image.getexif().get(ORIENTATION)
        except Exception:  # the image itself will be reported when it is decoded
            return None
        for x0, y0, x1, y1 in boxes:
            mask.paste(255, (round(x0), round(y0), round(x1), round(y1)))
        exif = Image.Exif()
        if orientation:  # boxes lie on the stored image; the mask must be turned as the image will be
            exif[ORIENTATION] = orientation
        return _encode(mask, "PNG", exif=exif)


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
            builder = hub.patiently(lambda: load_dataset_builder(self.repo, revision=self.revision), hub.passing)
            data_files = builder.config.data_files or {}
        except Exception as error:  # datasets and the Hub's client raise many kinds
            raise UserError(
                f"{self.repo} cannot be opened ({hub.said(error)}); repeat the same command, "
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
        stream = hub.patiently(lambda: filesystem.open(path, "rb", cache_type="none"), hub.passing)
        return pq.ParquetFile(stream, pre_buffer=True)

    def _index(self, file: str) -> list[_Group]:
        return _from_the_hub(file, lambda: Parquet._index(self, file))

    def _read(self, group: _Group) -> pa.Table:
        return _from_the_hub(group.file, lambda: Parquet._read(self, group))

    @cached_property
    def _groups(self) -> list[_Group]:
        # the addresses name the dataset's commit, so an index cannot outlive what it describes
        key = sha256("\n".join(self.files).encode()).hexdigest()[:20]
        kept = Path(self.cache_dir).expanduser() / "labels" / f"{key}.parquet" if self.cache_dir else None
        try:
            if kept is not None and kept.exists():
                return [_Group(**row) for row in pq.read_table(kept).to_pylist()]
        except (pa.ArrowException, OSError, TypeError):
            pass  # a damaged index is read again from the source
        with ThreadPoolExecutor(16) as pool:
            progress = tqdm(pool.map(self._index, self.files), "reading labels", len(self.files), unit=" files")
            groups = [group for found in progress for group in found]
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            draft = kept.with_suffix(f".{os.getpid()}.tmp")
            pq.write_table(pa.Table.from_pylist([asdict(group) for group in groups]), draft)
            os.replace(draft, kept)
        return groups

    def _announce(self, groups: list[_Group]) -> None:
        size = sum(group.bytes for group in groups)
        print(f"{self.repo}: downloading {len(groups)} row groups, {size / 2**20:,.1f} MiB, once")


def _from_the_hub(file: str, read: Callable[[], Any]) -> Any:
    """What `read` gives; whatever goes wrong on the way from the Hub is a sentence, and nothing half-read is kept."""
    try:
        return hub.patiently(read, _damaged)
    except Exception as error:  # the client's transport errors are not OSErrors
        reason = error.__cause__ if isinstance(error, UserError) else error
        if reason is None:
            raise  # it arrived well, and is not what it should be
        problem, remedy = "cannot be read from the Hugging Face Hub", "repeat the same command"
        if _damaged(error):
            problem = "arrived damaged or cut short"
            remedy += ", or take another commit of the dataset: data.revision=COMMIT"
        raise UserError(f"{file} {problem} ({hub.said(reason)}); {remedy}.") from error


def _damaged(error: Exception) -> bool:
    """Whether bytes came but made no sense; the Hub's client repeats a request that fails, not one that ends early."""
    reason = error.__cause__ if isinstance(error, UserError) else None
    return isinstance(reason, pa.ArrowException) or type(reason) is OSError


class ImageFolder:
    """A tree with one folder per class; folders named by WordNet ids get ImageNet's own class numbers."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()

    @cached_property
    def _items(self) -> list[tuple[str, int]]:
        if not self.path.is_dir():
            raise UserError(f"data.path={self.path} is not a folder; name one that holds a folder per class.")
        names = sorted(folder.name for folder in self.path.iterdir() if folder.is_dir())
        if names and all(re.fullmatch(r"n\d{8}", name) for name in names):
            from timm.data import ImageNetInfo

            numbers = {name: number for number, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
            unknown = [name for name in names if name not in numbers]
            if unknown:
                raise UserError(f"{self.path}: {unknown[0]} is not one of the 1,000 classes of ImageNet-1k.")
        else:
            numbers = {name: number for number, name in enumerate(names)}
        items = [
            (file.relative_to(self.path).as_posix(), numbers[name])
            for name in names
            for file in sorted((self.path / name).rglob("*"))
            if file.suffix.lower() in PICTURES
        ]
        if not items:
            raise UserError(
                f"data.path={self.path} has no images in class folders; expected {self.path}/CLASS/IMAGE.jpg."
            )
        return items

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "imagefolder",
            "files": [[name, label, *self._version(self.path / name)] for name, label in self._items],
        }

    @staticmethod
    def _version(file: Path) -> tuple[int, int]:
        found = file.stat()
        return found.st_size, found.st_mtime_ns

    def labels(self) -> Sequence[int]:
        return [label for _, label in self._items]

    def fetch(self, positions: Sequence[int]) -> Iterator[Record]:
        for position in positions:
            name, label = self._items[position]
            try:
                yield Record(name, label, (self.path / name).read_bytes())
            except OSError as error:
                raise UserError(f"{self.path / name} cannot be read ({error.strerror}).") from error


def _check_schema(file: str, schema: pa.Schema) -> None:
    fields = {field.name: field.type for field in schema}
    image = fields.get("image")
    parts = {field.name for field in image} if image is not None and pa.types.is_struct(image) else set()
    if not {"bytes", "path"} <= parts or not pa.types.is_integer(fields.get("label", pa.null())):
        found = ", ".join(f"{name}: {kind}" for name, kind in fields.items())
        raise UserError(f"{file} has columns ({found}), expected image {{bytes, path}} and an integer label.")


def _split_of(file: str) -> str:
    """`train` of train-00000-of-00294.parquet; other names do not name a split."""
    found = re.fullmatch(r"(.+)-\d{5}-of-\d{5}.*\.parquet", Path(file).name)
    return found[1] if found else ""


def _tail_hash(file: str) -> str:
    """The hash of a Parquet file's end, where its footer is: it changes when the content does."""
    with Path(file).open("rb") as stream:
        stream.seek(-min(65536, Path(file).stat().st_size), os.SEEK_END)
        return sha256(stream.read()).hexdigest()


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
