"""AR, Attention Rollout (Abnar and Zuidema, 2020).

    A^l = mean_h A^{l,h}        T^l = RowNorm(A^l + I)        R = T^L ... T^1        map = R[0, 1:]

Attention flows along the product of the layers' transitions; half of each step is the residual connection.
The class is not looked at.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT

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
    check(vit, images, classes, head_fusion=(head_fusion, FUSIONS))
    start_layer = vit.block_number(start_layer)
    attention = [discard(fuse(a, head_fusion), discard_ratio) for a in vit.trace(images).attention[start_layer:]]
    maps, layer_maps, single = rollout([row_norm(residual(a)) for a in attention], layers)
    return Explanation(maps, vit.grid, layer_maps, single)


def rollout(transitions: Sequence[Tensor], layers: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The class token's row of T^L ... T^1 over patches [B,P]; if asked, that of every T^l ... T^1 and T^l [B,L,P].

    The final row alone is a chain of vector-matrix products; only the layer maps need full products.
    """
    if not layers:
        row = transitions[-1][:, :1]
        for transition in reversed(transitions[:-1]):
            row = row @ transition
        return row[:, 0, 1:], None, None
    product, rows = None, []
    for transition in transitions:
        product = transition if product is None else transition @ product
        rows.append(product[:, 0, 1:])
    return rows[-1], torch.stack(rows, 1), torch.stack([transition[:, 0, 1:] for transition in transitions], 1)


def residual(attention: Tensor) -> Tensor:
    return attention + torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)


def row_norm(matrix: Tensor) -> Tensor:
    return matrix / matrix.sum(-1, keepdim=True)


def fuse(attention: Tensor, how: str) -> Tensor:
    """[B,H,N,N] -> [B,N,N] over heads."""
    return attention.mean(1) if how == "mean" else attention.amax(1) if how == "max" else attention.amin(1)


def discard(attention: Tensor, ratio: float) -> Tensor:
    """Set the lowest `ratio` of each image's entries to zero, but never the class token's attention to itself."""
    count = int(attention[0].numel() * ratio)
    if count == 0:
        return attention
    flat = attention.flatten(1)
    kept = flat.scatter(1, flat.topk(count, largest=False).indices, 0)
    kept[:, 0] = flat[:, 0]
    return kept.view_as(attention)
