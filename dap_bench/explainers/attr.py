"""AttR, Attribution Rollout (Xu et al., 2023).

    f^l = head(norm(Y^l))_c        g^{l,h} = d f^l / d A^{l,h}        Y^l: output of block l
    W^l = max_h 0.5 A^{l,h} g^{l,h}        T^l = RowNorm(W^l + I)        R = T^L ... T^1        map = row of R

Each layer is asked what the head would already say after it. The original integrates the gradient along a path on
which it is constant: what is left of the integral is the factor 0.5 = mean of linspace(0, 1, 20). W is signed, so
maps can hold a few negative values. `path: true` takes the integral for real, W^l = max_h A^{l,h} times the mean of
g^{l,h} over `steps` points from no attention to A^{l,h}. `normalise: false` leaves T^l = W^l + I as it is.

With a class token f^l depends on A^l through its row alone: the other rows of T^l are the identity, and the rollout is
a recursion over that one row. With `readout: final` (the gradient of the model's own logit) it is a full product, and
so it is without a class token, where f^l averages all patches: the map is then the mean of their rows.
"""

import torch
from torch import Tensor

from dap_bench.errors import UserError, require_int
from dap_bench.explainers.ar import FUSIONS, fuse, residual, rollout, row_norm
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def attr(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    readout: str = "layer",
    head_fusion: str = "max",
    clamp: bool = False,
    heads: str | int = "all",
    path: bool = False,
    steps: int = 20,
    normalise: bool = True,
) -> Explanation:
    """Attribution Rollout: the rollout of attention times its gradient of what the head would say after each block.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        readout: What the gradient is taken of: the logit that the head would read after each block (layer), or the
            model's own (final). Defaults to "layer".
        head_fusion: How a block's heads are joined: mean, max or min. Defaults to "max".
        clamp: Set negative weights to zero. Defaults to False.
        heads: How many of the first heads are used, or all. Defaults to "all".
        path: Integrate the gradient from no attention to the attention, instead of taking it at the end of that
            path. Needs `readout` layer. Defaults to False.
        steps: Points of that integral. Defaults to 20.
        normalise: Divide each row of a transition by its sum. Defaults to True.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, signed unless `clamp`.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, readout=(readout, ("layer", "final")), head_fusion=(head_fusion, FUSIONS))
    if path and readout == "final":
        raise UserError("AttR's path integral needs readout=layer: it looks at one block at a time.")
    require_int("steps", steps)
    trace = vit.trace(images, grad=["attention"])
    if path:
        gradients = trace.path_gradients(classes, steps)
    else:
        take = trace.gradients if readout == "final" else trace.layer_gradients
        gradients = [0.5 * gradient for gradient in take(classes, "attention")]
    used = slice(None if heads == "all" else int(heads))
    weights = [fuse((a * g)[:, used], head_fusion) for a, g in zip(trace.attention, gradients, strict=True)]
    if clamp:
        weights = [weight.clamp(min=0) for weight in weights]
    layout = trace.layout
    if readout == "final" or layout.leading != 1:
        transitions = [residual(weight) for weight in weights]
        transitions = [row_norm(each) for each in transitions] if normalise else transitions
        maps, layer_maps, each = rollout(transitions, layers, layout)
        return Explanation(maps, vit.grid, layer_maps, each, signed=not clamp)
    rows: list[Tensor] = []
    single: list[Tensor] = []
    for weight in weights:
        own, others = layout.split(layout.row_of(weight).squeeze(1))
        total = 1 + own + others.sum(1, keepdim=True) if normalise else torch.ones_like(own)
        single.append(layout.patches_of(others / total))
        rows.append(single[-1] + (1 + own) / total * rows[-1] if rows else single[-1])
    stacked = (torch.stack(rows, 1), torch.stack(single, 1)) if layers else (None, None)
    return Explanation(rows[-1], vit.grid, stacked[0], stacked[1], signed=not clamp)
