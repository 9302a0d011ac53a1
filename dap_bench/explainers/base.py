"""What every explainer returns, and how a map of patches becomes a heatmap of pixels, or one of pixels of patches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from dap_bench.errors import UserError, one_of
from dap_bench.vit import ViT, double_of


@dataclass(frozen=True)
class Explanation:
    """Relevance of each patch to a class, row-major over the grid; or of each pixel, where the grid is the image's.

    Attributes:
        maps: The maps [B,P].
        grid: Rows and columns of what the maps are of: `vit.grid` for patches, `vit.image_size` for pixels.
        layers: The map as far as each layer [B,L,P]. Defaults to None.
        single: What each layer adds by itself [B,L,P], where that is something else. Defaults to None.
        signed: Maps may hold negative values: evidence against the class. Defaults to False.
        upsample: How the method's authors enlarge the maps. Defaults to "bilinear".
        fallback: Images for which the method had to fall back to another rule [B] bool. Defaults to None.
    """

    maps: Tensor  # [B,P]
    grid: tuple[int, int]
    layers: Tensor | None = None  # [B,L,P] the map as far as each layer
    single: Tensor | None = None  # [B,L,P] what each layer adds by itself, where that is something else
    signed: bool = False
    upsample: str = "bilinear"
    fallback: Tensor | None = None  # [B] bool

    def heatmaps(self, size: tuple[int, int], upsample: str | None = None) -> Tensor:
        """Maps enlarged to `size` and scaled to 0..1 per image. A constant map becomes all zero.

        Rounded to single precision and enlarged in double, where the bilinear weights of 16 pixels lose no digit:
        pixels that are equal by symmetry are equal in the last bit, and their order is not up to the machine.

        Args:
            size: Height and width in pixels, such as `vit.image_size`.
            upsample: How to enlarge: bilinear, nearest or bicubic; None as the method's authors do. Defaults to None.

        Returns:
            Heatmaps [B,H,W] in double precision.
        """
        mode = upsample or self.upsample
        options = {} if mode == "nearest" else {"align_corners": False}
        maps = double_of(self.maps.float()).unflatten(1, self.grid)[:, None]
        if self.grid != tuple(size):
            maps = interpolate(maps, size, mode=mode, **options)
        return min_max(maps[:, 0].flatten(1)).unflatten(1, size)

    def on(self, grid: tuple[int, int]) -> Tensor:
        """The maps on a grid of patches.

        Args:
            grid: Rows and columns of patches, such as `vit.grid`.

        Returns:
            Maps [B,P]: as they are, or the mean over each patch's pixels.
        """
        if self.grid == tuple(grid):
            return self.maps
        return adaptive_avg_pool2d(self.maps.unflatten(1, self.grid), grid).flatten(1)


Explainer = Callable[..., Explanation]


def checked(found: Any, grid: tuple[int, int], images: Tensor) -> Explanation:
    """What an explainer returned, as an Explanation.

    Args:
        found: What it returned. Maps may come alone: [B,P] or [B,rows,columns] of the patches, [B,H,W] of the pixels.
        grid: The model's rows and columns of patches.
        images: The images [B,3,H,W] that it was given.

    Returns:
        The explanation, its tensors detached.

    Raises:
        UserError: If the method is mistaken in shapes, devices or kinds.
        ValueError: If a number is not finite, which fails the image alone.
    """
    size = tuple(images.shape[-2:])
    if isinstance(found, Tensor):
        own = (found.shape[1], found.shape[2]) if found.ndim == 3 else grid
        found = Explanation(found.flatten(1) if found.ndim == 3 else found, own)
    if not isinstance(found, Explanation):
        raise UserError(
            f"the explainer returned a {type(found).__name__}; return an Explanation, or maps [B,P] or [B,H,W]."
        )
    if tuple(found.grid) not in (tuple(grid), size):
        sides = " or ".join(f"{rows} x {columns}" for rows, columns in (grid, size))
        raise UserError(
            f"the explanation's maps are on a grid of {' x '.join(map(str, found.grid))}, expected {sides}: "
            "of patches or of pixels."
        )
    batch, patches = len(images), found.grid[0] * found.grid[1]
    shapes = {
        "maps": (batch, patches),
        "layers": (batch, -1, patches),
        "single": (batch, -1, patches),
        "fallback": (batch,),
    }
    for name, expected in shapes.items():
        tensor = getattr(found, name)
        if tensor is None and name != "maps":
            continue
        if not isinstance(tensor, Tensor):
            raise UserError(f"the explanation's {name} must be a tensor, not a {type(tensor).__name__}.")
        shape = tuple(tensor.shape)
        if len(shape) != len(expected) or any(
            want not in (-1, size) for want, size in zip(expected, shape, strict=True)
        ):
            wanted = ", ".join("L" if want == -1 else str(want) for want in expected)
            raise UserError(f"the explanation's {name} has shape {list(shape)}, expected [{wanted}].")
        if tensor.device != images.device and images.device.type != "mps":  # which has no double precision
            raise UserError(f"the explanation's {name} is on {tensor.device}, its images on {images.device}.")
        if name != "fallback" and not tensor.is_floating_point():
            raise UserError(f"the explanation's {name} holds {tensor.dtype}, expected floating-point numbers.")
        if not tensor.float().isfinite().all():
            raise ValueError(f"the explanation's {name} is not finite")
    detached = {name: getattr(found, name).detach() for name in shapes if getattr(found, name) is not None}
    return replace(found, **detached)


def min_max(values: Tensor) -> Tensor:
    """Scale each row to 0..1; a constant row becomes all zero.

    Args:
        values: Values [B,n].

    Returns:
        Values in 0..1 [B,n].
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    return (values - low) / torch.where(high > low, high - low, 1)


def check(vit: ViT, images: Tensor, classes: Tensor, **options: tuple[object, tuple[object, ...]]) -> None:
    """Check what every explainer is given.

    Args:
        vit: The model.
        images: Images [B,3,H,W].
        classes: Classes [B].
        **options: For each option its value, and the values that it may have.

    Raises:
        UserError: If an image is not finite, there is not one class of the model's per image, or an option has another
            value.
    """
    for name, (value, allowed) in options.items():
        one_of(name, value, allowed)
    if classes.ndim != 1 or len(classes) != len(images):
        raise UserError(f"{len(images)} images need as many classes, got a tensor of shape {list(classes.shape)}.")
    wrong = classes[(classes < 0) | (classes >= vit.classes)]
    if len(wrong):
        raise UserError(f"class {wrong[0].item()} is out of range: the model has classes 0 to {vit.classes - 1}.")
    finite = images.flatten(1).isfinite().all(1)
    if not finite.all():
        raise UserError(f"image {finite.long().argmin().item()} of the batch holds NaN or infinity.")
