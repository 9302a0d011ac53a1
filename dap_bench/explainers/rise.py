"""RISE, randomised input sampling (Petsiuk et al., 2018).

    map = 1 / (N p) sum_k p_c(x * M_k) M_k        k = 1 .. N

A mask M is a grid of `cells` x `cells` draws, 1 with probability p and 0 otherwise, enlarged bilinearly to the image's
size and one cell more in each direction, and cut to the image at a random place. What it hides is zero after
normalisation: grey. Only the model's probabilities are looked at, at the price of N forward passes.

All images have the same masks, as in the original, and mask k is the same for every N: it depends on `seed` alone. N is
called `samples`: an explainer that names a parameter `masks` is told where the objects are. The map is of pixels; there
are no layers.
"""

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

from dap_bench.errors import require_int, require_number
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT

CHUNK = 32  # masked images that are scored at a time


@torch.no_grad()
def rise(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    samples: int = 4000,
    cells: int = 7,
    probability: float = 0.5,
    seed: int = 0,
) -> Explanation:
    """RISE: the mean of random masks, weighed by the class's probability when only what they show is left.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        samples: Masks; each takes a forward pass, and the error falls with the square root of their number.
            Defaults to 4000.
        cells: Cells of a mask along each side. Defaults to 7.
        probability: That a cell is shown. Defaults to 0.5.
        seed: Another seed draws other masks. Defaults to 0.

    Returns:
        Maps of pixels [B,H*W], not negative.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes)
    require_int("samples", samples)
    require_int("cells", cells, most=min(vit.image_size))
    require_int("seed", seed, least=0)
    require_number("probability", probability, least=0.001, most=1)
    vit.check_images(images)
    maps = images.new_zeros(len(images), images.shape[2] * images.shape[3])
    for drawn in draw(samples, cells, probability, seed, vit.image_size):
        drawn = drawn.to(images.dtype).to(images.device)
        for at, image in enumerate(images):  # one by one: a batch gives the maps of its images
            scores = vit.score(image * drawn[:, None], full=True).softmax(1)
            maps[at] += scores[:, classes[at : at + 1]].squeeze(1) @ drawn.flatten(1)
    return Explanation(maps / (samples * probability), vit.image_size)


def draw(samples: int, cells: int, probability: float, seed: int, size: tuple[int, int]) -> Iterator[Tensor]:
    """Random masks, some at a time.

    Args:
        samples: How many in all.
        cells: Cells of a mask along each side.
        probability: That a cell is shown.
        seed: Another seed draws other masks.
        size: Height and width of the image in pixels.

    Yields:
        At most 32 masks [n,H,W] in 0..1, in double precision.
    """
    generator = torch.Generator().manual_seed(seed)
    for done in range(0, samples, CHUNK):
        numbers = torch.rand(min(CHUNK, samples - done), cells**2 + 2, generator=generator, dtype=torch.float64)
        shown = (numbers[:, 2:] < probability).double().unflatten(1, (cells, cells))
        rows, columns = (_places(numbers[:, axis], side, cells) for axis, side in enumerate(size))
        yield rows @ shown @ columns.transpose(1, 2)


def _places(shifts: Tensor, side: int, cells: int) -> Tensor:
    """How much of each cell a pixel has along one side [n,side,cells], for shifts of 0..1 cells."""
    cell = ceil(side / cells)
    pixels = torch.arange(side) + (shifts * cell).floor()[:, None] + 0.5
    places = (pixels * cells / ((cells + 1) * cell) - 0.5).abs()
    places = (cells - 1 - (cells - 1 - places).abs()).clamp(min=0)  # mirrored at both ends, as in the original
    return (1 - (places[:, :, None] - torch.arange(cells)).abs()).clamp(min=0)
