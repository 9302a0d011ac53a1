"""What every source gives, and how a file is known."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image


@dataclass(frozen=True)
class Record:
    """One image as it is stored at its source.

    Attributes:
        id: Its name.
        label: Its class.
        data: The picture's file.
        mask: A PNG of where the object is, if known. Defaults to None.
    """

    id: str
    label: int
    data: bytes
    mask: bytes | None = None


class Source(Protocol):
    """Images by position."""

    def identity(self) -> dict[str, Any]:
        """What tells this source from any other, in plain data: it changes when the images do."""

    def labels(self) -> Sequence[int]:
        """The class of every image, by position."""

    def fetch(self, positions: Sequence[int]) -> Iterator[Record]:
        """The images at these positions, in their order.

        Args:
            positions: Positions of the images, in increasing order.

        Yields:
            The images.

        Raises:
            UserError: If one cannot be read.
        """


def version(file: Path) -> list[int]:
    """What changes when a file's content does: a program can set back mtime, but not ctime.

    Args:
        file: The file.

    Returns:
        Its size, its times of change and its inode.
    """
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file.

    Args:
        image: The picture.
        kind: The format, as Pillow names it: "PNG".
        **options: Options of Pillow's encoder.

    Returns:
        The file's content.
    """
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
