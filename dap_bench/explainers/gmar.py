"""GMAR, Gradient-driven Multi-head Attention Rollout (Jo et al., 2025).

    A^l = sum_h w_h A^{l,h}, sum_h w_h = 1        T^l = RowNorm(A^l + I)        R = T^L ... T^1        map = row of R

Heads are weighted by the size of their gradient. `source: norm1_last` splits d z_c / d norm1 of the last block, on
patches, into one group of channels per head, and uses the same weights in all layers; `source: attention` weighs each
layer's heads by d z_c / d A^{l,h}. A gradient of zero gives equal weights. The row is the one that the head reads, as
in AR: the class token's, or without one the mean of the patches' rows.

The published code reads its map off another place: rows 1.. of head 0 instead of the class token's row, which does
not depend on the class at all. That is not copied here.
"""

import torch
from torch import Tensor

from dap_bench.explainers.ar import residual, rollout, row_norm
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT

NORMS = {"l1": 1, "l2": 2}


def gmar(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    source: str = "norm1_last",
    norm: str = "l1",
) -> Explanation:
    """Gradient-driven Multi-head Attention Rollout: Attention Rollout with heads weighed by the size of their gradient.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        source: Where the gradient is taken: at the last block's input of attention, one set of weights for all
            blocks (norm1_last), or at each block's own attention (attention). Defaults to "norm1_last".
        norm: How its size is measured: l1 or l2. Defaults to "l1".

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, norm=(norm, tuple(NORMS)), source=(source, ("norm1_last", "attention")))
    with vit.shared_traces():
        weights = head_weights(vit, images, classes, source, norm)
        trace = vit.trace(images)
    fused = [(w[:, :, None, None] * a).sum(1) for w, a in zip(weights, trace.attention, strict=True)]
    maps, layer_maps, single = rollout([row_norm(residual(a)) for a in fused], layers, trace.layout)
    return Explanation(maps, vit.grid, layer_maps, single)


def head_weights(vit: ViT, images: Tensor, classes: Tensor, source: str, norm: str) -> list[Tensor]:
    """The weight of each head.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W].
        classes: The class to explain in each image [B].
        source: Where the gradient is taken: norm1_last or attention.
        norm: How its size is measured: l1 or l2.

    Returns:
        For each block weights [B,H] that sum to 1.
    """
    heads = vit.blocks[-1].attn.num_heads
    if source == "attention":
        gradients = vit.trace(images, grad=["attention"]).gradients(classes, "attention")
        sizes = [gradient.flatten(2).norm(NORMS[norm], dim=2) for gradient in gradients]
    else:
        (gradient,) = vit.trace(images, grad=["norm1"], start=-1).gradients(classes, "norm1", [-1])
        channels = vit.layout.patches_of(gradient, 1).unflatten(2, (heads, -1))  # [B,P,H,D/H]
        sizes = [channels.transpose(1, 2).flatten(2).norm(NORMS[norm], dim=2)] * vit.depth
    return [_shares(size) for size in sizes]


def _shares(sizes: Tensor) -> Tensor:
    total = sizes.sum(1, keepdim=True)
    return torch.where(total > 0, sizes / total, 1 / sizes.shape[1])
