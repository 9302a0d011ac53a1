"""Scores are the model's own logits, whatever its tokens; the shortcut is taken where it is exact."""

import pytest
import torch
from layouts import LAYOUTS, SIZE, build

from dap_bench import ViT
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


def test_bf16_scoring_stays_near_fp32():
    model, images = build("plain").eval(), torch.randn(4, 3, *SIZE)
    full = ViT(model).score(images)
    reduced = ViT(model, precision="bf16").score(images)
    assert reduced.dtype == torch.float32
    assert not torch.equal(full, reduced)
    torch.testing.assert_close(full, reduced, rtol=0, atol=0.05)
