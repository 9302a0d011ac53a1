"""Scoring perturbed images at the speed of the bare model.

A perturbed image takes some pixels from one image and the rest from another. Which ones is said by ranks: pixel i is
taken when rank_i < count, so an order of relevance and a list of counts describe a whole curve. All (image, count)
jobs of a batch form one flat stream that is cut into chunks of a bounded size, built on the device and scored.

A curve hangs on the image, the order and the baseline alone: where two methods rank an image's pixels alike, as DAP's
Uniform variant and AR do, the curve of one is the other's, and is not computed again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from dap_bench.errors import UserError, one_of
from dap_bench.explainers.base import Explanation
from dap_bench.metrics.base import Batch, check_options
from dap_bench.vit import double_of

BASELINES = ("zero", "black", "mean", "blur")
CURVES_IN_MEMORY = 100_000  # of some 20 numbers each
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Perturbation:
    """Options of all metrics that replace pixels in the order of the heatmap.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        baseline: What pixels are replaced by: zero (grey), black, the image's mean colour (mean), or the image
            blurred (blur). Defaults to "zero".
        kernel: Side of the blur's kernel in pixels, an odd number. Defaults to 51.
        sigma: Standard deviation of the blur in pixels. Defaults to 8.0.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of random ties. Defaults to 0.
    """

    unit: str = "pixel"  # what is taken at a time: pixel (in the heatmap's order) or patch
    upsample: str | None = None  # None: as the method's authors do
    baseline: str = "zero"  # zero (after normalisation: grey) | black | mean (colour of the image) | blur
    kernel: int = 51  # of blur, in pixels
    sigma: float = 8.0  # of blur; torchvision takes 8 for a kernel of 51
    ties: str = "stable"  # among equal values: stable (raster order) | random
    seed: int = 0  # of random ties

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        one_of("baseline", self.baseline, BASELINES)
        one_of("ties", self.ties, ("stable", "random"))
        if self.kernel % 2 == 0 or self.kernel < 1 or self.sigma <= 0:
            raise UserError(f"blur needs an odd kernel and a positive sigma, not {self.kernel} and {self.sigma}.")

    def ranks(self, batch: Batch, explanation: Explanation) -> Tensor:
        """Rank of every pixel, 0 the most relevant; pixels of a patch share its rank where `unit` is patch.

        Args:
            batch: The images.
            explanation: What says how relevant they are.

        Returns:
            Ranks [B,H*W].
        """
        key = (id(explanation), self.unit, self.upsample, self.ties, self.seed)
        if key not in batch.shared:
            order = order_of(batch.values(explanation, self.unit, self.upsample), self.ties, self.seed)
            places = torch.arange(order.shape[1], dtype=torch.int32, device=order.device).expand_as(order)
            ranks = torch.empty_like(places).scatter_(1, order, places)
            ranks = ranks.to(batch.images.device)
            batch.shared[key] = ranks if self.unit == "pixel" else ranks[:, patch_of_pixel(batch)]
        return batch.shared[key]

    def units(self, batch: Batch) -> int:
        """How many pixels or patches an image has.

        Args:
            batch: The images.

        Returns:
            Their number.
        """
        height, width = batch.vit.image_size
        return height * width if self.unit == "pixel" else batch.vit.patches

    def baseline_images(self, batch: Batch) -> Tensor:
        """What pixels are replaced by.

        Args:
            batch: The images.

        Returns:
            The baseline of each image [B,3,H,W].
        """
        if self.baseline_key not in batch.shared:
            batch.shared[self.baseline_key] = self._baseline_images(batch)
        return batch.shared[self.baseline_key]

    def _baseline_images(self, batch: Batch) -> Tensor:
        images = batch.images
        if self.baseline == "zero":
            return torch.zeros_like(images)
        if self.baseline == "black":
            return batch.vit.normalised(0.0).to(images).expand_as(images)
        if self.baseline == "mean":
            return images.mean((2, 3), keepdim=True).expand_as(images)
        return blur(images, self.kernel, self.sigma)

    @property
    def baseline_key(self) -> tuple[object, ...]:
        """What tells one baseline of an image from another."""
        return (self.baseline, self.kernel, self.sigma) if self.baseline == "blur" else (self.baseline,)

    def baseline_probability(self, batch: Batch) -> Tensor:
        """p(y) of the baseline, computed once per image and sweep.

        Args:
            batch: The images.

        Returns:
            Probabilities of the predicted class [B].
        """

        def compute() -> Tensor:
            images = self.baseline_images(batch)
            return probabilities(batch, lambda chosen: images[chosen], len(images))

        return batch.once(self.baseline_key, compute)

    def deleting(self, batch: Batch, ranks: Tensor, counts: Sequence[int]) -> Tensor:
        """p(y) while pixels are replaced by the baseline.

        Args:
            batch: The images.
            ranks: The rank of every pixel [B,H*W]; low ranks are replaced first.
            counts: How many units are replaced at each point.

        Returns:
            Probabilities of the predicted class [B,counts].
        """
        baseline = self.baseline_images(batch)
        return curve(batch, ranks, counts, of=baseline, into=batch.images, key=("deleting", *self.baseline_key))

    def inserting(self, batch: Batch, ranks: Tensor, counts: Sequence[int]) -> Tensor:
        """p(y) while pixels of the image are put into the baseline.

        Args:
            batch: The images.
            ranks: The rank of every pixel [B,H*W]; low ranks are put in first.
            counts: How many units are put in at each point.

        Returns:
            Probabilities of the predicted class [B,counts].
        """
        baseline = self.baseline_images(batch)
        return curve(batch, ranks, counts, of=batch.images, into=baseline, key=("inserting", *self.baseline_key))


def blur(images: Tensor, kernel: int, sigma: float) -> Tensor:
    """Gaussian blur with reflected borders: torchvision's, but one axis after the other, which is far cheaper.

    Args:
        images: Images [B,3,H,W].
        kernel: Side of the kernel in pixels, an odd number.
        sigma: Standard deviation in pixels.

    Returns:
        Blurred images [B,3,H,W].
    """
    place = torch.arange(kernel, dtype=images.dtype, device=images.device) - (kernel - 1) / 2
    weights = (-0.5 * (place / sigma) ** 2).exp()
    weights = (weights / weights.sum()).repeat(3, 1, 1, 1)
    half = kernel // 2
    rows = conv2d(pad(images, (half, half, 0, 0), mode="reflect"), weights, groups=3)
    return conv2d(pad(rows, (0, 0, half, half), mode="reflect"), weights.transpose(2, 3), groups=3)


def order_of(values: Tensor, ties: str, seed: int) -> Tensor:
    """Indices of each row from the largest value to the smallest.

    Args:
        values: Values [B,n].
        ties: Which of equal values comes first: in raster order (stable), or by lot (random).
        seed: Of random ties.

    Returns:
        Indices [B,n].
    """
    if ties == "stable":
        return values.sort(dim=1, descending=True, stable=True).indices
    # one shuffle for all images: a batch must not change its images' values
    shuffle = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(seed)).to(values.device)
    return shuffle[values[:, shuffle].sort(dim=1, descending=True, stable=True).indices]


def patch_of_pixel(batch: Batch) -> Tensor:
    """The patch that each pixel belongs to.

    Args:
        batch: The images.

    Returns:
        Patches [H*W], in raster order.
    """
    (rows, columns), (height, width) = batch.vit.grid, batch.vit.image_size
    row, column = torch.arange(height) * rows // height, torch.arange(width) * columns // width
    return (row[:, None] * columns + column[None, :]).flatten().to(batch.images.device)


def curve(
    batch: Batch, ranks: Tensor, counts: Sequence[int], of: Tensor, into: Tensor, key: tuple[object, ...] = ()
) -> Tensor:
    """p(y) when pixels are taken from one image and the others from another.

    Args:
        batch: The images.
        ranks: The rank of every pixel [B,H*W].
        counts: For each point of the curve, the rank below which pixels are taken from `of`.
        of: Images [B,3,H,W].
        into: Images [B,3,H,W].
        key: What tells this perturbation from others: the same curve is then computed once in a sweep. Defaults to ().

    Returns:
        Probabilities of the predicted class [B,counts].
    """
    known: dict[object, list[float]] = batch.known.setdefault("curves", {})
    names = list(zip(batch.ids, _marks(ranks), strict=True)) if key and batch.ids else []
    keys = [(key, tuple(counts), *name) for name in names]
    if keys and all(each in known for each in keys):
        return torch.tensor([known[each] for each in keys], dtype=torch.float64).to(batch.confidence)
    steps = torch.tensor(list(counts), device=ranks.device)
    ranks = ranks.unflatten(1, batch.vit.image_size)

    def build(jobs: Tensor) -> Tensor:
        image, step = jobs // len(steps), jobs % len(steps)
        taken = ranks[image] < steps[step, None, None]
        return torch.where(taken[:, None], of[image], into[image])

    found = probabilities(batch, build, len(ranks) * len(steps), len(steps)).unflatten(0, (len(ranks), len(steps)))
    known.update(zip(keys, found.tolist() if keys else [], strict=True))
    while len(known) > CURVES_IN_MEMORY:
        del known[next(iter(known))]  # the oldest
    return found


def _marks(ranks: Tensor) -> list[tuple[int, ...]]:
    """128 bits that tell each row of ranks [B,n] from any other."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (2, ranks.shape[1]), generator=random).to(ranks.device)
    return [tuple(mark) for mark in (ranks.long()[:, None] * weights).sum(2).tolist()]


def probabilities(batch: Batch, build: Callable[[Tensor], Tensor], total: int, per_image: int = 1) -> Tensor:
    """p(y) of perturbed images.

    Args:
        batch: The images that they are made from.
        build: Makes images [n,3,H,W] for numbers of jobs [n].
        total: The number of jobs.
        per_image: Jobs of each image: job j belongs to image j // per_image. Defaults to 1.

    Returns:
        Probabilities of the predicted class [total].
    """

    def read(scores: Tensor, image: Tensor) -> Tensor:
        p = double_of(scores).softmax(1)
        return p.gather(1, batch.predicted[image][:, None].to(p.device))[:, 0]

    return scored(batch, build, total, read, per_image)


@torch.inference_mode()
def scored(
    batch: Batch,
    build: Callable[[Tensor], Tensor],
    total: int,
    read: Callable[[Tensor, Tensor], Tensor],
    per_image: int = 1,
) -> Tensor:
    """A number for each perturbed image, read from its logits.

    Where memory runs out, fewer images are scored at a time.

    Args:
        batch: The images that they are made from.
        build: Makes images [n,3,H,W] for numbers of jobs [n].
        total: The number of jobs.
        read: From logits [n,C] and positions in the batch [n] to numbers [n].
        per_image: Jobs of each image: job j belongs to image j // per_image. Defaults to 1.

    Returns:
        The numbers [total].
    """
    jobs = torch.arange(total, device=batch.images.device)
    found, done = [], 0
    while done < total:
        chosen = jobs[done : done + batch.chunk]
        try:
            scores = batch.vit.score(build(chosen))
        except torch.OutOfMemoryError:
            if batch.chunk == 1:
                raise
            batch.chunk = max(1, batch.chunk // 2)
            log.warning("out of memory: perturbed images are now scored %d at a time", batch.chunk)
            torch.cuda.empty_cache()
            continue
        found.append(read(scores, chosen // per_image))
        done += len(chosen)
    return torch.cat(found) if found else torch.empty_like(batch.confidence[:0])


def area(curves: Tensor, rule: str) -> Tensor:
    """Area under curves on [0,1].

    Args:
        curves: Curves [B,points], evenly spaced.
        rule: The trapezoid rule (trapezoid), or the mean of the points (mean).

    Returns:
        Areas [B].
    """
    return torch.trapezoid(curves, dx=1 / (curves.shape[1] - 1), dim=1) if rule == "trapezoid" else curves.mean(1)


def interior(steps: int, total: int) -> list[int]:
    """How many units are taken at the points strictly between the two ends of a curve.

    Args:
        steps: Intervals of the curve.
        total: The number of all units.

    Returns:
        A number for each of the steps - 1 points.
    """
    return [round(step * total / steps) for step in range(1, steps)]
