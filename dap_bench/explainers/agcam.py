"""AGCAM, Attention-Guided CAM (Leem and Seo, 2024).

    map_j = sum_l sum_h relu(d z_c / d A^{l,h}[r, j]) sigmoid(S^{l,h}[r, j])        S: attention before softmax

The gradient runs along the residual stream and the MLPs only: the input of every attention is detached. Without that
(`detach: false`) it is another map. Row r is the class token's; without a class token the product is taken in every
patch's row and averaged over them. S holds relative or rotary positions where the model has them.
"""

import torch
from torch import Tensor

from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def agcam(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, *, detach: bool = True) -> Explanation:
    """Attention-Guided CAM: positive gradients of attention times the sigmoid of its scores, summed over blocks.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        detach: Cut the gradient at each attention's input, so that it runs along the residual stream and the MLPs
            only. Defaults to True.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes)
    trace = vit.trace(images, grad=["attention"], detach_attention=detach)
    layout, maps = trace.layout, []
    for layer, gradient in enumerate(trace.gradients(classes, "attention")):
        scores = layout.patches_of(vit.attention_scores(layer, trace.norm1[layer]))
        rows = layout.patches_of(layout.rows_of(gradient)).relu() * scores.sigmoid()  # [B,H,R,P]
        maps.append(layout.mean_of(rows).squeeze(2).sum(1))
    stacked = torch.stack(maps, 1)
    return Explanation(stacked.sum(1), vit.grid, *((stacked.cumsum(1), stacked) if layers else ()))
