"""Controls: maps that know nothing of the model, to see what a number of the others is worth.

    random    map_j ~ U(0, 1), drawn from the image's own generator
    centre    map_j = exp(-((r_j / R)^2 + (c_j / C)^2) / (2 sigma^2))        r, c: distance from the centre in patches
    edges     map_j = mean over patch j of sqrt((S_x * Y)^2 + (S_y * Y)^2)        S: Sobel's filters, Y: luminance
    oracle    map_j = share of patch j that is inside the object

The grid has R x C patches, so `sigma` is a share of its side. A method that is no better than `random` on a metric says
nothing there; one no better than `centre` or `edges` says nothing of the model. The oracle knows the answer, not the
model's reasons: it needs a source that knows where the object is. None looks at the class, and none has layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, pad

from dap_bench.data.images import BadImage
from dap_bench.errors import UserError, require_int
from dap_bench.explainers.base import Explanation, check
from dap_bench.isolation import content, generator
from dap_bench.vit import ViT

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (Rec. 601)


def random(
    vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, ids: Sequence[str] = (), *, seed: int = 0
) -> Explanation:
    check(vit, images, classes)
    require_int("seed", seed, least=0)
    names = list(ids) or list(map(content, images))  # a prior is not told the ids
    draws = [torch.rand(vit.patches, generator=generator(f"{name}/{seed}")) for name in names]
    return Explanation(torch.stack(draws).to(images), vit.grid)


def centre(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, *, sigma: float = 0.25) -> Explanation:
    check(vit, images, classes)
    if not sigma > 0:
        raise UserError(f"sigma={sigma} must be above 0: it is a share of the grid's side, such as 0.25.")
    row, column = ((torch.arange(side).to(images) - (side - 1) / 2) / side for side in vit.grid)
    gaussian = (-(row[:, None] ** 2 + column**2) / (2 * sigma**2)).exp()
    return Explanation(gaussian.flatten().repeat(len(images), 1), vit.grid)


def edges(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False) -> Explanation:
    check(vit, images, classes)
    luminance = (vit.pixels(images) * torch.tensor(LUMINANCE).to(images)[:, None, None]).sum(1)
    return Explanation(_patches(vit, sobel(luminance)), vit.grid)


def oracle(
    vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, masks: Sequence[Tensor | None] = ()
) -> Explanation:
    check(vit, images, classes)
    if not masks:
        raise UserError("the oracle must be told where the objects are: give it masks, one [H,W] per image.")
    known = [mask for mask in masks if mask is not None and mask.any()]
    if len(known) < len(masks):
        raise BadImage("no mask is known for this image")
    return Explanation(_patches(vit, torch.stack(known).to(images)), vit.grid)


def sobel(plane: Tensor) -> Tensor:
    """The size of the gradient of [B,H,W], borders repeated: 8 x the slope of a ramp, 4 x the height of a step."""
    wide = pad(plane[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    rows = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]  # smoothed down, to be compared across
    columns = wide[:, :, :-2] + 2 * wide[:, :, 1:-1] + wide[:, :, 2:]
    across, down = rows[:, :, 2:] - rows[:, :, :-2], columns[:, 2:] - columns[:, :-2]
    return (across**2 + down**2).sqrt()


def _patches(vit: ViT, plane: Tensor) -> Tensor:
    """The mean of [B,H,W] over each patch: [B,P]."""
    return adaptive_avg_pool2d(plane, vit.grid).flatten(1)
