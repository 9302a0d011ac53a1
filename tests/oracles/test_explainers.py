"""Our explainers beside other people's libraries, on the golden nano ViT in double precision.

`agreement` is the largest difference of an image's map relative to the largest value of the other library's map; the
bound is 1e-5 unless a test says why not. Run by `make test-oracles`, with `-s` to see the numbers.
"""

from math import ceil

import numpy as np
import pytest
import torch
from torch import nn

from dap_bench import load_method
from dap_bench.explainers.attnlrp import _gamma
from dap_bench.explainers.rise import draw
from dap_bench.isolation import generator

pytestmark = pytest.mark.oracle
BOUND = 1e-5


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: make test-oracles installs it")


def agreement(ours, theirs):
    ours, theirs = ours.detach().flatten(1), torch.as_tensor(theirs).detach().flatten(1)
    found = ((ours - theirs).abs().amax(1) / theirs.abs().amax(1)).max().item()
    print(f" {found:.1e}", end="")
    return found


@pytest.fixture(params=["pred", "alt"])
def classes(request, nano):
    return nano.classes(request.param)


# ---------------------------------------------------------------------- captum


def test_input_x_gradient_is_captums(nano, classes):
    attr = library("captum.attr")
    theirs = attr.InputXGradient(nano.vit.model).attribute(nano.images.clone().requires_grad_(), target=classes)
    for channels, reduced in (("sum", theirs.sum(1)), ("abs", theirs.abs().sum(1)), ("max", theirs.abs().amax(1))):
        ours = load_method("input_x_gradient", channels=channels)(nano.vit, nano.images, classes)
        assert agreement(ours.maps, reduced) < BOUND


@pytest.mark.parametrize("baseline", ["zero", "black", "mean"])
def test_integrated_gradients_are_captums(nano, classes, baseline):
    """captum's default rule, Gauss and Legendre's, with as many steps."""
    attr = library("captum.attr")
    images = nano.images
    start = {
        "zero": torch.zeros_like(images),
        "black": nano.vit.normalised(0.0).to(images).expand_as(images),
        "mean": images.mean((2, 3), keepdim=True).expand_as(images),
    }[baseline]
    theirs = attr.IntegratedGradients(nano.vit.model).attribute(
        images, start, target=classes, n_steps=16, method="gausslegendre", internal_batch_size=2
    )
    ours = load_method("integrated_gradients", baseline=baseline, steps=16)(nano.vit, images, classes)
    assert agreement(ours.maps, theirs.sum(1)) < BOUND


def test_smoothgrad_is_captums_with_the_same_noise(nano, classes, monkeypatch):
    attr = library("captum.attr")
    from captum.attr._core import noise_tunnel

    images, ids = nano.images, ["a", "b"]
    ours = load_method("smoothgrad", samples=5, noise=0.2, channels="sum")(nano.vit, images, classes, ids=ids)
    for at, name in enumerate(ids):
        draws = generator(f"{name}/0")
        drawn = torch.stack([torch.randn(images.shape[1:], generator=draws) for _ in range(5)]).to(images)
        monkeypatch.setattr(noise_tunnel.torch, "normal", lambda mean, std, drawn=drawn: mean + std * drawn)
        image = images[at : at + 1]
        theirs = attr.NoiseTunnel(attr.Saliency(nano.vit.model)).attribute(
            image,
            nt_type="smoothgrad",
            nt_samples=5,
            stdevs=0.2 * (image.max() - image.min()).item(),
            target=classes[at : at + 1],
            abs=False,
        )
        monkeypatch.undo()
        assert agreement(ours.maps[at : at + 1], theirs.sum(1)) < BOUND


# ---------------------------------------------------------------------- grad-cam


def test_gradcam_is_that_of_the_grad_cam_package(nano, classes):
    """Before it scales its map to 0..1 and enlarges it."""
    package = library("pytorch_grad_cam")
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model = nano.vit.model

    def spatial(tokens):
        return tokens[:, 1:].transpose(1, 2).unflatten(2, nano.vit.grid)

    with package.GradCAM(model=model, target_layers=[model.blocks[-1].norm1], reshape_transform=spatial) as cam:
        targets = [ClassifierOutputTarget(label) for label in classes.tolist()]
        logits = cam.activations_and_grads(nano.images)
        sum(target(row) for target, row in zip(targets, logits, strict=True)).backward()
        (activations,), (gradients,) = (
            [tensor.numpy() for tensor in kept]
            for kept in (cam.activations_and_grads.activations, cam.activations_and_grads.gradients)
        )
        theirs = cam.get_cam_image(nano.images, None, targets, activations, gradients)
        shown = cam(input_tensor=nano.images, targets=targets)
    model.zero_grad()
    assert agreement(load_method("gradcam", relu=False)(nano.vit, nano.images, classes).maps, theirs) < BOUND
    ours = load_method("gradcam")(nano.vit, nano.images, classes)
    assert agreement(ours.maps, np.maximum(theirs, 0)) < BOUND
    # enlarged by OpenCV in single precision after scaling: the same picture to its rounding
    assert np.abs(ours.heatmaps(nano.vit.image_size).numpy() - shown).max() < 1e-4


# ---------------------------------------------------------------------- RISE


@pytest.mark.parametrize("cells", [4, 7, 8])
def test_rise_masks_are_enlarged_as_its_authors_do(cells):
    """By scikit-image's `resize`, order 1, mode reflect, to one cell more than the image; then cut."""
    transform = library("skimage.transform")
    numbers = torch.rand(40, cells**2 + 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    cell, theirs = ceil(224 / cells), []
    for down, across, *shown in numbers:
        grid = (np.array(shown) < 0.5).astype(float).reshape(cells, cells)
        large = transform.resize(grid, ((cells + 1) * cell,) * 2, order=1, mode="reflect", anti_aliasing=False)
        top, left = int(down * cell), int(across * cell)
        theirs.append(large[top : top + 224, left : left + 224])
    assert agreement(torch.cat(list(draw(40, cells, 0.5, 0, (224, 224)))), np.stack(theirs)) < BOUND


# ---------------------------------------------------------------------- lxt and zennit


def test_attnlrp_is_that_of_its_authors_rules(nano, classes):
    """lxt's explicit rules put together to a ViT: there the backward pass carries relevance itself.

    lxt adds 1e-6 or 1e-8 to denominators, which moves the map by 1e-4; here that is 0, as in a gradient. It has no
    patch embedding: images are unfolded, and the convolution is a linear layer.
    """
    lrp = library("lxt.explicit.functional")
    model, images = nano.vit.model, nano.images
    patches = nn.functional.unfold(images, 16, stride=16).transpose(1, 2).requires_grad_()
    embed = model.patch_embed.proj

    def affine(x, layer):
        return lrp.linear_epsilon(x, layer.weight, layer.bias, 0.0)

    def norm(x, layer):
        return lrp.layer_norm_grad_fn.apply(x, layer.weight, layer.bias, layer.eps, 0.0)

    def passed_on(function, x):
        return x + (function(x) - x).detach()  # the identity rule where gradients are relevance

    x = lrp.linear_epsilon(patches, embed.weight.flatten(1), embed.bias, 0.0)
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], 1)
    x = lrp.add2(x, model.pos_embed.expand(len(x), -1, -1), False, 0.0)
    for block in model.blocks:
        joint = affine(norm(x, block.norm1), block.attn.qkv)
        query, key, value = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in joint.chunk(3, 2))
        key = passed_on(lambda values, scale=block.attn.scale: values * scale, key)
        scores = lrp.matmul(query, key.transpose(-2, -1), False, 0.0)
        mixed = lrp.matmul(lrp.softmax(scores, -1), value, False, 0.0).transpose(1, 2).flatten(2)
        x = lrp.add2(x, affine(mixed, block.attn.proj), False, 0.0)
        hidden = passed_on(nn.functional.gelu, affine(norm(x, block.norm2), block.mlp.fc1))
        x = lrp.add2(x, affine(hidden, block.mlp.fc2), False, 0.0)
    logits = affine(norm(x, model.norm)[:, 0], model.head)
    torch.testing.assert_close(logits, nano.vit.score(images), rtol=1e-9, atol=1e-9)
    relevance = torch.zeros_like(logits).scatter(1, classes[:, None], logits.gather(1, classes[:, None])).detach()
    (of_patches,) = torch.autograd.grad(logits, patches, relevance)
    theirs = nn.functional.fold(of_patches.transpose(1, 2), images.shape[-2:], 16, stride=16).sum(1)
    assert agreement(load_method("attnlrp")(nano.vit, images, classes).maps, theirs) < BOUND


@pytest.mark.parametrize("gamma", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Linear(6, 5, bias=False), nn.Conv2d(3, 4, 2, 2)], ids=str)
def test_the_gamma_rule_is_zennits(layer, gamma):
    rules = library("zennit.rules")
    torch.manual_seed(0)
    layer.reset_parameters()  # seeded
    layer = layer.double()
    x = torch.randn(8, 6, dtype=torch.float64) if isinstance(layer, nn.Linear) else torch.randn(8, 3, 4, 4).double()
    x.requires_grad_()
    out = layer(x)
    start = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(_gamma(gamma)(layer, (x,), out.detach()), x, start)
    handles = rules.Gamma(gamma, stabilizer=1e-15).register(layer)
    out = layer(x)
    (theirs,) = torch.autograd.grad(out, x, start * out.detach())  # where gradients are relevance
    handles.remove()
    assert agreement(x * gradient, theirs) < BOUND
