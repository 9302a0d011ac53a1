"""AFS, attention flow sparsity: the share of the map's mass in its top fraction.

AFS = sum of the top 10 % / sum of all        on the map scaled to 0..1; NaN for a constant map

The curve that is kept has the share of the mass in the top 0, 5, ... 100 %.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from dap_bench.metrics.base import Batch, OfCurve, as_curve, check_options, top_count
from dap_bench.vit import double_of

POINTS = 20  # intervals of the curve


@dataclass(frozen=True)
class FlowSparsity(OfCurve):
    """AFS: the share of the map's mass in its top fraction.

    Attributes:
        unit: What has the mass: pixels of the heatmap, or patches (pixel, patch). Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        fraction: Of the map that counts as its top. Defaults to 0.1.
        rounding: Of the number in the top: round or floor. Defaults to "round".
    """

    unit: str = "pixel"
    upsample: str | None = None  # None: as the method's authors do
    fraction: float = 0.10
    rounding: str = "round"  # of the number in the top: round | floor

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample, fraction=self.fraction, rounding=self.rounding)

    def with_curve(self, batch: Batch) -> tuple[Tensor, Tensor]:
        values = double_of(batch.values(batch.explanation, self.unit, self.upsample))
        total = values.shape[1]
        mass = values.sort(dim=1, descending=True).values.cumsum(1)
        shares = pad(mass / mass[:, -1:], (1, 0))  # of the first 0, 1, ... all
        curve = as_curve([shares[:, round(step * total / POINTS)] for step in range(POINTS + 1)])
        return shares[:, top_count(self.fraction, total, self.rounding)], curve
