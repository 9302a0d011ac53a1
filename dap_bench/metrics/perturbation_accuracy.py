"""Perturbation tests (Chefer et al., 2021): how long is the image still recognised while pixels are removed?

    accuracy_f = 1 if the model still gives the true class with the share f of pixels removed, else 0
    value = area under accuracy_f over f = 0.1, 0.2 ... 0.9, by the trapezoid rule, divided by its width

`first: most` removes the most relevant pixels first (positive perturbation: lower is better), `first: least` the least
relevant (negative: higher is better). `explained: predicted` explains the class that the model gives the image,
`explained: label` the class it has. Its mean over images is the area under the accuracy's curve. NaN without a label.
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
        if self.explained == "predicted":
            return batch.explanation
        if OF_LABELS not in batch.references:
            batch.references[OF_LABELS] = batch.explain_anew(classes=labels)
        return batch.references[OF_LABELS]

    def ordered(self, batch: Batch, explanation: Explanation) -> Tensor:
        return self.ranks(batch, explanation)


class NegativePerturbation(PositivePerturbation):
    better: ClassVar[str] = "higher"

    def ordered(self, batch: Batch, explanation: Explanation) -> Tensor:
        return self.units(batch) - 1 - self.ranks(batch, explanation)
