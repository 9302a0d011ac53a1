"""AttnLRP, layer-wise relevance propagation through attention (Achtibat et al., 2024).

    map = x * d z_c / d x, with the gradient changed on its way back:

    y = f(x) element by element (GELU)      dx = f(x) / x dy                    identity rule
    y = (x - mean) / std (LayerNorm)        std is a constant                   identity rule
    y = a b (Q K^T, A V, gated MLPs)        da = dy b^T / 2, db = a^T dy / 2    uniform rule
    y = softmax(x)                          as it is                            Taylor expansion at x
    y = W x + bias                          as it is, or the gamma rule

Relevance is input times gradient everywhere, so these changes are all it takes. What the pixels receive and what
softmax and biases absorb add up to the logit. `attention: cp` is CP-LRP (Ali et al., 2022): attention is a constant,
and values receive everything. The authors find the plain rule noisy on ViTs and search a gamma for each model:
contributions with the sign of their output count 1 + gamma times, in linear layers (gamma) or in the patch embedding
(gamma_patches).

The rules are hooks, gone afterwards. Halving the gradient at A and again before the projection gives V a half, Q and K
a quarter each; norms and rotations in between are linear, and relative positions absorb their part as biases do.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath, GluMlp, LayerScale, Mlp, PatchDropout, RmsNorm, SwiGLU
from torch import Tensor, nn

from dap_bench.errors import UserError, require_number
from dap_bench.explainers.base import Explanation, check
from dap_bench.explainers.pixel_gradients import CHANNELS, gradient, pixel_map
from dap_bench.vit import ViT

LINEAR = (nn.Linear, nn.Conv2d, nn.Identity, nn.Dropout, DropPath, PatchDropout, LayerScale)
NORMS = (nn.LayerNorm, RmsNorm)
GATED = (GluMlp, SwiGLU)


def attnlrp(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    attention: str = "uniform",
    gamma: float = 0.0,
    gamma_patches: float = 0.0,
    channels: str = "sum",
) -> Explanation:
    """AttnLRP: input times gradient, the gradient changed by the rules of relevance propagation.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        attention: Where products of attention pass relevance on: half to each factor (uniform), or to the values
            alone, as CP-LRP does (cp). Defaults to "uniform".
        gamma: How much more contributions with the sign of their output count in linear layers; 0 is the plain
            rule, anything else takes about four times as long. Defaults to 0.0.
        gamma_patches: The same for the patch embedding. Defaults to 0.0.
        channels: What a pixel's three channels become: their sum with its sign (sum), the sum of their absolute
            values (abs) or the largest absolute value (max). Defaults to "sum".

    Returns:
        Maps of pixels [B,H*W], signed if `channels` is sum: then the sum of a map and what softmax and biases
        absorb is the logit.

    Raises:
        UserError: If the model has a part that there is no rule for, or if an option, an image or a class is not
            one that the method and the model take.
    """
    check(vit, images, classes, attention=(attention, ("uniform", "cp")), channels=(channels, tuple(CHANNELS)))
    require_number("gamma", gamma)
    require_number("gamma_patches", gamma_patches)
    _check_model(vit, gamma)

    def rules(handles: list[Any]) -> None:
        for part in _seen(vit):
            if isinstance(part, NORMS):
                handles.append(part.register_forward_hook(_norm))
            elif _elementwise(part):
                handles.append(part.register_forward_hook(_identity))
            elif isinstance(part, nn.Linear | nn.Conv2d):
                share = gamma if isinstance(part, nn.Linear) else gamma_patches
                handles += [part.register_forward_hook(_gamma(share))] if share else []
        for block in vit.blocks:
            if isinstance(block.mlp, GATED):
                handles.append(block.mlp.fc2.register_forward_pre_hook(_halve_input))
            handles.append(block.attn.attn_drop.register_forward_hook(lambda _, __, output: weaken(output)))
        pool = getattr(vit.model, "attn_pool", None)
        if pool is not None:
            handles.append(pool.kv.register_forward_hook(lambda _, __, output: _weaken_keys(output, weaken)))
        if attention == "uniform":
            pooled = [] if pool is None else [pool]
            for attends in [*(block.attn for block in vit.blocks), *pooled]:
                handles.append(attends.proj.register_forward_pre_hook(_halve_input))

    weaken = _halved if attention == "uniform" else Tensor.detach
    return pixel_map(images * gradient(vit, images, classes, rules), channels)


def _seen(vit: ViT) -> list[nn.Module]:
    """The model's parts that content passes through: not those that say where tokens are."""
    return [part for name, part in vit.model.named_modules() if "rope" not in name and "rel_pos" not in name]


def _elementwise(part: nn.Module) -> bool:
    known = type(part).__module__ in ("torch.nn.modules.activation", "timm.layers.activations")
    return known and not isinstance(part, nn.Softmax | nn.MultiheadAttention)


def _check_model(vit: ViT, gamma: float) -> None:
    """Raise where the model has a part that there is no rule for."""
    reasons = [
        f"{type(part).__name__} in the model"
        for part in _seen(vit)
        if not isinstance(part, LINEAR + NORMS) and not _elementwise(part) and not list(part.children())
    ]
    for block in vit.blocks:
        if not isinstance(block.mlp, (Mlp, *GATED)):
            reasons.append(f"an MLP of the kind {type(block.mlp).__name__}")
        if getattr(block.attn, "gate", None) is not None:
            reasons.append("gated attention")
        unseen = getattr(block.attn, "q_bias", None) is not None and not getattr(block.attn, "qkv_bias_separate", False)
        if gamma and unseen:  # timm does not call the layer there, so no hook sees it
            reasons.append("gamma where queries, keys and values have biases of their own; use gamma=0")
    if reasons:
        raise UserError(f"AttnLRP has no rule for {reasons[0]}.")


def _halved(values: Tensor) -> Tensor:
    """The same values with half the gradient."""
    return values / 2 + (values / 2).detach()


def _halve_input(part: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_halved(inputs[0]), *inputs[1:])


def _weaken_keys(joint: Tensor, weaken: Callable[[Tensor], Tensor]) -> Tensor:
    """The keys and values of an attention pool [B,N,2D]; its query is a constant and absorbs its half."""
    key, value = joint.chunk(2, -1)
    return torch.cat([weaken(key), value], -1)


def _identity(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    x = inputs[0]
    return x * (output / torch.where(x == 0, 1, x)).detach()


def _norm(part: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    x = inputs[0]
    centred = x if isinstance(part, RmsNorm) else x - x.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + part.eps).rsqrt().detach()
    normed = normed if part.weight is None else normed * part.weight
    return normed if getattr(part, "bias", None) is None else normed + part.bias


def _gamma(share: float) -> Callable[..., Tensor]:
    """The hook of a linear layer: of each output, what has its sign counts 1 + share times, up to a common factor."""

    def hook(part: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        apply = part._conv_forward if isinstance(part, nn.Conv2d) else nn.functional.linear
        high, low = inputs[0].clamp(min=0), inputs[0].clamp(max=0)
        with torch.no_grad():
            up, down = (part.weight + share * side for side in (part.weight.clamp(min=0), part.weight.clamp(max=0)))
            bias = part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
        above = apply(high, up, bias + share * bias.clamp(min=0)) + apply(low, down, None)
        below = apply(high, down, bias + share * bias.clamp(max=0)) + apply(low, up, None)
        total = torch.where(output > 0, above, below)
        return output.detach() * (total / torch.where(total == 0, 1, total).detach())

    return hook
