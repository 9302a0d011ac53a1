"""Grid pointing: among images of other classes, does the map find the one that is asked about (Böhle et al., 2021)?

    grid pointing = sum of the positive map in the image's cell / sum of the positive map        n x n images

The image shares the model's input with others of the sample set, each of another class and shrunk to a cell; which cell
is its own is drawn from its id. The class explained is the one that the model gave the image by itself. A map that does
not look at the class has 1/n^2 on average. What a map says against the class (negative values, where it is signed) is
left out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from dap_bench.errors import UserError, require_int
from dap_bench.isolation import content, generator
from dap_bench.metrics.base import Batch
from dap_bench.vit import double_of


@dataclass(frozen=True)
class GridPointing:
    """The share of the positive map that lies on the image, in a grid of images of other classes.

    Attributes:
        companions: How many other images are in the grid: 3 or 8. Defaults to 3.
        seed: Of the cells. Defaults to 0.
    """

    companions: int = 3  # a square number with the image itself
    seed: int = 0  # of the cells

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require_int("companions", self.companions)
        require_int("seed", self.seed, least=0)
        if self.side**2 != self.companions + 1:
            raise UserError(f"companions={self.companions} and the image do not make a square grid; use 3 or 8.")

    @property
    def side(self) -> int:
        """Images along each side of the grid."""
        return round((self.companions + 1) ** 0.5)

    def __call__(self, batch: Batch) -> Tensor:
        if batch.companions is None:
            raise UserError("grid pointing needs other images of the sample set; use it in a run.")
        cells = self.cells(batch)
        found = batch.explain_anew(mosaics(batch.images, batch.companions(self.companions), cells))
        positive = double_of(found.maps).clamp(min=0).unflatten(1, found.grid)[:, None]
        pixels = interpolate(positive, batch.vit.image_size, mode="nearest").flatten(1)
        masses = pixels.new_zeros(len(pixels), self.side**2)
        masses.scatter_add_(
            1, cell_of_pixel(batch.vit.image_size, self.side).to(pixels.device).expand_as(pixels), pixels
        )
        return masses.gather(1, cells[:, None].to(masses.device))[:, 0] / masses.sum(1)

    def cells(self, batch: Batch) -> Tensor:
        """The cell that each image is put into.

        Args:
            batch: The images and their explanations.

        Returns:
            Cells [B], in raster order.
        """
        names = batch.ids or list(map(content, batch.images))
        drawn = [torch.randint(self.companions + 1, (), generator=generator(f"{name}/{self.seed}")) for name in names]
        return torch.stack(drawn).to(batch.images.device)


def mosaics(images: Tensor, others: Tensor, cells: Tensor) -> Tensor:
    """Each image in its cell, with other images in the cells left.

    Args:
        images: Normalised images [B,3,H,W].
        others: The other images of each [B,n,3,H,W]; n + 1 is a square number.
        cells: The cell of each image [B], in raster order.

    Returns:
        The grids, as images [B,3,H,W].
    """
    count = others.shape[1] + 1
    side = round(count**0.5)
    height, width = images.shape[2:]
    rows, columns = ([size * edge // side for edge in range(side + 1)] for size in (height, width))
    found = torch.empty_like(images)
    for cell in range(count):
        there = slice(*rows[cell // side :][:2]), slice(*columns[cell % side :][:2])
        place = torch.where(cells > cell, cell, cell - 1).clamp(0, count - 2)  # among the others
        chosen = others[torch.arange(len(images), device=images.device), place]
        chosen = torch.where((cells == cell)[:, None, None, None], images, chosen)
        size = (there[0].stop - there[0].start, there[1].stop - there[1].start)
        found[:, :, there[0], there[1]] = adaptive_avg_pool2d(chosen, size)
    return found


def cell_of_pixel(size: tuple[int, int], side: int) -> Tensor:
    """The cell that each pixel belongs to [H*W].

    Args:
        size: Height and width in pixels.
        side: Cells along each side.

    Returns:
        Cells [H*W], in raster order.
    """
    edges = [torch.tensor([length * edge // side for edge in range(1, side)]) for length in size]
    row, column = (
        torch.bucketize(torch.arange(length), edge, right=True) for length, edge in zip(size, edges, strict=True)
    )
    return (row[:, None] * side + column).flatten()
