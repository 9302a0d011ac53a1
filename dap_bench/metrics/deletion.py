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
        """p(y) [B,steps+1]."""
        ranks = self.ranks(batch, batch.explanation)
        middle = self.deleting(batch, ranks, interior(self.steps, self.units(batch)))
        return as_curve([batch.confidence, *middle.unbind(1), self.baseline_probability(batch)])


@dataclass(frozen=True)
class Insertion(Deletion):
    baseline: str = "blur"

    better: ClassVar[str] = "higher"

    def curve(self, batch: Batch) -> Tensor:
        ranks = self.ranks(batch, batch.explanation)
        middle = self.inserting(batch, ranks, interior(self.steps, self.units(batch)))
        return as_curve([self.baseline_probability(batch), *middle.unbind(1), batch.confidence])


@dataclass(frozen=True)
class BetweenCurves(Deletion):
    """ABPC: deletion beginning with the least relevant, minus deletion beginning with the most relevant."""

    better: ClassVar[str] = "higher"

    def curve(self, batch: Batch) -> Tensor:
        total = self.units(batch)
        ranks, counts = self.ranks(batch, batch.explanation), interior(self.steps, total)
        most, least = self.deleting(batch, ranks, counts), self.deleting(batch, total - 1 - ranks, counts)
        flat = torch.zeros_like(batch.confidence)
        return as_curve([flat, *(least - most).unbind(1), flat])
