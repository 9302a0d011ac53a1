"""The bundled source: pictures that the project draws itself."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dap_bench.data import shapes
from dap_bench.data.sources.base import Record, encode
from dap_bench.errors import require_int


class Shapes:
    """Objects drawn on textured backgrounds, with their true masks."""

    def __init__(self, size: int = 12_000, seed: int = 0) -> None:
        require_int("data.size", size)
        require_int("data.seed", seed, least=0)
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
            name = f"shapes-{self.seed}-{index:06d}"
            yield Record(name, shapes.label_of(index), encode(picture, "PPM"), encode(mask, "PNG"))
