"""What metrics are given, and the arithmetic they share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dap_bench.errors import UserError, one_of
from dap_bench.explainers.base import Explainer, Explanation, min_max
from dap_bench.isolation import altered, copied, explained
from dap_bench.vit import ViT, double_of


class Metric(Protocol):
    """A number per image, NaN where it is not defined.

    A metric that is read off a curve has a method `with_curve` too, which gives both. One that asks other explainers
    of the same images has a method `prepare`, which does so while their forward passes can be shared.

    Attributes:
        better: The direction of improvement: "higher" or "lower".
        needs: What it needs besides the explanation, made only if asked for: "layers", "masks", "alternative".
    """

    better: ClassVar[str]  # "higher" or "lower"
    needs: ClassVar[tuple[str, ...]]  # "layers", "masks", "alternative" cost time: made only if asked for

    def __call__(self, batch: "Batch") -> Tensor: ...


class OfCurve(ABC):
    """A metric that is read off a curve."""

    def __call__(self, batch: "Batch") -> Tensor:
        return self.with_curve(batch)[0]

    @abstractmethod
    def with_curve(self, batch: "Batch") -> tuple[Tensor, Tensor | None]:
        """Measure a batch, and keep what the values were read off.

        Args:
            batch: The images and their explanations.

        Returns:
            The values [B], and the curve [B,points] where there is one.
        """


@dataclass
class Batch:
    """Some images, what the model says of them, and their explanations, made when first asked for.

    Attributes:
        vit: The model for scoring; explainers work on copies.
        explain: The explainer that is measured.
        images: Normalised images [B,3,H,W].
        predicted: The class that is explained [B].
        alternative: The runner-up [B].
        confidence: The probability of the predicted class [B].
        layers: Whether the explanation should hold layer maps. Defaults to False.
        double: Explain in double precision. Defaults to False.
        masks: Where the object is in each image, [H,W] bool, None where that is not known; empty by default.
        labels: The true class [B], if known. Defaults to None.
        companions: A function from a number n to that many other images, of other classes, for each [B,n,3,H,W].
            Defaults to None.
        chunk: How many perturbed images are scored at a time. Defaults to 32.
        ids: Names of the images, which `known` goes by; empty by default.
        known: What is the same for all explainers of these images; one dictionary may serve many batches.
        shared: What metrics share: ranks of pixels, baselines.
        references: What other explainers said of these images (see `explained_by`).
    """

    vit: ViT  # for scoring; explainers work on copies
    explain: Explainer
    images: Tensor  # [B,3,H,W], normalised
    predicted: Tensor  # [B] the class explained
    alternative: Tensor  # [B] the runner-up
    confidence: Tensor  # [B] p(y|x), y the predicted class
    layers: bool = False  # should the explanation hold layer maps
    double: bool = False  # explain in double precision
    masks: list[Tensor | None] = field(default_factory=list)  # [H,W] bool, where the object is, if known
    labels: Tensor | None = None  # [B] the true class, if known
    companions: Callable[[int], Tensor] | None = None  # that many other images for each, of other classes [B,n,3,H,W]
    chunk: int = 32  # how many perturbed images are scored at a time
    ids: list[Any] = field(default_factory=list)  # names of the images, for `known`
    known: dict[Any, Any] = field(default_factory=dict)  # what is the same for all explainers of these images
    shared: dict[Any, Tensor] = field(default_factory=dict)  # what metrics share: ranks of pixels, baselines
    references: dict[tuple[int, bool], Explanation] = field(default_factory=dict)  # see `explained_by`

    @classmethod
    def of(cls, vit: ViT, explain: Explainer, images: Tensor, **options: Any) -> "Batch":
        """A batch of images with the classes that the model gives them.

        Args:
            vit: The model.
            explain: The explainer.
            images: Normalised images [B,3,H,W], on the model's device.
            **options: Other attributes of the batch, such as `layers`, `masks` or `ids`.

        Returns:
            The batch; nothing is explained yet.
        """
        nothing = torch.empty(0)
        batch = cls(vit, explain, images, nothing, nothing, nothing, **options)
        clean = batch.once("clean", lambda: _best_two(vit, images))
        batch.predicted, batch.alternative = (clean[:, column].long().to(images.device) for column in (0, 1))
        batch.confidence = clean[:, 2]
        return batch

    @cached_property
    def explanation(self) -> Explanation:
        """What the explainer says of the predicted class."""
        return explained(self.explain, self._own, self._inputs, self.predicted, self.ids, self.layers, self.masks)

    @cached_property
    def alternative_explanation(self) -> Explanation:
        """What the explainer says of the runner-up."""
        if "_own" in vars(self) and altered(self._own, self.vit):
            del self._own  # the explainer has changed its copy of the model: take another
        return explained(self.explain, self._own, self._inputs, self.alternative, self.ids, masks=self.masks)

    def explain_all(self, alternative: bool, metrics: Iterable[Any] = ()) -> None:
        """Make the explanations now, from shared traces, and let go of the copy of the model they were made on.

        Args:
            alternative: Explain the runner-up too.
            metrics: Metrics to be computed: what they ask of other explainers comes first, because these traces reach
                furthest. Defaults to ().
        """
        with self._own.shared_traces():
            self.reference = self._own, self._inputs
            for metric in metrics:
                if hasattr(metric, "prepare"):
                    metric.prepare(self)
            del self.reference
            if self.references and altered(self._own, self.vit):
                del self._own
            _ = self.explanation
            if alternative:
                _ = self.alternative_explanation
        vars(self).pop("_own", None)

    def explained_by(self, explain: Explainer, layers: bool = False) -> Explanation:
        """The explanation of the predicted class that a metric asks of another explainer, as its reference.

        Args:
            explain: The other explainer; it is asked once.
            layers: Whether layer maps are wanted. Defaults to False.

        Returns:
            Its explanation, checked.
        """
        key = (id(explain), layers)
        if key not in self.references:
            found = explained(explain, *self.reference, self.predicted, self.ids, layers, self.masks)
            self.references[key] = found
        return self.references[key]

    def explain_anew(
        self, images: Tensor | None = None, classes: Tensor | None = None, vit: ViT | None = None
    ) -> Explanation:
        """What the explainer says of other versions of the images, of other classes, or on another model.

        Args:
            images: Images [B,3,H,W] in place of the batch's. Defaults to None.
            classes: Classes [B] in place of the predicted ones. Defaults to None.
            vit: A model in place of the batch's. Defaults to None.

        Returns:
            An explanation that is not kept.
        """
        twin = copied(vit if vit is not None else self.vit, self.double)
        given = self._inputs if images is None else double_of(images) if self.double else images
        asked = self.predicted if classes is None else classes
        return explained(self.explain, twin, given, asked, self.ids, masks=self.masks)

    @cached_property
    def reference(self) -> tuple[ViT, Tensor]:
        """The model and the images that metrics may look inside, in the precision of explanations."""
        return copied(self.vit, self.double), self._inputs

    @cached_property
    def _own(self) -> ViT:
        """The model of the explainer under test."""
        return copied(self.vit, self.double)

    @cached_property
    def _inputs(self) -> Tensor:
        return double_of(self.images) if self.double else self.images

    def values(self, explanation: Explanation, unit: str, upsample: str | None = None) -> Tensor:
        """An explanation as values in 0..1.

        Args:
            explanation: What an explainer gave for these images.
            unit: Of what: the heatmap's pixels (pixel), or the patches (patch).
            upsample: How maps of patches are enlarged to pixels; None as the method's authors do. Defaults to None.

        Returns:
            Values [B,n], each image's scaled by itself.
        """
        if unit == "pixel":
            return explanation.heatmaps(self.vit.image_size, upsample).flatten(1)
        return min_max(explanation.on(self.vit.grid))

    def once(self, what: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Numbers per image that do not depend on the explainer: computed once per image and sweep.

        Args:
            what: What they are, for `known`.
            compute: How they are computed, one number or a list of numbers for each image.

        Returns:
            The numbers, from `known` where they are there for all images.
        """
        keys = [(what, name) for name in self.ids]
        if not keys or any(key not in self.known for key in keys):
            values = compute()
            self.known.update(zip(keys, values.tolist(), strict=bool(keys)))
            return values
        known = torch.tensor([self.known[key] for key in keys], dtype=torch.float64)
        return known if self.images.device.type == "mps" else known.to(self.images.device)


def _best_two(vit: ViT, images: Tensor) -> Tensor:
    """The two likeliest classes and the probability of the first [B,3]."""
    best = double_of(vit.score(images, full=True)).softmax(1).topk(2, dim=1)
    return torch.cat([best.indices.double(), best.values[:, :1]], 1)


def as_curve(points: Sequence[Tensor]) -> Tensor:
    """Points of curves as one tensor.

    Args:
        points: The points, from the first to the last, of all images [B] each.

    Returns:
        The curves [B,points].
    """
    return torch.stack([point.to(points[0]) for point in points], 1)


def check_options(**options: object) -> None:
    """Check options that several metrics have.

    Args:
        **options: Options by name: `unit`, `upsample` and `rounding` must be one of their choices, any other a number
            above 0 and at most 1.

    Raises:
        UserError: If one has another value.
    """
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
    """How many values make the top fraction, at least one.

    Args:
        fraction: The fraction.
        total: The number of all values.
        rounding: round or floor. Defaults to "round".

    Returns:
        Their number.
    """
    return max(1, (floor if rounding == "floor" else round)(fraction * total))


def ranks(values: Tensor) -> Tensor:
    """Ranks within each row; equal values share the mean of their ranks.

    Args:
        values: Values [B,n].

    Returns:
        Ranks 0..n-1 [B,n], the smallest value first.
    """
    ordered, order = values.sort(dim=1)
    place = torch.arange(values.shape[1], device=values.device).expand_as(order)
    changes = ordered[:, 1:] != ordered[:, :-1]
    edge = torch.ones_like(changes[:, :1])
    first = torch.where(torch.cat([edge, changes], 1), place, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), place, place.shape[1]).flip(1).cummin(1).values.flip(1)
    mean = double_of(first + last) / 2
    return torch.empty_like(mean).scatter_(1, order.to(mean.device), mean)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation of each pair of rows, with mean ranks for ties; NaN where a row is constant.

    Args:
        a: Values [B,n].
        b: Values [B,n].

    Returns:
        Correlations [B].
    """
    x, y = (r - r.mean(1, keepdim=True) for r in (ranks(a), ranks(b)))
    return (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()
