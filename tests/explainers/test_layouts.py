"""Every explainer on every layout of tokens: finite, the same in a batch, and nothing left behind on the model."""

from functools import partial

import pytest
import torch
from helpers import EXPLAINERS, PIXELS, quick
from layouts import LAYOUTS, SIZE, UNCOVERED, build

from dap_bench import UserError, ViT
from dap_bench.explainers.ar import residual, rollout, row_norm
from dap_bench.explainers.chefer import _head
from dap_bench.vit import Layout

METHODS = {name: quick(name) for name in EXPLAINERS}
VARIANTS = {
    "attr, path": partial(METHODS["attr"], path=True, steps=3),
    "attr, final": partial(METHODS["attr"], readout="final"),
    "legrad, mean": partial(METHODS["legrad"], readout="mean"),
    "cdam, smooth": partial(METHODS["cdam"], variant="smooth", steps=2),
    "chefer, attention": partial(METHODS["chefer"], relevance="attention"),
    "gradcam, all tokens": partial(METHODS["gradcam"], tokens="all"),
    "ar, discard": partial(METHODS["ar"], discard_ratio=0.5),
    "raw_attention, max": partial(METHODS["raw_attention"], head_fusion="max", layer=0),
    "beyond_intuition, head": partial(METHODS["beyond_intuition"], perception="head", start_layer=1),
    "attnlrp, cp": partial(METHODS["attnlrp"], attention="cp"),
    "attnlrp, gamma": partial(METHODS["attnlrp"], gamma=0.05, gamma_patches=0.25),
}
CLASSES = torch.tensor([0, 6, 3])


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request):
    torch.manual_seed(2)
    vit = ViT(build(request.param).eval()).double()
    return request.param, vit, torch.randn(3, 3, *SIZE, dtype=torch.float64)


def state(model):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    flags = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        hooks,
        flags,
        [b.attn.fused_attn for b in model.blocks],
    )


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_every_explainer_on_every_layout(case, method):
    name, vit, images = case
    explain = {**METHODS, **VARIANTS}[method]
    if method == "chefer" and name in UNCOVERED:
        with pytest.raises(UserError, match=f"{UNCOVERED[name]}.*use relevance=attention"):
            explain(vit, images, CLASSES)
        return
    if method == "attnlrp, gamma" and name in ("beit", "beit, shared", "eva, packed"):
        with pytest.raises(UserError, match="no rule for gamma where .* have biases of their own; use gamma=0"):
            explain(vit, images, CLASSES)
        return
    before = state(vit.model)
    pixels = method.split(",")[0] in PIXELS
    whole = explain(vit, images, CLASSES, layers=True)
    assert whole.grid == (SIZE if pixels else (4, 3))
    assert whole.maps.shape == (3, whole.grid[0] * whole.grid[1])
    assert whole.maps.isfinite().all()
    assert (whole.maps.amax(1) > whole.maps.amin(1)).all()
    one = explain(vit, images[1:2], CLASSES[1:2], layers=True)
    torch.testing.assert_close(one.maps[0], whole.maps[1], rtol=1e-6, atol=1e-12)
    if pixels:
        assert whole.layers is None
    else:
        assert whole.layers.shape == (3, 3, 12)
        assert whole.layers.isfinite().all()
        torch.testing.assert_close(one.layers[0], whole.layers[1], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(explain(vit, images, CLASSES).maps, whole.maps, rtol=1e-6, atol=1e-12)
    after = state(vit.model)
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    assert before[1:] == after[1:]


def test_gradients_equal_finite_differences(case):
    """d z_c / d T where it enters the last attention: rotations, biases and pools included."""
    name, vit, images = case
    (gradient,) = vit.trace(images, grad=["norm1"], start=-1).gradients(CLASSES, "norm1", [-1])
    direction, step = torch.randn_like(gradient), 1e-6

    def logit(scale):
        shift = lambda module, inputs: (inputs[0] + scale * direction,)  # noqa: E731
        where = vit.blocks[-1] if "norms after" in name else vit.blocks[-1].attn  # there it is the block's own input
        handle = where.register_forward_pre_hook(shift)
        logits = vit.model(images).gather(1, CLASSES[:, None])[:, 0]
        handle.remove()
        return logits.detach()

    quotient = (logit(step) - logit(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum((1, 2)), quotient, rtol=1e-5, atol=1e-8)


def test_chefers_relevance_enters_at_what_the_head_reads():
    """Each token has its part of the mean, and together they have what one token alone would have."""
    head, norm = torch.nn.Linear(4, 3).double(), torch.nn.Identity()
    head.weight.data.abs_()
    seed, read = torch.eye(3, dtype=torch.float64)[:2], torch.rand(2, 5, 4, dtype=torch.float64) + 0.1
    shares = _head(seed, read, norm, head)
    alone = _head(seed, read.mean(1, keepdim=True), norm, head)
    torch.testing.assert_close(shares.sum(1, keepdim=True), alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(shares / alone, read / read.sum(1, keepdim=True), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------- by hand

# four tokens, two layers; T = (A + I) / 2 because every row of A sums to 1
FIRST = torch.tensor(
    [[[0.2, 0.2, 0.2, 0.4], [0.0, 1.0, 0.0, 0.0], [0.4, 0.0, 0.6, 0.0], [0.0, 0.2, 0.8, 0.0]]], dtype=torch.float64
)
SECOND = torch.tensor(
    [[[0.4, 0.2, 0.4, 0.0], [0.0, 0.0, 0.0, 1.0], [0.2, 0.0, 0.0, 0.8], [0.0, 0.0, 0.4, 0.6]]], dtype=torch.float64
)
# T1 = [[.6, .1, .1, .2], [0, 1, 0, 0], [.2, 0, .8, 0], [0, .1, .4, .5]]
# T2 = [[.7, .1, .2, 0], [0, .5, 0, .5], [.1, 0, .5, .4], [0, 0, .2, .8]]


@pytest.mark.parametrize(
    ("layout", "single", "maps"),
    [
        # a class token, one register, two patches: T2[0] T1 = .7 T1[0] + .1 T1[1] + .2 T1[2] = [.46, .17, .23, .14]
        (Layout(2, 2, "class token"), [[0.1, 0.2], [0.2, 0.0]], [0.23, 0.14]),
        # no class token, four patches: mean row of T2 = [.2, .15, .225, .425]; times T1 =
        # [.12 + .045, .02 + .15 + .0425, .02 + .18 + .17, .04 + .2125]
        (
            Layout(0, 4, "mean of patches"),
            [[0.2, 0.3, 0.325, 0.175], [0.2, 0.15, 0.225, 0.425]],
            [0.165, 0.2125, 0.37, 0.2525],
        ),
        # one register, three patches: mean of rows 1 to 3 of T2 = [1/30, 1/6, 7/30, 17/30]; times T1, over patches:
        # [.1/30 + 5/30 + 1.7/30, .1/30 + 5.6/30 + 6.8/30, .2/30 + 8.5/30]
        (
            Layout(1, 3, "mean of patches"),
            [[1.1 / 3, 1.2 / 3, 0.5 / 3], [0.5 / 3, 0.7 / 3, 1.7 / 3]],
            [6.8 / 30, 12.5 / 30, 8.7 / 30],
        ),
        # class and distillation token: mean of rows 0 and 1 of T2 = [.35, .3, .1, .25]; times T1 over two patches:
        # [.035 + .08 + .1, .07 + .125]
        (Layout(2, 2, "class and distillation token"), [[0.05, 0.1], [0.1, 0.25]], [0.215, 0.195]),
    ],
    ids=["registers", "average", "average, registers", "distilled"],
)
def test_rollout_of_two_layers_by_hand(layout, single, maps):
    transitions = [row_norm(residual(a)) for a in (FIRST, SECOND)]
    found, layers, each = rollout(transitions, True, layout)
    torch.testing.assert_close(each, torch.tensor([single], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([maps], dtype=torch.float64))
    torch.testing.assert_close(layers[:, 0], each[:, 0])
    torch.testing.assert_close(rollout(transitions, False, layout)[0], found)


@pytest.mark.parametrize("name", ["registers", "average", "average, registers", "distilled", "average of all"])
def test_rollout_of_a_model_by_its_definition(name):
    """R written out with full matrices, and the row picked from it by hand."""
    vit = ViT(build(name)).double()
    images = torch.randn(2, 3, *SIZE, dtype=torch.float64)
    product = torch.eye(vit.layout.prefix + 12, dtype=torch.float64)
    for a in vit.trace(images).attention:
        step = a.mean(1) + torch.eye(a.shape[-1])
        product = step / step.sum(-1, keepdim=True) @ product
    rows = {
        "registers": product[:, 0],
        "average": product.mean(1),
        "average, registers": product[:, 4:].mean(1),
        "distilled": (product[:, 0] + product[:, 1]) / 2,
        "average of all": product.mean(1),
    }
    torch.testing.assert_close(METHODS["ar"](vit, images, CLASSES[:2]).maps, rows[name][:, -12:])


def test_attr_with_registers_is_the_full_product():
    """The recursion over the class token's row counts registers in the row's sum, and shows none of them."""
    vit = ViT(build("registers")).double()
    images = torch.randn(3, 3, *SIZE, dtype=torch.float64)
    trace = vit.trace(images, grad=["attention"])
    gradients = trace.layer_gradients(CLASSES, "attention")
    weights = [(0.5 * a * g).amax(1) for a, g in zip(trace.attention, gradients, strict=True)]
    expected, layers, single = rollout([row_norm(residual(w)) for w in weights], True, vit.layout)
    out = METHODS["attr"](vit, images, CLASSES, layers=True)
    torch.testing.assert_close(out.maps, expected)
    torch.testing.assert_close(out.layers, layers)
    torch.testing.assert_close(out.single, single)


def test_dap_gives_every_prefix_token_the_prior_one():
    vit = ViT(build("average, registers")).double()
    images = torch.randn(3, 3, *SIZE, dtype=torch.float64)
    scores = METHODS["gradcam"](vit, images, CLASSES).maps
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    d = torch.cat([torch.ones(3, 4), (scores - low) / (high - low)], 1)
    steps = [row_norm(residual(a.mean(1)) * d[:, None]) for a in vit.trace(images).attention]
    product = steps[2] @ steps[1] @ steps[0]
    torch.testing.assert_close(METHODS["dap"](vit, images, CLASSES).maps, product[:, 4:, 4:].mean(1))


def test_gradcam_after_the_last_block_is_cam_where_patches_are_averaged():
    """With the mean of patches read by norm and head, the gradient is the same at every patch."""
    vit = ViT(build("average")).double()
    images = torch.randn(3, 3, *SIZE, dtype=torch.float64)
    trace = vit.trace(images, grad=["tokens"], start=-1)
    (gradient,) = trace.gradients(CLASSES, "tokens", [-1])
    torch.testing.assert_close(gradient, gradient[:, :1].expand_as(gradient))
    out = METHODS["gradcam"](vit, images, CLASSES, at="output", relu=False)
    torch.testing.assert_close(out.maps, (gradient * trace.tokens[-1]).sum(-1))
    for name in ("registers", "distilled"):
        with pytest.raises(UserError, match="has no gradient on any patch"):
            METHODS["gradcam"](ViT(build(name)).double(), images, CLASSES, at="output")
