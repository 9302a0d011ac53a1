"""Grad-CAM on a ViT (Selvaraju et al., 2017), on the tokens T at some place in the model.

    w_k = mean_i (d z_c / d T)[i, k]        map_i = relu( sum_k w_k T[i, k] )        i over patches

`at: norm1` is what enters a block's attention, `at: output` what leaves the block. The last block's norm1 is the last
place where patches still have a gradient if the head reads a class token: after its attention only that token reaches
the head. Where the head averages patches they have one everywhere, and `at: output` of the last block is the classic
CAM: what each patch adds to the mean. `at: norm1` then shows what each patch gives to the others by attention.
"""

import torch
from torch import Tensor

from dap_bench.errors import UserError
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def gradcam(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    layer: int = -1,
    at: str = "norm1",
    relu: bool = True,
    tokens: str = "patches",
) -> Explanation:
    """Grad-CAM: the tokens at one place in the model, weighed by the mean gradient of each channel there.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map of each block [B,L,P]. Defaults to False.
        layer: The block; a negative number counts from the last. Defaults to -1.
        at: The place: what enters the block's attention (norm1), or what leaves the block (output). Defaults to
            "norm1".
        relu: Set negative values to zero. Defaults to True.
        tokens: Over which tokens gradients are averaged: patches or all. Defaults to "patches".

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, signed unless `relu`.

    Raises:
        UserError: If no patch has a gradient there, as after the last attention of a model with a class token, or
            if an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, at=(at, ("norm1", "output")), tokens=(tokens, ("patches", "all")))
    number = vit.block_number(layer)
    kind, shift = ("norm1", 0) if at == "norm1" else ("tokens", 1)
    trace = vit.trace(images, grad=[kind], start=0 if layers else number)
    chosen = list(range(vit.depth)) if layers else [number]
    gradients = trace.gradients(classes, kind, [block + shift for block in chosen])
    activations = trace.norm1 if at == "norm1" else trace.tokens
    layout, maps = vit.layout, {}
    for block, gradient in zip(chosen, gradients, strict=True):
        if block == number and not layout.patches_of(gradient, 1).any():
            raise UserError(
                f"Grad-CAM at the {at} of block {block} has no gradient on any patch: after the last attention only "
                "the class token has a gradient; use at=norm1 or an earlier layer."
            )
        weights = (layout.patches_of(gradient, 1) if tokens == "patches" else gradient).mean(1, keepdim=True)
        scores = (weights * layout.patches_of(activations[block + shift], 1)).sum(-1)
        maps[block] = scores.relu() if relu else scores
    return Explanation(maps[number], vit.grid, torch.stack(list(maps.values()), 1) if layers else None, signed=not relu)
