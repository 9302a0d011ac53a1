"""A tree of image files, one folder per class."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dap_bench.data.images import FORMATS
from dap_bench.data.sources.base import Record, version
from dap_bench.errors import UserError


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
            if file.suffix.lower() in FORMATS and file.is_file()
        ]
        if not items:
            raise UserError(
                f"data.path={self.path} has no images in class folders; expected {self.path}/CLASS/IMAGE.jpg."
            )
        for name, _ in items:
            if not name.isprintable():  # such a name is no text, or breaks the lists that it stands in
                raise UserError(f"data.path={self.path} has a file named {name!a}; rename it in printable characters.")
        return items

    def identity(self) -> dict[str, Any]:
        try:
            return {
                "kind": "imagefolder",
                "files": [[name, label, *version(self.path / name)] for name, label in self._items],
            }
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from error

    def labels(self) -> Sequence[int]:
        return [label for _, label in self._items]

    def fetch(self, positions: Sequence[int]) -> Iterator[Record]:
        for position in positions:
            name, label = self._items[position]
            try:
                yield Record(name, label, (self.path / name).read_bytes())
            except OSError as error:
                raise UserError(f"{self.path / name} cannot be read ({error.strerror}).") from error
