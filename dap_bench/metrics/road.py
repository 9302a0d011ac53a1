"""ROAD, remove and debias (Rong et al., 2022): pixels are removed by imputing them from their neighbours.

    sum_{q ~ p} w_pq (x_p - x_q) = 0 for every removed pixel p        w: 1/6 to the sides, 1/12 across corners
    ROAD = mean_f (p(y | the least salient f removed) - p(y | the most salient f removed)) / 2

A grey or black hole tells the model where something is missing, and so what shape it had; an imputed one hardly does.
A little noise (`noise`, in normalised units, the image's own) hides that it is smooth. The curve that is kept has the
difference for each share f. Each image and share is one sparse symmetric system for three channels, solved exactly on
the CPU, as many of a batch at a time as torch has threads: that, not the forward passes, is what it costs.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import splu
from torch import Tensor

from dap_bench.errors import UserError
from dap_bench.isolation import content, generator
from dap_bench.metrics.base import Batch, OfCurve
from dap_bench.metrics.perturbation import Perturbation, probabilities

NEIGHBOURS = [(-1, 0, 1 / 6), (1, 0, 1 / 6), (0, -1, 1 / 6), (0, 1, 1 / 6)]
NEIGHBOURS += [(down, across, 1 / 12) for down in (-1, 1) for across in (-1, 1)]


@dataclass(frozen=True)
class RemoveAndDebias(OfCurve):
    """ROAD: p(y) without the least salient pixels minus p(y) without the most salient, removed by imputation.

    Attributes:
        unit: What is taken at a time: a pixel, in the heatmap's order, or a patch. Defaults to "pixel".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        ties: Which of equal values comes first: in raster order (stable), or by lot (random). Defaults to "stable".
        seed: Of the noise and of random ties. Defaults to 0.
        fractions: Shares of the pixels that are removed. Defaults to (0.2, 0.4, 0.6, 0.8).
        noise: Standard deviation of what is added to imputed pixels, in normalised units. Defaults to 0.01.
    """

    unit: str = "pixel"
    upsample: str | None = None  # None: as the method's authors do
    ties: str = "stable"  # among equal values: stable (raster order) | random
    seed: int = 0  # of the noise and of random ties
    fractions: Sequence[float] = (0.2, 0.4, 0.6, 0.8)  # f
    noise: float = 0.01

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _ = self.order
        if not self.fractions or not all(0 < each < 1 for each in self.fractions):
            raise UserError(f"fractions={list(self.fractions)} must lie between 0 and 1, such as [0.2, 0.5].")
        if not self.noise >= 0:
            raise UserError(f"noise={self.noise} must not be negative.")

    @property
    def order(self) -> Perturbation:
        """How pixels are ranked."""
        return Perturbation(self.unit, self.upsample, ties=self.ties, seed=self.seed)

    def with_curve(self, batch: Batch) -> tuple[Tensor, Tensor]:
        ranks, units = self.order.ranks(batch, batch.explanation), self.order.units(batch)
        counts = [round(fraction * units) for fraction in self.fractions]
        most, least = (self.removing(batch, order, counts) for order in (ranks, units - 1 - ranks))
        curve = (least - most) / 2
        return curve.mean(1), curve

    def removing(self, batch: Batch, ranks: Tensor, counts: Sequence[int]) -> Tensor:
        """p(y) while pixels are removed by imputation.

        Args:
            batch: The images.
            ranks: The rank of every pixel [B,H*W]; low ranks are removed first.
            counts: How many units are removed at each point.

        Returns:
            Probabilities of the predicted class [B,counts].
        """
        images, noise = batch.images, self.noises(batch)
        places = ranks.unflatten(1, batch.vit.image_size)

        def build(jobs: Tensor) -> Tensor:
            image, step = jobs // len(counts), jobs % len(counts)
            limits = torch.tensor(counts, device=ranks.device)[step]
            removed = places[image] < limits[:, None, None]
            filled = impute(images[image], removed)
            return torch.where(removed[:, None], filled + noise[image], filled)

        total = len(images) * len(counts)
        return probabilities(batch, build, total, len(counts)).unflatten(0, (len(images), len(counts)))

    def noises(self, batch: Batch) -> Tensor:
        """The noise that is added to imputed pixels.

        Args:
            batch: The images.

        Returns:
            Noise for every pixel [B,3,H,W].
        """
        names = batch.ids or list(map(content, batch.images))
        shape = batch.images.shape[1:]
        draws = [torch.randn(shape, generator=generator(f"{name}/{self.seed}")) for name in names]
        return self.noise * torch.stack(draws).to(batch.images)


def impute(images: Tensor, removed: Tensor) -> Tensor:
    """Replace each removed pixel by the weighted mean of its neighbours, all at once.

    Args:
        images: Images [B,3,H,W].
        removed: Which pixels are removed [B,H,W] bool.

    Returns:
        Images [B,3,H,W].
    """
    pictures, holes = images.double().cpu().numpy(), removed.cpu().numpy()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # the solver lets other threads run
        filled = list(pool.map(_impute, pictures, holes))
    return torch.from_numpy(np.stack(filled)).to(images)


def _impute(picture: np.ndarray, hole: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(hole)
    count = len(rows)
    if count in (0, hole.size):  # nothing to impute, or nothing to impute it from
        return picture
    number = np.pad(np.full(hole.shape, -1), 1, constant_values=-2)  # of each unknown; -1: known, -2: outside
    number[rows + 1, columns + 1] = np.arange(count)
    padded = np.pad(picture, ((0, 0), (1, 1), (1, 1)))
    own, known = np.zeros(count), np.zeros((count, len(picture)))
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for down, across, weight in NEIGHBOURS:
        there = rows + 1 + down, columns + 1 + across
        neighbour = number[there]
        own += weight * (neighbour > -2)
        known += weight * np.where(neighbour == -1, padded[:, there[0], there[1]], 0).T
        (unknown,) = np.nonzero(neighbour >= 0)
        entries.append((unknown, neighbour[unknown], np.full(len(unknown), -weight)))
    entries.append((np.arange(count), np.arange(count), own))
    row, column, value = (np.concatenate(each) for each in zip(*entries, strict=True))
    matrix = csc_matrix((value, (row, column)), shape=(count, count))
    solver = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    filled = picture.copy()
    filled[:, rows, columns] = solver.solve(known).T
    return filled
