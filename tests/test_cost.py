"""scripts/cost.py counts what is known by hand, and the tables of methods and metrics say what it counts."""

import importlib.util
import re
from pathlib import Path

import pytest
import timm
import torch
from helpers import quick
from test_method_table import ROWS as METHODS
from test_method_table import cell
from test_metric_table import COLUMNS
from test_metric_table import ROWS as METRICS
from torch.nn.functional import linear, scaled_dot_product_attention

from dap_bench import ViT
from dap_bench.runner import batch_size_of

SPEC = importlib.util.spec_from_file_location("cost", Path(__file__).parents[1] / "scripts" / "cost.py")
cost = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cost)

PAGE = (Path(__file__).parents[1] / "scripts" / "README.md").read_text()
DAP = ("dap", "dap_uniform", "dap_source", "dap_target", "dap_final")
TOLERANCE = 0.10  # of the tables' numbers: scoring leaves out most of the last block, tables round


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


# ---------------------------------------------------------------------- by hand


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inference", [False, True])
def test_a_linear_layer(dtype, inference):
    """[2,5,7] by [7,3]: 2 x 5 x 3 sums of 7 products, a product and a sum being two."""
    with cost.Flops() as flops, torch.inference_mode(inference):
        linear(meta(2, 5, 7, dtype=dtype), meta(3, 7, dtype=dtype), meta(3, dtype=dtype))
    assert dict(flops.counted) == {(False, dtype == torch.float64): 2 * 2 * 5 * 3 * 7}


@pytest.mark.parametrize("inference", [False, True])
def test_attention(inference):
    """Q K^T and A V: 2 heads of 5 x 5 x 7 each."""
    query = meta(1, 2, 5, 7)
    with cost.Flops() as flops, torch.inference_mode(inference):
        scaled_dot_product_attention(query, query, query)
    assert flops.total == 2 * (2 * 2 * 5 * 5 * 7)


def test_a_backward_pass_through_frozen_weights_is_one_product():
    x, weight = meta(4, 7).requires_grad_(), meta(3, 7)
    with cost.Flops() as flops:
        torch.autograd.grad(linear(x, weight).sum(), x)
    assert dict(flops.counted) == {(False, False): 2 * 4 * 3 * 7, (True, False): 2 * 4 * 3 * 7}


def test_a_backward_pass_through_both_sides_is_two_products():
    x, weight = meta(4, 7).requires_grad_(), meta(3, 7).requires_grad_()
    with cost.Flops() as flops:
        torch.autograd.grad(linear(x, weight).sum(), [x, weight])
    assert flops.counted[True, False] == 2 * flops.counted[False, False]


def test_a_vit_by_hand():
    """ViT-T: patches, then 12 blocks of qkv, two products of attention, projection and MLP, then the head."""
    tokens, width, layers, classes = 197, 192, 12, 1000
    patches = 196 * width * 3 * 16 * 16
    block = tokens * width * (3 * width + width + 8 * width) + 2 * tokens * tokens * width
    assert cost.unit("vit_t") == 2 * (patches + layers * block + width * classes)


def test_meta_and_real_tensors_cost_the_same():
    """What meta tensors cannot answer leads nowhere else than real numbers do."""
    torch.manual_seed(0)
    small = {"pretrained": False, "img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    for name in ("chefer", "dap", "attr", "integrated_gradients", "rise"):
        counted = []
        for device in ("cpu", "meta"):
            with torch.device(device):
                vit = ViT(timm.create_model("vit_tiny_patch16_224", **small).eval())
                images, classes = torch.rand(1, 3, 32, 32), torch.zeros(1, dtype=torch.long)
            with cost.Flops() as flops:
                quick(name)(vit, images, classes)
            counted.append(dict(flops.counted))
        assert counted[0] == counted[1], name


# ---------------------------------------------------------------------- methods and metrics


def test_a_forward_pass_and_what_comes_on_top():
    assert cost.method("ar", "vit_t").total == pytest.approx(1, abs=0.01)
    assert cost.method("ar", "vit_t").backward == 0
    gradient = cost.method("input_x_gradient", "vit_t")
    assert gradient.forward == 1
    assert gradient.backward == pytest.approx(1.143, abs=0.001)  # attention is a product of two that need gradients
    assert cost.method("centre", "vit_t").total == 0


def test_repeated_steps_cost_what_they_cost_when_all_are_counted():
    for name, options in {"integrated_gradients": {"steps": 3}, "smoothgrad": {"samples": 3}}.items():
        once, twice = (cost.explanation(name, "vit_t", **dict.fromkeys(options, count)) for count in (1, 2))
        assert once.on(twice, 2).total == pytest.approx(cost.explanation(name, "vit_t", **options).total)


def test_double_precision_is_counted_apart():
    single, double = (cost.method("gradcam", "vit_t", double=wide) for wide in (False, True))
    assert single.double == 0
    assert double.total == double.double == single.total
    assert str(single) == "1.09"
    assert str(double) == "1.09 (1.09)"
    inside = cost.explanation("chefer", "vit_t", dtype="float64")
    assert inside.double == inside.total


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"maps", "oracle"} - set(DAP)))
def test_the_table_of_methods(name):
    told = float(cell(name, "cost").replace(",", ""))
    for of in ("vit_t", "vit_b"):
        assert cost.method(name, of).total == pytest.approx(told, rel=TOLERANCE), of


def test_dap_costs_its_prior():
    """They share the forward pass."""
    prior = cost.method("gradcam", "vit_t").total
    for name in DAP:
        assert cost.method(name, "vit_t").total == pytest.approx(prior, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_the_table_of_metrics(name):
    told = METRICS[name][COLUMNS.index("cost")]
    passes = re.match(r"(\d+)(?! E| \+)\b", told)
    again = re.search(r"(L \+ )?(\d+) E", told)
    found = cost.metric(name, "vit_t")
    assert found.total == pytest.approx(int(passes[1]) if passes else 0, rel=TOLERANCE)
    expected = (12 if again[1] else 0) + int(again[2]) if again else 0
    if name == "negative_label":
        expected = 1  # the table says that it is shared
    assert found.explanations == expected
    assert found.double == pytest.approx(0, abs=0.01)


def test_a_cell_costs_its_scoring_and_one_pass_there_and_back():
    """AR's maps, the runner-up's and LDA's references come from the same traces."""
    whole, scoring = cost.cell("ar", "vit_t")
    curves = sum(cost.metric(name, "vit_t").total for name in ("deletion", "insertion", "tcc"))
    assert scoring == pytest.approx(1 + curves, rel=0.01)  # and the image itself
    assert whole - scoring == pytest.approx(cost.metric("lda", "vit_t").total, rel=0.05)


@pytest.mark.slow
def test_the_hours_of_the_paper():
    total, *lines = cost.cards().splitlines()
    assert f"{total.split(';')[0]}." in PAGE
    numbers = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][
        1:
    ]  # without the head
    assert len(numbers) == 4
    for card, single, half, double, *hours in numbers:
        assert f"| {card} | {single}, {half}, {double} | {' | '.join(hours)} |" in PAGE


def test_the_batches_that_fit():
    """Of ViT-B, with 1.5 GB for CUDA and three copies of the weights, or two of them in double precision."""
    vit = cost.model("vit_b")
    weights = 4 * sum(parameter.numel() for parameter in vit.model.parameters())
    cells = []
    for size in (8, 16, 24):
        free = [int((size - 1.5) * 2**30) - copies * weights for copies in (3, 5)]
        cells.append("{} ({})".format(*(batch_size_of(vit, double, room) for double, room in enumerate(free))))
    assert f"| ViT-B | 337 | {' | '.join(cells)} |" in PAGE
