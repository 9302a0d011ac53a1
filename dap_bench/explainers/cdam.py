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
    """Class-Discriminative Attention Maps: each patch's token times its gradient where it enters a block's attention.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map of each block [B,L,P]. Defaults to False.
        layer: The block; a negative number counts from the last. Defaults to -1.
        negatives: What values below zero become: 0 (clamp), their absolute value (abs), or what they are (keep), as
            in the original. Defaults to "clamp".
        variant: The map itself (plain), its mean over noisy copies of the block's input (smooth), or over shares of
            that input (integrated). Layer maps are always plain. Defaults to "plain".
        steps: Copies of smooth, points of integrated. Defaults to 50.
        noise: Standard deviation of smooth, as a share of the range of the tokens. Defaults to 0.05.
        seed: Of the noise of smooth. Defaults to 0.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, signed if `negatives` is keep, to be enlarged without
        interpolation.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
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
    """Each patch's token times its gradient, summed over channels, per layer.

    Args:
        trace: A trace with gradients of norm1.
        classes: The class to explain in each image [B].
        layers: The blocks.

    Returns:
        The sums of each block [B,P], with their sign.
    """
    gradients = trace.gradients(classes, "norm1", layers)
    products = [(trace.norm1[layer] * gradient).sum(-1) for layer, gradient in zip(layers, gradients, strict=True)]
    return [trace.vit.layout.patches_of(product) for product in products]


def _noisy(tokens: Tensor, copies: int, noise: float, seed: int) -> Iterator[Tensor]:
    """Copies of [B,N,D] with the same noise for every image, so that a batch does not change its images' maps."""
    generator = torch.Generator().manual_seed(seed)
    spread = tokens.amax((1, 2), keepdim=True) - tokens.amin((1, 2), keepdim=True)
    for _ in range(copies):
        yield tokens + noise * spread * torch.randn(tokens.shape[1:], generator=generator).to(tokens)
