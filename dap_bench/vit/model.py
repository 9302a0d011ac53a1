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
    distilled, Eva, Beit and models of that kind.

    Args:
        model: The timm model; it is used as it is, not copied.
        precision: Of scoring: fp32, tf32 or bf16. Defaults to "fp32".
        class_names: The classes in words. Defaults to None: ImageNet's, where there are 1,000.

    Attributes:
        model: The timm model.
        layout: Which tokens it has, and what its head reads of them.
        transform: From a picture (PIL) to a normalised image [3,H,W], as the weights were trained on.
        compile: Score by torch.compile; False at first.

    Raises:
        UserError: If the model cannot be explained, with the reason.
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
        """timm's blocks, from the first to the last."""
        return list(self.model.blocks)

    @property
    def depth(self) -> int:
        """The number of blocks, L."""
        return len(self.model.blocks)

    @property
    def classes(self) -> int:
        """The number of classes, C."""
        return self.model.num_classes

    @property
    def class_names(self) -> list[str] | None:
        """The classes in words, where they are known: ImageNet's, in their short form, for 1,000 classes."""
        if self._class_names is None and self.classes == 1000:
            imagenet = ImageNetInfo("imagenet-1k")
            self._class_names = [imagenet.index_to_description(label).split(",")[0] for label in range(1000)]
        return list(self._class_names) if self._class_names is not None else None

    def class_name(self, label: int) -> str:
        """A class in words, or `class N` where its name is not known.

        Args:
            label: The class's number.

        Returns:
            The name.
        """
        return self.class_names[label] if self.class_names is not None else f"class {label}"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.model.patch_embed.grid_size
        return height, width

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that the model takes."""
        height, width = self.model.patch_embed.img_size
        return height, width

    @property
    def crop(self) -> float:
        """The share of a picture's shorter side that the model's preprocessing keeps."""
        return float(self._data_config["crop_pct"])

    @property
    def patches(self) -> int:
        """The number of patches, P."""
        return self.grid[0] * self.grid[1]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return next(self.model.parameters()).dtype

    def read(self, tokens: Tensor) -> Tensor:
        """Logits that the head reads.

        Args:
            tokens: All tokens [B,N,D] as they leave a block, or those that the head needs.

        Returns:
            Logits [B,C].
        """
        return reading.read(self.model, self.layout, tokens)

    def head(self, token: Tensor) -> Tensor:
        """Logits that the head would read from one token, if there were no other.

        Args:
            token: A token [B,D] as it leaves a block.

        Returns:
            Logits [B,C].
        """
        return reading.read_one(self.model, self.layout, token)

    def pixels(self, images: Tensor) -> Tensor:
        """The colours that one would look at.

        Args:
            images: Normalised images [B,3,H,W].

        Returns:
            The same in 0..1.
        """
        black, white = (self.normalised(value).to(images) for value in (0.0, 1.0))
        return ((images - black) / (white - black)).clamp(0, 1)

    def normalised(self, value: float) -> Tensor:
        """What a channel value becomes when the model's preprocessing normalises it.

        Args:
            value: A channel's value in 0..1.

        Returns:
            The value for each channel [3,1,1].
        """
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
        """A block's number from 0, also where it is counted from the end.

        Args:
            layer: 0 to L - 1, or -L to -1.

        Returns:
            0 to L - 1.

        Raises:
            UserError: If there is no such block.
        """
        if not -self.depth <= layer < self.depth:
            raise UserError(f"layer={layer} is not a block: the model has blocks 0 to {self.depth - 1}.")
        return layer % self.depth

    @torch.no_grad()
    def qkv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a block.

        Args:
            layer: The block.
            normed: What enters its attention [B,N,D], such as `trace.norm1[layer]`.

        Returns:
            Three tensors [B,H,N,D/H], as they meet: after their norms, rotated where positions are rotary.
        """
        with frozen_evaluation(self.model, fused=False):
            rope = families.positions(self.model)[layer].get("rope")
            return families.qkv(self.blocks[layer].attn, normed, rope)

    @torch.no_grad()
    def attention_scores(self, layer: int, normed: Tensor) -> Tensor:
        """Attention before softmax, in the rows that the head reads.

        Args:
            layer: The block.
            normed: What enters its attention [B,N,D], such as `trace.norm1[layer]`.

        Returns:
            Scores [B,H,R,N].
        """
        query, key, _ = self.qkv(layer, normed)
        attention = self.blocks[layer].attn
        scores = (self.layout.rows_of(query) @ key.transpose(-2, -1)) * attention.scale
        with frozen_evaluation(self.model, fused=False):  # some positions come from an MLP with dropout
            bias = families.bias(attention, families.positions(self.model)[layer])
        return scores if bias is None else scores + self.layout.rows_of(bias)

    def mask(self, mask: Image.Image) -> Tensor:
        """An object mask, taken through the same geometry as its image.

        Args:
            mask: A picture that is bright on the object and dark beside it.

        Returns:
            Where the object is [H,W] bool.
        """
        plain = {**self._data_config, "interpolation": "nearest", "mean": (0.0,) * 3, "std": (1.0,) * 3}
        return timm.data.create_transform(**plain)(mask.convert("RGB"))[0] > 0.5

    def trace(
        self, images: Tensor, grad: Collection[str] = (), start: int = 0, detach_attention: bool = False
    ) -> Trace:
        """Run images through the model and keep what explainers need.

        Args:
            images: Normalised images [B,3,H,W].
            grad: What gradients will be asked of: any of attention, norm1, tokens. Defaults to ().
            start: The first block where they will be: the backward pass ends there, so asking late is cheap. Defaults
                to 0.
            detach_attention: Cut the gradient at the input of each attention, so that it runs along the residual stream
                and the MLPs only. Defaults to False.

        Returns:
            The trace; inside `shared_traces` perhaps one that was made before.

        Raises:
            UserError: If the images have another size than the model takes, or there is no block `start`.
        """
        self.check_images(images)
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
        """A trace of the last blocks for other tokens, with gradients of norm1.

        Args:
            tokens: What enters block `layer` [B,N,D].
            layer: The first block, from 0.

        Returns:
            The trace; its lists begin at that block.
        """

        def forward() -> Tensor:
            x = tokens
            for block, given in list(zip(self.blocks, families.positions(self.model), strict=True))[layer:]:
                x = block(x, **given)
            return self.model.forward_head(self.model.norm(x))

        logits, kept = run(self, forward, frozenset(["norm1"]), layer, False)
        return Trace(self, tokens, frozenset(["norm1"]), layer, False, logits, kept)

    def score(self, images: Tensor, full: bool = False) -> Tensor:
        """Logits as fast as the model can, with fused attention.

        Args:
            images: Normalised images [B,3,H,W].
            full: Compute in full precision, whatever the model's `precision`. Defaults to False.

        Returns:
            Logits [B,C] in float32 or better.

        Raises:
            UserError: If the images have another size than the model takes.
        """
        self.check_images(images)
        return score(self, images, "fp32" if full else self.precision)

    def check_images(self, images: Tensor) -> None:
        """Check the shape of images.

        Args:
            images: What should be images [B,3,H,W] of the model's size.

        Raises:
            UserError: If they are not.
        """
        expected = (3, *self.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise UserError(
                f"images have shape {list(images.shape)}, but {name_of(self.model)} takes [batch, "
                f"{', '.join(map(str, expected))}]; use vit.transform on the pictures."
            )


def name_of(model: Any) -> str:
    """The name that timm gave a model's architecture, or that of its class.

    Args:
        model: The model.

    Returns:
        The name.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("architecture") or type(model).__name__


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
