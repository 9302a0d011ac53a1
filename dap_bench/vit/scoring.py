"""Logits as fast as the model can, for metrics: fused attention, inference mode, no more tokens than the head reads."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, proxy

import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from dap_bench.errors import UserError
from dap_bench.vit import tokens as reading
from dap_bench.vit.frozen import frozen_evaluation

if TYPE_CHECKING:
    from dap_bench.vit.model import ViT

PRECISIONS = ("fp32", "tf32", "bf16")
_compiled: "WeakKeyDictionary[ViT, Callable[[Tensor], Tensor]]" = WeakKeyDictionary()


@torch.inference_mode()
def score(vit: "ViT", images: Tensor, precision: str) -> Tensor:
    """Logits of images, with fused attention and in inference mode.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W].
        precision: fp32, tf32 or bf16.

    Returns:
        Logits [B,C] in float32 or better.
    """
    reduced = torch.autocast(vit.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
    with frozen_evaluation(vit.model, fused=True, tf32=precision == "tf32"), reduced:
        logits = _compiled_forward(vit, images) if vit.compile else _forward(vit, images)
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _forward(vit: "ViT", images: Tensor) -> Tensor:
    return _leading_tokens_only(vit, images) if shortcut_is_exact(vit) else vit.model(images)


def _compiled_forward(vit: "ViT", images: Tensor) -> Tensor:
    """The same by torch.compile, with the weights as constants and any number of images."""
    try:
        if vit not in _compiled:
            weak = proxy(vit)
            forward = torch.compile(lambda batch: _forward(weak, batch), dynamic=True, options={"freezing": True})
            _compiled[vit] = forward
        return _compiled[vit](images)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"compile=true does not work here ({reason}); use compile=false.") from error


def shortcut_is_exact(vit: "ViT") -> bool:
    """Whether of the last block only the first tokens need be computed, which is faster.

    That is so if the head reads them alone, and the block is timm's own, so that we know all it does.

    Args:
        vit: The model.

    Returns:
        True if so.
    """
    last: Any = vit.blocks[-1]
    own = type(last) is Block and type(last.attn) is Attention and getattr(last.attn, "gate", None) is None
    return own and vit.layout.leading > 0 and type(vit.model) in (VisionTransformer, VisionTransformerDistilled)


def _leading_tokens_only(vit: "ViT", images: Tensor) -> Tensor:
    """The model's logits, computing of the last block only what the head reads: the class token, or it and another.

    Its keys and values need all tokens; its query, projection and MLP need one of 197.
    """
    model: Any = vit.model
    needed, last = vit.layout.needed, vit.blocks[-1]
    attention = last.attn
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
    for block in vit.blocks[:-1]:
        x = block(x)
    normed, width = last.norm1(x), attention.attn_dim
    weight, bias = attention.qkv.weight, attention.qkv.bias
    query = linear(needed(normed), weight[:width], bias[:width] if bias is not None else None)
    both = linear(normed, weight[width:], bias[width:] if bias is not None else None)
    key, value = both.unflatten(2, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query = query.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
    mixed = scaled_dot_product_attention(attention.q_norm(query), attention.k_norm(key), value)
    token = needed(x) + last.ls1(attention.proj(attention.norm(mixed.transpose(1, 2).flatten(2))))
    token = token + last.ls2(last.mlp(last.norm2(token)))
    return reading.read(model, vit.layout, token)
