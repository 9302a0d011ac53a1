"""Perturbation tests (Chefer et al., 2021): how long is the image still recognised while pixels are removed?

    accuracy_f = 1 if the model still gives the true class with the share f of pixels removed, else 0
    value = area under accuracy_f over f = 0.1, 0.2 ... 0.9, by the trapezoid rule, divided by its width

Positive perturbation removes the most relevant pixels first (lower is better), negative perturbation the least relevant
(higher is better). `explained: predicted` explains the class that the model gives the image, `explained: label` the
class it has. The mean over images is the area under the curve of the accuracy. NaN without a label.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import one_of, require_int
from dap_bench.explainers.base import Explanation
from dap_bench.metrics.base import Batch, OfCurve
from dap_bench.metrics.perturbation import Perturbation, area, scored

OF_LABELS = (-1, False)  # among a batch's references: the method's own explanation of the true classes


@dataclass(frozen=True)
class PositivePerturbation(Perturbation, OfCurve):
    """The area under the accuracy while the most relevant pixels are removed; NaN without a label.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What pixels are replaced by: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "black".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        steps: Removals of 1 / steps of the pixels each; all and nothing are left out. Defaults to 10.
        explained: Whose map it is: of the predicted class (predicted), or of the true one (label). Defaults to
            "predicted".
    """

    baseline: str = "black"
    steps: int = 10  # of 1 / steps each; the ends are left out
    explained: str = "predicted"  # predicted | label

    better: ClassVar[str] = "lower"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("steps", self.steps, least=3)
        one_of("explained", self.explained, ("predicted", "label"))

    def with_curve(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        labels = batch.labels
        if labels is None:
            return torch.full((len(batch.images),), torch.nan), None
        known = (labels >= 0) & (labels < batch.vit.classes)
        labels = labels.clamp(0, batch.vit.classes - 1)
        ranks, units = self.ordered(batch, self.explanation(batch, labels)), self.units(batch)
        counts = torch.tensor([round(step * units / self.steps) for step in range(1, self.steps)], device=ranks.device)
        images, baseline, places = batch.images, self.baseline_images(batch), ranks.unflatten(1, batch.vit.image_size)

        def build(jobs: Tensor) -> Tensor:
            image, step = jobs // len(counts), jobs % len(counts)
            removed = places[image] < counts[step, None, None]
            return torch.where(removed[:, None], baseline[image], images[image])

        def right(scores: Tensor, image: Tensor) -> Tensor:
            return (scores.argmax(1) == labels[image]).to(batch.confidence)

        total = len(images) * len(counts)
        found = scored(batch, build, total, right, len(counts)).unflatten(0, (len(images), len(counts)))
        found = found.masked_fill(~known[:, None].to(found.device), torch.nan)
        return area(found, "trapezoid"), found

    def explanation(self, batch: Batch, labels: Tensor) -> Explanation:
        """The explanation that is tested: of the predicted classes, or of the true ones.

        Args:
            batch: The images and their explanations.
            labels: The true class of each image [B].

        Returns:
            The explanation.
        """
        if self.explained == "predicted":
            return batch.explanation
        if OF_LABELS not in batch.references:
            batch.references[OF_LABELS] = batch.explain_anew(classes=labels)
        return batch.references[OF_LABELS]

    def ordered(self, batch: Batch, explanation: Explanation) -> Tensor:
        """Rank of every pixel, 0 the first to be removed.

        Args:
            batch: The images.
            explanation: What says how relevant they are.

        Returns:
            Ranks [B,H*W].
        """
        return self.ranks(batch, explanation)


class NegativePerturbation(PositivePerturbation):
    """The area under the accuracy while the least relevant pixels are removed; NaN without a label.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What pixels are replaced by: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "black".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
        steps: Removals of 1 / steps of the pixels each; all and nothing are left out. Defaults to 10.
        explained: Whose map it is: of the predicted class (predicted), or of the true one (label). Defaults to
            "predicted".
    """

    better: ClassVar[str] = "higher"

    def ordered(self, batch: Batch, explanation: Explanation) -> Tensor:
        return self.units(batch) - 1 - self.ranks(batch, explanation)
