"""What metrics are given, and the arithmetic they share."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from math import floor
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dap_bench.errors import UserError, one_of
from dap_bench.explainers.base import Explainer, Explanation, min_max
from dap_bench.vit import ViT


class Metric(Protocol):
    """A number per image, NaN where it is not defined; `better` is the direction of improvement."""

    better: ClassVar[str]  # "higher" or "lower"
    needs: ClassVar[tuple[str, ...]]  # "layers", "masks", "alternative" cost time: made only if asked for

    def __call__(self, batch: "Batch") -> Tensor: ...


@dataclass
class Batch:
    """Some images, what the model says of them, and their explanations, made when first asked for."""

    vit: ViT
    explain: Explainer
    images: Tensor  # [B,3,H,W], normalised
    predicted: Tensor  # [B] the class explained
    alternative: Tensor  # [B] the runner-up
    confidence: Tensor  # [B] p(y|x), y the predicted class
    layers: bool = False  # should the explanation hold layer maps
    double: bool = False  # explain in double precision
    masks: list[Tensor | None] = field(default_factory=list)  # [H,W] bool, where the object is, if known
    chunk: int = 32  # how many perturbed images are scored at a time
    ids: list[Any] = field(default_factory=list)  # names of the images, for `known`
    known: dict[Any, Any] = field(default_factory=dict)  # what is the same for all explainers of these images
    orders: dict[Any, Tensor] = field(default_factory=dict)  # ranks of pixels, shared by metrics
    curves: dict[str, Tensor] = field(default_factory=dict)  # what metrics kept
    metric: str | None = None  # the name under which the metric at work was configured

    @classmethod
    def of(cls, vit: ViT, explain: Explainer, images: Tensor, **options: Any) -> "Batch":
        """A batch of images with the classes that the model gives them."""
        nothing = torch.empty(0)
        batch = cls(vit, explain, images, nothing, nothing, nothing, **options)
        clean = batch.once("clean", lambda: _best_two(vit, images))
        batch.predicted, batch.alternative, batch.confidence = clean[:, 0].long(), clean[:, 1].long(), clean[:, 2]
        return batch

    @cached_property
    def explanation(self) -> Explanation:
        return self.explained_by(self.explain, self.predicted, layers=self.layers)

    @cached_property
    def alternative_explanation(self) -> Explanation:
        return self.explained_by(self.explain, self.alternative)

    def explained_by(self, explain: Explainer, classes: Tensor, **options: Any) -> Explanation:
        return explain(*self.explained, classes, **options)

    @cached_property
    def explained(self) -> tuple[ViT, Tensor]:
        """The model and the images in the precision of explanations."""
        return (self.vit.double(), self.images.double()) if self.double else (self.vit, self.images)

    def values(self, explanation: Explanation, unit: str, upsample: str | None = None) -> Tensor:
        """An explanation as [B,n] values in 0..1: of the heatmap's pixels or of the patches."""
        if unit == "pixel":
            return explanation.heatmaps(self.vit.image_size, upsample).flatten(1)
        return min_max(explanation.maps)

    def once(self, what: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Numbers per image that do not depend on the explainer: computed once per image and sweep."""
        keys = [(what, name) for name in self.ids]
        if not keys or any(key not in self.known for key in keys):
            values = compute()
            self.known.update(zip(keys, values.tolist(), strict=bool(keys)))
            return values
        return torch.tensor([self.known[key] for key in keys], dtype=torch.float64, device=self.images.device)

    def keep(self, name: str, points: list[Tensor]) -> Tensor:
        """Points [B] of a curve as [B,points], kept for those who want the curve."""
        curve = torch.stack([point.to(points[0]) for point in points], 1)
        self.curves[self.metric or name] = curve
        return curve


def _best_two(vit: ViT, images: Tensor) -> Tensor:
    """The two likeliest classes and the probability of the first [B,3]."""
    best = vit.score(images, full=True).double().softmax(1).topk(2, dim=1)
    return torch.cat([best.indices.double(), best.values[:, :1]], 1)


def check_options(**options: object) -> None:
    """Options that several metrics have, checked by name."""
    allowed: dict[str, tuple[object, ...]] = {
        "unit": ("pixel", "patch"),
        "upsample": (None, "bilinear", "nearest", "bicubic"),
        "rounding": ("round", "floor"),
    }
    for name, value in options.items():
        if name in allowed:
            one_of(name, value, allowed[name])
        elif not isinstance(value, int | float) or not 0 < value <= 1:
            raise UserError(f"{name}={value} must be above 0 and at most 1.")


def top_count(fraction: float, total: int, rounding: str = "round") -> int:
    """How many of `total` make the top `fraction`: rounded or cut, at least one."""
    return max(1, (floor if rounding == "floor" else round)(fraction * total))


def ranks(values: Tensor) -> Tensor:
    """Ranks 0..n-1 of each row of [B,n]; equal values share the mean of their ranks."""
    ordered, order = values.sort(dim=1)
    place = torch.arange(values.shape[1], device=values.device).expand_as(order)
    changes = ordered[:, 1:] != ordered[:, :-1]
    edge = torch.ones_like(changes[:, :1])
    first = torch.where(torch.cat([edge, changes], 1), place, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), place, place.shape[1]).flip(1).cummin(1).values.flip(1)
    mean = (first + last).double() / 2
    return torch.empty_like(mean).scatter_(1, order, mean)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation of each pair of rows, with mean ranks for ties; NaN where a row is constant."""
    x, y = (r - r.mean(1, keepdim=True) for r in (ranks(a), ranks(b)))
    return (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()
