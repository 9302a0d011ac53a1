"""Beyond Intuition, also called bidirectional transformer attribution (Chen et al., 2023).

    token    C^l = mean_h A^{l,h} diag(|W v_j| / |x_j|)        x_j enters the block, W v_j is its projected value
    head     C^l = sum_h w_h A^{l,h},  w_h ~ mean_ij |A^T G|_ij,  sum_h w_h = 1        G = d z_c / d A^{l,h}

    R = (I + C^L) ... (I + C^s)        F = mean_h relu(mean_k d z_c / d A^{L,h} at a_k x)        map = row of F * R

Perception R says where tokens have their content from, feedback F what the decision makes of the last attention: an
integrated gradient over `steps` points a_k from a grey image to x, both included. The map of a layer has R up to there.

This method is here rather than TokenTM (Wu et al., 2024) because its authors' code could be had and run: the maps equal
theirs. Layer scale, which their models lack, is part of W.
"""

from functools import partial

import torch
from torch import Tensor, nn

from dap_bench.errors import require_int
from dap_bench.explainers.ar import residual
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import Trace, ViT
from dap_bench.vit.families import norms_after, scaled
from dap_bench.vit.trace import run


def beyond_intuition(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    perception: str = "token",
    start_layer: int = 0,
    steps: int = 20,
) -> Explanation:
    """Beyond Intuition: where tokens have their content from, times what the decision makes of the last attention.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer [B,L,P]. Defaults to False.
        perception: What attention is weighed by: each token by the size of its value (token), or each head by its
            gradient (head). Defaults to "token".
        start_layer: The first block of the product; a negative number counts from the last. (Of 12 blocks the
            authors take 6 for token and 3 for head.) Defaults to 0.
        steps: Images from grey to the image itself over which the gradient of the last attention is integrated.
            Defaults to 20.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, perception=(perception, ("token", "head")))
    require_int("steps", steps)
    start_layer = vit.block_number(start_layer)
    trace = vit.trace(images, grad=["attention"] if perception == "head" else ())
    mixed = _by_heads(trace, classes) if perception == "head" else _by_tokens(trace)
    feedback = _feedback(vit, images, classes, steps)
    perceived, maps = torch.eye(feedback.shape[-1]).to(feedback), []
    for layer, step in enumerate(mixed):
        perceived = residual(step) @ perceived if layer >= start_layer else perceived
        if layers or layer == vit.depth - 1:
            maps.append(trace.layout.map_of(feedback * perceived))
    return Explanation(maps[-1], vit.grid, torch.stack(maps, 1) if layers else None)


def _by_heads(trace: Trace, classes: Tensor) -> list[Tensor]:
    """Attention [B,N,N] of every layer, its heads weighed by how much they and their gradients agree."""
    found = []
    for attention, gradient in zip(trace.attention, trace.gradients(classes, "attention"), strict=True):
        sizes = (attention.transpose(-2, -1) @ gradient).abs().mean((-2, -1))
        total = sizes.sum(1, keepdim=True)
        weights = torch.where(total > 0, sizes / total, 1 / sizes.shape[1])
        found.append((weights[:, :, None, None] * attention).sum(1))
    return found


@torch.no_grad()
def _by_tokens(trace: Trace) -> list[Tensor]:
    """Attention [B,N,N] of every layer, each token weighed by how much its value adds to its own size."""
    found = []
    for layer, block in enumerate(trace.vit.blocks):
        value = trace.vit.qkv(layer, trace.norm1[layer])[2].transpose(1, 2).flatten(2)
        added = nn.functional.linear(value, block.attn.proj.weight)
        added = added if norms_after(block) else scaled(block, 1)(added)
        ratio = added.norm(dim=-1) / trace.tokens[layer].norm(dim=-1)
        found.append(trace.attention[layer].mean(1) * ratio[:, None])
    return found


def _feedback(vit: ViT, images: Tensor, classes: Tensor, steps: int) -> Tensor:
    """The positive part of the gradient at the last attention [B,N,N], integrated over ever clearer images.

    Not by `vit.trace`, whose traces may be kept for the next class: here that would be the memory of all steps.
    """
    total = torch.zeros(1).to(images)
    for share in torch.linspace(0, 1, steps, dtype=torch.float64).tolist():
        logits, kept = run(vit, partial(vit.model, share * images), frozenset(["attention"]), vit.depth - 1, False)
        with torch.enable_grad():
            logit = logits.gather(1, classes[:, None]).sum()
        total = total + torch.autograd.grad(logit, kept["attention"][-1])[0]
    return (total / steps).relu().mean(1)
