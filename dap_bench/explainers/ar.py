"""AR, Attention Rollout (Abnar and Zuidema, 2020).

    A^l = mean_h A^{l,h}        T^l = RowNorm(A^l + I)        R = T^L ... T^1        map = row of R

Attention flows along the product of the layers' transitions; half of each step is the residual connection.
The class is not looked at. The row is the one that the head reads, over patches: the class token's; without a class
token the mean of the patches' rows (see `dap_bench.vit.tokens`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import Layout, ViT

FUSIONS = ("mean", "max", "min")


def ar(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    start_layer: int = 0,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
) -> Explanation:
    """Attention Rollout: attention followed through all blocks, each mixed half and half with the identity.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        start_layer: The first block of the product; a negative number counts from the last. Defaults to 0.
        head_fusion: How a block's heads are joined: mean, max or min. Defaults to "mean".
        discard_ratio: The share of each attention's smallest entries that is set to zero first. Defaults to 0.0.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative. They do not depend on `classes`.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, head_fusion=(head_fusion, FUSIONS))
    start_layer = vit.block_number(start_layer)
    trace = vit.trace(images)
    fused = [fuse(a, head_fusion) for a in trace.attention[start_layer:]]
    steps = [row_norm(residual(discard(a, discard_ratio, vit.layout))) for a in fused]
    maps, layer_maps, single = rollout(steps, layers, trace.layout)
    return Explanation(maps, vit.grid, layer_maps, single)


def rollout(transitions: Sequence[Tensor], layers: bool, layout: Layout) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The row of T^L ... T^1 that the head reads, over patches.

    The final row is a chain of vector-matrix products, to the last digit the same whether layers are asked for or not;
    only the layer maps need full products.

    Args:
        transitions: T^1 ... T^L, each [B,N,N].
        layers: Whether to give the maps of layers too.
        layout: Which tokens are patches, and what the head reads.

    Returns:
        The map [B,P]; if asked, that of every T^l ... T^1 and of every T^l by itself [B,L,P], else None and None.
    """
    row = layout.row_of(transitions[-1])
    for transition in reversed(transitions[:-1]):
        row = row @ transition
    final = layout.patches_of(row).squeeze(1)
    if not layers:
        return final, None, None
    product, rows = None, []
    for transition in transitions:
        product = transition if product is None else transition @ product
        rows.append(layout.map_of(product))
    return final, torch.stack(rows, 1), torch.stack([layout.map_of(transition) for transition in transitions], 1)


def residual(attention: Tensor) -> Tensor:
    """Attention [B,N,N] and the identity: what a token passes on to others, and what it keeps.

    Args:
        attention: Attention [B,N,N].

    Returns:
        Their sum [B,N,N].
    """
    return attention + torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)


def row_norm(matrix: Tensor) -> Tensor:
    """A matrix [...,N,N] with each row divided by its sum.

    Args:
        matrix: A matrix [...,N,N] without rows that sum to 0.

    Returns:
        The matrix [...,N,N]; each row sums to 1.
    """
    return matrix / matrix.sum(-1, keepdim=True)


def fuse(attention: Tensor, how: str) -> Tensor:
    """Join the heads of an attention.

    Args:
        attention: Attention [B,H,N,N].
        how: mean, max or min.

    Returns:
        Attention [B,N,N].
    """
    return attention.mean(1) if how == "mean" else attention.amax(1) if how == "max" else attention.amin(1)


def discard(attention: Tensor, ratio: float, layout: Layout) -> Tensor:
    """Set the lowest `ratio` of each image's entries to zero, but never the class token's attention to itself.

    Args:
        attention: Attention [B,N,N].
        ratio: The share to set to zero, 0..1.
        layout: Which token is the class token.

    Returns:
        Attention [B,N,N].
    """
    count = int(attention[0].numel() * ratio)
    if count == 0:
        return attention
    flat = attention.flatten(1)
    kept = flat.scatter(1, flat.topk(count, largest=False).indices, 0).view_as(attention)
    layout.own(kept).copy_(layout.own(attention))
    return kept
