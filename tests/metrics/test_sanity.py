"""Randomisation, max-sensitivity, grid pointing, concentration and segmentation: values known by hand."""

import math
from itertools import product

import pytest
import torch
from cells import run
from layouts import LAYOUTS, SIZE, build
from test_maps import batch_of as map_of

from dap_bench import UserError, ViT, load_method
from dap_bench.explainers.base import Explanation
from dap_bench.isolation import generator
from dap_bench.metrics.base import Batch, spearman
from dap_bench.metrics.concentration import Entropy, Gini
from dap_bench.metrics.grid_pointing import GridPointing, cell_of_pixel, mosaics
from dap_bench.metrics.max_sensitivity import MaxSensitivity
from dap_bench.metrics.randomisation import Randomisation, parts
from dap_bench.metrics.segmentation import AveragePrecision, IntersectionOverUnion, PixelAccuracy


@pytest.fixture
def vit():
    torch.manual_seed(5)
    return ViT(build("plain")).double()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def images(count=3):
    return torch.randn(count, 3, *SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------- randomisation


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_weight_is_in_one_part_and_the_head_comes_first(name):
    vit = ViT(build(name))
    found = parts(vit)
    assert len(found) == vit.depth + 2
    assert sorted(name for part in found for name in part) == sorted(dict(vit.model.named_parameters()))
    assert {"head.weight", "head.bias"} <= set(found[0])
    assert all(name.startswith(f"blocks.{vit.depth - 1}.") for name in found[1])
    assert "patch_embed.proj.weight" in found[-1]
    tokens = {"pos_embed", "cls_token", "reg_token"} & set(dict(vit.model.named_parameters()))
    assert tokens <= set(found[-1])  # Quantus leaves these as they were learned


def test_weights_are_shuffled_from_the_head_down_and_the_model_stays(vit):
    before = {name: weight.clone() for name, weight in vit.model.named_parameters()}
    done = 0
    for depth, twin in enumerate(Randomisation().models(vit), 1):
        changed = {name for part in parts(vit)[:depth] for name in part}
        for name, weight in twin.model.named_parameters():
            assert torch.equal(weight.flatten().sort().values, before[name].flatten().sort().values)
            same = torch.equal(weight, before[name])
            assert same == (name not in changed) or before[name].unique().numel() == 1, name
        done += 1
    assert done == vit.depth + 2
    assert all(torch.equal(weight, before[name]) for name, weight in vit.model.named_parameters())


def test_randomisation_of_maps_that_are_known(vit):
    """A map that never changes has 1, one that depends on the head alone what its ranks say, a constant one 0."""
    batch = Batch.of(vit, lambda vit, images, classes: images.mean(1)[:, ::16, ::16].flatten(1), images())
    assert Randomisation()(batch).tolist() == pytest.approx([1, 1, 1])
    head = lambda vit, images, classes: vit.model.head.weight.flatten()[: vit.patches].repeat(len(images), 1)  # noqa: E731
    batch = Batch.of(vit, head, images())
    values, curve = Randomisation().with_curve(batch)
    weight = vit.model.head.weight.flatten()
    order = torch.randperm(len(weight), generator=generator("head.weight/0"))
    rho = spearman(weight[None, : vit.patches], weight[order][None, : vit.patches]).item()
    assert curve[0].tolist() == pytest.approx([rho] * (vit.depth + 2))
    assert values.tolist() == pytest.approx([rho] * 3)
    same = torch.equal
    first = vit.model.pos_embed.clone()
    vanishing = lambda vit, images, classes: (  # noqa: E731
        images.mean(1)[:, ::16, ::16].flatten(1) * same(vit.model.pos_embed, first)
    )
    curve = Randomisation().with_curve(Batch.of(vit, vanishing, images()))[1]
    assert curve[0].tolist() == pytest.approx([1] * (vit.depth + 1) + [0])
    nothing = lambda vit, images, classes: torch.ones(len(images), vit.patches)  # noqa: E731
    assert Randomisation()(Batch.of(vit, nothing, images())).isnan().all()
    few = Randomisation(depths=2).with_curve(Batch.of(vit, vanishing, images()))[1]
    assert few[0].tolist() == pytest.approx([1, 0])
    with pytest.raises(UserError, match="too many: the model has"):
        Randomisation(depths=99)(Batch.of(vit, vanishing, images()))


def test_randomisation_does_not_hang_on_the_batch(vit):
    whole = Randomisation()(Batch.of(vit, load_method("gradcam"), images()))
    alone = Randomisation()(Batch.of(vit, load_method("gradcam"), images()[1:2]))
    assert alone.item() == pytest.approx(whole[1].item(), abs=1e-9)


# ---------------------------------------------------------------------- max-sensitivity


def test_max_sensitivity_of_a_map_that_is_the_image(vit):
    """The map is the mean of each patch, so its change is known from the noise."""
    show = lambda vit, images, classes: images.unfold(2, 16, 16).unfold(3, 16, 16).mean((1, 4, 5))  # noqa: E731
    metric = MaxSensitivity(samples=4, radius=0.1)
    batch = Batch.of(vit, show, images(), ids=["a", "b", "c"])
    scale = lambda maps: (maps - maps.min()) / (maps.max() - maps.min())  # noqa: E731
    for at, name in enumerate("abc"):
        draws = torch.rand(4, 3, *SIZE, generator=generator(f"{name}/0"))
        unit = (vit.normalised(1.0) - vit.normalised(0.0)).double()
        original = scale(show(vit, images()[at : at + 1], None))
        noisy = [scale(show(vit, images()[at : at + 1] + (2 * draw - 1) * 0.1 * unit, None)) for draw in draws]
        expected = max(((each - original).norm() / original.norm()).item() for each in noisy)
        assert metric(batch)[at].item() == pytest.approx(expected, rel=1e-5)
    assert MaxSensitivity(samples=1)(Batch.of(vit, load_method("centre"), images())).tolist() == [0, 0, 0]
    with pytest.raises(UserError, match="radius=0 must be above 0"):
        MaxSensitivity(radius=0)


# ---------------------------------------------------------------------- grid pointing


def test_a_mosaic_by_hand():
    mine, others = torch.full((2, 3, 4, 6), 9.0), torch.arange(1.0, 4).view(1, 3, 1, 1, 1).expand(2, 3, 3, 4, 6)
    grids = mosaics(mine, others, torch.tensor([0, 2]))
    assert grids[0, 0, ::2, ::3].tolist() == [[9, 1], [2, 3]]
    assert grids[1, 0, ::2, ::3].tolist() == [[1, 2], [9, 3]]
    assert cell_of_pixel((4, 6), 2).view(4, 6)[::2, ::3].tolist() == [[0, 1], [2, 3]]
    assert cell_of_pixel((5, 5), 2).view(5, 5)[:, 0].tolist() == [0, 0, 2, 2, 2]


def test_grid_pointing_of_maps_that_are_known(vit):
    """Bright images among dark ones: a map of brightness is right, a constant one has a quarter."""
    bright = torch.ones(3, 3, *SIZE, dtype=torch.float64)
    dark = lambda count: torch.zeros(3, count, 3, *SIZE, dtype=torch.float64)  # noqa: E731
    show = lambda vit, images, classes: Explanation(images[:, 0].flatten(1), vit.image_size)  # noqa: E731
    assert GridPointing()(Batch.of(vit, show, bright, companions=dark)).tolist() == pytest.approx([1, 1, 1])
    assert GridPointing(companions=8)(Batch.of(vit, show, bright, companions=dark)).tolist() == pytest.approx([1] * 3)
    flat = lambda vit, images, classes: torch.ones(len(images), vit.patches)  # noqa: E731
    found = GridPointing()(Batch.of(vit, flat, bright, companions=dark))
    assert found.tolist() == pytest.approx([0.25] * 3)  # though the grid of 3 columns cuts patches
    against = lambda vit, images, classes: Explanation(-images[:, 0].flatten(1) + 0.5, vit.image_size)  # noqa: E731
    assert GridPointing()(Batch.of(vit, against, bright, companions=dark)).tolist() == pytest.approx([0, 0, 0])
    with pytest.raises(UserError, match="do not make a square grid"):
        GridPointing(companions=2)
    with pytest.raises(UserError, match="use it in a run"):
        GridPointing()(Batch.of(vit, flat, bright))


def test_grid_pointing_in_a_run(tmp_path, cache):
    """Whatever batch an image comes in, it has the same companions; what knows nothing of the class has a quarter."""
    options = ["metric=[grid_pointing]", "sampler.n=8"]
    rows = {row["sample_id"]: row["grid_pointing"] for row in run(tmp_path / "a", cache, *options).rows()}
    again = run(tmp_path / "b", cache, *options, "batch_size=3").rows()
    assert {row["sample_id"]: row["grid_pointing"] for row in again} == pytest.approx(rows, abs=1e-4)
    assert len(set(rows.values())) == 8
    control = run(tmp_path / "c", cache, *options, method="centre").rows()
    assert [row["grid_pointing"] for row in control] == pytest.approx([0.25] * 8)
    with pytest.raises(UserError, match="images of 4 classes, but the sample has 3; draw more"):
        run(tmp_path / "d", cache, "metric=[grid_pointing]", "sampler.n=3")


def test_companions_of_another_draw_are_other_companions(tmp_path, cache):
    """Values that hang on the sample set are not taken over from another one."""
    few, more = (run(tmp_path, cache, "metric=[grid_pointing,afs]", f"sampler.n={count}") for count in (6, 8))
    metrics = [cell.info["identity"]["metrics"] for cell in (few, more)]
    assert metrics[0]["grid_pointing"] != metrics[1]["grid_pointing"]
    assert metrics[0]["afs"] == metrics[1]["afs"]


# ---------------------------------------------------------------------- concentration


def test_gini_and_entropy_by_hand():
    peak, ramp, flat = [[0.0, 0.0, 0.0, 5.0]], [[0.0, 1.0, 2.0, 3.0]], [[2.0] * 4]
    assert Gini(unit="patch")(map_of(peak)).item() == pytest.approx(0.75)
    assert Gini(unit="patch")(map_of(ramp)).item() == pytest.approx((-3 * 0 - 1 + 2 + 9) / (4 * 6))
    assert Entropy(unit="patch")(map_of(peak)).item() == 0
    expected = -sum(p * math.log(p) for p in (1 / 6, 2 / 6, 3 / 6)) / math.log(4)
    assert Entropy(unit="patch")(map_of(ramp)).item() == pytest.approx(expected)
    assert Gini()(map_of(peak)).item() == pytest.approx(0.75)  # of nearest pixels: the same
    assert Gini()(map_of(flat)).isnan().all()
    assert Entropy()(map_of(flat)).isnan().all()


# ---------------------------------------------------------------------- segmentation

LEFT = torch.tensor([[True, True, False, False]] * 4)  # patches 0 and 2 of a 4 x 4 image


def test_segmentation_by_hand():
    """Patches 0 and 1 are above the mean, 0 and 2 are the object."""
    batch = map_of([[4.0, 3.0, 1.0, 0.0]], masks=[LEFT])
    assert IntersectionOverUnion()(batch).item() == pytest.approx(1 / 3)
    assert PixelAccuracy()(batch).item() == pytest.approx(0.5)
    assert IntersectionOverUnion(threshold=0.2)(batch).item() == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert PixelAccuracy(threshold=0.2)(batch).item() == pytest.approx(0.75)
    assert AveragePrecision(classes="object")(batch).item() == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    # scores 4 3 1 0 of the object and 0 1 3 4 of the background: the pairs 4 and 1 are right, 3 and 0 wrong
    assert AveragePrecision()(batch).item() == pytest.approx(0.5 * 2 / 2 + 0.5 * 4 / 6)
    tied = map_of([[1.0, 1.0, 0.0, 0.0]], masks=[LEFT])
    assert AveragePrecision(classes="object")(tied).item() == pytest.approx(0.5 * 0.5 + 0.5 * 0.5)
    perfect = map_of([[1.0, 0.0, 1.0, 0.0]], masks=[LEFT])
    for metric in (IntersectionOverUnion(), PixelAccuracy(), AveragePrecision()):
        assert metric(perfect).item() == 1
        assert metric(map_of([[1.0, 0.0, 1.0, 0.0]], masks=[None])).isnan().all()
        assert metric(map_of([[1.0, 1.0, 1.0, 1.0]], masks=[LEFT])).isnan().all()
    with pytest.raises(UserError, match="threshold=1.5 must be mean"):
        IntersectionOverUnion(threshold=1.5)


def test_average_precision_against_a_plain_loop():
    torch.manual_seed(2)
    values = torch.randint(0, 4, (3, 4)).float()  # few values: ties
    masks = [torch.rand(4, 4) < 0.4 for _ in range(3)]
    batch = map_of(values.tolist(), masks=masks)
    heat, true = batch.values(batch.explanation, "pixel"), torch.stack(masks).flatten(1)
    lists = {"object": (heat, true), "both": (torch.cat([heat, 1 - heat], 1), torch.cat([true, ~true], 1))}
    for (classes, (scores, right)), at in product(lists.items(), range(3)):
        expected, recall = 0.0, 0.0
        for limit in sorted(set(scores[at].tolist()), reverse=True):
            chosen = scores[at] >= limit
            hits = right[at][chosen].sum().item()
            now = hits / right[at].sum().item()
            expected, recall = expected + (now - recall) * hits / chosen.sum().item(), now
        assert AveragePrecision(classes=classes)(batch)[at].item() == pytest.approx(expected)
