"""Max-sensitivity: how far the map moves when the image hardly does (Yeh et al., 2019).

    max-sensitivity = max_k |E(x + d_k) - E(x)| / |E(x)|        d_k ~ U(-r, r) per pixel and channel, k = 1 ... K

E is the map scaled to 0..1, r is in colours of 0..1, and |.| the Euclidean norm. The noise is the image's own, whatever
batch it comes in; the class explained stays the one that the undisturbed image was given.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import UserError, require_int
from dap_bench.isolation import content, generator
from dap_bench.metrics.base import Batch, check_options


@dataclass(frozen=True)
class MaxSensitivity:
    """The largest change of the map, relative to its size, under noise that one hardly sees.

    Attributes:
        unit: What is compared: pixels of the heatmap, or patches (pixel, patch). Defaults to "patch".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        samples: Draws of noise; each takes an explanation. Defaults to 10.
        radius: Of the noise, in colours of 0..1. Defaults to 0.02.
        seed: Another seed draws other noise. Defaults to 0.
    """

    unit: str = "patch"
    upsample: str | None = None
    samples: int = 10  # K
    radius: float = 0.02  # r
    seed: int = 0

    better: ClassVar[str] = "lower"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        require_int("samples", self.samples)
        require_int("seed", self.seed, least=0)
        if not self.radius > 0:
            raise UserError(f"radius={self.radius} must be above 0: it is a share of the range of colours.")

    def __call__(self, batch: Batch) -> Tensor:
        original = batch.values(batch.explanation, self.unit, self.upsample)
        size = original.norm(dim=1)
        changes = []
        for noise in self.noise(batch):
            values = batch.values(batch.explain_anew(batch.images + noise), self.unit, self.upsample)
            changes.append((values - original).norm(dim=1) / size)
        return torch.stack(changes).amax(0).where(size > 0, torch.nan)

    def noise(self, batch: Batch) -> list[Tensor]:
        """The noise that is added to the images.

        Args:
            batch: The images.

        Returns:
            `samples` draws [B,3,H,W], in the units of normalised images.
        """
        names = batch.ids or list(map(content, batch.images))
        shape = (self.samples, *batch.images.shape[1:])
        draws = [torch.rand(shape, generator=generator(f"{name}/{self.seed}")) for name in names]
        unit = batch.vit.normalised(1.0) - batch.vit.normalised(0.0)  # of a colour's whole range
        scaled = [(2 * draw - 1) * self.radius * unit for draw in draws]
        return list(torch.stack(scaled, 1).to(batch.images))
