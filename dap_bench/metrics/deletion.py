"""Del and Ins: p(y) while the most relevant part of the image is removed, or inserted (Petsiuk et al., 2018).

Both are areas under a curve over the share of the image taken, 0 to 1 with both end points. Del begins at the image
and ends at its baseline, Ins begins at its baseline and ends at the image. Neither is divided by p(y|x).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import one_of, require_int
from dap_bench.metrics.base import Batch, OfCurve, as_curve
from dap_bench.metrics.perturbation import Perturbation, area, interior


@dataclass(frozen=True)
class Deletion(OfCurve, Perturbation):
    """Del: the area under p(y) while the most relevant part of the image is removed.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What pixels are replaced by: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "zero".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        steps: Intervals of the curve. Defaults to 20.
        auc: How the area is taken: trapezoid, or the mean of the points (mean). Defaults to "trapezoid".
    """

    steps: int = 20  # intervals of the curve
    auc: str = "trapezoid"  # trapezoid | mean

    better: ClassVar[str] = "lower"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("steps", self.steps)
        one_of("auc", self.auc, ("trapezoid", "mean"))

    def with_curve(self, batch: Batch) -> tuple[Tensor, Tensor]:
        points = self.curve(batch)
        return area(points, self.auc), points

    def curve(self, batch: Batch) -> Tensor:
        """The curve whose area is the metric.

        Args:
            batch: The images and their explanations.

        Returns:
            The curve [B,steps+1].
        """
        ranks = self.ranks(batch, batch.explanation)
        middle = self.deleting(batch, ranks, interior(self.steps, self.units(batch)))
        return as_curve([batch.confidence, *middle.unbind(1), self.baseline_probability(batch)])


@dataclass(frozen=True)
class Insertion(Deletion):
    """Ins: the area under p(y) while the most relevant part of the image is inserted into its baseline.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What the image begins as: zero (grey), black, its mean colour (mean), or itself blurred (blur).
            Defaults to "blur".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        steps: Intervals of the curve. Defaults to 20.
        auc: How the area is taken: trapezoid, or the mean of the points (mean). Defaults to "trapezoid".
    """

    baseline: str = "blur"

    better: ClassVar[str] = "higher"

    def curve(self, batch: Batch) -> Tensor:
        ranks = self.ranks(batch, batch.explanation)
        middle = self.inserting(batch, ranks, interior(self.steps, self.units(batch)))
        return as_curve([self.baseline_probability(batch), *middle.unbind(1), batch.confidence])


@dataclass(frozen=True)
class BetweenCurves(Deletion):
    """ABPC: deletion beginning with the least relevant, minus deletion beginning with the most relevant.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What pixels are replaced by: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "zero".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        steps: Intervals of the curve. Defaults to 20.
        auc: How the area is taken: trapezoid, or the mean of the points (mean). Defaults to "trapezoid".
    """

    better: ClassVar[str] = "higher"

    def curve(self, batch: Batch) -> Tensor:
        total = self.units(batch)
        ranks, counts = self.ranks(batch, batch.explanation), interior(self.steps, total)
        most, least = self.deleting(batch, ranks, counts), self.deleting(batch, total - 1 - ranks, counts)
        flat = torch.zeros_like(batch.confidence)
        return as_curve([flat, *(least - most).unbind(1), flat])
