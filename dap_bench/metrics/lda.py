"""LDA, layer-wise decision alignment: how early the layers agree with a reference map.

    LDA = mean_l rho_s(M_l, M_ref)        rank correlation over patches or pixels

As printed, M_l is the map propagated up to layer l (`intermediate: accumulated`) and M_ref the method's own final map
(`reference: own_final`). Other readings: M_l of layer l alone (single), what it adds to the layer before (added), the
raw attention in the row that the head reads (raw_attention) or the prior at layer l (prior); M_ref the decision prior
(prior), the prior at layer l itself (prior_layers), or the raw attention of the last layer (last_attention).
`similarity` may also be Pearson's correlation, the cosine, or the overlap of the top 10 % (intersection over union). A
method without layer maps has no value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dap_bench.errors import UserError, one_of
from dap_bench.explainers.base import Explainer, Explanation
from dap_bench.metrics.base import Batch, OfCurve, as_curve, check_options, spearman, top_count


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation of each pair of rows.

    Args:
        a: Values [B,n].
        b: Values [B,n].

    Returns:
        Correlations [B].
    """
    return cosine_similarity(a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True), dim=1)


def overlap(a: Tensor, b: Tensor, fraction: float = 0.10) -> Tensor:
    """Intersection over union of the largest values of each pair of rows.

    Args:
        a: Values [B,n].
        b: Values [B,n].
        fraction: Of the values that count as the largest. Defaults to 0.1.

    Returns:
        The overlap in 0..1 [B].
    """
    count = top_count(fraction, a.shape[1])
    tops = [torch.zeros_like(each).scatter(1, each.topk(count, dim=1).indices, 1) for each in (a, b)]
    return (tops[0] * tops[1]).sum(1) / torch.maximum(tops[0], tops[1]).sum(1)


def raw_attention(batch: Batch) -> list[Tensor]:
    """The attention to each patch in the row that the head reads, mean over heads.

    Args:
        batch: The images and their explanations.

    Returns:
        The attention of each block [B,P].
    """
    vit, images = batch.reference
    trace = vit.trace(images)
    return [trace.layout.map_of(attention.mean(1)) for attention in trace.attention]


SIMILARITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "spearman": spearman,
    "pearson": pearson,
    "cosine": cosine_similarity,
    "overlap": overlap,
}


@dataclass(frozen=True)
class DecisionAlignment(OfCurve):
    """LDA: the mean similarity of each layer's map to a reference; NaN for a method without layer maps.

    Attributes:
        prior: The explainer that gives the reference prior, or the map of layers where `intermediate` is prior.
        unit: What is compared: pixels of the heatmap, or patches (pixel, patch). Defaults to "patch".
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic; None as the method's authors do.
            Defaults to None.
        reference: What layers are compared with: the method's final map (own_final), the prior (prior), the prior
            at the same layer (prior_layers), or the attention of the last block (last_attention). Defaults to
            "own_final".
        intermediate: A layer's map: the method's as far as there (accumulated), of that layer alone (single), what
            it adds to the layer before (added), its attention (raw_attention), or the prior there (prior). Defaults
            to "accumulated".
        layers: Which layers count: all or all_but_last. Defaults to "all".
        similarity: spearman, pearson, cosine, or the overlap of the top 10 % (overlap). Defaults to "spearman".
    """

    prior: Explainer
    unit: str = "patch"
    upsample: str | None = None
    reference: str = "own_final"  # own_final | prior | prior_layers | last_attention
    intermediate: str = "accumulated"  # accumulated | single | added | raw_attention | prior
    layers: str = "all"  # all | all_but_last
    similarity: str = "spearman"  # spearman | pearson | cosine | overlap

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        if not callable(self.prior):
            raise UserError(f"LDA's prior is an explainer, not {self.prior!r}.")
        one_of("LDA's reference", self.reference, ("own_final", "prior", "prior_layers", "last_attention"))
        maps = ("accumulated", "single", "added", "raw_attention", "prior")
        one_of("LDA's intermediate", self.intermediate, maps)
        one_of("LDA's similarity", self.similarity, tuple(SIMILARITIES))
        one_of("LDA's layers", self.layers, ("all", "all_but_last"))

    def prepare(self, batch: Batch) -> None:
        """Ask the prior now, while its forward pass can be shared.

        Args:
            batch: The images.
        """
        if self.reference == "prior_layers" or self.intermediate == "prior":
            batch.explained_by(self.prior, layers=True)
        if self.reference == "prior":
            batch.explained_by(self.prior)

    def with_curve(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        maps = self.maps(batch)
        if maps is None:
            return torch.full((len(batch.images),), torch.nan), None
        references = self.references(batch, maps.shape[1])
        used = slice(None if self.layers == "all" else -1)
        rhos = [
            self._similarity(self._values(batch, each), self._values(batch, reference))
            for each, reference in zip(maps.unbind(1)[used], references[used], strict=True)
        ]
        curve = as_curve(rhos)
        return curve.mean(1), curve

    def maps(self, batch: Batch) -> Tensor | None:
        """The map of each layer.

        Args:
            batch: The images and their explanations.

        Returns:
            Maps [B,L,P], or None for a method without layer maps.

        Raises:
            UserError: If the prior should have layer maps and has none.
        """
        if self.intermediate == "raw_attention":
            return torch.stack(raw_attention(batch), 1)
        if self.intermediate == "prior":
            return self._prior_layers(batch)
        layers, single = batch.explanation.layers, batch.explanation.single
        if self.intermediate == "added" and layers is not None:
            return torch.cat([layers[:, :1], layers[:, 1:] - layers[:, :-1]], 1)
        return single if self.intermediate == "single" and single is not None else layers

    def _prior_layers(self, batch: Batch) -> Tensor:
        layers = batch.explained_by(self.prior, layers=True).layers
        if layers is None:
            raise UserError("LDA needs a prior with one map per layer here, such as gradcam.")
        return layers

    def references(self, batch: Batch, depth: int) -> Sequence[Tensor]:
        """What the map of each layer is compared with.

        Args:
            batch: The images and their explanations.
            depth: The number of layers.

        Returns:
            A map [B,P] for each layer.

        Raises:
            UserError: If the prior should have layer maps and has none.
        """
        if self.reference == "prior_layers":
            return self._prior_layers(batch)[:, -depth:].unbind(1)  # of a method that begins later, its own layers
        if self.reference == "prior":
            return [batch.explained_by(self.prior).on(batch.vit.grid)] * depth
        if self.reference == "last_attention":
            return raw_attention(batch)[-1:] * depth
        return [batch.explanation.maps] * depth

    def _similarity(self, a: Tensor, b: Tensor) -> Tensor:
        constant = (a.amax(1) == a.amin(1)) | (b.amax(1) == b.amin(1))
        return SIMILARITIES[self.similarity](a, b).masked_fill(constant, torch.nan)

    def _values(self, batch: Batch, maps: Tensor) -> Tensor:
        own = batch.explanation
        grid = own.grid if maps.shape[1] == own.maps.shape[1] else batch.vit.grid
        as_explained = Explanation(maps, grid, upsample=own.upsample)
        return batch.values(as_explained, self.unit, self.upsample)
