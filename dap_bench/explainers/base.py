"""What every explainer returns, and how a map of patches becomes a heatmap of pixels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dap_bench.errors import UserError, one_of
from dap_bench.vit import ViT, double_of


@dataclass(frozen=True)
class Explanation:
    """Relevance of each patch to a class, row-major over the grid.

    `signed` maps may hold negative values (evidence against the class); `upsample` is how the method's authors
    enlarge them; `fallback` marks images for which the method had to fall back to another rule.
    """

    maps: Tensor  # [B,P]
    grid: tuple[int, int]
    layers: Tensor | None = None  # [B,L,P] the map as far as each layer
    single: Tensor | None = None  # [B,L,P] what each layer adds by itself, where that is something else
    signed: bool = False
    upsample: str = "bilinear"
    fallback: Tensor | None = None  # [B] bool

    def heatmaps(self, size: tuple[int, int], upsample: str | None = None) -> Tensor:
        """Maps enlarged to `size` and scaled to 0..1 per image: [B,H,W]. A constant map becomes all zero.

        Rounded to single precision and enlarged in double, where the bilinear weights of 16 pixels lose no digit:
        pixels that are equal by symmetry are equal in the last bit, and their order is not up to the machine.
        """
        mode = upsample or self.upsample
        options = {} if mode == "nearest" else {"align_corners": False}
        maps = double_of(self.maps.float()).unflatten(1, self.grid)[:, None]
        return min_max(interpolate(maps, size, mode=mode, **options)[:, 0].flatten(1)).unflatten(1, size)


Explainer = Callable[..., Explanation]


def min_max(values: Tensor) -> Tensor:
    """Scale each row of [B,n] to 0..1; a constant row becomes all zero."""
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    return (values - low) / torch.where(high > low, high - low, 1)


def check(vit: ViT, images: Tensor, classes: Tensor, **options: tuple[object, tuple[object, ...]]) -> None:
    """Finite images, one class per image that the model has, and each option (its value, the values it may have)."""
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
