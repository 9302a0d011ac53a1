"""A look inside must leave no trace on the model, and cost no more forward passes than needed."""

import pytest
import timm
import torch

from dap_bench import UserError, ViT, load_method, load_metrics, load_vit
from dap_bench.evaluation import Evaluation, Loaded
from dap_bench.report.layouts import paper_methods

SMALL = {"pretrained": False, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}


def small(name="vit_tiny_patch16_224", **changes):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, "img_size": 64, **changes})


def snapshot(model):
    """Everything that explaining could leave behind."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    return state, flags, [m.training for m in model.modules()], [b.attn.fused_attn for b in model.blocks], hooks


def assert_same(before, after):
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", paper_methods())
def test_the_model_is_unchanged(method, training):
    model = small().train(training)
    model.blocks[0].attn.fused_attn = False  # a mixed model must come back mixed
    model.head.bias.requires_grad_(False)
    vit, images = ViT(model), torch.randn(2, 3, 64, 64)
    before = snapshot(model)
    load_method(method)(vit, images, torch.tensor([1, 2]), layers=True)
    vit.score(images)
    assert_same(before, snapshot(model))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("path", ["trace", "score"])
def test_the_model_is_unchanged_after_an_exception(path):
    model = small().train()
    vit, before = ViT(model), snapshot(model)
    broken = model.blocks[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        getattr(vit, path)(torch.randn(1, 3, 64, 64))
    broken.remove()
    assert_same(before, snapshot(model))


def test_frozen_and_learning_models_give_the_same_maps():
    images, classes = torch.randn(2, 3, 64, 64), torch.tensor([0, 3])
    maps = [load_method("dap")(ViT(small().requires_grad_(on)), images, classes).maps for on in (True, False)]
    assert torch.equal(*maps)
    assert not maps[0].requires_grad


def test_gradients_equal_finite_differences():
    """d z_c / d T at the last norm1, against a difference quotient made by shifting that tensor."""
    model = small().double().eval()
    vit, images, classes = ViT(model), torch.randn(2, 3, 64, 64).double(), torch.tensor([1, 4])
    (gradient,) = vit.trace(images, grad=["norm1"], start=-1).gradients(classes, "norm1", [-1])
    direction, step = torch.randn_like(gradient), 1e-6

    def logit(scale):
        handle = model.blocks[-1].norm1.register_forward_hook(lambda m, i, out: out + scale * direction)
        logits = vit.score(images).gather(1, classes[:, None])[:, 0]
        handle.remove()
        return logits

    quotient = (logit(step) - logit(-step)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum((1, 2)), quotient, rtol=1e-6, atol=1e-9)


def test_one_forward_pass_serves_prior_attention_and_both_classes(monkeypatch):
    model = small()
    vit, images = ViT(model), torch.randn(2, 3, 64, 64)
    passes = []
    forward = model.forward_features
    monkeypatch.setattr(model, "forward_features", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])
    explain = load_method("dap")
    with vit.shared_traces():
        explain(vit, images, torch.tensor([0, 1]))
        explain(vit, images, torch.tensor([2, 3]))
    assert len(passes) == 1
    explain(vit, images, torch.tensor([0, 1]))
    assert len(passes) == 2  # nothing is kept beyond the block
    load_method("gmar")(vit, images, torch.tensor([0, 1]))
    assert len(passes) == 3


def test_a_trace_is_shared_by_content():
    """Not by which tensor it is: a caller may write into the images, or have another copy of the same ones."""
    vit, images, passes = ViT(small()), torch.randn(2, 3, 64, 64), []
    vit.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with vit.shared_traces():
        first = vit.trace(images)
        assert vit.trace(images.clone()) is first
        assert len(passes) == 1
        images[0, 0, 0, 0] += 1
        changed = vit.trace(images)
        assert changed is not first
        assert not torch.equal(changed.logits, first.logits)
        assert vit.trace(images[:1]) is not changed
        assert len(passes) == 3
    with vit.shared_traces():
        assert vit.trace(images) is not changed


def test_a_trace_serves_every_gradient_after_its_beginning():
    """In the order of the forward pass: a block's tokens, its norm1, its attention; then the next block's."""
    vit, images, classes = ViT(small()).double(), torch.randn(2, 3, 64, 64, dtype=torch.float64), torch.tensor([0, 3])
    places = [(kind, layer) for layer in range(2) for kind in ("tokens", "norm1", "attention")]
    for at, (kind, layer) in enumerate(places):
        for number, (other, later) in enumerate(places):
            with vit.shared_traces():
                first = vit.trace(images, grad=[kind], start=layer)
                second = vit.trace(images, grad=[other], start=later)
            assert (second is first) == (number >= at), ((kind, layer), (other, later))
            own = vit.trace(images, grad=[other], start=later).gradients(classes, other, [later])
            assert torch.equal(second.gradients(classes, other, [later])[0], own[0])
    with vit.shared_traces():
        cut = vit.trace(images, grad=["attention"], detach_attention=True)
        assert vit.trace(images, grad=["attention"]) is not cut
        assert vit.trace(images) is cut


def test_one_backward_pass_serves_all_that_come_after_its_beginning(monkeypatch):
    vit, classes = ViT(small(depth=3)).double(), torch.tensor([0, 3])
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    passes, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (passes.append(1), grad(*a, **k))[1])
    trace = vit.trace(images, grad=["tokens"])
    fresh = vit.trace(images, grad=["tokens"])
    late = trace.gradients(classes, "norm1", [-1])
    assert len(passes) == 1  # a pass that stops early brings only what was asked for
    trace.gradients(classes, "tokens", [1, 2])  # what leaves the first block is nearly all
    everything = [trace.gradients(classes, kind) for kind in ("tokens", "norm1", "attention")]
    assert len(passes) == 2
    for kind, found in zip(("tokens", "norm1", "attention"), everything, strict=True):
        expected = vit.trace(images, grad=["tokens"]).gradients(classes, kind)
        assert all(map(torch.equal, found, expected))
    assert torch.equal(late[0], everything[1][-1])
    everything[1][-1].zero_()  # the caller's own
    assert torch.equal(trace.gradients(classes, "norm1", [-1])[0], late[0])
    other = trace.gradients(classes.flip(0), "tokens")
    assert not torch.equal(other[0], fresh.gradients(classes, "tokens")[0])


@pytest.mark.parametrize("method", ["ar", "dap", "gradcam", "legrad", "attr", "gmar", "cdam"])
def test_a_batch_of_the_paper_needs_one_traced_forward_pass(method):
    """The explanation, the runner-up's and LDA's two references; AGCAM cuts attention out, Chefer may be in double."""
    vit, passes = ViT(small()), []
    vit.model.register_forward_pre_hook(lambda *_: passes.append(1))  # copies of the model have it too
    metrics = load_metrics("paper")
    evaluation = Evaluation(vit, load_method(method), metrics)
    images = [Loaded(name, torch.randn(3, 64, 64), None, 0) for name in "ab"]
    assert {row["status"] for row in evaluation(images, list(metrics))} == {"ok"}
    assert len(passes) == 1  # scoring goes another way: it leaves out what the head does not read


def test_device_and_dtype():
    assert (ViT(small()).device, ViT(small()).dtype) == (torch.device("cpu"), torch.float32)
    assert ViT(small()).double().dtype == torch.float64


def test_wrong_image_size_is_one_sentence():
    with pytest.raises(UserError, match=r"takes \[batch, 3, 64, 64\]"):
        ViT(small()).score(torch.randn(1, 3, 32, 32))


def test_the_mask_goes_through_the_same_geometry_as_the_image():
    from PIL import Image

    vit = load_vit("vit_shapes", device="cpu")
    mask = Image.new("L", (448, 448))
    mask.paste(255, (0, 0, 224, 448))  # the left half
    expected = torch.zeros(224, 224, dtype=torch.bool)
    expected[:, :112] = True
    assert torch.equal(vit.mask(mask), expected)


def test_the_double_copy_follows_the_weights():
    vit = ViT(small())
    first = vit.double()
    assert vit.double() is first
    assert first.double() is first
    with torch.no_grad():
        vit.model.head.weight.mul_(2)
    assert vit.double() is not first
    assert torch.equal(vit.double().model.head.weight, vit.model.head.weight.double())


def test_the_transform_gives_the_models_own_size():
    from PIL import Image

    vit = ViT(small())
    assert vit.transform(Image.new("RGB", (300, 200))).shape == (3, 64, 64)


def test_precision_settings_are_put_back():
    def settings():
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision

    before, inside = settings(), []
    model = small()
    model.register_forward_pre_hook(lambda *_: inside.append(settings()))
    ViT(model, precision="tf32").trace(torch.randn(1, 3, 64, 64))
    assert inside == [("ieee", "ieee")]
    assert settings() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", ["ar", "dap", "chefer", "agcam", "legrad"])
def test_cuda_gives_the_maps_of_the_cpu(method):
    images, classes = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
    here = load_method(method)(ViT(small()), images, classes).maps
    there = load_method(method)(ViT(small().cuda()), images.cuda(), classes.cuda()).maps.cpu()
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-5)
