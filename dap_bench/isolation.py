"""An explainer by itself: what it is given, and what is put back after it.

An explainer never holds what scoring uses. It is given a copy of the model and clones of the images and classes, and
torch's global state is as before when it returns; so whatever it changes or leaves behind is nobody else's.

Rows must not hang on the batch an image came in. An explainer that draws random numbers names a parameter `ids`, is
given the ids of its images, and draws each image's from `generator(id)`. One that draws from torch's, NumPy's or
Python's global generator instead is called again image by image, with the generators seeded by each image's id. One
that names a parameter `masks` is given where the objects are, [H,W] bool each, None where that is not known.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import sha256
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules import module as modules

from dap_bench.explainers.base import Explanation, checked
from dap_bench.vit import ViT

PRECISION_SWITCHES = (
    "cuda.matmul cudnn cudnn.conv cudnn.rnn mkldnn mkldnn.matmul mkldnn.conv mkldnn.rnn"  # below torch.backends
)
CUDNN_SWITCHES = ("enabled", "benchmark", "deterministic")


def explained(
    explain: Callable[..., Any],
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    ids: Sequence[str] = (),
    layers: bool = False,
    masks: Sequence[Tensor | None] = (),
) -> Explanation:
    """What an explainer gives for some images, checked.

    Args:
        explain: The explainer.
        vit: A copy of the model made for it (see `copied`).
        images: Normalised images [B,3,H,W].
        classes: The class to explain in each [B].
        ids: Names of the images, which random numbers depend on; without names, their content. Defaults to ().
        layers: Whether layer maps are wanted. Defaults to False.
        masks: Where the objects are, for explainers that ask. Defaults to ().

    Returns:
        The explanation.

    Raises:
        UserError: If what the explainer returned is no explanation of these images.
    """
    given = Given(images, classes.to(images.device), list(ids) or list(map(content, images)), list(masks))
    with global_state() as untouched:
        found = call(explain, vit, given, layers)
        seedless = untouched()
    if not seedless:
        found = _joined([_seeded(explain, vit, given.of(at), layers) for at in range(len(images))])
    return checked(found, vit.grid, images)


@dataclass(frozen=True)
class Given:
    """What explainers are called with besides the model: they get clones of it.

    Attributes:
        images: Normalised images [B,3,H,W].
        classes: The class to explain in each [B].
        ids: Names of the images.
        masks: Where the objects are [H,W] bool, None where that is not known; empty where nobody has looked for them.
    """

    images: Tensor
    classes: Tensor
    ids: list[str]
    masks: list[Tensor | None]  # empty where nobody has looked for them

    def of(self, at: int) -> "Given":
        """One image of the batch.

        Args:
            at: Its position in the batch.

        Returns:
            A batch of that image alone.
        """
        one = slice(at, at + 1)
        return Given(self.images[one], self.classes[one], self.ids[one], self.masks[one])


def takes(explain: Callable[..., Any], name: str) -> bool:
    """Whether an explainer names a parameter, and so is given it.

    Args:
        explain: The explainer.
        name: The parameter's name, such as "ids".

    Returns:
        True if it does.
    """
    return name in signature(explain).parameters


def call(explain: Callable[..., Any], vit: ViT, given: Given, layers: bool = False) -> Any:
    """What an explainer returns, unchecked and with nothing put back after it.

    Args:
        explain: The explainer.
        vit: The model that it works on, as it is.
        given: The images and classes; the explainer gets clones.
        layers: Whether layer maps are wanted. Defaults to False.

    Returns:
        Whatever it returns.
    """
    options: dict[str, Any] = {"layers": True} if layers else {}
    if takes(explain, "ids"):
        options["ids"] = list(given.ids)
    if takes(explain, "masks"):
        masks = given.masks or [None] * len(given.images)
        options["masks"] = [mask if mask is None else mask.to(given.images.device, copy=True) for mask in masks]
    return explain(vit, given.images.clone(), given.classes.clone(), **options)


def copied(vit: ViT, double: bool = False) -> ViT:
    """The same model in memory of its own. It is not compiled: that would take longer than what it is for.

    Args:
        vit: The model.
        double: Make the copy in double precision. Defaults to False.

    Returns:
        The copy.
    """
    twin = deepcopy(vit)
    twin.compile = False
    return twin.double() if double else twin


def altered(twin: ViT, vit: ViT) -> bool:
    """Whether a copy of a model is no longer what it was copied from.

    Args:
        twin: The copy.
        vit: The original.

    Returns:
        True if weights, buffers, hooks or switches differ.
    """
    pairs = list(zip(twin.model.modules(), vit.model.modules(), strict=False))
    if any(_marks(mine) != _marks(theirs) for mine, theirs in pairs):
        return True
    tensors = [[*model.parameters(), *model.buffers()] for model in (twin.model, vit.model)]
    if [tensor.shape for tensor in tensors[0]] != [tensor.shape for tensor in tensors[1]]:
        return True
    both = [(one, other.to(one)) for one, other in zip(*tensors, strict=True)]
    if all(one.device.type == "cpu" for one, _ in both):
        return not all(torch.equal(one, other) for one, other in both)
    return bool(torch.stack([(one != other).any() for one, other in both]).any())  # one question to the device


def _marks(module: torch.nn.Module) -> dict[str, Any]:
    """A module's kind, switches, children and how many hooks it has."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str | tuple)}
    sizes = {name: len(value) for name, value in vars(module).items() if isinstance(value, dict)}
    return {**plain, **sizes, "type": type(module)}


def generator(sample_id: str) -> torch.Generator:
    """A generator of random numbers of one image, the same on every machine.

    Args:
        sample_id: The image's name.

    Returns:
        A generator of the CPU, seeded by the name.
    """
    return torch.Generator().manual_seed(_seed(sample_id))


def _seed(name: str) -> int:
    return int.from_bytes(sha256(name.encode(errors="surrogatepass")).digest()[:4], "big")


def content(image: Tensor) -> str:
    """A name for an image that has none.

    Args:
        image: The image [3,H,W].

    Returns:
        The hash of its numbers.
    """
    return sha256(image.detach().cpu().numpy().tobytes()).hexdigest()


def _seeded(explain: Callable[..., Any], vit: ViT, given: Given, layers: bool) -> Explanation:
    """A single image, with every global generator seeded by its id."""
    with global_state():
        seed = _seed(given.ids[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return checked(call(explain, vit, given, layers), vit.grid, given.images)


def _joined(parts: Sequence[Explanation]) -> Explanation:
    """Explanations of single images as that of a batch."""
    tensors: dict[str, Any] = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])
        for field in fields(Explanation)
        if isinstance(getattr(parts[0], field.name), Tensor)
    }
    return replace(parts[0], **tensors)


@contextmanager
def global_state() -> Iterator[Callable[[], bool]]:
    """Put torch's global state, and the global generators, back when the block ends.

    Yields a function that tells whether the generators have not been used so far.
    """
    states = [(get(), put) for get, put in _switches()]
    generators = _generators()
    hooks = _global_hooks()
    try:
        yield lambda: all(_same(now, was) for (now, _), (was, _) in zip(_generators(), generators, strict=True))
    finally:
        for state, put in (*states, *generators):
            put(state)
        for name, value in hooks.items():
            registry = getattr(modules, name)
            if dict(registry) != value:
                registry.clear()
                registry.update(value)


def switches() -> list[Any]:
    """The values of torch's global state as it is now, to be compared."""
    return [*(get() for get, _ in _switches()), _global_hooks()]


def _global_hooks() -> dict[str, dict[Any, Any]]:
    kept = {name: value for name, value in vars(modules).items() if name.startswith("_global_")}
    return {name: dict(value) for name, value in kept.items() if isinstance(value, dict)}


def _generators() -> list[tuple[Any, Callable[[Any], Any]]]:
    """The state of every global generator of random numbers, and how to set it."""
    found: list[tuple[Any, Callable[[Any], Any]]] = [
        (torch.get_rng_state(), torch.set_rng_state),
        (np.random.get_state(), np.random.set_state),
        (random.getstate(), random.setstate),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append((tuple(torch.cuda.get_rng_state_all()), torch.cuda.set_rng_state_all))
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _switches() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and to set each part of torch's global state."""
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _default_device, torch.set_default_device
    for kind in ("cpu", "cuda"):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    for name in PRECISION_SWITCHES.split():
        yield _attribute(name, "fp32_precision")
    for name in CUDNN_SWITCHES:
        yield _attribute("cudnn", name)
    kernels: Any = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        yield getattr(kernels, f"{name}_sdp_enabled"), getattr(kernels, f"enable_{name}_sdp")


def _default_device() -> Any:
    """None where no default was set: setting one, even the CPU, slows every call down."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _attribute(path: str, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    owner: Any = torch.backends
    for part in path.split("."):
        owner = getattr(owner, part)
    return partial(getattr, owner, name), partial(setattr, owner, name)
