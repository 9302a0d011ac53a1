"""What differs between timm's blocks, found by what a model has and not by its name.

All accepted blocks add an attention branch and an MLP branch to their tokens. They differ in where queries, keys and
values come from, in what says where a token is (nothing, a rotation of queries and keys, a bias of attention), in the
name of layer scale and in whether a norm comes before or after a branch. Each difference is a function below.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from dap_bench.vit.devices import double_of
from dap_bench.vit.tokens import head_of

# transformers' model types, and where timm has such weights
ELSEWHERE = {
    "vit": "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "deit": "deit_base_distilled_patch16_224.fb_in1k",
    "beit": "beit_base_patch16_224.in22k_ft_in22k_in1k",
    "dinov2": "vit_base_patch14_dinov2.lvd142m",
    "dinov2_with_registers": "vit_base_patch14_reg4_dinov2.lvd142m",
}


def refusal(model: Any) -> str | None:
    """Why a model cannot be explained.

    Args:
        model: The model.

    Returns:
        The reason, or None where it can.
    """
    if type(model).__module__.startswith("transformers."):
        tag = ELSEWHERE.get(getattr(model.config, "model_type", ""), ELSEWHERE["vit"])
        return f"it is a model of Hugging Face transformers; use timm's weights of the same kind, such as {tag}"
    parts = ("blocks", "patch_embed", "num_prefix_tokens", "cls_token", "global_pool", "norm", "head", "forward_head")
    if not all(hasattr(model, part) for part in parts) or not hasattr(model.patch_embed, "num_patches"):
        return "it is not a timm ViT with global attention (windows, convolutions and stages have no map of tokens)"
    if getattr(model.patch_embed, "img_size", None) is None:
        return "it has no image size of its own; give it one (img_size=224)"
    for block in model.blocks:
        reason = _block_refusal(block)
        if reason:
            return reason
    if not isinstance(model.head, nn.Linear):
        return "it has no class head (num_classes=0)"
    if head_of(model) is None:
        return f"its head (global_pool={model.global_pool!r}) reads no weighted mean of tokens"
    return None


def _block_refusal(block: Any) -> str | None:
    attention = getattr(block, "attn", None)
    name = type(block).__name__
    if attention is None or not all(hasattr(block, part) for part in ("norm1", "norm2", "mlp")):
        return f"its blocks ({name}) are not norm, attention, norm, MLP with residual sums"
    if hasattr(attention, "lambda_init"):
        return f"the attention of its blocks ({name}) is a difference of two, which is no propagation"
    if not all(hasattr(attention, part) for part in ("qkv", "num_heads", "attn_drop", "scale", "proj", "fused_attn")):
        return f"the attention of its blocks ({name}) is not timm's plain one of tokens to tokens"
    return None


def positions(model: Any) -> list[dict[str, Tensor]]:
    """What the model gives each block beside its tokens: rotary positions or a bias that blocks share.

    Args:
        model: The timm model.

    Returns:
        For each block its further arguments by name.
    """
    depth = len(model.blocks)
    if getattr(model, "rope", None) is not None:
        shape = {"shape": model.patch_embed.grid_size} if model.dynamic_img_size else {}
        rope = model.rope.get_embed(**shape)
        return [{"rope": rope[layer] if model.rope_mixed else rope} for layer in range(depth)]
    if getattr(model, "rel_pos_bias", None) is not None:
        return [{"shared_rel_pos_bias": model.rel_pos_bias()}] * depth
    if getattr(model, "shared_rel_pos", None) is not None:
        return [{"shared_rel_pos": model.shared_rel_pos.get_bias()}] * depth
    return [{}] * depth


def in_double(model: Any) -> Any:
    """The model itself, now in double precision.

    Args:
        model: The timm model.

    Returns:
        The same model, on the CPU where its device has no double precision.
    """
    model = double_of(model)
    rope: Any = getattr(model, "rope", None)
    if getattr(rope, "t_x", None) is not None:  # timm mixes these with frequencies in single precision, always
        rope.t_x, rope.t_y = rope.t_x.float(), rope.t_y.float()
    return model


def qkv(attention: Any, normed: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as they meet: after their norms, rotated where positions are rotary.

    Args:
        attention: The attention of a timm block.
        normed: What enters it [B,N,D].
        rope: Rotary positions, if the block has them. Defaults to None.

    Returns:
        Three tensors [B,H,N,D/H].
    """
    if attention.qkv is not None:
        joint = attention.qkv(normed)
        if getattr(attention, "q_bias", None) is not None:
            joint = joint + torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        query, key, value = joint.unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    else:
        parts = [project(normed) for project in (attention.q_proj, attention.k_proj, attention.v_proj)]
        query, key, value = (part.unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for part in parts)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    if rope is not None:
        query, key = (_rotated(attention, each, rope) for each in (query, key))
    groups = query.shape[1] // key.shape[1]  # of queries that share a key
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return query, key, value


def _rotated(attention: Any, each: Tensor, rope: Tensor) -> Tensor:
    prefix, patches = each.tensor_split([attention.num_prefix_tokens], dim=2)
    turned = apply_rot_embed_cat(patches, rope, half=getattr(attention, "rotate_half", False))
    return torch.cat([prefix, turned], 2).type_as(each)


def bias(attention: Any, given: dict[str, Tensor]) -> Tensor | None:
    """What is added to attention before softmax for where tokens are to each other.

    Args:
        attention: The attention of a timm block.
        given: What the model gives the block beside its tokens, from `positions`.

    Returns:
        The bias [1,H,N,N], or None where there is none.
    """
    own = None
    if getattr(attention, "relative_position_bias_table", None) is not None:
        own = attention._get_rel_pos_bias()
    elif getattr(attention, "rel_pos", None) is not None:
        own = attention.rel_pos.get_bias()
    found = [each for each in (own, given.get("shared_rel_pos_bias"), given.get("shared_rel_pos")) if each is not None]
    return sum(found[1:], found[0]) if found else None


def norms_after(block: Any) -> bool:
    """Do the block's norms come after its branches? Such blocks of timm have no layer scale, not even an empty one.

    Args:
        block: A timm block.

    Returns:
        True if they do.
    """
    return not hasattr(block, "ls1") and not hasattr(block, "gamma_1")


def scaled(block: Any, branch: int) -> Callable[[Tensor], Tensor]:
    """The layer scale of a branch (1: attention, 2: MLP) by either of its names, or the norm that comes after it.

    Args:
        block: A timm block.
        branch: 1 for attention, 2 for the MLP.

    Returns:
        The function that is applied to what leaves the branch.
    """
    if norms_after(block):
        return getattr(block, f"norm{branch}")
    if hasattr(block, f"ls{branch}"):
        return getattr(block, f"ls{branch}")
    gamma = getattr(block, f"gamma_{branch}")
    return nn.Identity() if gamma is None else lambda values: gamma * values


def after_attention(block: Any, tokens: Tensor, normed: Tensor, mixed: Tensor) -> Tensor:
    """What leaves a block, given what its attention mixed.

    Args:
        block: A timm block.
        tokens: What enters the block [B,R,D].
        normed: What enters its attention, of the same tokens [B,R,D].
        mixed: The values that attention gave them [B,H,R,D/H].

    Returns:
        Tokens [B,R,D].
    """
    attention = block.attn
    merged = mixed.transpose(1, 2).flatten(2)
    merged = attention.norm(merged) if hasattr(attention, "norm") else merged
    if getattr(attention, "gate", None) is not None:
        merged = merged * attention.gate(normed).sigmoid()
    tokens = tokens + scaled(block, 1)(attention.proj(merged))
    return tokens + scaled(block, 2)(block.mlp(tokens if norms_after(block) else block.norm2(tokens)))
