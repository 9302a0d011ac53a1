"""TCC, token contribution consistency: how much of the prediction the top patches alone preserve.

TCC = p(y | only the top 10 % of patches) / p(y | x)        the rest is the baseline; may exceed 1
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dap_bench.metrics.base import Batch, check_options, top_count
from dap_bench.metrics.perturbation import Perturbation


@dataclass(frozen=True)
class ContributionConsistency(Perturbation):
    unit: str = "patch"
    fraction: float = 0.10
    rounding: str = "round"  # of the number of patches: round | floor

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(fraction=self.fraction, rounding=self.rounding)

    def __call__(self, batch: Batch) -> Tensor:
        count = top_count(self.fraction, self.units(batch), self.rounding)
        kept = self.inserting(batch, self.ranks(batch, batch.explanation), [count])
        return kept[:, 0] / batch.confidence
