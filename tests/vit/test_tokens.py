"""The layout of tokens, and the row that each head reads."""

import re
from pathlib import Path

import pytest
import torch
from layouts import LAYOUTS, SIZE, build

from dap_bench import ViT, explainers
from dap_bench.vit import Layout

MATRIX = torch.arange(25.0).view(1, 5, 5)  # row i holds 5 i .. 5 i + 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_every_model(name):
    _, _, prefix, head = LAYOUTS[name]
    vit = ViT(build(name))
    assert (vit.layout.prefix, vit.layout.patches, vit.layout.head) == (prefix, 12, head)
    assert vit.trace(torch.randn(1, 3, *SIZE)).tokens[0].shape[1] == prefix + 12


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(1, 4, "class token"), [1.0, 2.0, 3.0, 4.0]),
        (Layout(3, 2, "class token"), [3.0, 4.0]),  # two registers
        (Layout(2, 3, "class and distillation token"), [4.5, 5.5, 6.5]),  # mean of rows 0 and 1
        (Layout(2, 3, "mean of patches"), [17.0, 18.0, 19.0]),  # mean of rows 2, 3 and 4 is row 3
        (Layout(2, 3, "mean of all"), [12.0, 13.0, 14.0]),  # row 2
        (Layout(2, 3, "attention pool", torch.tensor([[0.5, 0, 0, 0, 0.5]])), [12.0, 13.0, 14.0]),
    ],
)
def test_the_row_that_the_head_reads(layout, expected):
    assert layout.map_of(MATRIX).tolist() == [expected]
    four = MATRIX[:, None].expand(-1, 2, -1, -1)  # with heads
    assert layout.map_of(four).tolist() == [[expected, expected]]


def test_patches_and_prefix():
    layout = Layout(2, 3)
    assert layout.patches_of(torch.arange(5)).tolist() == [2, 3, 4]
    assert layout.patches_of(torch.arange(10).view(1, 5, 2), 1).tolist() == [[[4, 5], [6, 7], [8, 9]]]
    assert layout.with_prefix(torch.tensor([[5.0, 6.0, 7.0]]), 1).tolist() == [[1, 1, 5, 6, 7]]
    assert layout.own(MATRIX).tolist() == [[0.0]]
    assert Layout(2, 3, "class and distillation token").own(MATRIX).tolist() == [[0.0, 6.0]]
    assert Layout(2, 3, "mean of patches").own(MATRIX).tolist() == [[]]


@pytest.mark.parametrize("name", ["attention pool", "attention pool, registers"])
def test_the_pools_attention_is_what_the_pool_does(name):
    """What leaves the pool's attention changes with a token's value by the attention to it: its gradient."""
    vit = ViT(build(name).requires_grad_(False)).double()
    pool, kept = vit.model.attn_pool, {}
    trace = vit.trace(torch.randn(2, 3, *SIZE, dtype=torch.float64))
    handles = [
        pool.kv.register_forward_hook(lambda module, inputs, output: kept.update(values=output.requires_grad_())),
        pool.proj.register_forward_pre_hook(lambda module, inputs: kept.update(mixed=inputs[0])),
    ]
    vit.read(trace.tokens[-1])
    for handle in handles:
        handle.remove()
    (gradient,) = torch.autograd.grad(kept["mixed"].sum(), kept["values"])
    expected = gradient[:, :, 24:].mean(2)  # keys, then values: of 3 heads with 8 channels each
    weights = trace.layout.weights
    torch.testing.assert_close(vit.layout.patches_of(weights), expected)
    assert torch.equal(weights[:, : vit.layout.prefix], torch.zeros(2, vit.layout.prefix).double())


def test_one_token_is_read_as_the_whole_would_be():
    """Where all tokens are the same token, reading them all and reading the one are the same."""
    for name in LAYOUTS:
        vit = ViT(build(name))
        token = torch.randn(2, 24)
        whole = token[:, None].expand(-1, vit.layout.prefix + 12, -1)
        torch.testing.assert_close(vit.read(whole), vit.head(token), rtol=1e-4, atol=1e-5)


def test_no_explainer_counts_tokens_by_itself():
    """The first token and those after it are told apart in one place only."""
    others = ("base.py", "controls.py")  # which look at no token
    files = [file for file in Path(explainers.__file__).parent.glob("*.py") if file.name not in others]
    assert len(files) >= 9
    for file in files:
        assert not re.findall(r"\[(?::, )+(?:0|1:|:1)[,\] ]", file.read_text()), file.name
