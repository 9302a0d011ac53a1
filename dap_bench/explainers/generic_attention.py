"""Generic attention explainability (Chefer et al., ICCV 2021).

    C^l = mean_h relu(G^{l,h} A^{l,h})        R = I, then R <- R + C^l R for l = s .. L        map = row of R
    G = d z_c / d A

The successor of transformer attribution by the same authors: attention itself stands where relevance stood, so nothing
is divided, single precision is enough, and every model that has attention is covered. It is `chefer` with
`relevance: attention`, under its own name and in the precision of the images.
"""

from torch import Tensor

from dap_bench.explainers.base import Explanation
from dap_bench.explainers.chefer import chefer
from dap_bench.vit import ViT


def generic_attention(
    vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, *, start_layer: int = 0
) -> Explanation:
    return chefer(vit, images, classes, layers, start_layer=start_layer, relevance="attention", dtype=None)
