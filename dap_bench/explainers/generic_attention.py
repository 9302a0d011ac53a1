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
    """Generic attention explainability: `chefer` with attention in relevance's place, which covers every model.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        start_layer: The first block of the product; a negative number counts from the last. Defaults to 0.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    return chefer(vit, images, classes, layers, start_layer=start_layer, relevance="attention", dtype=None)
