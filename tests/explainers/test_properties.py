"""What must hold for any ViT: hand-computed rollouts, DAP's algebra, batches, options, bad input."""

import pytest
import timm
import torch
from helpers import EXPLAINERS, PIXELS, quick

from dap_bench import UserError, ViT, load_method
from dap_bench.explainers.ar import discard, residual, rollout, row_norm
from dap_bench.explainers.base import Explanation, min_max
from dap_bench.isolation import content, explained
from dap_bench.vit import Layout

METHODS = EXPLAINERS


@pytest.fixture(scope="module")
def toy():
    torch.manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=(64, 48), embed_dim=24, depth=3, num_heads=3, num_classes=7
    )
    with torch.no_grad():  # sharper than a fresh model: attention that really differs between tokens
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)
    vit = ViT(model.double())
    return vit, torch.randn(4, 3, 64, 48, dtype=torch.float64), torch.tensor([0, 6, 3, 3])


def test_rollout_of_two_layers_by_hand():
    """Three tokens, the first the class token. T = RowNorm(A + I) = (A + I)/2, R = T2 T1, map = R[0, 1:]."""
    first = torch.tensor([[[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    second = torch.tensor([[[0.6, 0.4, 0.0], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    # T1 = [[.6, .15, .25], [0, 1, 0], [.25, .25, .5]], T2[0] = [.8, .2, 0]
    # R[0] = .8 T1[0] + .2 T1[1] = [.48, .12 + .2, .2]
    transitions = [row_norm(residual(a)) for a in (first, second)]
    maps, layers, single = rollout(transitions, True, Layout(1, 2))
    torch.testing.assert_close(single, torch.tensor([[[0.15, 0.25], [0.2, 0.0]]], dtype=torch.float64))
    torch.testing.assert_close(maps, torch.tensor([[0.32, 0.20]], dtype=torch.float64))
    torch.testing.assert_close(layers, torch.tensor([[[0.15, 0.25], [0.32, 0.20]]], dtype=torch.float64))
    torch.testing.assert_close(rollout(transitions, False, Layout(1, 2))[0], maps)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_gives_the_maps_of_its_images_one_by_one(toy, method):
    vit, images, classes = toy
    explain = quick(method)
    whole = explain(vit, images, classes, layers=True)
    for at in range(len(images)):
        one = explain(vit, images[at : at + 1], classes[at : at + 1], layers=True)
        torch.testing.assert_close(one.maps[0], whole.maps[at], rtol=1e-9, atol=1e-12)
        if method in PIXELS:
            assert one.layers is None
            continue
        torch.testing.assert_close(one.layers[0], whole.layers[at], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_gives_the_maps_of_a_plain_call(toy, method):
    """Ids and masks are given to those that name them: no option of another kind may have these names."""
    vit, images, classes = toy
    ids = [content(image) for image in images]
    masks = [torch.zeros(64, 48, dtype=torch.bool)] * 4
    run = explained(quick(method), vit, images, classes, ids, masks=masks)
    torch.testing.assert_close(run.maps, quick(method)(vit, images, classes).maps)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(PIXELS)))
def test_layer_maps_do_not_change_the_map(toy, method):
    vit, images, classes = toy
    explain = quick(method)
    out = explain(vit, images, classes, layers=True)
    assert out.maps.shape == (4, 12)
    assert out.layers.shape == (4, 3, 12)
    torch.testing.assert_close(explain(vit, images, classes).maps, out.maps)
    assert explain(vit, images, classes).layers is None
    if method != "dap_final":  # whose prior comes after the last layer
        torch.testing.assert_close(out.layers[:, -1], out.maps)
    if method in ("agcam", "legrad"):
        torch.testing.assert_close(out.single.sum(1), out.maps)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ar", "dap_uniform", "raw_attention"}))
def test_class_specific_methods_see_the_class(toy, method):
    vit, images, classes = toy
    explain = quick(method)
    assert not torch.allclose(explain(vit, images, classes).maps, explain(vit, images, (classes + 1) % 7).maps)


@pytest.mark.parametrize("method", ["ar", "raw_attention"])
def test_attention_alone_does_not_see_the_class(toy, method):
    vit, images, classes = toy
    explain = load_method(method)
    assert torch.equal(explain(vit, images, classes).maps, explain(vit, images, 6 - classes).maps)


# ---------------------------------------------------------------------- DAP


def written_out(vit, images, classes, variant):
    """DAP as its formulas are printed, one image at a time, full matrices, pairwise rows of 0/0 filled with 0."""
    maps, layers = [], []
    for image, label in zip(images[:, None], classes[:, None], strict=True):
        attention = [a[0].mean(0) for a in vit.trace(image).attention]
        s = load_method("gradcam")(vit, image, label).maps[0]
        d = torch.cat([torch.ones(1).double(), (s - s.min()) / (s.max() - s.min())])
        product, rows = torch.eye(len(d)).double(), []
        for a in attention:
            step = a + torch.eye(len(d))
            step = {"pairwise": step * torch.outer(d, d), "zero_rows": step * d[:, None]}.get(variant, step)
            step = (step / step.sum(1, keepdim=True)).nan_to_num(0)
            product = (step * d[:, None] if variant == "no_renorm" else step) @ product
            rows.append(product[0, 1:])
        maps.append(product[0, 1:] * (d[1:] if variant == "final" else 1))
        layers.append(torch.stack(rows))
    return torch.stack(maps), torch.stack(layers)


@pytest.mark.parametrize(
    ("method", "options", "variant"),
    [
        ("dap", {}, "pairwise"),
        ("dap_source", {}, "pairwise"),
        ("dap_target", {}, "no_renorm"),
        ("dap_target", {"target": "zero_rows"}, "zero_rows"),
        ("dap_final", {}, "final"),
        ("dap_uniform", {}, "uniform"),
    ],
)
def test_dap_is_its_formulas(toy, method, options, variant):
    maps, layers = written_out(*toy, variant)
    out = load_method(method, **options)(*toy, layers=True)
    torch.testing.assert_close(out.maps, maps)
    torch.testing.assert_close(out.layers, layers)
    assert not out.fallback.any()


def test_dap_with_a_uniform_prior_is_rollout(toy):
    flat = lambda vit, images, classes: Explanation(torch.full((len(images), 12), 0.3).double(), vit.grid)  # noqa: E731
    out = load_method("dap", prior=flat)(*toy)
    torch.testing.assert_close(out.maps, load_method("ar")(*toy).maps)
    assert out.fallback.all()


def test_dap_uniform_is_rollout(toy):
    torch.testing.assert_close(load_method("dap_uniform")(*toy).maps, load_method("ar")(*toy).maps)


def test_dap_is_zero_exactly_where_its_prior_is(toy):
    prior = load_method("gradcam")(*toy).maps
    assert torch.equal(load_method("dap")(*toy).maps == 0, prior == prior.amin(1, keepdim=True))


@pytest.mark.parametrize("prior", ["legrad", "agcam", "ar", "cdam"])
def test_dap_takes_any_explainer_as_its_prior(toy, prior):
    vit, images, classes = toy
    d = torch.cat([torch.ones(4, 1).double(), min_max(load_method(prior)(*toy).maps)], 1)
    transitions = [row_norm(residual(a.mean(1)) * d[:, None]) for a in vit.trace(images).attention]
    torch.testing.assert_close(load_method("dap", prior=prior)(*toy).maps, rollout(transitions, False, vit.layout)[0])


# ---------------------------------------------------------------------- options of the others


def test_gmar_is_its_formulas(toy):
    vit, images, classes = toy
    (gradient,) = vit.trace(images, grad=["norm1"], start=-1).gradients(classes, "norm1", [-1])
    for norm, power in (("l1", 1), ("l2", 2)):
        for at in range(len(images)):
            groups = gradient[at, 1:].split(24 // 3, dim=1)
            n = torch.stack([group.abs().pow(power).sum() ** (1 / power) for group in groups])
            w = n / n.sum()
            product = torch.eye(13).double()
            for a in vit.trace(images).attention:
                step = sum(w[h] * a[at, h] for h in range(3)) + torch.eye(13)
                product = step / step.sum(1, keepdim=True) @ product
            torch.testing.assert_close(load_method("gmar", norm=norm)(*toy).maps[at], product[0, 1:])


def test_gmar_weights_per_layer(toy):
    vit, images, classes = toy
    gradients = vit.trace(images, grad=["attention"]).gradients(classes, "attention")
    transitions = []
    for a, g in zip(vit.trace(images).attention, gradients, strict=True):
        size = g.abs().sum((2, 3))
        weights = size / size.sum(1, keepdim=True)
        transitions.append(row_norm(residual((a * weights[:, :, None, None]).sum(1))))
    torch.testing.assert_close(
        load_method("gmar", source="attention")(*toy).maps, rollout(transitions, False, vit.layout)[0]
    )


def test_gmar_without_a_gradient_weighs_heads_equally(toy):
    vit, images, classes = toy
    weight = vit.model.head.weight.data.clone()
    try:
        vit.model.head.weight.data.zero_()
        torch.testing.assert_close(load_method("gmar")(*toy).maps, load_method("ar")(*toy).maps)
    finally:
        vit.model.head.weight.data.copy_(weight)


def test_attr_with_the_final_logit_is_its_formula(toy):
    vit, images, classes = toy
    trace = vit.trace(images, grad=["attention"])
    for fusion, reduce in (("max", lambda w: w.amax(1)), ("mean", lambda w: w.mean(1))):
        gradients = trace.gradients(classes, "attention")
        weights = [reduce(0.5 * a * g) for a, g in zip(trace.attention, gradients, strict=True)]
        expected = rollout([row_norm(residual(w)) for w in weights], False, vit.layout)[0]
        torch.testing.assert_close(load_method("attr", readout="final", head_fusion=fusion)(*toy).maps, expected)


def test_attrs_path_integral_is_complete(toy):
    """Attention times its path gradient sums to what the attention does to the logit: the axiom of completeness."""
    vit, images, classes = toy
    trace = vit.trace(images)
    gradients = trace.path_gradients(classes, steps=1001)
    for layer, block in enumerate(vit.blocks):
        without = trace.tokens[layer][:, 0] + block.ls1(block.attn.proj.bias)
        without = vit.head(without + block.ls2(block.mlp(block.norm2(without))))
        gain = vit.head(trace.tokens[layer + 1][:, 0]) - without
        found = (trace.attention[layer] * gradients[layer]).sum((1, 2, 3))
        torch.testing.assert_close(found, gain.gather(1, classes[:, None])[:, 0], rtol=1e-3, atol=1e-5)
    weights = [(a * g).amax(1) for a, g in zip(trace.attention, trace.path_gradients(classes, 20), strict=True)]
    expected = rollout([row_norm(residual(w)) for w in weights], False, vit.layout)[0]
    torch.testing.assert_close(load_method("attr", path=True)(*toy).maps, expected)
    with pytest.raises(UserError, match="readout=layer"):
        load_method("attr", path=True, readout="final")(*toy)


def test_attr_closed_form_is_the_full_product(toy):
    vit, images, classes = toy
    trace = vit.trace(images, grad=["attention"])
    for clamp in (False, True):
        weights = [
            (0.5 * a * g).amax(1)
            for a, g in zip(trace.attention, trace.layer_gradients(classes, "attention"), strict=True)
        ]
        weights = [w.clamp(min=0) if clamp else w for w in weights]
        expected, layers, single = rollout([row_norm(residual(w)) for w in weights], True, vit.layout)
        out = load_method("attr", clamp=clamp)(*toy, layers=True)
        torch.testing.assert_close(out.maps, expected)
        torch.testing.assert_close(out.layers, layers)
        torch.testing.assert_close(out.single, single)
        assert out.signed == (not clamp)


def test_attr_with_some_heads(toy):
    assert not torch.allclose(load_method("attr", heads=2)(*toy).maps, load_method("attr")(*toy).maps)
    torch.testing.assert_close(load_method("attr", heads=3)(*toy).maps, load_method("attr")(*toy).maps)


def test_legrad_with_the_last_layers(toy):
    single = load_method("legrad")(*toy, layers=True).single
    torch.testing.assert_close(load_method("legrad", last_layers=2)(*toy).maps, single[:, 1:].sum(1))


def test_legrad_with_the_final_logit(toy):
    vit, images, classes = toy
    gradients = vit.trace(images, grad=["attention"]).gradients(classes, "attention")
    expected = sum(g.clamp(min=0).mean((1, 2))[:, 1:] for g in gradients)
    torch.testing.assert_close(load_method("legrad", readout="final")(*toy).maps, expected)


def test_agcam_without_detach_is_another_map(toy):
    assert not torch.allclose(load_method("agcam", detach=False)(*toy).maps, load_method("agcam")(*toy).maps)


def test_cdam_variants(toy):
    signed = load_method("cdam", negatives="keep")(*toy)
    assert signed.signed
    assert signed.upsample == "nearest"
    torch.testing.assert_close(load_method("cdam")(*toy).maps, signed.maps.clamp(min=0))
    torch.testing.assert_close(load_method("cdam", negatives="abs")(*toy).maps, signed.maps.abs())
    smooth = load_method("cdam", variant="smooth", negatives="keep", steps=3, noise=0.0)(*toy)
    torch.testing.assert_close(smooth.maps, signed.maps)
    assert not torch.allclose(load_method("cdam", variant="smooth", steps=3, negatives="keep")(*toy).maps, signed.maps)


def test_cdam_integrated_is_the_mean_over_scaled_inputs(toy):
    vit, images, classes = toy
    tokens = vit.trace(images).tokens[-2]
    expected = 0
    for k in (1, 2, 3):
        block = vit.blocks[-1]
        normed = block.norm1(k / 4 * tokens).detach().requires_grad_()
        middle = k / 4 * tokens + block.attn(normed)
        logits = vit.head((middle + block.mlp(block.norm2(middle)))[:, 0])
        (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), normed)
        expected = expected + (normed * gradient).sum(-1)[:, 1:].detach() / 3
    out = load_method("cdam", variant="integrated", steps=4, negatives="keep")(*toy)
    torch.testing.assert_close(out.maps, expected)


def test_gradcam_averages_over_patches_or_all_tokens(toy):
    vit, images, classes = toy
    (gradient,) = vit.trace(images, grad=["norm1"]).gradients(classes, "norm1", [1])
    tokens = vit.trace(images).norm1[1][:, 1:]
    expected = (gradient.mean(1, keepdim=True) * tokens).sum(-1)
    torch.testing.assert_close(load_method("gradcam", tokens="all", layer=1, relu=False)(*toy).maps, expected)


def test_discard_keeps_the_largest_and_the_class_token():
    attention = torch.tensor([[[0.0, 0.4], [0.3, 0.1]]])
    assert torch.equal(discard(attention, 0.5, Layout(1, 1)), torch.tensor([[[0.0, 0.4], [0.3, 0.0]]]))
    assert torch.equal(discard(attention, 0.0, Layout(1, 1)), attention)


def test_heatmaps():
    out = Explanation(torch.tensor([[0.0, 1.0, 2.0, 4.0], [5.0, 5.0, 5.0, 5.0]]), (2, 2))
    near = out.heatmaps((4, 4), "nearest")
    assert torch.equal(near[0, ::3, ::3], torch.tensor([[0.0, 0.25], [0.5, 1.0]]))
    smooth = out.heatmaps((4, 4))[0]
    # bilinear without aligned corners: corners keep their value, the middle is mixed 9:3:3:1
    assert torch.equal(smooth[[0, 0, 3, 3], [0, 3, 0, 3]], torch.tensor([0.0, 0.25, 0.5, 1.0]))
    assert smooth[1, 1].item() == pytest.approx((9 * 0 + 3 * 1 + 3 * 2 + 1 * 4) / 16 / 4)
    assert torch.equal(near[1], torch.zeros(4, 4))  # a constant map has nothing to show


def test_heatmaps_are_as_symmetric_as_their_maps_to_the_last_bit():
    """In single precision rounding would break the ties, another way on another machine."""
    maps = torch.zeros(3, 3)
    maps[1, 1], maps[0, 0], maps[2, 2] = 0.7, 0.3, 0.1
    heatmap = Explanation(maps.flatten()[None], (3, 3)).heatmaps((48, 48))[0]
    assert torch.equal(heatmap, heatmap.T)
    (alone,) = Explanation((maps == 0.7).flatten()[None] * 0.7, (3, 3)).heatmaps((48, 48))
    assert torch.equal(alone, alone.flip(0))
    assert torch.equal(alone, alone.T)


# ---------------------------------------------------------------------- other ViTs, bad input


@pytest.mark.parametrize(
    ("name", "changes", "patches"),
    [
        pytest.param(  # no class position
            "deit3_small_patch16_224",
            {"embed_dim": 48, "num_heads": 3, "img_size": 64},
            16,
            marks=pytest.mark.slow,
        ),
        ("vit_tiny_patch16_384", {"img_size": (96, 64)}, 24),  # not square
        pytest.param(  # norm_pre
            "vit_base_patch16_clip_224",
            {"embed_dim": 48, "num_heads": 3, "img_size": 64},
            16,
            marks=pytest.mark.slow,
        ),
        pytest.param(  # DINO's size
            "vit_small_patch8_224",
            {"img_size": 64, "embed_dim": 48, "num_heads": 3},
            64,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_families(name, changes, patches):
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, depth=2, num_classes=5, **changes)
    vit = ViT(model.double())
    assert vit.patches == patches
    images, classes = torch.randn(2, 3, *vit.image_size, dtype=torch.float64), torch.tensor([1, 4])
    torch.testing.assert_close(vit.score(images), model.eval()(images).detach())
    for method in METHODS:
        out = quick(method)(vit, images, classes)
        assert out.maps.shape == (2, vit.image_size[0] * vit.image_size[1] if method in PIXELS else patches)
        assert out.maps.isfinite().all()
        alone = quick(method)(vit, images[1:], classes[1:])
        torch.testing.assert_close(alone.maps[0], out.maps[1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (torch.tensor([0, 1, 2, 7]), "class 7 is out of range: the model has classes 0 to 6"),
        (torch.tensor([-1, 1, 2, 3]), "class -1 is out of range"),
        (torch.tensor([0]), "4 images need as many classes"),
    ],
)
def test_bad_classes(toy, method, classes, words):
    with pytest.raises(UserError, match=words):
        quick(method)(*toy[:2], classes)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("gradcam", {"layer": 3}),
        ("cdam", {"layer": -4}),
        ("ar", {"start_layer": 3}),
        ("chefer", {"start_layer": 9}),
        ("raw_attention", {"layer": 3}),
        ("generic_attention", {"start_layer": 3}),
        ("beyond_intuition", {"start_layer": -4}),
    ],
)
def test_a_layer_that_does_not_exist(toy, method, option):
    with pytest.raises(UserError, match="the model has blocks 0 to 2"):
        load_method(method, **option)(*toy)


def test_gradcam_after_the_last_attention_is_refused(toy):
    with pytest.raises(UserError, match="after the last attention only the class token has a gradient"):
        load_method("gradcam", at="output")(*toy)


def test_gradcam_at_a_blocks_output(toy):
    vit, images, classes = toy
    (gradient,) = vit.trace(images, grad=["tokens"]).gradients(classes, "tokens", [2])
    expected = (gradient[:, 1:].mean(1, keepdim=True) * vit.trace(images).tokens[2][:, 1:]).sum(-1)
    out = load_method("gradcam", at="output", layer=1, relu=False)(*toy, layers=True)
    torch.testing.assert_close(out.maps, expected)
    torch.testing.assert_close(out.layers[:, 1], expected)


@pytest.mark.parametrize("method", METHODS)
def test_images_that_are_not_finite(toy, method):
    vit, images, classes = toy
    images = images.clone()
    images[2, 0, 5, 5] = float("nan")
    with pytest.raises(UserError, match="image 2 of the batch holds NaN or infinity"):
        quick(method)(vit, images, classes)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("attr", {"readout": "x"}),
        ("legrad", {"readout": "x"}),
        ("gmar", {"norm": "l3"}),
        ("cdam", {"negatives": "x"}),
        ("chefer", {"relevance": "x"}),
        ("dap", {"variant": "x"}),
        ("ar", {"head_fusion": "x"}),
        ("gradcam", {"tokens": "x"}),
        ("gradcam", {"at": "x"}),
        ("chefer", {"dtype": "x"}),
        ("raw_attention", {"head_fusion": "x"}),
        ("beyond_intuition", {"perception": "x"}),
        ("input_x_gradient", {"channels": "x"}),
        ("integrated_gradients", {"channels": "x"}),
        ("integrated_gradients", {"baseline": "x"}),
        ("smoothgrad", {"channels": "x"}),
        ("attnlrp", {"channels": "x"}),
        ("attnlrp", {"attention": "x"}),
    ],
)
def test_an_option_with_a_wrong_value(toy, method, option):
    with pytest.raises(UserError, match="not x|not l3"):
        load_method(method, **option)(*toy)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("beyond_intuition", {"steps": 0}),
        ("integrated_gradients", {"steps": 2.5}),
        ("integrated_gradients", {"steps": 100_000}),
        ("smoothgrad", {"samples": 0}),
        ("smoothgrad", {"seed": -1}),
        ("smoothgrad", {"noise": -0.1}),
        ("smoothgrad", {"noise": "x"}),
        ("attnlrp", {"gamma": True}),
        ("attnlrp", {"gamma": -1}),
        ("attnlrp", {"gamma_patches": float("nan")}),
        ("rise", {"samples": 0}),
        ("rise", {"cells": True}),
        ("rise", {"cells": 49}),
        ("rise", {"probability": 0}),
        ("rise", {"probability": 1.5}),
        ("rise", {"seed": -1}),
    ],
)
def test_a_number_out_of_range(toy, method, option):
    with pytest.raises(UserError, match=f"{next(iter(option))}=.* must be"):
        load_method(method, **option)(*toy)


@pytest.mark.parametrize("method", METHODS)
def test_images_of_another_size(toy, method):
    vit, images, classes = toy
    with pytest.raises(UserError, match=r"images have shape \[4, 3, 48, 64\]"):
        quick(method)(vit, images.transpose(2, 3), classes)


def test_an_option_that_does_not_exist():
    with pytest.raises(UserError, match="method 'gradcam' has no option 'rleu'; it has layer, at, relu, tokens"):
        load_method("gradcam", rleu=False)
