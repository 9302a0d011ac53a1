"""`ViT`: a timm model with plain global attention that one can look inside.

Two ways through it:

    vit.trace(images)      attention, tokens and gradients, for explainers
    vit.score(images)      logits as fast as the model can, for metrics

Whatever either changes on the model (fused attention, hooks, requires_grad, training mode) is put back on the way out,
also after an exception. timm's names are kept: `blocks`, `attn`, `norm1`, `head`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor, nn

from dap_bench.errors import UserError
from dap_bench.vit import families
from dap_bench.vit import tokens as reading
from dap_bench.vit.frozen import frozen_evaluation
from dap_bench.vit.scoring import PRECISIONS, score
from dap_bench.vit.tokens import Layout, layout_of
from dap_bench.vit.trace import Trace, run


class ViT:
    """A timm model, loaded by its tag or built by the user, ready to be explained and scored.

    Any model that `families.refusal` has nothing against: VisionTransformer with whatever prefix tokens and pooling,
    distilled, Eva, Beit and models of that kind. `layout` says which tokens it has and what its head reads.
    """

    def __init__(self, model: nn.Module, precision: str = "fp32", class_names: Sequence[str] | None = None) -> None:
        reason = families.refusal(model)
        if reason:
            raise UserError(f"{name_of(model)} cannot be explained: {reason}.")
        if precision not in PRECISIONS:
            raise UserError(f"precision={precision} is unknown; use one of {', '.join(PRECISIONS)}.")
        self.model: Any = model
        self.precision, self._class_names = precision, class_names
        self.compile = False  # score by torch.compile
        self.layout: Layout = layout_of(model)
        self._memo: list[tuple[Tensor, Trace]] | None = None
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
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def read(self, tokens: Tensor) -> Tensor:
        """Logits that the head reads from all tokens [B,N,D] as they leave a block, or from those it needs."""
        return reading.read(self.model, self.layout, tokens)

    def head(self, token: Tensor) -> Tensor:
        """Logits that the head would read from one token [B,D], as it leaves a block, if there were no other."""
        return reading.read_one(self.model, self.layout, token)

    def pixels(self, images: Tensor) -> Tensor:
        """Normalised images [B,3,H,W] as the colours 0..1 that one would look at."""
        black, white = (self.normalised(value).to(images) for value in (0.0, 1.0))
        return ((images - black) / (white - black)).clamp(0, 1)

    def normalised(self, value: float) -> Tensor:
        """What a channel value of 0..1 becomes when the model's preprocessing normalises it: [3,1,1]."""
        mean, std = (torch.tensor(self._data_config[key]) for key in ("mean", "std"))
        return ((value - mean) / std)[:, None, None]

    def double(self) -> "ViT":
        """A double-precision copy of this ViT, made again only when its weights have changed; itself if it is one.

        It is on the CPU where the model's own device has no double precision (mps).
        """
        if self.dtype == torch.float64:
            return self
        weights = [(parameter.data_ptr(), parameter._version) for parameter in self.model.parameters()]
        if self._double is None or self._double[0] != weights:
            self._double = weights, ViT(families.in_double(deepcopy(self.model)), class_names=self._class_names)
        return self._double[1]

    def block_number(self, layer: int) -> int:
        """A block's number from 0, also where it is counted from the end."""
        if not -self.depth <= layer < self.depth:
            raise UserError(f"layer={layer} is not a block: the model has blocks 0 to {self.depth - 1}.")
        return layer % self.depth

    @torch.no_grad()
    def qkv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B,H,N,D/H] of a block for what enters its attention."""
        with frozen_evaluation(self.model, fused=False):
            rope = families.positions(self.model)[layer].get("rope")
            return families.qkv(self.blocks[layer].attn, normed, rope)

    @torch.no_grad()
    def attention_scores(self, layer: int, normed: Tensor) -> Tensor:
        """Attention before softmax [B,H,R,N], of the rows that the head reads, for what enters a block's attention."""
        query, key, _ = self.qkv(layer, normed)
        attention = self.blocks[layer].attn
        scores = (self.layout.rows_of(query) @ key.transpose(-2, -1)) * attention.scale
        with frozen_evaluation(self.model, fused=False):  # some positions come from an MLP with dropout
            bias = families.bias(attention, families.positions(self.model)[layer])
        return scores if bias is None else scores + self.layout.rows_of(bias)

    def mask(self, mask: Image.Image) -> Tensor:
        """An object mask, taken through the same geometry as its image: [H,W] bool."""
        plain = {**self._data_config, "interpolation": "nearest", "mean": (0.0,) * 3, "std": (1.0,) * 3}
        return timm.data.create_transform(**plain)(mask.convert("RGB"))[0] > 0.5

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
        for its_images, known in self._memo or ():
            if known.reaches(wanted, start, detach_attention) and known.untouched and _same(its_images, images):
                return known
        if self._memo is not None or images.is_inference():
            images = images.clone()  # ours: whoever gave them may write into theirs
        logits, kept = run(self, lambda: self.model(images), wanted, start, detach_attention)
        trace = Trace(self, images, wanted, start, detach_attention, logits, kept)
        if self._memo is not None and trace.untouched:  # from now on
            self._memo.append((images, trace))
        return trace

    @contextmanager
    def shared_traces(self) -> Iterator[None]:
        """Within this block a trace of equal images is made once and serves every explainer and class."""
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
            x = tokens
            for block, given in list(zip(self.blocks, families.positions(self.model), strict=True))[layer:]:
                x = block(x, **given)
            return self.model.forward_head(self.model.norm(x))

        logits, kept = run(self, forward, frozenset(["norm1"]), layer, False)
        return Trace(self, tokens, frozenset(["norm1"]), layer, False, logits, kept)

    def score(self, images: Tensor, full: bool = False) -> Tensor:
        """Logits [B,C] in float32 or better, with fused attention, in the chosen precision or in `full`."""
        self._check(images)
        return score(self, images, "fp32" if full else self.precision)

    def _check(self, images: Tensor) -> None:
        expected = (3, *self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise UserError(
                f"images have shape {list(images.shape)}, but {name_of(self.model)} takes [batch, "
                f"{', '.join(map(str, expected))}]; use vit.transform on the pictures."
            )


def name_of(model: Any) -> str:
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("architecture") or type(model).__name__


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
