"""A ViT by its timm tag: the architecture is looked at first, then its weights are found and loaded."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from dap_bench import hub
from dap_bench.errors import UserError
from dap_bench.hub import resolve_checkpoint
from dap_bench.vit.devices import choose_device
from dap_bench.vit.families import refusal
from dap_bench.vit.model import ViT, name_of


def load(
    tag: str,
    checkpoint: str | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    class_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> ViT:
    """A ViT by its timm tag, with weights from the Hub or from a local file.

    Args:
        tag: timm's name of a model and its weights, such as "vit_tiny_patch16_224.augreg_in21k_ft_in1k".
        checkpoint: A file of weights: safetensors, or a .pth with tensors only. None takes the tag's from the Hub.
            Defaults to None.
        device: auto, cpu, cuda, cuda:N or mps. Defaults to "cpu".
        precision: Of scoring: fp32, tf32 or bf16. Explanations are not affected. Defaults to "fp32".
        class_names: The classes in words. Defaults to None: ImageNet's, where there are 1,000.
        **kwargs: For timm.create_model, such as `img_size`.

    Returns:
        The model in evaluation mode, without gradients of its weights.

    Raises:
        UserError: If timm has no such model, it cannot be explained, or its weights cannot be had.
    """
    architecture = tag.split(".")[0]
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), 3)
        raise UserError(f"timm has no model {tag!r}" + (f"; did you mean {' or '.join(near)}?" if near else "."))
    reason = refusal(blueprint(tag, **kwargs))
    if reason:
        raise UserError(f"{architecture} cannot be explained: {reason}.")
    chosen = choose_device(device)
    if checkpoint is None:
        _require_weights(tag)
    # a checkpoint may be for another size than the tag's own weights, so timm loads nothing then
    model = _create(tag, pretrained=checkpoint is None, **kwargs)
    if checkpoint is not None:
        _load_weights(model, resolve_checkpoint(checkpoint))
    return ViT(model.eval().requires_grad_(False).to(chosen), precision, class_names)


def blueprint(tag: str, **kwargs: Any) -> nn.Module:
    """The model without any weights: made in a moment, whatever its size.

    Args:
        tag: timm's name of a model.
        **kwargs: For timm.create_model, such as `img_size`.

    Returns:
        The model, on the device "meta" where it can be made there.

    Raises:
        UserError: If timm cannot make it.
    """
    try:
        with torch.device("meta"):
            return timm.create_model(tag, pretrained=False, **kwargs)
    except (RuntimeError, NotImplementedError):  # either it counts on real numbers, or it cannot be made at all
        return _create(tag, pretrained=False, **kwargs)


def _create(tag: str, **kwargs: Any) -> nn.Module:
    try:
        return timm.create_model(tag, **kwargs)
    except RuntimeError as error:
        raise UserError(f"timm could not create {tag!r}: {str(error).splitlines()[0]}") from error


def _load_weights(model: nn.Module, path: Path) -> None:
    """Weights from safetensors, or from a .pth that holds tensors only: nothing in a file is ever executed.

    Weights stored in half precision are loaded in the model's own.
    """
    if not path.is_file():
        raise UserError(f"model.checkpoint={path} does not exist.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: dict[str, Any] = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"model.checkpoint={path} cannot be read ({str(error).splitlines()[0]}); "
            "expected safetensors, or a .pth with tensors only."
        ) from error
    for wrapper in ("state_dict", "model"):
        state = state.get(wrapper, state)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:300]
        raise UserError(f"model.checkpoint={path} does not fit {name_of(model)}: {problem}") from error


def _require_weights(tag: str) -> None:
    """Fail at once and in a sentence, not after minutes of retries, where the Hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache

    config = timm.get_pretrained_cfg(tag)
    if config is None or not config.hf_hub_id:
        return
    # timm writes "timm/" for repositories named by the tag itself
    repo = config.hf_hub_id + (f"{config.architecture}.{config.tag}" if config.hf_hub_id.endswith("/") else "")
    if isinstance(try_to_load_from_cache(repo, "model.safetensors"), str):
        return
    hub.require(repo, "model", "Or give the weights as a local file: model.checkpoint=FILE.safetensors.")
