"""LDA, layer-wise decision alignment: how early the layers agree with a reference map.

    LDA = mean_l rho_s(M_l, M_ref)        rank correlation over patches or pixels

As printed, M_l is the map propagated up to layer l (`intermediate: accumulated`) and M_ref the method's own final map
(`reference: own_final`). Other readings: M_l of layer l alone (single) or the raw attention of the class token
(raw_attention); M_ref the decision prior (prior) or the raw attention of the last layer (last_attention).
A method without layer maps has no value.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dap_bench.errors import one_of
from dap_bench.explainers.base import Explainer, Explanation
from dap_bench.metrics.base import Batch, check_options, spearman


@dataclass(frozen=True)
class DecisionAlignment:
    prior: Explainer
    unit: str = "patch"
    upsample: str | None = None
    reference: str = "own_final"  # own_final | prior | last_attention
    intermediate: str = "accumulated"  # accumulated | single | raw_attention
    layers: str = "all"  # all | all_but_last

    better: ClassVar[str] = "higher"
    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __post_init__(self) -> None:
        check_options(unit=self.unit, upsample=self.upsample)
        one_of("LDA's reference", self.reference, ("own_final", "prior", "last_attention"))
        one_of("LDA's intermediate", self.intermediate, ("accumulated", "single", "raw_attention"))
        one_of("LDA's layers", self.layers, ("all", "all_but_last"))

    def __call__(self, batch: Batch) -> Tensor:
        maps = self.maps(batch)
        if maps is None:
            return torch.full((len(batch.images),), torch.nan)
        reference = batch.values(self.reference_map(batch), self.unit, self.upsample)
        used = maps.unbind(1) if self.layers == "all" else maps.unbind(1)[:-1]
        values = (batch.values(self._as_explanation(batch, each), self.unit, self.upsample) for each in used)
        return batch.keep("lda", [spearman(each, reference) for each in values]).mean(1)

    def maps(self, batch: Batch) -> Tensor | None:
        """M_l [B,L,P]."""
        if self.intermediate == "raw_attention":
            return torch.stack([a.mean(1)[:, 0, 1:] for a in batch.vit.trace(batch.images).attention], 1)
        single = batch.explanation.single
        return single if self.intermediate == "single" and single is not None else batch.explanation.layers

    def reference_map(self, batch: Batch) -> Explanation:
        if self.reference == "prior":
            return self.prior(batch.vit, batch.images, batch.predicted)
        if self.reference == "last_attention":
            return self._as_explanation(batch, batch.vit.trace(batch.images).attention[-1].mean(1)[:, 0, 1:])
        return batch.explanation

    @staticmethod
    def _as_explanation(batch: Batch, maps: Tensor) -> Explanation:
        return Explanation(maps, batch.vit.grid, upsample=batch.explanation.upsample)
