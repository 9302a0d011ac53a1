"""AFS, attention flow sparsity: the share of the map's mass in its top fraction.

AFS = sum of the top 10 % / sum of all        on the map scaled to 0..1; NaN for a constant map
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dap_bench.metrics.base import Batch, check_options, top_count


@dataclass(frozen=True)
class FlowSparsity:
    unit: str = "pixel"
    upsample: str | None = None  # None: as the method's authors do
    fraction: float = 0.10
    rounding: str = "round"  # of the number in the top: round | floor

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample, fraction=self.fraction, rounding=self.rounding)

    def __call__(self, batch: Batch) -> Tensor:
        values = batch.values(batch.explanation, self.unit, self.upsample).double()
        top = values.topk(top_count(self.fraction, values.shape[1], self.rounding), dim=1).values
        return top.sum(1) / values.sum(1)
