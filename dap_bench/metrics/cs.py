"""CS, class sensitivity: how much the map changes when the runner-up class is asked about instead.

CS = (1 - rho_s(E_predicted, E_alternative)) / 2        0: the same order, 1: the opposite order

The paper prints 1 - rho/2, which is 0.5 for identical maps where its tables say 0: `formula: as_printed`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dap_bench.errors import one_of
from dap_bench.metrics.base import Batch, check_options, spearman


@dataclass(frozen=True)
class ClassSensitivity:
    """CS: how much the map changes when the runner-up class is asked about, from 0 (same order) to 1 (opposite).

    Attributes:
        unit: What is compared: pixels of the heatmap, or patches (pixel, patch). Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        formula: (1 - rho) / 2 (half_distance), or 1 - rho / 2 (as_printed). Defaults to "half_distance".
    """

    unit: str = "pixel"
    upsample: str | None = None  # None: as the method's authors do
    formula: str = "half_distance"  # (1 - rho)/2 | as_printed: 1 - rho/2

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ("alternative",)

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        one_of("formula", self.formula, ("half_distance", "as_printed"))

    def __call__(self, batch: Batch) -> Tensor:
        maps = (batch.explanation, batch.alternative_explanation)
        predicted, alternative = (batch.values(each, self.unit, self.upsample) for each in maps)
        rho = spearman(predicted, alternative)
        return (1 - rho) / 2 if self.formula == "half_distance" else 1 - rho / 2
