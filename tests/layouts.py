"""Tiny random models of every layout of tokens and every family of blocks that is accepted."""

import timm
import torch
from timm.models.vision_transformer import ResPostBlock
from timm.models.vision_transformer_relpos import ResPostRelPosBlock

SIZE = (64, 48)  # 4 x 3 patches
SMALL = {"pretrained": False, "img_size": SIZE, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 7}
VIT, EVA = "vit_tiny_patch16_224", "eva02_tiny_patch14_224"
ROTARY = {"patch_size": 16, "num_heads": 3, "use_rot_pos_emb": True}
RELATIVE = {"patch_size": 16, "rel_pos_dim": 8}

# name -> (timm's name, what is changed, prefix tokens, what the head reads)
LAYOUTS = {
    "plain": (VIT, {}, 1, "class token"),
    "registers": (VIT, {"reg_tokens": 4, "dynamic_img_size": True}, 5, "class token"),
    "average": (VIT, {"class_token": False, "global_pool": "avg"}, 0, "mean of patches"),
    "average, registers": (VIT, {"class_token": False, "global_pool": "avg", "reg_tokens": 4}, 4, "mean of patches"),
    "average, class token": (VIT, {"global_pool": "avg"}, 1, "mean of patches"),
    "average of all": (VIT, {"global_pool": "avg", "pool_include_prefix": True}, 1, "mean of all"),
    "attention pool": (VIT, {"class_token": False, "global_pool": "map"}, 0, "attention pool"),
    "attention pool, registers": (VIT, {"global_pool": "map", "reg_tokens": 2}, 3, "attention pool"),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, 2, "class and distillation token"),
    "layer scale, qk-norm": (VIT, {"init_values": 0.5, "qk_norm": True}, 1, "class token"),
    "norms after": (VIT, {"block_fn": ResPostBlock, "class_token": False, "global_pool": "avg"}, 0, "mean of patches"),
    "eva": (EVA, {**ROTARY, "swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False}, 1, "mean of patches"),
    "eva, packed": (
        EVA,
        {**ROTARY, "swiglu_mlp": True, "init_values": 0.5, "dynamic_img_size": True},
        1,
        "mean of patches",
    ),
    "eva, mixed": (
        "vit_small_patch16_rope_mixed_224",
        {"num_heads": 3, "global_pool": "token"},
        1,
        "class token",
    ),
    "beit": ("beit_base_patch16_224", {"init_values": 0.5}, 1, "mean of patches"),
    "beit, shared": (
        "beit_base_patch16_224",
        {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "global_pool": "token"},
        1,
        "class token",
    ),
    "relative": ("vit_relpos_small_patch16_224", {**RELATIVE, "class_token": True}, 1, "mean of patches"),
    "relative, shared": ("vit_relpos_small_patch16_224", {**RELATIVE, "shared_rel_pos": True}, 0, "mean of patches"),
    "relative, norms after": (
        "vit_relpos_small_patch16_224",
        {**RELATIVE, "block_fn": ResPostRelPosBlock},
        0,
        "mean of patches",
    ),
}
# models that Chefer's relevance rules do not cover, and the word that says why
UNCOVERED = {
    "attention pool": "attention pooling",
    "attention pool, registers": "attention pooling",
    "norms after": "norms after attention and MLP",
    "eva": "MLP",
    "eva, packed": "MLP",
    "eva, mixed": "rotary positions",
    "relative, norms after": "norms after attention and MLP",
}


def build(name):
    """A model whose attention, positions and heads all differ from nothing and from each other."""
    torch.manual_seed(0)
    architecture, changes, _, _ = LAYOUTS[name]
    model = timm.create_model(architecture, **{**SMALL, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model
