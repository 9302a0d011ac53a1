"""LDA, layer-wise decision alignment: how early the layers agree with a reference map.

    LDA = mean_l rho_s(M_l, M_ref)        rank correlation over patches or pixels

As printed, M_l is the map propagated up to layer l (`intermediate: accumulated`) and M_ref the method's own final map
(`reference: own_final`). Other readings: M_l of layer l alone (single) or the raw attention of the class token
(raw_attention); M_ref the decision prior (prior), the prior taken at layer l itself (prior_layers), or the raw
attention of the last layer (last_attention). A method without layer maps has no value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import UserError, one_of
from dap_bench.explainers.base import Explainer, Explanation
from dap_bench.metrics.base import Batch, check_options, spearman


@dataclass(frozen=True)
class DecisionAlignment:
    prior: Explainer
    unit: str = "patch"
    upsample: str | None = None
    reference: str = "own_final"  # own_final | prior | prior_layers | last_attention
    intermediate: str = "accumulated"  # accumulated | single | raw_attention
    layers: str = "all"  # all | all_but_last

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        one_of("LDA's reference", self.reference, ("own_final", "prior", "prior_layers", "last_attention"))
        one_of("LDA's intermediate", self.intermediate, ("accumulated", "single", "raw_attention"))
        one_of("LDA's layers", self.layers, ("all", "all_but_last"))

    def __call__(self, batch: Batch) -> Tensor:
        maps = self.maps(batch)
        if maps is None:
            return torch.full((len(batch.images),), torch.nan)
        references = self.references(batch, maps.shape[1])
        used = slice(None if self.layers == "all" else -1)
        rhos = [
            spearman(self._values(batch, each), self._values(batch, reference))
            for each, reference in zip(maps.unbind(1)[used], references[used], strict=True)
        ]
        return batch.keep("lda", rhos).mean(1)

    def maps(self, batch: Batch) -> Tensor | None:
        """M_l [B,L,P]."""
        if self.intermediate == "raw_attention":
            return torch.stack([a.mean(1)[:, 0, 1:] for a in batch.vit.trace(batch.images).attention], 1)
        single = batch.explanation.single
        return single if self.intermediate == "single" and single is not None else batch.explanation.layers

    def references(self, batch: Batch, depth: int) -> Sequence[Tensor]:
        """M_ref of each layer [B,P]."""
        if self.reference == "prior_layers":
            layers = self.prior(batch.vit, batch.images, batch.predicted, layers=True).layers
            if layers is None or layers.shape[1] != depth:
                raise UserError("LDA's reference=prior_layers needs a prior with one map per layer, such as gradcam.")
            return layers.unbind(1)
        if self.reference == "prior":
            return [self.prior(batch.vit, batch.images, batch.predicted).maps] * depth
        if self.reference == "last_attention":
            return [batch.vit.trace(batch.images).attention[-1].mean(1)[:, 0, 1:]] * depth
        return [batch.explanation.maps] * depth

    def _values(self, batch: Batch, maps: Tensor) -> Tensor:
        as_explained = Explanation(maps, batch.vit.grid, upsample=batch.explanation.upsample)
        return batch.values(as_explained, self.unit, self.upsample)
