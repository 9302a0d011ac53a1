"""Raw attention, generic attention and Beyond Intuition: by hand, by their formulas and by their authors' numbers.

`tests/data/beyond_intuition.npz` holds what the authors' own code gave (github.com/jiaminchen-1031/transformerinterp,
commit a76854a, `generate_ours` as head and `generate_ours_c` as token, 20 steps, images one by one, in double precision
on the CPU) for the weights, images and classes of `nano.npz`. Their `start_layer` counts from 1: `_start2` is 3 there.
`_average` is their model with global pooling, which reads the mean of the patches through the same norm, with mae=True.
`scripts/golden.py` makes them again.
"""

import numpy as np
import pytest
import timm
import torch
from conftest import DATA
from layouts import SIZE, build

from dap_bench import ViT, load_method

EXPECTED = dict(np.load(DATA / "beyond_intuition.npz"))


@pytest.fixture(scope="module")
def averaging(nano):
    """The nano ViT whose head reads the mean of its patches."""
    model = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        embed_dim=48,
        depth=4,
        num_heads=4,
        num_classes=10,
        global_pool="avg",
    )
    weights = nano.vit.model.state_dict()
    model.load_state_dict({f"fc_{name}" if name.startswith("norm.") else name: w for name, w in weights.items()})
    return ViT(model.double().eval())


@pytest.mark.parametrize("name", EXPECTED)
def test_beyond_intuition_equals_the_original(nano, averaging, name):
    key, which = name.split("/")
    explain = load_method(
        "beyond_intuition", perception=key.split("_")[0], start_layer=2 if key.endswith("start2") else 0
    )
    vit = averaging if key.endswith("average") else nano.vit
    out = explain(vit, nano.images, nano.classes(which), layers=True)
    expected = torch.from_numpy(EXPECTED[name])
    torch.testing.assert_close(out.maps, expected, rtol=0, atol=1e-12 * expected.max().item())
    torch.testing.assert_close(out.layers[:, -1], out.maps)
    if key.endswith("start2"):
        assert not out.layers[:, :2].any()  # before it begins, every token has its content from itself


def test_beyond_intuition_in_single_precision(nano32):
    for perception in ("token", "head"):
        out = load_method("beyond_intuition", perception=perception)(nano32.vit, nano32.images, nano32.classes("pred"))
        expected = torch.from_numpy(EXPECTED[f"{perception}/pred"])
        assert ((out.maps - expected).abs().amax(1) / expected.amax(1)).max() < 1e-4
        assert out.maps.dtype == torch.float32


def test_beyond_intuition_keeps_no_trace_of_its_steps(nano):
    with nano.vit.shared_traces():
        load_method("beyond_intuition")(nano.vit, nano.images, nano.classes("pred"))
        assert len(nano.vit._memo) == 1  # of the images themselves


def test_beyond_intuition_knows_layer_scale():
    """Scaling a branch is the same as scaling its projection."""
    torch.manual_seed(3)
    scaled = ViT(build("layer scale, qk-norm").eval()).double()
    merged = ViT(build("layer scale, qk-norm").eval()).double()
    with torch.no_grad():
        for block in merged.blocks:
            block.attn.proj.weight *= block.ls1.gamma[:, None]
            block.attn.proj.bias *= block.ls1.gamma
            block.ls1.gamma.fill_(1)
    images, classes = torch.randn(2, 3, *SIZE, dtype=torch.float64), torch.tensor([1, 5])
    explain = load_method("beyond_intuition", steps=3)
    torch.testing.assert_close(explain(scaled, images, classes).maps, explain(merged, images, classes).maps)


@pytest.mark.parametrize("which", ["pred", "alt"])
def test_generic_attention_equals_the_original(nano, nano32, which):
    out = load_method("generic_attention")(nano.vit, nano.images, nano.classes(which))
    torch.testing.assert_close(out.maps, nano("chefer_attention", which), rtol=1e-6, atol=1e-9)
    single = load_method("generic_attention")(nano32.vit, nano32.images, nano32.classes(which)).maps
    assert single.dtype == torch.float32  # no double-precision copy: nothing is divided
    torch.testing.assert_close(single.double(), out.maps, rtol=1e-3, atol=1e-7)


def test_generic_attention_by_its_recursion():
    """R <- R + C R with full matrices, one image at a time, and the row of the class token."""
    vit = ViT(build("registers").eval()).double()
    torch.manual_seed(4)
    images, classes = torch.randn(2, 3, *SIZE, dtype=torch.float64), torch.tensor([6, 2])
    for at in range(2):
        trace = vit.trace(images[at : at + 1], grad=["attention"])
        relevance = torch.eye(17, dtype=torch.float64)
        gradients = trace.gradients(classes[at : at + 1], "attention")
        for attention, gradient in zip(trace.attention, gradients, strict=True):
            relevance = relevance + (attention * gradient)[0].clamp(min=0).mean(0) @ relevance
        out = load_method("generic_attention")(vit, images, classes)
        torch.testing.assert_close(out.maps[at], relevance[0, 5:])


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("plain", lambda a: a[:, 0, 1:]),
        ("registers", lambda a: a[:, 0, 5:]),
        ("distilled", lambda a: (a[:, 0, 2:] + a[:, 1, 2:]) / 2),
        ("average, registers", lambda a: a[:, 4:, 4:].mean(1)),
    ],
)
def test_raw_attention_is_a_row_of_the_last_attention(layout, row):
    vit = ViT(build(layout).eval()).double()
    torch.manual_seed(5)
    images, classes = torch.randn(2, 3, *SIZE, dtype=torch.float64), torch.tensor([0, 1])
    attention = vit.trace(images).attention
    out = load_method("raw_attention")(vit, images, classes, layers=True)
    torch.testing.assert_close(out.maps, row(attention[-1].mean(1)))
    torch.testing.assert_close(out.layers[:, 0], row(attention[0].mean(1)))
    largest = load_method("raw_attention", head_fusion="max", layer=1)(vit, images, classes)
    torch.testing.assert_close(largest.maps, row(attention[1].amax(1)))
