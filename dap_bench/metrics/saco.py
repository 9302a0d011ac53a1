"""SaCo, salience-guided faithfulness coefficient (Wu et al., 2024): is what counts more also worth more?

    G_1 ... G_K: the pixels in K groups of equal size, from the most salient to the least
    s_i = mean salience of G_i        d_i = p(y | x) - p(y | x without G_i)
    SaCo = sum_{i<j} w_ij / sum_{i<j} |w_ij|        w_ij = s_i - s_j if d_i >= d_j, else s_j - s_i

1: every group that is said to matter more does; -1: none does. NaN for a constant map.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import UserError, require_int
from dap_bench.metrics.base import Batch
from dap_bench.metrics.perturbation import Perturbation, patch_of_pixel, probabilities
from dap_bench.vit import double_of


@dataclass(frozen=True)
class SalienceCoefficient(Perturbation):
    """SaCo: whether groups of more salient pixels have more effect, from -1 (none has) to 1 (all have).

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What pixels are replaced by: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "mean".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        groups: Groups of equal size, at least 2. Defaults to 10.
    """

    baseline: str = "mean"
    groups: int = 10  # K

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("groups", self.groups, least=2)

    def __call__(self, batch: Batch) -> Tensor:
        count, units = len(batch.images), self.units(batch)
        if self.groups > units:
            raise UserError(f"groups={self.groups} is too many: there are {units} {self.unit}s.")
        group = self.ranks(batch, batch.explanation).long() * self.groups // units  # of each pixel [B,H*W]
        images, baseline = batch.images, self.baseline_images(batch)
        place = group.unflatten(1, batch.vit.image_size)

        def without(jobs: Tensor) -> Tensor:
            image, number = jobs // self.groups, jobs % self.groups
            return torch.where((place[image] == number[:, None, None])[:, None], baseline[image], images[image])

        left = probabilities(batch, without, count * self.groups, self.groups).unflatten(0, (count, self.groups))
        effect = batch.confidence[:, None] - left
        values = double_of(batch.values(batch.explanation, self.unit, self.upsample))
        if self.unit == "patch":
            values = values[:, patch_of_pixel(batch).to(values.device)]
        group, nothing = group.to(values.device), values.new_zeros(count, self.groups)
        sizes = nothing.scatter_add(1, group, torch.ones_like(values))
        salience = nothing.scatter_add(1, group, values) / sizes
        return coefficient(salience, effect.to(salience))


def coefficient(salience: Tensor, effect: Tensor) -> Tensor:
    """SaCo of groups in descending order of salience.

    Args:
        salience: Mean salience of each group [B,K].
        effect: What p(y) loses without each group [B,K].

    Returns:
        SaCo [B].
    """
    first, second = torch.triu_indices(salience.shape[1], salience.shape[1], 1).to(salience.device)
    difference = salience[:, first] - salience[:, second]
    agrees = effect[:, first] >= effect[:, second]
    return torch.where(agrees, difference, -difference).sum(1) / difference.abs().sum(1)
