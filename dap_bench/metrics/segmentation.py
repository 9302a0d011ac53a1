"""The heatmap as a segmentation of the object; NaN where no mask of it is known, or the map is constant.

    iou                 mean over object and background of |predicted and true| / |predicted or true|
    pixel_accuracy      share of pixels on the right side
    average_precision   sum_k (recall_k - recall_{k-1}) precision_k, pixels in descending order of the heatmap

`threshold: mean` takes for the object what is above the heatmap's mean, as Chefer et al. (2021) do; a number is a
threshold on the heatmap scaled to 0..1. Average precision is that of object and background in one list, a pixel of
relevance r scored r for the object and 1 - r for the background, as theirs is; `classes: object` is that of the object
alone. Chefer et al. sum intersections and unions over all images before they divide, here each image has a value of its
own. Pixels of equal value enter average precision together.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import UserError, one_of
from dap_bench.metrics.base import Batch, check_options
from dap_bench.metrics.localisation import masks
from dap_bench.vit import double_of


@dataclass(frozen=True)
class _Segmentation:
    upsample: str | None = None

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ("masks",)

    def __post_init__(self) -> None:
        check_options(upsample=self.upsample)

    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The heatmaps, and 1 on the object, 0 beside it [B,H*W]; NaN where no object is known or a map is constant."""
        values = double_of(batch.values(batch.explanation, "pixel", self.upsample))
        constant = (values == values[:, :1]).all(1, keepdim=True)
        return values, masks(batch).to(values.device).masked_fill(constant, torch.nan)


@dataclass(frozen=True)
class _Thresholded(_Segmentation):
    threshold: str | float = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.threshold, int | float) and 0 <= self.threshold < 1
        if self.threshold != "mean" and not number:
            raise UserError(f"threshold={self.threshold} must be mean, or a number from 0 to below 1.")

    def predicted(self, values: Tensor) -> Tensor:
        """1 where values [B,H*W] are above the threshold, else 0."""
        limit = values.mean(1, keepdim=True) if self.threshold == "mean" else float(self.threshold)
        return (values > limit).to(values)


class IntersectionOverUnion(_Thresholded):
    """Intersection over union of what is above the threshold and the object, mean of object and background.

    Attributes:
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        threshold: Above which a pixel counts as the object: the heatmap's mean (mean), or a number on the heatmap
            scaled to 0..1. Defaults to "mean".
    """

    def __call__(self, batch: Batch) -> Tensor:
        values, true = self.values(batch)
        found = self.predicted(values)
        sides = [(found * true, found + true - found * true), ((1 - found) * (1 - true), 1 - found * true)]
        return torch.stack([both.sum(1) / either.sum(1) for both, either in sides]).mean(0)


class PixelAccuracy(_Thresholded):
    """The share of pixels on the right side of the threshold: object above, background below.

    Attributes:
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        threshold: Above which a pixel counts as the object: the heatmap's mean (mean), or a number on the heatmap
            scaled to 0..1. Defaults to "mean".
    """

    def __call__(self, batch: Batch) -> Tensor:
        values, true = self.values(batch)
        return 1 - (self.predicted(values) - true).abs().mean(1)


@dataclass(frozen=True)
class AveragePrecision(_Segmentation):
    """Average precision of the heatmap as a score for object pixels.

    Attributes:
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        classes: Of object and background in one list (both), or of the object alone (object). Defaults to "both".
    """

    classes: str = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("classes", self.classes, ("both", "object"))

    def __call__(self, batch: Batch) -> Tensor:
        values, true = self.values(batch)
        if self.classes == "both":
            values, true = torch.cat([values, 1 - values], 1), torch.cat([true, 1 - true], 1)
        ordered, order = values.sort(1, descending=True)
        hits = true.gather(1, order).cumsum(1)
        seen = torch.arange(1, values.shape[1] + 1, dtype=values.dtype, device=values.device)
        last = torch.cat([ordered[:, 1:] != ordered[:, :-1], torch.ones_like(ordered[:, :1], dtype=torch.bool)], 1)
        hits_so_far = torch.where(last, hits, 0).cummax(1).values  # of the pixels up to the last of equal ones
        gained = torch.where(last, hits - torch.cat([torch.zeros_like(hits[:, :1]), hits_so_far[:, :-1]], 1), 0)
        precision = (gained * hits / seen).sum(1) / hits[:, -1]
        return precision.where(true.isfinite().all(1), torch.nan)
