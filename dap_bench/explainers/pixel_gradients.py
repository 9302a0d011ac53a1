"""Gradients of the class's logit by the pixels x, and two ways to calm them.

    input_x_gradient        x * g(x)                                                   g(x) = d z_c / d x
    integrated_gradients    (x - b) * sum_k w_k g(b + a_k (x - b))                     (Sundararajan et al., 2017)
    smoothgrad              mean_k g(x + noise (max x - min x) e_k), e_k ~ N(0, 1)     (Smilkov et al., 2017)

The integral is taken at the `steps` nodes a_k of the Gauss-Legendre rule on [0, 1], captum's default: the sum over
pixels is z_c(x) - z_c(b), up to the error of the rule. The baseline b is `zero` (after normalisation: grey), `black`,
or `mean` (the image's mean colour). An image's noise is drawn from its own generator; max and min are those of the
normalised image.

A pixel has three channels: `channels` takes their sum with its sign, the sum of their absolute values (abs) or the
largest absolute value (max). Maps are of pixels; there are no layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from dap_bench.errors import require_int, require_number
from dap_bench.explainers.base import Explanation, check
from dap_bench.isolation import content, generator
from dap_bench.vit import ViT
from dap_bench.vit.frozen import frozen_evaluation

CHANNELS = {"sum": lambda v: v.sum(1), "abs": lambda v: v.abs().sum(1), "max": lambda v: v.abs().amax(1)}
BASELINES = ("zero", "black", "mean")


def input_x_gradient(
    vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, *, channels: str = "sum"
) -> Explanation:
    """Input times gradient: each pixel times the gradient of the class's logit by it.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        channels: What a pixel's three channels become: their sum with its sign (sum), the sum of their absolute
            values (abs) or the largest absolute value (max). Defaults to "sum".

    Returns:
        Maps of pixels [B,H*W], signed if `channels` is sum.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, channels=(channels, tuple(CHANNELS)))
    return pixel_map(images * gradient(vit, images, classes), channels)


def integrated_gradients(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    baseline: str = "zero",
    steps: int = 50,
    channels: str = "sum",
) -> Explanation:
    """Integrated gradients: the pixels' difference from a baseline, times the mean gradient on the way from there.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        baseline: Where the path begins: zero (grey), black, or the image's mean colour (mean). Defaults to "zero".
        steps: Nodes of the Gauss-Legendre rule; each takes a forward and a backward pass. Defaults to 50.
        channels: What a pixel's three channels become: their sum with its sign (sum), the sum of their absolute
            values (abs) or the largest absolute value (max). Defaults to "sum".

    Returns:
        Maps of pixels [B,H*W], signed if `channels` is sum: then a map adds up to the difference of the two logits.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, baseline=(baseline, BASELINES), channels=(channels, tuple(CHANNELS)))
    require_int("steps", steps, most=1000)
    start = baseline_images(vit, images, baseline)
    total = torch.zeros_like(images)
    for place, weight in zip(*(side.tolist() for side in leggauss(steps)), strict=True):  # on [-1, 1]
        total += weight / 2 * gradient(vit, start + (1 + place) / 2 * (images - start), classes)
    return pixel_map((images - start) * total, channels)


def smoothgrad(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    ids: Sequence[str] = (),
    *,
    samples: int = 25,
    noise: float = 0.15,
    channels: str = "abs",
    seed: int = 0,
) -> Explanation:
    """SmoothGrad: the mean gradient of the class's logit over noisy copies of the image.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        ids: Names of the images, which their noise depends on; without names, their content. Defaults to ().
        samples: Noisy copies; each takes a forward and a backward pass. Defaults to 25.
        noise: Standard deviation, as a share of the image's range. Defaults to 0.15.
        channels: What a pixel's three channels become: their sum with its sign (sum), the sum of their absolute
            values (abs) or the largest absolute value (max). Defaults to "abs".
        seed: Another seed draws other noise. Defaults to 0.

    Returns:
        Maps of pixels [B,H*W], signed if `channels` is sum.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, channels=(channels, tuple(CHANNELS)))
    require_int("samples", samples)
    require_int("seed", seed, least=0)
    require_number("noise", noise)
    generators = [generator(f"{name}/{seed}") for name in list(ids) or list(map(content, images))]
    spread = images.amax((1, 2, 3), keepdim=True) - images.amin((1, 2, 3), keepdim=True)
    total = torch.zeros_like(images)
    for _ in range(samples):
        drawn = torch.stack([torch.randn(images.shape[1:], generator=each) for each in generators]).to(images)
        total += gradient(vit, images + noise * spread * drawn, classes)
    return pixel_map(total / samples, channels)


def gradient(
    vit: ViT, images: Tensor, classes: Tensor, rules: Callable[[list[Any]], None] = lambda handles: None
) -> Tensor:
    """The gradient of the class's logit by the pixels.

    Images do not mix, so one backward pass gives each image its own.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W].
        classes: The class to explain in each image [B].
        rules: May set hooks that change the gradient; those whose handles it appends to its list are removed
            afterwards. Defaults to one that sets none.

    Returns:
        The gradient [B,3,H,W].

    Raises:
        UserError: If the images have another size than the model takes.
    """
    vit.check_images(images)
    with torch.enable_grad(), frozen_evaluation(vit.model, fused=False) as handles:
        rules(handles)
        pixels = images.detach().clone().requires_grad_()
        logits = vit.model(pixels).gather(1, classes[:, None])
        (found,) = torch.autograd.grad(logits.sum(), pixels)
    return found


def baseline_images(vit: ViT, images: Tensor, baseline: str) -> Tensor:
    """The images at which the path begins.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W].
        baseline: zero (grey), black, or the image's mean colour (mean).

    Returns:
        Normalised images [B,3,H,W].
    """
    if baseline == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    return vit.normalised(0.0).to(images).expand_as(images) if baseline == "black" else torch.zeros_like(images)


def pixel_map(values: Tensor, channels: str) -> Explanation:
    """A map of pixels from values of their channels.

    Args:
        values: Values of channels [B,3,H,W].
        channels: What a pixel's three channels become: sum, abs or max.

    Returns:
        The map [B,H*W], signed if `channels` is sum.
    """
    height, width = values.shape[-2:]
    return Explanation(CHANNELS[channels](values).flatten(1), (height, width), signed=channels == "sum")
