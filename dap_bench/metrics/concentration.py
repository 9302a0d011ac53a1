"""How concentrated the map is, on its values v_1 <= ... <= v_n scaled to 0..1; NaN for a constant map.

    gini    = sum_i (2 i - n - 1) v_i / (n sum_i v_i)        0: the same everywhere, towards 1: a single peak
    entropy = - sum_i p_i log p_i / log n, p = v / sum v     1: the same everywhere, 0: a single peak

A map can be concentrated in the wrong place: these say how much there is to read, not whether it is true.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.metrics.base import Batch, check_options
from dap_bench.vit import double_of


@dataclass(frozen=True)
class _Concentration:
    unit: str = "pixel"
    upsample: str | None = None

    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)

    def values(self, batch: Batch) -> Tensor:
        """The map's values in double precision [B,n]."""
        return double_of(batch.values(batch.explanation, self.unit, self.upsample))


class Gini(_Concentration):
    """The inequality of the map's values: 0 if all are the same, towards 1 for a single peak.

    Attributes:
        unit: Whose values: of the heatmap's pixels, or of patches (pixel, patch). Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
    """

    better: ClassVar[str] = "higher"

    def __call__(self, batch: Batch) -> Tensor:
        values = self.values(batch).sort(1).values
        count = values.shape[1]
        weights = 2 * torch.arange(1, count + 1, dtype=values.dtype, device=values.device) - count - 1
        return (weights * values).sum(1) / (count * values.sum(1))


class Entropy(_Concentration):
    """The entropy of the map as a distribution, as a share of the largest: 1 if all is the same, 0 for a single peak.

    Attributes:
        unit: Whose values: of the heatmap's pixels, or of patches (pixel, patch). Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
    """

    better: ClassVar[str] = "lower"

    def __call__(self, batch: Batch) -> Tensor:
        values = self.values(batch)
        shares = values / values.sum(1, keepdim=True)
        return -torch.special.xlogy(shares, shares).sum(1) / log(values.shape[1])
