"""Every explainer against the numbers of its original public code, which scripts/golden.py makes again."""

import numpy as np
import pytest
import torch
from conftest import TAG, Golden

from dap_bench import load_method, load_vit
from dap_bench.explainers.gmar import head_weights

# golden array -> (method, options); *_layers are compared with the layer maps of the same call
ORIGINALS = {
    "ar": ("ar", {}),
    "attr": ("attr", {}),
    "chefer": ("chefer", {}),
    "chefer_start1": ("chefer", {"start_layer": 1}),
    "chefer_attention": ("chefer", {"relevance": "attention"}),
    "gradcam": ("gradcam", {}),
    "gradcam_signed": ("gradcam", {"relu": False}),
    "cdam_signed": ("cdam", {"negatives": "keep"}),
    "agcam": ("agcam", {}),
    "legrad_cls": ("legrad", {}),
    "legrad_mean": ("legrad", {"readout": "mean"}),
}
SINGLE_FLOAT = {"gradcam", "gradcam_signed", "cdam_signed", "agcam", "legrad_cls", "legrad_mean"}


def difference(ours, theirs, scale_free=False):
    """The largest difference of an image's map, relative to the largest value of that map."""
    ours, theirs = ours.flatten(1), theirs.flatten(1)
    if scale_free:
        ours, theirs = ours / ours.amax(1, keepdim=True), theirs / theirs.amax(1, keepdim=True)
    return ((ours - theirs).abs().amax(1) / theirs.abs().amax(1)).max().item()


@pytest.mark.parametrize("which", ["pred", "alt"])
@pytest.mark.parametrize("name", ORIGINALS)
def test_nano_equals_the_original(nano, name, which):
    method, options = ORIGINALS[name]
    out = load_method(method, **options)(nano.vit, nano.images, nano.classes(which), layers=True)
    assert difference(out.maps, nano(name, which), scale_free="legrad" in name) < 1e-5
    if f"{name}_layers/{which}" in nano.arrays:
        # of AGCAM and LeGrad the golden layers are the single ones, of the rollouts the accumulated ones
        layers = out.single if name in ("agcam", "legrad_cls") else out.layers
        assert difference(layers, nano(f"{name}_layers", which), scale_free="legrad" in name) < 1e-5


@pytest.mark.parametrize("name", ORIGINALS)
def test_nano_in_single_precision(nano32, name):
    method, options = ORIGINALS[name]
    exact = {"dtype": "float64"} if method == "chefer" else {}  # its rules are badly conditioned
    out = load_method(method, **options, **exact)(nano32.vit, nano32.images, nano32.classes("pred"))
    assert difference(out.maps, nano32(name, "pred").to(out.maps), scale_free="legrad" in name) < 1e-4
    assert not out.maps.requires_grad


def test_how_far_chefer_is_off_in_single_precision(nano32):
    out = load_method("chefer")(nano32.vit, nano32.images, nano32.classes("pred"))
    off = difference(out.maps, nano32("chefer", "pred").to(out.maps))
    assert 1e-5 < off < 0.1  # how far depends on the CPU; what follows is in conf/method/README.md


@pytest.mark.parametrize("which", ["pred", "alt"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_gmar_weights_equal_the_original(nano, norm, which):
    weights = head_weights(nano.vit, nano.images, nano.classes(which), "norm1_last", norm)
    assert len(weights) == nano.vit.depth
    for layer in weights:
        torch.testing.assert_close(layer, nano(f"gmar_weights_{norm}", which), rtol=1e-5, atol=0)


def test_logits_of_nano(nano):
    torch.testing.assert_close(nano.vit.score(nano.images), nano_logits(nano), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(nano.vit.trace(nano.images).logits, nano_logits(nano), rtol=1e-9, atol=1e-9)


def nano_logits(nano):
    return torch.from_numpy(nano.arrays["logits"])


@pytest.fixture(scope="module")
def real(assets):
    arrays = dict(np.load(assets / "golden" / "real.npz"))
    vit = load_vit("vit_t", device="cpu", checkpoint=str(assets / "weights" / f"{TAG}.safetensors"))
    vit.model.double()
    # normalised in single precision, as the originals were: Chefer's rules notice the difference
    images = (torch.from_numpy(arrays["pixels"]).float() / 255 - 0.5) / 0.5
    return Golden(arrays, vit, images.double())


@pytest.mark.parametrize("which", ["pred", "alt"])
@pytest.mark.parametrize("name", ORIGINALS)
def test_real_vit_equals_the_original(real, name, which):
    method, options = ORIGINALS[name]
    out = load_method(method, **options)(real.vit, real.images, real.classes(which))
    tolerance = 1e-4 if name in SINGLE_FLOAT else 1e-5
    assert difference(out.maps, real(name, which), scale_free="legrad" in name) < tolerance
