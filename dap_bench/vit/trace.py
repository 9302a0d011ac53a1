"""One forward pass looked at from inside: attention, tokens, and gradients of either."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dap_bench.errors import UserError
from dap_bench.vit import tokens as reading
from dap_bench.vit.families import after_attention
from dap_bench.vit.frozen import frozen_evaluation
from dap_bench.vit.tokens import Layout

if TYPE_CHECKING:
    from dap_bench.vit.model import ViT


@dataclass(frozen=True)
class Trace:
    """One forward pass; gradients are taken from it for any class, any number of times. Its tensors are detached.

    Attributes:
        vit: The model.
        images: The images [B,3,H,W]; of `ViT.trace_from` the tokens instead.
        wanted: What gradients can be asked of.
        start: The first block where.
        detached: Whether the gradient was cut at the input of each attention.
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
        """Attention A after softmax [B,H,N,N] of each block."""
        return [tensor.detach() for tensor in self._kept["attention"]]

    @property
    def norm1(self) -> list[Tensor]:
        """Tokens T [B,N,D] that enter each block's attention: where norms come after branches, the block's input."""
        return [tensor.detach() for tensor in self._kept["norm1"]]

    @property
    def tokens(self) -> list[Tensor]:
        """Tokens X [B,N,D] that enter each block, and last what leaves the last one: L + 1 tensors."""
        return [tensor.detach() for tensor in self._kept["tokens"]]

    @property
    def logits(self) -> Tensor:
        """The model's logits [B,C]."""
        return self._logits.detach()

    @cached_property
    def _versions(self) -> list[int]:
        """How often each tensor was written into, as torch counts it, when this is first asked."""
        return [tensor._version for kept in self._kept.values() for tensor in kept]

    @property
    def untouched(self) -> bool:
        """Whether nobody has written into the tensors since the trace was made."""
        return self._versions == [tensor._version for kept in self._kept.values() for tensor in kept]

    @cached_property
    def layout(self) -> Layout:
        """Which tokens are patches, and the row that the head reads, for these images."""
        with frozen_evaluation(self.vit.model, fused=False):
            return reading.for_images(self.vit.model, self.vit.layout, self.tokens[-1])

    def reaches(self, wanted: frozenset[str], start: int, detached: bool) -> bool:
        """Whether this trace has what another would be made for.

        The graph begins at one tensor and holds all that comes after it, unless attention was cut out of it.

        Args:
            wanted: What gradients would be asked of.
            start: The first block where.
            detached: Whether the gradient would be cut at the input of each attention.

        Returns:
            True if it has all of that.
        """
        if not wanted:
            return True
        if self.detached or detached or not self.wanted:
            return self.detached == detached and wanted <= self.wanted and self.start <= start
        return _beginning(self.wanted, self.start) <= _beginning(wanted, start)

    def gradients(self, classes: Tensor, of: str, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Gradients of the logit of each image's class. One backward pass for the batch.

        A pass that goes back to the first blocks goes on to where the graph begins, and brings all gradients there are:
        they serve whoever asks next.

        Args:
            classes: The class of each image [B].
            of: What they are taken of: attention, norm1 or tokens; one that the trace was made for.
            layers: The blocks, or None for all. Defaults to None.

        Returns:
            For each of the layers d z_c / d `of`[l], in the shape of `of`[l].
        """
        kept = self._kept[of]
        places = [range(len(kept))[layer] for layer in layers] if layers is not None else list(range(len(kept)))
        known = self._gradients.setdefault(tuple(classes.tolist()), {})
        if any((of, place) not in known for place in places):
            wanted = [(of, place) for place in places]
            if min(places) <= self.start + 1 and not self.detached:
                kinds = self._kept.items()
                wanted = [
                    (kind, at) for kind, tensors in kinds for at, each in enumerate(tensors) if each.requires_grad
                ]
            tensors = [self._kept[kind][at] for kind, at in wanted]
            found = self._differentiate(self._logits, classes, tensors)
            if len(wanted) == len(places):
                return found
            known.update(zip(wanted, found, strict=True))
        return [known[of, place].clone() for place in places]  # whoever asks may write into theirs

    @cached_property
    def _gradients(self) -> dict[tuple[int, ...], dict[tuple[str, int], Tensor]]:
        """Gradients that were computed, by the classes they are of."""
        return {}

    def layer_gradients(self, classes: Tensor, of: str, readout: str = "cls") -> list[Tensor]:
        """Gradients of what the head would already say after each block (the logit lens).

        Args:
            classes: The class of each image [B].
            of: What they are taken of: attention, norm1 or tokens; one that the trace was made for.
            readout: What the logits are read from: cls as the head does (its class token, or what it has instead), mean
                the average of all tokens. Defaults to "cls".

        Returns:
            For each block d y^l_c / d `of`[l], y^l the logits that are read from that block's own output.
        """
        gradients = []
        for layer, tensor in enumerate(self._kept[of]):
            output = self._kept["tokens"][layer + 1]
            with torch.enable_grad(), frozen_evaluation(self.vit.model, fused=False):
                logits = self.vit.read(output) if readout == "cls" else self.vit.head(output.mean(dim=1))
            gradients += self._differentiate(logits, classes, [tensor])
        return gradients

    def path_gradients(self, classes: Tensor, steps: int) -> list[Tensor]:
        """Integrated gradients of each block by itself, from no attention to its attention.

        Args:
            classes: The class of each image [B].
            steps: Points of the straight path, both ends included.

        Returns:
            For each block the mean of d y^l_c / d A^l along the path [B,H,N,N], with y^l as in `layer_gradients`. Rows
            of A^l that the head does not need for y^l are 0.

        Raises:
            UserError: If a block does more than its parts say.
        """
        found = []
        needed = self.vit.layout.needed
        shares = torch.linspace(0, 1, steps, dtype=self.images.dtype, device=self.images.device)
        for layer, full in enumerate(self.attention):
            block, rows = self.vit.blocks[layer], needed(full)
            tokens, normed = needed(self.tokens[layer]), needed(self.norm1[layer])
            value = self.vit.qkv(layer, self.norm1[layer])[2]
            total = torch.zeros_like(rows)
            for share in shares:
                with torch.enable_grad(), frozen_evaluation(self.vit.model, fused=False):
                    part = (share * rows).requires_grad_()
                    output = after_attention(block, tokens, normed, part @ value)
                    logits = self.vit.read(output)
                total += self._differentiate(logits, classes, [part])[0]
            check_block(block, output, needed(self.tokens[layer + 1]))
            gradient = torch.zeros_like(full)
            needed(gradient).copy_(total / steps)
            found.append(gradient)
        return found

    @staticmethod
    def _differentiate(logits: Tensor, classes: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
        # images do not mix, so the gradient of the sum holds each image's own gradient
        with torch.enable_grad():
            target = logits.gather(1, classes[:, None]).sum()
        return list(torch.autograd.grad(target, list(of), retain_graph=True, materialize_grads=True))


def _beginning(wanted: frozenset[str], start: int) -> tuple[int, int]:
    """Where a graph begins: the block, and the place in it."""
    return start, min(map(("tokens", "norm1", "attention").index, wanted))


def check_block(block: object, ours: Tensor, its: Tensor) -> None:
    """Raise unless a block put together from its parts gives what the block itself gave.

    Args:
        block: The block.
        ours: What its parts gave.
        its: What it gave itself, in the same shape.

    Raises:
        UserError: If the two differ.
    """
    if not torch.allclose(ours, its, rtol=1e-3, atol=1e-3 * its.abs().max().item()):
        raise UserError(f"{type(block).__name__} does more than its known parts: this method does not cover it.")


def run(
    vit: "ViT", forward: Callable[[], Tensor], wanted: frozenset[str], start: int, detach_attention: bool
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A forward pass that keeps what it passes.

    Args:
        vit: The model.
        forward: Makes the logits.
        wanted: What gradients will be asked of: any of attention, norm1, tokens.
        start: The first block where.
        detach_attention: Cut the gradient at the input of each attention.

    Returns:
        Logits [B,C], and attention, norm1 and tokens of each block by these names.

    Raises:
        UserError: If an attention is not of all tokens to all tokens.
    """
    kept: dict[str, list[Tensor]] = {"attention": [], "norm1": [], "tokens": []}

    def keep(kind: str, layer: int, tensor: Tensor) -> None:
        if kind in wanted and layer >= start and not tensor.requires_grad:
            tensor.requires_grad_()  # nothing before it needs a gradient: the graph begins here
        kept[kind].append(tensor)

    def entering(kind: str, layer: int) -> Callable[..., None]:
        return lambda module, inputs: keep(kind, layer, inputs[0])

    def leaving(kind: str, layer: int) -> Callable[..., None]:
        return lambda module, inputs, output: keep(kind, layer, output)

    with frozen_evaluation(vit.model, fused=False) as handles, torch.set_grad_enabled(bool(wanted)):
        for layer, block in enumerate(vit.blocks):
            handles += [
                block.register_forward_pre_hook(entering("tokens", layer)),
                block.attn.register_forward_pre_hook(entering("norm1", layer)),
                block.attn.attn_drop.register_forward_hook(leaving("attention", layer)),
            ]
            if detach_attention:
                handles.append(block.attn.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),)))
        handles.append(vit.blocks[-1].register_forward_hook(leaving("tokens", vit.depth)))
        logits = forward()
    for attention, tokens in zip(kept["attention"], kept["tokens"], strict=False):
        count = tokens.shape[1]
        if attention.ndim != 4 or attention.shape[2:] != (count, count):
            raise UserError(
                f"an attention of {type(vit.model).__name__} has shape {list(attention.shape)} for {count} tokens: "
                "it is not global, so it has no map of tokens."
            )
    return logits, kept
