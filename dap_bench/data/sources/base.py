"""What every source gives, and how a file is known."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image


@dataclass(frozen=True)
class Record:
    """One image as it is stored at its source; `mask` is a PNG of where the object is, if known."""

    id: str
    label: int
    data: bytes
    mask: bytes | None = None


class Source(Protocol):
    """Images by position."""

    def identity(self) -> dict[str, Any]: ...
    def labels(self) -> Sequence[int]: ...
    def fetch(self, positions: Sequence[int]) -> Iterator[Record]: ...


def version(file: Path) -> list[int]:
    """What changes when a file's content does: a program can set back mtime, but not ctime."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
