"""Gradients of pixels on models whose gradients are known: linear ones, and the axioms on real ones."""

import pytest
import torch
from layouts import SIZE, build
from torch import nn

from dap_bench import ViT, load_method
from dap_bench.explainers.pixel_gradients import baseline_images, gradient
from dap_bench.isolation import content, explained, generator

CLASSES = torch.tensor([0, 6, 3])


class Known(nn.Module):
    """z_c = w_c . x + q_c (v_c . x)^2, in the place of a ViT's model."""

    def __init__(self, curvature):
        super().__init__()
        torch.manual_seed(0)
        size = 3 * SIZE[0] * SIZE[1]
        self.w, self.v = (nn.Parameter(torch.randn(7, size, dtype=torch.float64) / size) for _ in range(2))
        self.q, self.blocks, self.num_classes = curvature, [], 7

    def forward(self, x):
        x = x.flatten(1)
        return x @ self.w.T + self.q * (x @ self.v.T) ** 2


def known(curvature=0.0):
    vit = ViT(build("plain").eval()).double()
    model = Known(curvature)
    model.patch_embed, vit.model = vit.model.patch_embed, model
    torch.manual_seed(1)
    return vit, torch.randn(3, 3, *SIZE, dtype=torch.float64)


def weights(vit, name="w"):
    return getattr(vit.model, name)[CLASSES].detach().unflatten(1, (3, *SIZE))


@pytest.mark.parametrize(
    ("channels", "reduce"),
    [
        ("sum", lambda v: v[:, 0] + v[:, 1] + v[:, 2]),
        ("abs", lambda v: v[:, 0].abs() + v[:, 1].abs() + v[:, 2].abs()),
        ("max", lambda v: v.abs().max(1).values),
    ],
)
def test_of_a_linear_model(channels, reduce):
    """The gradient is the weight everywhere: x w, (x - b) w and w."""
    vit, images = known()
    w = weights(vit)
    product = load_method("input_x_gradient", channels=channels)(vit, images, CLASSES)
    torch.testing.assert_close(product.maps, reduce(images * w).flatten(1))
    assert (product.grid, product.signed, product.layers) == (SIZE, channels == "sum", None)
    for baseline, start in (
        ("zero", 0),
        ("black", vit.normalised(0.0).double()),
        ("mean", images.mean((2, 3), keepdim=True)),
    ):
        out = load_method("integrated_gradients", channels=channels, baseline=baseline, steps=1)(vit, images, CLASSES)
        torch.testing.assert_close(out.maps, reduce((images - start) * w).flatten(1))
    out = load_method("smoothgrad", channels=channels, samples=2)(vit, images, CLASSES)
    torch.testing.assert_close(out.maps, reduce(w).flatten(1))


def test_gauss_and_legendre_are_exact_on_a_quadratic_model_in_one_step():
    """g(a x) = w + 2 a q (v.x) v is linear along the path: its integral is w + q (v.x) v."""
    vit, images = known(curvature=5.0)
    w, v = weights(vit), weights(vit, "v")
    inner = (v * images).sum((1, 2, 3), keepdim=True)
    out = load_method("integrated_gradients", steps=1)(vit, images, CLASSES)
    torch.testing.assert_close(out.maps, (images * (w + 5 * inner * v)).sum(1).flatten(1))
    there = load_method("input_x_gradient")(vit, images, CLASSES)
    torch.testing.assert_close(there.maps, (images * (w + 10 * inner * v)).sum(1).flatten(1))


@pytest.mark.parametrize("baseline", ["zero", "black", "mean"])
@pytest.mark.parametrize("layout", ["plain", "registers", "distilled", "average"])
def test_integrated_gradients_are_complete(layout, baseline):
    """Their sum is the difference of the logits at both ends of the path."""
    vit = ViT(build(layout).eval()).double()
    torch.manual_seed(2)
    images = torch.randn(3, 3, *SIZE, dtype=torch.float64)
    ends = [vit.score(x).gather(1, CLASSES[:, None])[:, 0] for x in (images, baseline_images(vit, images, baseline))]
    out = load_method("integrated_gradients", baseline=baseline, steps=200)(vit, images, CLASSES)
    torch.testing.assert_close(out.maps.sum(1), ends[0] - ends[1], rtol=0, atol=1e-5)


def test_smoothgrad_draws_from_each_images_own_generator():
    vit = ViT(build("plain").eval()).double()
    torch.manual_seed(3)
    images, ids = torch.randn(3, 3, *SIZE, dtype=torch.float64), ["a", "b", "c"]
    explain = load_method("smoothgrad", samples=2, noise=0.3, channels="sum", seed=5)
    whole = explained(explain, vit, images, CLASSES, ids).maps
    draws = generator("b/5")
    noise = torch.stack([torch.randn(3, *SIZE, generator=draws) for _ in range(2)]).double()
    spread = images[1].max() - images[1].min()
    two = gradient(vit, images[1] + 0.3 * spread * noise, CLASSES[[1, 1]])
    torch.testing.assert_close(whole[1], two.mean(0).sum(0).flatten())
    backwards = explained(explain, vit, images.flip(0), CLASSES.flip(0), ids[::-1]).maps
    torch.testing.assert_close(backwards.flip(0), whole)
    named = explain(vit, images, CLASSES, ids=[content(image) for image in images]).maps
    assert torch.equal(explain(vit, images, CLASSES).maps, named)  # a prior is not told the ids


def test_smoothgrad_without_noise_is_the_gradient():
    vit = ViT(build("plain").eval()).double()
    images = torch.randn(3, 3, *SIZE, dtype=torch.float64)
    out = load_method("smoothgrad", samples=2, noise=0.0, channels="sum")(vit, images, CLASSES)
    torch.testing.assert_close(out.maps, gradient(vit, images, CLASSES).sum(1).flatten(1))


@pytest.mark.parametrize("method", ["input_x_gradient", "integrated_gradients", "smoothgrad", "attnlrp"])
def test_single_precision(method):
    images = torch.randn(3, 3, *SIZE)
    options = {"integrated_gradients": {"steps": 4}, "smoothgrad": {"samples": 3}}.get(method, {})
    explain, vit = load_method(method, **options), ViT(build("plain").eval())
    with torch.no_grad():
        single = explain(vit, images, CLASSES, **({"ids": list("abc")} if method == "smoothgrad" else {})).maps
    double = explained(explain, vit.double(), images.double(), CLASSES, list("abc")).maps
    assert single.dtype == torch.float32
    assert not single.requires_grad
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4 * double.abs().max().item())
