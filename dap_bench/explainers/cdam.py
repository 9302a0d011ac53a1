"""CDAM, Class-Discriminative Attention Maps (Brocki et al., 2023), at the output T of a block's norm1.

    map_i = sum_k T[i, k] (d z_c / d T)[i, k]        i over patches

Signed in the original; `negatives` says what becomes of values below zero: clamp, abs or keep. Enlarged without
interpolation, as its authors do. Two variants average the map over changed inputs X of the block:
`smooth` over noisy copies, X + 0.05 (max X - min X) noise; `integrated` over k/steps X, k = 1 .. steps - 1.

Without a class token patches also reach the head past the attention, along the residual stream, which T does not show:
the map is then what each patch gives to the others, not what it keeps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import Trace, ViT

NEGATIVES = {"clamp": lambda s: s.clamp(min=0), "abs": lambda s: s.abs(), "keep": lambda s: s}


def cdam(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    layer: int = -1,
    negatives: str = "clamp",
    variant: str = "plain",
    steps: int = 50,
    noise: float = 0.05,
    seed: int = 0,
) -> Explanation:
    variants = ("plain", "smooth", "integrated")
    check(vit, images, classes, negatives=(negatives, tuple(NEGATIVES)), variant=(variant, variants))
    number = vit.block_number(layer)
    trace = vit.trace(images, grad=["norm1"], start=0 if layers else number)
    chosen = list(range(vit.depth)) if layers else [number]
    maps = dict(zip(chosen, map(NEGATIVES[negatives], contributions(trace, classes, chosen)), strict=True))
    final = maps[number]
    if variant != "plain":
        tokens = trace.tokens[number]
        changed = (
            _noisy(tokens, steps, noise, seed) if variant == "smooth" else (k / steps * tokens for k in range(1, steps))
        )
        scores = [contributions(vit.trace_from(each, number), classes, [0])[0] for each in changed]
        final = NEGATIVES[negatives](torch.stack(scores).mean(0))
    layer_maps = torch.stack(list(maps.values()), 1) if layers else None
    return Explanation(final, vit.grid, layer_maps, signed=negatives == "keep", upsample="nearest")


def contributions(trace: Trace, classes: Tensor, layers: list[int]) -> list[Tensor]:
    """Each patch's token times its gradient, summed over channels, per layer."""
    gradients = trace.gradients(classes, "norm1", layers)
    products = [(trace.norm1[layer] * gradient).sum(-1) for layer, gradient in zip(layers, gradients, strict=True)]
    return [trace.vit.layout.patches_of(product) for product in products]


def _noisy(tokens: Tensor, copies: int, noise: float, seed: int) -> Iterator[Tensor]:
    """Copies of [B,N,D] with the same noise for every image, so that a batch does not change its images' maps."""
    generator = torch.Generator().manual_seed(seed)
    spread = tokens.amax((1, 2), keepdim=True) - tokens.amin((1, 2), keepdim=True)
    for _ in range(copies):
        yield tokens + noise * spread * torch.randn(tokens.shape[1:], generator=generator).to(tokens)
