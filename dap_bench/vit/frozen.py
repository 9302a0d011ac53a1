"""Borrowing a model: whatever is changed on it is put back on the way out, also after an exception."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def frozen_evaluation(model: Any, fused: bool, tf32: bool = False) -> Iterator[list[Any]]:
    """The model in evaluation mode, without gradients of its weights; afterwards as it was.

    CUDA's convolutions would use TF32 by default; here it is used where it was asked for and nowhere else.

    Args:
        model: The timm model.
        fused: Use fused attention, which is faster but shows no attention weights.
        tf32: Use TF32 on CUDA. Defaults to False.

    Yields:
        A list; hooks whose handles are appended to it are removed afterwards.
    """
    every: Any = torch.backends
    backends = (every.cuda.matmul, every.cudnn.conv)
    precisions = [backend.fp32_precision for backend in backends]
    training = [module for module in model.modules() if module.training]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fusing = [block.attn.fused_attn for block in model.blocks]
    handles: list[Any] = []
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if tf32 else "ieee"
        for module in training:
            module.training = False
        for parameter in learning:
            parameter.requires_grad_(False)
        for block in model.blocks:
            block.attn.fused_attn = fused
        yield handles
    finally:
        for handle in handles:
            handle.remove()
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision
        for block, was in zip(model.blocks, fusing, strict=True):
            block.attn.fused_attn = was
        for parameter in learning:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
