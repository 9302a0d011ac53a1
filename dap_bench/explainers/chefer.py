"""Chefer, transformer attribution (Chefer et al., 2021).

    C^l = mean_h relu(G^{l,h} Rel^{l,h})        map = row of (I + C^L) ... (I + C^s)        G = d z_c / d A

Rel is the relevance that layer-wise relevance propagation (LRP, alpha = 1) brings from the class's logit to each
attention entry. Below, each rule takes the relevance of a module's output to that of its inputs; GELU, softmax,
LayerNorm and dropout pass it on unchanged, and biases never enter, relative positions among them. `relevance:
attention` puts A in Rel's place, and covers what has no rule: rotary positions, gated MLPs, attention pools.

The row is the one that the head reads. Without a class token it is the mean of the patches' rows, and relevance enters
at the patches, each by its part in the mean; two heads have half each.

The original normalises its residual sums over the whole tensor and so takes one image at a time; here the sums are
per image, and a batch gives the same maps. Divisions by near-zero activations make the rules so badly conditioned
that single precision changes the order of patches in single images, though hardly any mean: `dtype: float64` runs a
double-precision copy of the model, which consumer GPUs do at 1/64 of the speed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dap_bench.errors import UserError
from dap_bench.explainers.ar import residual, rollout
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import Trace, ViT, double_of
from dap_bench.vit.families import norms_after, positions, scaled
from dap_bench.vit.trace import check_block


@torch.no_grad()
def chefer(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    start_layer: int = 0,
    relevance: str = "lrp",
    dtype: str | None = None,
) -> Explanation:
    """Transformer attribution: the product over blocks of the identity and attention's relevance times its gradient.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        start_layer: The first block of the product; a negative number counts from the last. The authors' evaluation
            scripts begin at 1. Defaults to 0.
        relevance: What the gradient of attention is multiplied by: relevance propagated from the logit (lrp), or
            attention itself (attention), which covers every model. Defaults to "lrp".
        dtype: float64 runs a copy of the model in double precision, because the rules of lrp divide by numbers near
            zero; None computes in that of the images. Defaults to None.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative.

    Raises:
        UserError: If `relevance` is lrp and the model has a part without a rule (rotary positions, gates, attention
            pools), or if an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, relevance=(relevance, ("lrp", "attention")), dtype=(dtype, (None, "float64")))
    start_layer = vit.block_number(start_layer)
    if dtype == "float64":
        vit, images = vit.double(), double_of(images)
        classes = classes.to(images.device)
    trace = vit.trace(images, grad=["attention"])
    gradients = trace.gradients(classes, "attention")
    lrp = relevance == "lrp"
    relevances = attention_relevance(vit, trace, classes, start_layer) if lrp else trace.attention[start_layer:]
    steps = [(g * r).relu().mean(1) for g, r in zip(gradients[start_layer:], relevances, strict=True)]
    maps, layer_maps, single = rollout([residual(step) for step in steps], layers, trace.layout)
    return Explanation(maps, vit.grid, layer_maps, single)


def attention_relevance(vit: ViT, trace: Trace, classes: Tensor, start_layer: int = 0) -> list[Tensor]:
    """LRP: the relevance of every attention entry, for a relevance of 1 at each image's class.

    Args:
        vit: The model.
        trace: A trace of the images.
        classes: The class to explain in each image [B].
        start_layer: The first block, from 0. Defaults to 0.

    Returns:
        The relevance [B,H,N,N] of every block from `start_layer` on.

    Raises:
        UserError: If the model has a part without a rule.
    """
    model: Any = vit.model
    if getattr(model, "attn_pool", None) is not None:
        raise UserError(_not_covered("attention pooling"))
    found = []
    tokens = trace.tokens
    heads = [head for head in (model.head, getattr(model, "head_dist", None)) if head is not None]
    final = model.norm(tokens[-1])
    seed = nn.functional.one_hot(classes, vit.classes).to(final) / len(heads)
    relevance = torch.zeros_like(final)
    parts = zip(vit.layout.rows_of(final).chunk(len(heads), 1), heads, strict=True)
    vit.layout.rows_of(relevance).copy_(torch.cat([_head(seed, read, model.fc_norm, head) for read, head in parts], 1))
    for layer in reversed(range(start_layer, vit.depth)):
        relevance, attention = _block(vit, trace, layer, relevance, onwards=layer > start_layer)
        found.append(attention)
    return found[::-1]


def _head(seed: Tensor, read: Tensor, norm: nn.Module, head: nn.Linear) -> Tensor:
    """Relevance of a head's logits -> of the tokens [B,R,D] whose mean it reads, each by its part in their sum."""
    return read * _div(_linear(seed, norm(read.mean(1)), head.weight), read.sum(1))[:, None]


def _not_covered(what: str) -> str:
    return f"Chefer's rules do not cover {what}, which this model has; use relevance=attention."


def _check_block(vit: ViT, layer: int) -> None:
    """Raise where a block has a part that there is no rule for."""
    block = vit.blocks[layer]
    mlp = block.mlp
    if not (isinstance(getattr(mlp, "fc1", None), nn.Linear) and mlp.fc1.out_features == mlp.fc2.in_features):
        raise UserError(_not_covered(f"this MLP ({type(mlp).__name__})"))
    if getattr(block.attn, "gate", None) is not None or not all(
        isinstance(getattr(part, "norm", nn.Identity()), nn.Identity) for part in (block.attn, mlp)
    ):
        raise UserError(_not_covered("gates or norms inside attention and MLP"))
    if block.attn.qkv is None:
        raise UserError(_not_covered("separate projections of queries, keys and values"))
    if "rope" in positions(vit.model)[layer]:
        raise UserError(_not_covered("rotary positions"))
    if norms_after(block):
        raise UserError(_not_covered("norms after attention and MLP"))


def _block(vit: ViT, trace: Trace, layer: int, relevance: Tensor, onwards: bool) -> tuple[Tensor, Tensor]:
    """Relevance of a block's output -> of its input if that goes `onwards`, and of its attention.

    Activations are computed again.
    """
    _check_block(vit, layer)
    block, x, attention = vit.blocks[layer], trace.tokens[layer], trace.attention[layer]
    mlp = block.mlp

    normed1 = block.norm1(x)
    query, key, value = vit.qkv(layer, normed1)
    mixed = attention @ value  # [B,H,N,dh]
    merged = mixed.transpose(1, 2).flatten(2)
    branch1 = scaled(block, 1)(block.attn.proj(merged))
    middle = x + branch1
    normed2 = block.norm2(middle)
    hidden = mlp.act(mlp.fc1(normed2))
    branch2 = scaled(block, 2)(mlp.fc2(hidden))
    check_block(block, middle + branch2, trace.tokens[layer + 1])

    skip, branch = _add(relevance, middle, branch2)
    branch = _linear(_linear(branch, hidden, mlp.fc2.weight), normed2, mlp.fc1.weight)
    relevance = middle * (_div(skip, middle) + _div(branch, middle))

    skip, branch = _add(relevance, x, branch1)
    branch = _linear(branch, merged, block.attn.proj.weight).unflatten(2, (value.shape[1], -1)).transpose(1, 2)
    share = _div(branch, mixed)
    of_attention = attention * (share @ value.transpose(-2, -1)) / 2
    if not onwards:
        return skip, of_attention
    of_value = value * (attention.transpose(-2, -1) @ share) / 2
    share = _div(of_attention, query @ key.transpose(-2, -1))
    of_query, of_key = query * (share @ key) / 2, key * (share.transpose(-2, -1) @ query) / 2
    parts = [part.transpose(1, 2).flatten(2) for part in (of_query, of_key, of_value)]
    branch = _linear(torch.cat(parts, 2), normed1, block.attn.qkv.weight)
    return x * (_div(skip, x) + _div(branch, x)), of_attention


def _linear(relevance: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """x W^T: positive with positive and negative with negative share the output's relevance."""
    up, down = weight.clamp(min=0), weight.clamp(max=0)
    share = _div(relevance, x.clamp(min=0) @ up.T + x.clamp(max=0) @ down.T)
    return x.clamp(min=0) * (share @ up) + x.clamp(max=0) * (share @ down)


def _add(relevance: Tensor, skip: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """skip + branch: each gets its part, scaled so that the two sums have the output's, image by image."""
    share = _div(relevance, skip + branch)
    a, b = skip * share, branch * share
    sum_a, sum_b, total = (each.sum((1, 2), keepdim=True) for each in (a, b, relevance))
    size = sum_a.abs() + sum_b.abs()
    return a * _div(_div(sum_a.abs(), size) * total, sum_a), b * _div(_div(sum_b.abs(), size) * total, sum_b)


def _div(a: Tensor, b: Tensor) -> Tensor:
    """a / b, kept away from division by zero as in the original; 0 where b is 0."""
    return torch.where(b == 0, 0, a / (b + 1e-9))
