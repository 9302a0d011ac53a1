"""Does the heatmap lie on the object? For sources that know where the object is; NaN where it is not known."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.metrics.base import Batch, check_options


@dataclass(frozen=True)
class _Localisation:
    upsample: str | None = None

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ("masks",)

    def __post_init__(self) -> None:
        check_options(upsample=self.upsample)


class Pointing(_Localisation):
    """1 where the heatmap's maximum is inside the object, else 0; the first maximum in raster order.

    Attributes:
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
    """

    def __call__(self, batch: Batch) -> Tensor:
        values = batch.values(batch.explanation, "pixel", self.upsample)
        inside = masks(batch).to(values.device)
        hits = inside.gather(1, values.argmax(1, keepdim=True))[:, 0]
        return hits.where(values.amax(1) > 0, torch.nan)  # a constant map points nowhere


class MassInside(_Localisation):
    """The share of the heatmap's mass that lies inside the object.

    Attributes:
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
    """

    def __call__(self, batch: Batch) -> Tensor:
        values = batch.values(batch.explanation, "pixel", self.upsample)
        inside = masks(batch).to(values.device)
        return (values * inside).sum(1) / values.sum(1)


def masks(batch: Batch) -> Tensor:
    """Where the objects are.

    Args:
        batch: The images and their masks.

    Returns:
        1 inside the object, 0 outside [B,H*W]; NaN for an image where no object is known or it was cropped away.
    """
    height, width = batch.vit.image_size
    known = [mask if mask is not None and mask.any() else None for mask in batch.masks]
    rows = [torch.full((height * width,), torch.nan) if mask is None else mask.flatten() for mask in known]
    return torch.stack([row.cpu().double() for row in rows])
