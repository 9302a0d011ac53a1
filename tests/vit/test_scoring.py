"""Scores are the model's own logits, whatever its tokens; the shortcut is taken where it is exact."""

import pytest
import torch
from layouts import LAYOUTS, SIZE, build

from dap_bench import UserError, ViT
from dap_bench.isolation import copied
from dap_bench.vit.scoring import shortcut_is_exact

SHORT = {"plain", "registers", "distilled", "layer scale, qk-norm"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_score_is_the_models_own(name):
    model, images = build(name).eval(), torch.randn(3, 3, *SIZE)
    vit = ViT(model)
    with torch.no_grad():
        expected = model(images)
    assert expected.std() > 0.05
    torch.testing.assert_close(vit.score(images), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(vit.trace(images).logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(vit.read(vit.trace(images).tokens[-1]), expected, rtol=0, atol=1e-5)
    assert shortcut_is_exact(vit) == (name in SHORT)


@pytest.mark.parametrize("name", sorted(SHORT))
def test_the_shortcut_computes_the_last_block_for_few_tokens(name):
    vit, seen = ViT(build(name)), []
    vit.blocks[-1].mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    vit.score(torch.randn(1, 3, *SIZE))
    assert seen == [2 if name == "distilled" else 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "average"])
def test_compiled_scoring_gives_the_same_logits(name):
    vit = ViT(build(name))
    images = torch.randn(5, 3, *SIZE)
    expected = vit.score(images)
    vit.compile = True
    for count in (5, 3, 1):  # any number of images
        torch.testing.assert_close(vit.score(images[:count]), expected[:count], rtol=0, atol=2e-5)
    assert not copied(vit).compile  # an explainer's copy would be compiled for every batch


def test_what_cannot_be_compiled_is_a_sentence(monkeypatch):
    vit = ViT(build("plain"))
    vit.compile = True
    monkeypatch.setattr(torch, "compile", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no compiler\nat all")))
    with pytest.raises(UserError, match=r"compile=true does not work here \(no compiler\); use compile=false"):
        vit.score(torch.randn(1, 3, *SIZE))


def test_bf16_scoring_stays_near_fp32():
    model, images = build("plain").eval(), torch.randn(4, 3, *SIZE)
    full = ViT(model).score(images)
    reduced = ViT(model, precision="bf16").score(images)
    assert reduced.dtype == torch.float32
    assert not torch.equal(full, reduced)
    torch.testing.assert_close(full, reduced, rtol=0, atol=0.05)
