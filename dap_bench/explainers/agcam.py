"""AGCAM, Attention-Guided CAM (Leem and Seo, 2024).

    map_j = sum_l sum_h relu(d z_c / d A^{l,h}[0, j]) sigmoid(S^{l,h}[0, j])        S: attention before softmax

The gradient runs along the residual stream and the MLPs only: the input of every attention is detached. Without that
(`detach: false`) it is another map.
"""

import torch
from torch import Tensor

from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def agcam(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, *, detach: bool = True) -> Explanation:
    check(vit, images, classes)
    trace = vit.trace(images, grad=["attention"], detach_attention=detach)
    maps = []
    for layer, gradient in enumerate(trace.gradients(classes, "attention")):
        query, key, _ = vit.qkv(layer, trace.norm1[layer])
        scores = (query[:, :, :1] @ key.transpose(-2, -1)) * vit.blocks[layer].attn.scale
        maps.append((gradient[:, :, 0, 1:].relu() * scores[:, :, 0, 1:].sigmoid()).sum(1))
    stacked = torch.stack(maps, 1)
    return Explanation(stacked.sum(1), vit.grid, *((stacked.cumsum(1), stacked) if layers else ()))
