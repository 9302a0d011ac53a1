"""Randomisation: does the map depend on what the model has learned (Adebayo et al., 2018)?

    randomisation = mean_k rho_s(E(f), E(f_k))        f_k: f with its top k parts randomised, k = 1 ... L + 2

The parts are the head, then the blocks from the last to the first, then the embeddings: patches, positions, class and
register tokens. Randomised is every weight of a part, its numbers put in another order, so that the model neither
explodes nor falls silent. A map that stays the same explains something else than the model. The randomised models are
the same for all images. A map that has become constant shares nothing with the first one: rho_s = 0.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import UserError, require_int
from dap_bench.isolation import copied, generator
from dap_bench.metrics.base import Batch, OfCurve, as_curve, check_options, spearman
from dap_bench.vit import ViT

HEADS = ("head", "norm.", "fc_norm", "attn_pool")  # how the names of weights after the last block begin


@dataclass(frozen=True)
class Randomisation(OfCurve):
    """The rank correlation with the maps of ever more randomised models, mean over how much is randomised.

    Attributes:
        unit: What is compared: pixels of the heatmap, or patches (pixel, patch). Defaults to "patch".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        depths: How many depths of randomisation, evenly spaced and with the deepest; None takes all: head, every
            block, embeddings. Defaults to None.
        seed: Another seed puts the weights in another order. Defaults to 0.
    """

    unit: str = "patch"
    upsample: str | None = None
    depths: int | None = None  # how many of the L + 2 depths, evenly spaced, the deepest among them; None: all
    seed: int = 0

    better: ClassVar[str] = "lower"
    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        require_int("seed", self.seed, least=0)
        if self.depths is not None:
            require_int("depths", self.depths)

    def with_curve(self, batch: Batch) -> tuple[Tensor, Tensor]:
        original = batch.values(batch.explanation, self.unit, self.upsample)
        constant = original.amax(1) == original.amin(1)
        rhos = []
        for model in self.models(batch.vit):
            values = batch.values(batch.explain_anew(vit=model), self.unit, self.upsample)
            rho = spearman(original, values).nan_to_num(0.0)
            rhos.append(rho.masked_fill(constant, torch.nan))
        curve = as_curve(rhos)
        return curve.mean(1), curve

    def models(self, vit: ViT) -> Iterator[ViT]:
        """The model with ever more of it randomised, from the head down.

        Args:
            vit: The model; it is not changed.

        Yields:
            A copy, which is changed further at the next step.

        Raises:
            UserError: If there are fewer depths than asked for.
        """
        twin, total = copied(vit), vit.depth + 2
        if self.depths is not None and self.depths > total:
            raise UserError(f"depths={self.depths} is too many: the model has {total} depths.")
        count = self.depths or total
        wanted = {total * (step + 1) // count for step in range(count)}
        for depth, part in enumerate(parts(twin), 1):
            for name, weight in part.items():
                shuffle(weight, generator(f"{name}/{self.seed}"))
            if depth in wanted:
                yield twin


def parts(vit: ViT) -> list[dict[str, Tensor]]:
    """All weights by name: the head's, those of each block from the last to the first, the embeddings'.

    Args:
        vit: The model.

    Returns:
        The weights of each part by name, from the head to the embeddings.
    """
    found: list[dict[str, Tensor]] = [{} for _ in range(vit.depth + 2)]
    for name, weight in vit.model.named_parameters():
        block = re.match(r"blocks\.(\d+)\.", name)
        at = vit.depth - int(block[1]) if block else 0 if name.startswith(HEADS) else -1
        found[at][name] = weight
    return found


@torch.no_grad()
def shuffle(weight: Tensor, random: torch.Generator) -> None:
    """Put the numbers of a weight in another order, in place.

    Args:
        weight: The weight.
        random: The generator that draws the order.
    """
    order = torch.randperm(weight.numel(), generator=random).to(weight.device)
    weight.copy_(weight.flatten()[order].view_as(weight))
