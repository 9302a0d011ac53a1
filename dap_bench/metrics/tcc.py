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
    """TCC: p(y) of the top patches alone, as a share of p(y) of the image.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "patch".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What the other patches become: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "zero".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        fraction: Of the patches that are left. Defaults to 0.1.
        rounding: Of their number: round or floor. Defaults to "round".
    """

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
