"""Local Parquet shards of the Hugging Face image schema."""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from dap_bench.data.images import FORMATS
from dap_bench.data.sources.base import Record, encode, version
from dap_bench.errors import UserError

ORIENTATION = 0x0112  # the EXIF tag
BATCH = 4  # rows that are decoded at a time
UNKNOWN = 1000  # ImageNet-S' number of pixels that nobody has looked at
INFLATED = (16, 2**24)  # images hardly compress: a column larger than 16 x its bytes on disk + 16 MiB is a bomb


@dataclass(frozen=True)
class Group:
    """A row group: the smallest piece of a Parquet file that can be read."""

    file: str
    number: int
    first: int  # row within the file
    bytes: int
    labels: list[int]


class Parquet:
    """Parquet shards with the columns `image {bytes, path}` and an integer `label`.

    `path` is a folder, a file or a glob pattern; `split` keeps the files named `<split>-...`;
    `boxes` is a CSV (path,x0,y0,x1,y1 in pixels of the stored image) from which object masks are drawn. A column
    `mask` of encoded pictures, like `image` or bytes alone, says where the object is by itself: see `_of_object`.
    """

    masks = True  # is a column of masks read

    def __init__(self, path: str, split: str | None = None, boxes: str | None = None) -> None:
        self.path, self.split, self.boxes = path, split, boxes

    @cached_property
    def files(self) -> list[str]:
        """The Parquet files that the path names, of the split if one is given."""
        path = Path(self.path).expanduser()
        if path.is_dir():
            files = sorted(str(file) for file in path.rglob("*.parquet") if file.is_file())
        else:
            found = glob(str(path)) if has_magic(str(path)) else [str(path)]
            files = sorted(file for file in found if Path(file).is_file())
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
        files = [[str(Path(file).resolve()), *version(Path(file))] for file in self.files]
        boxes = sha256(repr(sorted(self._boxes.items())).encode()).hexdigest() if self.boxes else None
        return {"kind": "parquet", "files": files, "boxes": boxes}

    def labels(self) -> Sequence[int]:
        return [label for group in self._groups for label in group.labels]

    def fetch(self, positions: Sequence[int]) -> Iterator[Record]:
        found: dict[int, list[int]] = defaultdict(list)
        starts, total = [], 0
        for group in self._groups:
            starts.append(total)
            total += len(group.labels)
        at = 0
        for position in positions:
            while at + 1 < len(starts) and starts[at + 1] <= position:
                at += 1
            found[at].append(position - starts[at])
        wanted = [(self._groups[at], rows) for at, rows in found.items()]
        for (group, rows), images in zip(wanted, self._images(wanted), strict=True):
            for row, image in zip(rows, images, strict=True):
                identifier = image.get("path") or f"{Path(group.file).name}:{group.first + row}"
                data = image.get("bytes") or b""
                mask = _of_object(image["mask"]) if image.get("mask") else self._mask(identifier, data)
                yield Record(identifier, group.labels[row], data, mask)

    def _images(self, wanted: list[tuple[Group, list[int]]]) -> Iterator[list[dict[str, Any]]]:
        """The images at some rows of some groups, group by group."""
        return (self._read(group, rows) for group, rows in wanted)

    def _open(self, file: str, column: str, group: int | None = None) -> pq.ParquetFile:
        """A file of which a column will be read: all of it, or that of one row group."""
        return pq.ParquetFile(file)

    def _read(self, group: Group, rows: list[int]) -> list[dict[str, Any]]:
        """The images at some rows of a group; only a few rows at a time are in memory."""
        try:
            found, first, wanted = [], 0, set(rows)
            with self._open(group.file, "image", group.number) as parquet:
                columns = [name for name in ("image", "mask") if name in parquet.schema_arrow.names]
                columns = columns if self.masks else ["image"]
                batches = parquet.iter_batches(BATCH, row_groups=[group.number], columns=columns, use_threads=False)
                for batch in batches:
                    here = [row - first for row in range(first, first + len(batch)) if row in wanted]
                    for row in here:
                        image, *mask = (batch.column(name)[row].as_py() for name in columns)
                        stored = mask[0] if mask else None
                        stored = stored.get("bytes") if isinstance(stored, dict) else stored
                        found.append({**(image or {}), "mask": stored})
                    first += len(batch)
            return found
        except UnicodeDecodeError as error:
            raise UserError(f"{group.file} has an image path that is not UTF-8 text; write the file again.") from error
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{group.file} cannot be read: it is damaged or cut short ({error}); download it again."
            ) from error

    @cached_property
    def _groups(self) -> list[Group]:
        """The row groups of all files with their labels; no image is read."""
        return [group for file in self.files for group in self._index(file)]

    def _index(self, file: str) -> list[Group]:
        try:
            with self._open(file, "label") as parquet:
                schema, metadata = parquet.schema_arrow, parquet.metadata
                _check_schema(file, schema)
                groups, first = [], 0
                for number in range(metadata.num_row_groups):
                    info = metadata.row_group(number)
                    _check_size(file, info)
                    table = parquet.read_row_group(number, columns=["label"], use_threads=False)
                    labels = _labels(file, table.column("label"))
                    size = sum(info.column(column).total_compressed_size for column in range(info.num_columns))
                    groups.append(Group(file, number, first, size, labels))
                    first += len(labels)
                return groups
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{file} cannot be read as Parquet: it is damaged or cut short ({error}); download it again."
            ) from error

    @cached_property
    def _boxes(self) -> dict[str, list[tuple[float, ...]]]:
        if self.boxes is None:
            return {}
        boxes: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        path = Path(self.boxes).expanduser()
        try:
            if not path.is_file():
                raise OSError("no such file")
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    boxes[row["path"]].append(tuple(float(row[edge]) for edge in ("x0", "y0", "x1", "y1")))
        except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
            raise UserError(f"data.boxes={self.boxes} is not a CSV with path,x0,y0,x1,y1 ({error}).") from error
        return boxes

    def _mask(self, identifier: str, data: bytes) -> bytes | None:
        boxes = self._boxes.get(identifier)
        if not boxes:
            return None
        try:
            with Image.open(io.BytesIO(data), formats=sorted(set(FORMATS.values()))) as image:
                mask, orientation = Image.new("L", image.size), image.getexif().get(ORIENTATION)
        except Exception:  # the image itself will be reported when it is decoded
            return None
        for x0, y0, x1, y1 in boxes:
            mask.paste(255, (round(x0), round(y0), round(x1), round(y1)))
        exif = Image.Exif()
        if orientation:  # boxes lie on the stored image; the mask must be turned as the image will be
            exif[ORIENTATION] = orientation
        return encode(mask, "PNG", exif=exif)


def _of_object(data: bytes) -> bytes:
    """A mask as it is stored, white on the object.

    Grey and palette pictures have anything but 0 there. Colours are ImageNet-S': red + 256 green is the class, 0 the
    background, 1000 what nobody has looked at.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            values = np.asarray(picture).astype(np.int64)
    except Exception:  # the sample is reported with its mask when that is decoded
        return data
    if values.ndim == 3:
        values = values[..., 0] + 256 * values[..., 1] if values.shape[2] > 2 else values[..., 0]
        values = np.where(values == UNKNOWN, 0, values)
    return encode(Image.fromarray(np.where(values > 0, 255, 0).astype(np.uint8)), "PNG")


def _check_schema(file: str, schema: pa.Schema) -> None:
    fields = {field.name: field.type for field in schema}
    image = fields.get("image")
    parts = {field.name: field.type for field in image} if image is not None and pa.types.is_struct(image) else {}
    kinds = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
    fits = parts.get("bytes") in kinds[:2] and parts.get("path") in kinds[2:]
    if not fits or not pa.types.is_integer(fields.get("label", pa.null())):
        found = ", ".join(f"{name}: {kind}" for name, kind in fields.items())
        raise UserError(
            f"{file} has columns ({found}), expected image {{bytes: binary, path: string}} and an integer label."
        )
    mask = fields.get("mask", pa.binary())
    inner = {field.name: field.type for field in mask}.get("bytes") if pa.types.is_struct(mask) else mask
    if inner not in kinds[:2]:
        raise UserError(f"{file} has a column mask of {mask}; expected encoded pictures, as bytes or like image.")
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise UserError(f"{file} has two columns called {twice.pop()}; keep one of them.")


def _check_size(file: str, group: Any) -> None:
    """Refuse, by its own description, a piece that would fill the memory."""
    times, more = INFLATED
    for column in map(group.column, range(group.num_columns)):
        stored, inflated = column.total_compressed_size, column.total_uncompressed_size
        if inflated > times * stored + more or group.num_rows > 2**20 + stored:
            raise UserError(
                f"{file} says it holds {inflated:,} bytes of {group.num_rows:,} rows in {stored:,} bytes of "
                f"{column.path_in_schema}: that is not a file of images."
            )


def _labels(file: str, column: pa.ChunkedArray) -> list[int]:
    try:
        labels = column.cast(pa.int32())
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} has labels that are not class numbers ({error}).") from error
    if labels.null_count or pc.any(pc.less(labels, 0)).as_py():
        raise UserError(f"{file} has images without a label (null or negative); use a split that has labels.")
    return labels.to_pylist()


def _split_of(file: str) -> str:
    """`train` of train-00000-of-00294.parquet; other names do not name a split."""
    found = re.fullmatch(r"(.+)-\d{5}-of-\d{5}.*\.parquet", Path(file).name)
    return found[1] if found else ""
