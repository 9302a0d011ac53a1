"""A timm Vision Transformer one can look inside.

`ViT` wraps a timm model and offers two ways through it:

    vit.trace(images)      attention, tokens and gradients, for explainers
    vit.score(images)      logits as fast as the model can (fused attention, inference mode), for metrics

Whatever either changes on the model (fused attention, hooks, requires_grad, training mode) is put back on the
way out, also after an exception. timm's names are kept: `blocks`, `attn`, `norm1`, `head`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from dap_bench import hub
from dap_bench.config import resolve_checkpoint
from dap_bench.errors import UserError

PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Trace:
    """One forward pass looked at from inside; gradients are taken from it for any class, any number of times.

    Per block l: `attention[l]` A [B,H,N,N] after softmax, `norm1[l]` T [B,N,D] that enters attention; `tokens[l]`
    X [B,N,D] that enters the block, and `tokens[L]` what leaves the last one. All are detached.
    """

    vit: "ViT"
    images: Tensor
    wanted: frozenset[str]
    start: int
    detached: bool
    _logits: Tensor
    _kept: Mapping[str, list[Tensor]]

    @property
    def attention(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self._kept["attention"]]

    @property
    def norm1(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self._kept["norm1"]]

    @property
    def tokens(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self._kept["tokens"]]

    @property
    def logits(self) -> Tensor:
        return self._logits.detach()

    def gradients(self, classes: Tensor, of: str, layers: Sequence[int] | None = None) -> list[Tensor]:
        """d z_c / d `of`[l] for each layer, z_c the logit of each image's class. One backward pass for the batch."""
        chosen = [self._kept[of][layer] for layer in layers] if layers is not None else self._kept[of]
        return self._differentiate(self._logits, classes, chosen)

    def layer_gradients(self, classes: Tensor, of: str, readout: str = "cls") -> list[Tensor]:
        """d y^l_c / d `of`[l], y^l the logits that the head reads from block l's own output (the logit lens).

        `readout` cls takes the class token, mean the average of all tokens.
        """
        gradients = []
        for layer, tensor in enumerate(self._kept[of]):
            output = self._kept["tokens"][layer + 1]
            with torch.enable_grad(), self.vit._opened(fused=False):
                logits = self.vit.head(output[:, 0] if readout == "cls" else output.mean(dim=1))
            gradients += self._differentiate(logits, classes, [tensor])
        return gradients

    def path_gradients(self, classes: Tensor, steps: int) -> list[Tensor]:
        """Mean of d y^l_c / d A^l along the straight path from no attention to A^l, with y^l as above: [B,H,N,N].

        Integrated gradients of each block by itself. Only the class token's row of A^l reaches y^l; the others are 0.
        """
        found = []
        shares = torch.linspace(0, 1, steps, dtype=self.images.dtype, device=self.images.device)
        for layer, full in enumerate(self.attention):
            block, rows = self.vit.blocks[layer], full[:, :, 0]
            value = self.vit.qkv(layer, self.norm1[layer])[2]
            total = torch.zeros_like(rows)
            for share in shares:
                with torch.enable_grad(), self.vit._opened(fused=False):
                    row = (share * rows).requires_grad_()
                    mixed = (row[:, :, None] @ value).transpose(1, 2).flatten(2)[:, 0]
                    token = self.tokens[layer][:, 0] + block.ls1(block.attn.proj(block.attn.norm(mixed)))
                    logits = self.vit.head(token + block.ls2(block.mlp(block.norm2(token))))
                total += self._differentiate(logits, classes, [row])[0]
            gradient = torch.zeros_like(full)
            gradient[:, :, 0] = total / steps
            found.append(gradient)
        return found

    @staticmethod
    def _differentiate(logits: Tensor, classes: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
        # images do not mix, so the gradient of the sum holds each image's own gradient
        with torch.enable_grad():
            target = logits.gather(1, classes[:, None]).sum()
        return list(torch.autograd.grad(target, list(of), retain_graph=True, materialize_grads=True))


class ViT:
    """A timm VisionTransformer with a class token, ready to be explained and scored."""

    def __init__(self, model: nn.Module, precision: str = "fp32", class_names: Sequence[str] | None = None) -> None:
        reason = _why_not(model)
        if reason:
            raise UserError(f"{_name(model)} cannot be explained: {reason}.")
        if precision not in PRECISIONS:
            raise UserError(f"precision={precision} is unknown; use one of {', '.join(PRECISIONS)}.")
        assert isinstance(model, VisionTransformer)
        self.model, self.precision, self._class_names = model, precision, class_names
        self._memo: list[Trace] | None = None
        self._double: tuple[list[tuple[int, int]], ViT] | None = None
        self._data_config = {**timm.data.resolve_model_data_config(model), "input_size": (3, *self.image_size)}
        self.transform: Callable[[Image.Image], Tensor] = timm.data.create_transform(**self._data_config)

    @property
    def blocks(self) -> list[Any]:
        return list(self.model.blocks)

    @property
    def depth(self) -> int:
        return len(self.model.blocks)

    @property
    def classes(self) -> int:
        return self.model.num_classes

    @property
    def class_names(self) -> list[str] | None:
        """The classes in words, where they are known: ImageNet's, in their short form, for 1,000 classes."""
        if self._class_names is None and self.classes == 1000:
            imagenet = ImageNetInfo("imagenet-1k")
            self._class_names = [imagenet.index_to_description(label).split(",")[0] for label in range(1000)]
        return list(self._class_names) if self._class_names is not None else None

    def class_name(self, label: int) -> str:
        return self.class_names[label] if self.class_names is not None else f"class {label}"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.model.patch_embed.grid_size
        return height, width

    @property
    def image_size(self) -> tuple[int, int]:
        height, width = self.model.patch_embed.img_size
        return height, width

    @property
    def crop(self) -> float:
        """The share of a picture's shorter side that the model's preprocessing keeps."""
        return float(self._data_config["crop_pct"])

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def device(self) -> torch.device:
        return self.parameter.device

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def parameter(self) -> nn.Parameter:
        """Any parameter: it tells the model's device and dtype."""
        return next(self.model.parameters())

    def head(self, token: Tensor) -> Tensor:
        """Logits that the head reads from one token [B,D] as it leaves a block."""
        model = self.model
        return model.head(model.head_drop(model.fc_norm(model.norm(token))))

    def pixels(self, images: Tensor) -> Tensor:
        """Normalised images [B,3,H,W] as the colours 0..1 that one would look at."""
        black, white = (self.normalised(value).to(images) for value in (0.0, 1.0))
        return ((images - black) / (white - black)).clamp(0, 1)

    def normalised(self, value: float) -> Tensor:
        """What a channel value of 0..1 becomes when the model's preprocessing normalises it: [3,1,1]."""
        mean, std = (torch.tensor(self._data_config[key]) for key in ("mean", "std"))
        return ((value - mean) / std)[:, None, None]

    def double(self) -> "ViT":
        """A double-precision copy of this ViT, made again only when its weights have changed; itself if it is one."""
        if self.parameter.dtype == torch.float64:
            return self
        weights = [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]
        if self._double is None or self._double[0] != weights:
            self._double = weights, ViT(deepcopy(self.model).double(), class_names=self._class_names)
        return self._double[1]

    def block_number(self, layer: int) -> int:
        """A block's number from 0, also where it is counted from the end."""
        if not -self.depth <= layer < self.depth:
            raise UserError(f"layer={layer} is not a block: the model has blocks 0 to {self.depth - 1}.")
        return layer % self.depth

    @torch.no_grad()
    def qkv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B,H,N,D/H] of a block for what its norm1 gave."""
        attention = self.blocks[layer].attn
        query, key, value = attention.qkv(normed).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return attention.q_norm(query), attention.k_norm(key), value

    def mask(self, mask: Image.Image) -> Tensor:
        """An object mask, taken through the same geometry as its image: [H,W] bool."""
        plain = {**self._data_config, "interpolation": "nearest", "mean": (0.0,) * 3, "std": (1.0,) * 3}
        return timm.data.create_transform(**plain)(mask.convert("RGB"))[0] > 0.5

    # ------------------------------------------------------------------ looking inside

    def trace(
        self, images: Tensor, grad: Collection[str] = (), start: int = 0, detach_attention: bool = False
    ) -> Trace:
        """Run `images` through the model and keep what explainers need.

        `grad` names what gradients will be asked of (attention, norm1, tokens), `start` the first block where: the
        backward pass ends there, so asking late is cheap. `detach_attention` cuts the gradient at the input of each
        attention, so that it runs along the residual stream and the MLPs only.
        """
        self._check(images)
        wanted, start = frozenset(grad), self.block_number(start)
        for known in self._memo or ():
            reaches = wanted <= known.wanted and (not wanted or known.start <= start)
            if known.images is images and reaches and (known.detached == detach_attention or not wanted):
                return known
        pixels = images.clone() if images.is_inference() else images
        logits, kept = self._run(lambda: self.model(pixels), wanted, start, detach_attention)
        trace = Trace(self, images, wanted, start, detach_attention, logits, kept)
        if self._memo is not None:
            self._memo.append(trace)
        return trace

    @contextmanager
    def shared_traces(self) -> Iterator[None]:
        """Within this block a trace of the same images is made once and serves every explainer and class."""
        outer, self._memo = self._memo, self._memo if self._memo is not None else []
        try:
            yield
        finally:
            self._memo = outer

    def trace_from(self, tokens: Tensor, layer: int) -> Trace:
        """A trace of the blocks from `layer` on, for other `tokens` [B,N,D] entering it, with gradients of norm1.

        Its lists begin at that block.
        """

        def forward() -> Tensor:
            return self.model.forward_head(self.model.norm(nn.Sequential(*self.blocks[layer:])(tokens)))

        logits, kept = self._run(forward, frozenset(["norm1"]), layer, False)
        return Trace(self, tokens, frozenset(["norm1"]), layer, False, logits, kept)

    def _run(
        self, forward: Callable[[], Tensor], wanted: frozenset[str], start: int, detach_attention: bool
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        kept: dict[str, list[Tensor]] = {"attention": [], "norm1": [], "tokens": []}

        def keep(kind: str, layer: int, tensor: Tensor) -> None:
            if kind in wanted and layer >= start and not tensor.requires_grad:
                tensor.requires_grad_()  # nothing before it needs a gradient: the graph begins here
            kept[kind].append(tensor)

        def hook(kind: str, layer: int) -> Callable[..., None]:
            return lambda module, inputs, output: keep(kind, layer, output)

        with self._opened(fused=False) as handles, torch.set_grad_enabled(bool(wanted)):
            for layer, block in enumerate(self.blocks):
                handles += [
                    block.register_forward_pre_hook(lambda _, inputs, layer=layer: keep("tokens", layer, inputs[0])),
                    block.norm1.register_forward_hook(hook("norm1", layer)),
                    block.attn.attn_drop.register_forward_hook(hook("attention", layer)),
                ]
                if detach_attention:
                    handles.append(block.attn.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),)))
            handles.append(self.blocks[-1].register_forward_hook(hook("tokens", self.depth)))
            logits = forward()
        return logits, kept

    @contextmanager
    def _opened(self, fused: bool, tf32: bool = False) -> Iterator[list[Any]]:
        """The model in evaluation mode, frozen, with attention fused or not; then as it was, without our hooks.

        CUDA's convolutions would use TF32 by default; here it is used where it was asked for and nowhere else.
        """
        every: Any = torch.backends
        backends = (every.cuda.matmul, every.cudnn.conv)
        precisions = [backend.fp32_precision for backend in backends]
        training = [module for module in self.model.modules() if module.training]
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        fusing = [block.attn.fused_attn for block in self.blocks]
        handles: list[Any] = []
        try:
            for backend in backends:
                backend.fp32_precision = "tf32" if tf32 else "ieee"
            for module in training:
                module.training = False
            for parameter in learning:
                parameter.requires_grad_(False)
            for block in self.blocks:
                block.attn.fused_attn = fused
            yield handles
        finally:
            for handle in handles:
                handle.remove()
            for backend, precision in zip(backends, precisions, strict=True):
                backend.fp32_precision = precision
            for block, was in zip(self.blocks, fusing, strict=True):
                block.attn.fused_attn = was
            for parameter in learning:
                parameter.requires_grad_(True)
            for module in training:
                module.training = True

    def _check(self, images: Tensor) -> None:
        expected = (3, *self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise UserError(
                f"images have shape {list(images.shape)}, but {_name(self.model)} takes [batch, "
                f"{', '.join(map(str, expected))}]; use vit.transform on the pictures."
            )

    # ------------------------------------------------------------------ scoring

    @torch.inference_mode()
    def score(self, images: Tensor, full: bool = False) -> Tensor:
        """Logits [B,C] in float32 or better, with fused attention, in the chosen precision or in `full`."""
        self._check(images)
        precision = "fp32" if full else self.precision
        reduced = torch.autocast(self.parameter.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
        with self._opened(fused=True, tf32=precision == "tf32"), reduced:
            logits = self._class_token_logits(images) if self._plain else self.model(images)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def _class_token_logits(self, images: Tensor) -> Tensor:
        """The model's logits, computing of the last block only what the head reads: the class token.

        Its keys and values need all tokens; its query, projection and MLP need one of 197.
        """
        model: Any = self.model
        last = self.blocks[-1]
        attention = last.attn
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for block in self.blocks[:-1]:
            x = block(x)
        normed, width = last.norm1(x), attention.attn_dim
        weight, bias = attention.qkv.weight, attention.qkv.bias
        query = linear(normed[:, :1], weight[:width], bias[:width] if bias is not None else None)
        both = linear(normed, weight[width:], bias[width:] if bias is not None else None)
        key, value = both.unflatten(2, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query = query.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        mixed = scaled_dot_product_attention(attention.q_norm(query), attention.k_norm(key), value)
        token = x[:, :1] + last.ls1(attention.proj(attention.norm(mixed.transpose(1, 2).flatten(2))))
        token = token + last.ls2(last.mlp(last.norm2(token)))
        return model.forward_head(model.norm(token))

    @property
    def _plain(self) -> bool:
        """Is the last block timm's own, so that the shortcut above is the same function?"""
        last: Any = self.blocks[-1]
        own = type(last) is Block and type(last.attn) is Attention and getattr(last.attn, "gate", None) is None
        return own and type(self.model) is VisionTransformer


# ---------------------------------------------------------------------- loading


def load(
    tag: str,
    checkpoint: str | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    class_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> ViT:
    """A ViT by its timm tag, with weights from the Hub or from a local `checkpoint`; `kwargs` go to timm."""
    architecture = tag.split(".")[0]
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), 3)
        raise UserError(f"timm has no model {tag!r}" + (f"; did you mean {' or '.join(near)}?" if near else "."))
    if checkpoint is None:
        _require_weights(tag)
    # a checkpoint may be for another size than the tag's own weights, so timm loads nothing then
    try:
        model = timm.create_model(tag, pretrained=checkpoint is None, **kwargs)
    except RuntimeError as error:
        raise UserError(f"timm cannot make {tag!r}: {str(error).splitlines()[0]}") from error
    if checkpoint is not None:
        _load_weights(model, resolve_checkpoint(checkpoint))
    return ViT(model.eval().requires_grad_(False).to(choose_device(device)), precision, class_names)


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={device} is unknown; use auto, cpu, cuda or cuda:N.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device} was asked for, but torch finds no CUDA here; use device=auto or device=cpu.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={device} was asked for, but there are {torch.cuda.device_count()} CUDA devices.")
    return chosen


def _load_weights(model: nn.Module, path: Path) -> None:
    """Weights from safetensors, or from a .pth that holds tensors only: nothing in a file is ever executed."""
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
        raise UserError(f"model.checkpoint={path} does not fit {_name(model)}: {problem}") from error


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


def _why_not(model: nn.Module) -> str | None:
    """Why `model` cannot be explained, or None where it can."""
    if not isinstance(model, VisionTransformer):
        return "it is not a timm VisionTransformer (windowed, convolutional and hybrid attention have no global map)"
    if model.cls_token is None:
        return "it has no class token"
    if model.num_prefix_tokens != 1:
        return (
            f"it has {model.num_prefix_tokens} tokens before the patches (register or distillation tokens), expected 1"
        )
    if model.global_pool != "token" or model.attn_pool is not None:
        return "its head does not read the class token"
    if not isinstance(model.head, nn.Linear):
        return "it has no class head (num_classes=0)"
    for block in model.blocks:
        attention = getattr(block, "attn", None)
        if not isinstance(block, Block) or not all(
            hasattr(attention, part) for part in ("qkv", "num_heads", "attn_drop")
        ):
            return f"its blocks ({type(block).__name__}) are not norm, attention, norm, MLP with residual sums"
    return None


def _name(model: nn.Module) -> str:
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("architecture") or type(model).__name__
