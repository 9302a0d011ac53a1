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
    """A control that knows nothing: numbers drawn uniformly from 0..1, by each image's own generator.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        ids: Names of the images, which their draws depend on; without names, their content. Defaults to ().
        seed: Another seed draws other maps. Defaults to 0.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`. They do not depend on `classes`.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes)
    require_int("seed", seed, least=0)
    names = list(ids) or list(map(content, images))  # a prior is not told the ids
    draws = [torch.rand(vit.patches, generator=generator(f"{name}/{seed}")) for name in names]
    return Explanation(torch.stack(draws).to(images), vit.grid)


def centre(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, *, sigma: float = 0.25) -> Explanation:
    """A control: a Gaussian about the middle of the picture, the same for every image.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        sigma: Its standard deviation, as a share of the grid's side. Defaults to 0.25.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`. They do not depend on `classes`.

    Raises:
        UserError: If `sigma` is not above 0.
    """
    check(vit, images, classes)
    if not sigma > 0:
        raise UserError(f"sigma={sigma} must be above 0: it is a share of the grid's side, such as 0.25.")
    row, column = ((torch.arange(side).to(images) - (side - 1) / 2) / side for side in vit.grid)
    gaussian = (-(row[:, None] ** 2 + column**2) / (2 * sigma**2)).exp()
    return Explanation(gaussian.flatten().repeat(len(images), 1), vit.grid)


def edges(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False) -> Explanation:
    """A control: the mean size of the luminance's gradient (Sobel) in each patch.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`. They do not depend on `classes`.
    """
    check(vit, images, classes)
    luminance = (vit.pixels(images) * torch.tensor(LUMINANCE).to(images)[:, None, None]).sum(1)
    return Explanation(_patches(vit, sobel(luminance)), vit.grid)


def oracle(
    vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, masks: Sequence[Tensor | None] = ()
) -> Explanation:
    """A control that knows the answer: the share of each patch that lies inside the object.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        masks: Where the object is in each image, [H,W] bool; None where that is not known. Defaults to ().

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`. They do not depend on `classes`.

    Raises:
        UserError: If there are no masks at all.
        BadImage: If the object of an image is not known, or was cropped away.
    """
    check(vit, images, classes)
    if not masks:
        raise UserError("the oracle needs to know where the objects are: pass masks, one [H,W] per image.")
    known = [mask for mask in masks if mask is not None and mask.any()]
    if len(known) < len(masks):
        raise BadImage("no mask is known for this image")
    return Explanation(_patches(vit, torch.stack(known).to(images)), vit.grid)


def sobel(plane: Tensor) -> Tensor:
    """The size of the gradient, borders repeated: 8 x the slope of a ramp, 4 x the height of a step.

    Args:
        plane: Values of pixels [B,H,W].

    Returns:
        The size at each pixel [B,H,W].
    """
    wide = pad(plane[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    rows = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]  # smoothed down, to be compared across
    columns = wide[:, :, :-2] + 2 * wide[:, :, 1:-1] + wide[:, :, 2:]
    across, down = rows[:, :, 2:] - rows[:, :, :-2], columns[:, 2:] - columns[:, :-2]
    return (across**2 + down**2).sqrt()


def _patches(vit: ViT, plane: Tensor) -> Tensor:
    """The mean of [B,H,W] over each patch: [B,P]."""
    return adaptive_avg_pool2d(plane, vit.grid).flatten(1)
