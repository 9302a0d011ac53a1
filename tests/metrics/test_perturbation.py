"""Del, Ins, TCC and ABPC against curves known by hand and against a plain loop."""

import math

import pytest
import torch
from torch.nn.functional import interpolate
from torchvision.transforms.functional import gaussian_blur

from dap_bench import UserError, load_method, load_metrics, load_vit
from dap_bench.data.shapes import draw
from dap_bench.explainers.base import Explanation
from dap_bench.metrics.base import Batch
from dap_bench.metrics.deletion import BetweenCurves, Deletion, Insertion
from dap_bench.metrics.perturbation import blur, interior, order_of
from dap_bench.metrics.tcc import ContributionConsistency


class Toy:
    """Four patches of 2 x 2 pixels in a 4 x 4 image; p(class 0) is given by a function of the image."""

    grid, image_size, patches = (2, 2), (4, 4), 4

    def __init__(self, probability):
        self.probability, self.scored = probability, []

    def score(self, images):
        self.scored.append(len(images))
        p = self.probability(images).double().clamp(1e-300, 1)
        return torch.stack([p.log(), (1 - p).clamp(min=1e-300).log()], 1)

    def normalised(self, value):
        return torch.full((3, 1, 1), (value - 0.5) / 0.5)


def patches(values):
    """A [1,3,4,4] image whose four patches have these values."""
    return torch.tensor(values).view(1, 1, 2, 2).repeat_interleave(2, 2).repeat_interleave(2, 3).expand(1, 3, 4, 4)


def batch_of(vit, images, maps, **options):
    explain = lambda vit, images, classes, layers=False: Explanation(torch.tensor(maps), vit.grid)  # noqa: E731
    confidence = vit.score(images).softmax(1)[:, 0]
    zeros = torch.zeros(len(images), dtype=torch.long)
    return Batch(vit, explain, images, zeros, zeros + 1, confidence, **options)


def total(images):
    """A linear model: the sum over patches of the first channel."""
    return images[:, 0, ::2, ::2].sum((1, 2))


WEIGHTS = [0.4, 0.1, 0.3, 0.2]


def test_areas_of_a_linear_model_by_hand():
    """Removing .4 .3 .2 .1 leaves 1 .6 .3 .1 0, inserting gives 0 .4 .7 .9 1."""
    batch = batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS])
    deletion, insertion = Deletion(unit="patch", steps=4), Insertion(unit="patch", steps=4, baseline="zero")
    assert deletion(batch).item() == pytest.approx((0.5 + 0.6 + 0.3 + 0.1) / 4)
    assert deletion.curve(batch)[0].tolist() == pytest.approx([1, 0.6, 0.3, 0.1, 0], abs=1e-6)
    assert insertion(batch).item() == pytest.approx((0.4 + 0.7 + 0.9 + 0.5) / 4)
    assert insertion.curve(batch)[0].tolist() == pytest.approx([0, 0.4, 0.7, 0.9, 1], abs=1e-6)
    assert Deletion(unit="patch", steps=4, auc="mean")(batch).item() == pytest.approx((1 + 0.6 + 0.3 + 0.1) / 5)
    assert BetweenCurves(unit="patch", steps=4)(batch).item() == pytest.approx((0.3 + 0.4 + 0.3) / 4)


def test_one_step_has_only_its_ends():
    batch = batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS])
    assert Deletion(unit="patch", steps=1)(batch).item() == pytest.approx(0.5)


def test_fewer_steps_than_units():
    """Two intervals over four patches: 1 .3 0."""
    batch = batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS])
    assert Deletion(unit="patch", steps=2)(batch).item() == pytest.approx((0.5 + 0.3) / 2)
    assert interior(4, 196) == [49, 98, 147]
    assert interior(20, 50176)[0] == 2509


def test_pixels_are_removed_in_the_order_of_the_heatmap():
    """Nearest upsampling makes four equal pixels of each patch: raster order decides among them."""
    image = torch.arange(16.0).view(1, 1, 4, 4).expand(1, 3, 4, 4) / 120  # all pixels sum to 1
    vit = Toy(lambda images: images[:, 0].sum((1, 2)))
    batch = batch_of(vit, image, [[0.0, 3.0, 1.0, 2.0]])
    curve = Deletion(unit="pixel", upsample="nearest", steps=16).curve(batch)
    removed = [2, 3, 6, 7, 10, 11, 14, 15, 8, 9, 12, 13, 0, 1, 4, 5]
    expected = [(120 - sum(removed[:count])) / 120 for count in range(17)]
    assert curve[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("baseline", "left"),
    [
        ("zero", [0.0, 0.0, 0.0, 0.0]),
        ("black", [-1.0, -1.0, -1.0, -1.0]),
        ("mean", [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_baselines(baseline, left):
    """p = (sum + 4)/8, so that black too is a probability; removing .4 .3 .2 .1 one by one."""
    vit = Toy(lambda images: (total(images) + 4) / 8)
    batch = batch_of(vit, patches(WEIGHTS), [WEIGHTS])
    curve = Deletion(unit="patch", steps=4, baseline=baseline).curve(batch)
    order = [0, 2, 3, 1]
    expected = []
    for count in range(5):
        values = [left[at] if at in order[:count] else WEIGHTS[at] for at in range(4)]
        expected.append((sum(values) + 4) / 8)
    assert curve[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kernel", "sigma"), [(51, 8.0), (11, 5.0), (1, 1.0)])
def test_blur_is_torchvisions(kernel, sigma):
    images = torch.randn(2, 3, 64, 80, generator=torch.Generator().manual_seed(0))
    expected = gaussian_blur(images, [kernel, kernel], [sigma, sigma])
    torch.testing.assert_close(blur(images, kernel, sigma), expected, rtol=0, atol=1e-6)


def test_any_model_is_a_table():
    """p looked up by which patches are there: no linearity to lean on."""
    table = torch.rand(16, generator=torch.Generator().manual_seed(3))

    def lookup(images):
        present = (images[:, 0, ::2, ::2] > 0).flatten(1).long()
        return table[(present * torch.tensor([8, 4, 2, 1])).sum(1)]

    batch = batch_of(Toy(lookup), patches([1.0, 1.0, 1.0, 1.0]), [[0.1, 0.9, 0.5, 0.7]])  # order 1 3 2 0
    deletion = Deletion(unit="patch", steps=4).curve(batch)
    assert deletion[0].tolist() == pytest.approx(table[[0b1111, 0b1011, 0b1010, 0b1000, 0]].tolist())
    insertion = Insertion(unit="patch", steps=4, baseline="zero").curve(batch)
    assert insertion[0].tolist() == pytest.approx(table[[0, 0b0100, 0b0101, 0b0111, 0b1111]].tolist())
    for fraction, mask in ((0.25, 0b0100), (0.5, 0b0101), (0.10, 0b0100)):
        kept = ContributionConsistency(fraction=fraction)(batch).item()
        assert kept == pytest.approx((table[mask] / table[15]).item())


def test_deletion_is_insertion_in_the_reversed_order():
    batch = batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS])
    reverse = batch_of(Toy(total), patches(WEIGHTS), [[-w for w in WEIGHTS]])
    deletion, removed = Deletion(unit="patch", steps=4).with_curve(batch)
    insertion, inserted = Insertion(unit="patch", steps=4, baseline="zero").with_curve(reverse)
    torch.testing.assert_close(deletion, insertion)
    torch.testing.assert_close(removed.flip(1), inserted)


def test_tie_rules():
    values = torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    assert order_of(values, "stable", 0).tolist() == [[1, 3, 0, 2]]
    orders = {tuple(order_of(values, "random", seed)[0].tolist()) for seed in range(40)}
    assert orders == {(1, 3, 0, 2), (3, 1, 0, 2), (1, 3, 2, 0), (3, 1, 2, 0)}
    assert torch.equal(order_of(values, "random", 7), order_of(values, "random", 7))
    assert torch.equal(order_of(values.repeat(3, 1), "random", 7)[2:], order_of(values, "random", 7))


def test_tcc_counts_round_or_floor():
    """k = 19.6 of 196 patches: 20 rounded, 19 cut."""
    from dap_bench.metrics.base import top_count

    assert (top_count(0.1, 196), top_count(0.1, 196, "floor"), top_count(0.001, 196)) == (20, 19, 1)


def test_a_wrong_option_is_one_sentence():
    for options in (
        {"unit": "token"},
        {"baseline": "white"},
        {"ties": "x"},
        {"steps": 0},
        {"auc": "sum"},
        {"kernel": 4},
    ):
        with pytest.raises(UserError):
            Deletion(**options)


# ---------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def shapes():
    vit = load_vit("vit_shapes", device="cpu")
    return vit, torch.stack([vit.transform(draw(index)[0]) for index in range(3)])


def plain_loop(vit, image, heat, unit, baseline, steps, insert, kernel=51, sigma=8.0):
    """One image, one step at a time, as one would write it first."""
    label = vit.score(image[None])[0].argmax()
    blank = {
        "zero": lambda: torch.zeros_like(image),
        "black": lambda: torch.full_like(image, -1.0),
        "mean": lambda: image.mean((1, 2), keepdim=True).expand_as(image),
        "blur": lambda: gaussian_blur(image, kernel, sigma),
    }[baseline]()
    start, end = (blank, image) if insert else (image, blank)
    order = sorted(range(heat.numel()), key=lambda at: -heat.flatten()[at].item())
    curve = []
    for step in range(steps + 1):
        mixed = start.clone()
        for at in order[: round(step * len(order) / steps)]:
            if unit == "pixel":
                mixed[:, at // 224, at % 224] = end[:, at // 224, at % 224]
            else:
                rows, columns = slice(at // 14 * 16, at // 14 * 16 + 16), slice(at % 14 * 16, at % 14 * 16 + 16)
                mixed[:, rows, columns] = end[:, rows, columns]
        curve.append(vit.score(mixed[None])[0].softmax(0)[label].item())
    return curve, (sum(curve) - curve[0] / 2 - curve[-1] / 2) / steps


@pytest.mark.parametrize("unit", ["patch", "pixel"])
@pytest.mark.parametrize(("baseline", "insert"), [("zero", False), ("black", False), ("mean", True), ("blur", True)])
def test_the_engine_agrees_with_a_plain_loop(shapes, unit, baseline, insert):
    vit, images = shapes
    batch = Batch.of(vit, load_method("gradcam", relu=False), images[:2])
    metric = (Insertion if insert else Deletion)(unit=unit, baseline=baseline, steps=5)
    values, curves = metric.with_curve(batch)
    for at in range(2):
        heat = batch.explanation.maps[at]
        if unit == "pixel":
            heat = interpolate(heat.view(1, 1, 14, 14), (224, 224), mode="bilinear", align_corners=False)
        curve, area = plain_loop(vit, images[at], heat, unit, baseline, 5, insert)
        assert curves[at].tolist() == pytest.approx(curve, abs=1e-5)
        assert values[at].item() == pytest.approx(area, abs=1e-5)


def test_tcc_is_a_point_of_insertion(shapes):
    """Top 10 % of patches on a zero baseline: the second of ten insertion points, divided by p(y|x)."""
    vit, images = shapes
    batch = Batch.of(vit, load_method("legrad"), images)
    tcc = ContributionConsistency()(batch)
    curve = Insertion(unit="patch", baseline="zero", steps=10).curve(batch)
    torch.testing.assert_close(tcc, curve[:, 1] / batch.confidence, rtol=1e-5, atol=1e-7)


def test_values_do_not_depend_on_batch_or_chunk_size(shapes):
    vit, images = shapes
    metrics = load_metrics("paper", "abpc")
    explain = load_method("dap")
    whole = Batch.of(vit, explain, images, layers=True, chunk=64)
    for name, metric in metrics.items():
        expected = metric(whole)
        for chunk in (1, 7):
            pieces = [Batch.of(vit, explain, image[None], layers=True, chunk=chunk) for image in images]
            torch.testing.assert_close(torch.cat([metric(p) for p in pieces]), expected, rtol=1e-4, atol=1e-5, msg=name)


def test_ends_are_scored_once_for_all_explainers():
    vit = Toy(total)
    images, known = patches(WEIGHTS), {}
    counts = []
    for maps in ([WEIGHTS], [WEIGHTS[::-1]]):
        vit.scored.clear()
        batch = batch_of(vit, images, maps, ids=["a"], known=known)
        vit.scored.clear()
        Deletion(unit="patch", steps=4)(batch)
        Insertion(unit="patch", steps=4, baseline="zero")(batch)
        counts.append(sum(vit.scored))
    # three points between the ends per curve; the blank image once, by the first explainer
    assert counts == [3 + 3 + 1, 3 + 3]


def test_equal_orders_are_scored_once(monkeypatch):
    """Another map with the same order of patches has the same curves; another order, baseline or image has not."""
    vit, known = Toy(total), {}
    metrics = [Deletion(unit="patch", steps=4), Insertion(unit="patch", steps=4, baseline="zero")]

    def scored(maps, name="a", metrics=metrics):
        batch = batch_of(vit, patches(WEIGHTS), [maps], ids=[name], known=known)
        vit.scored.clear()
        return [metric(batch).item() for metric in metrics], sum(vit.scored)

    first, count = scored(WEIGHTS)
    assert count == 7
    assert scored([weight**2 for weight in WEIGHTS]) == (first, 0)
    assert scored(WEIGHTS[::-1])[1] == 6  # the ends are known
    assert scored(WEIGHTS, "b") == (first, 7)
    assert scored(WEIGHTS, metrics=[Deletion(unit="patch", steps=4, baseline="black")])[1] == 4
    assert scored(WEIGHTS, metrics=[Deletion(unit="patch", steps=2)])[1] == 1
    monkeypatch.setattr("dap_bench.metrics.perturbation.CURVES_IN_MEMORY", 2)
    scored([1.0, 2.0, 3.0, 4.0])
    assert len(known["curves"]) == 2


def test_chunks_are_bounded(shapes):
    vit = Toy(total)
    batch = batch_of(vit, patches(WEIGHTS).repeat(5, 1, 1, 1), [WEIGHTS] * 5, chunk=4)
    vit.scored.clear()
    Deletion(unit="patch", steps=4)(batch)
    assert vit.scored == [4, 4, 4, 3, 4, 1]


def test_running_out_of_memory_halves_the_chunk_and_goes_on(caplog):
    class Small(Toy):
        def score(self, images):
            if len(images) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().score(images)

    batch = batch_of(Small(total), patches(WEIGHTS), [WEIGHTS], chunk=16)
    expected = Deletion(unit="patch", steps=4)(batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS]))
    batch = batch_of(Small(total), patches(WEIGHTS).repeat(3, 1, 1, 1), [WEIGHTS] * 3, chunk=16)
    torch.testing.assert_close(Deletion(unit="patch", steps=4)(batch), expected.repeat(3))
    assert batch.chunk == 2
    assert "scored 2 at a time" in caplog.text


def test_memory_for_not_even_one_image_is_an_error():
    class Tiny(Toy):
        def score(self, images):
            if self.scored:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().score(images)

    with pytest.raises(torch.OutOfMemoryError):
        Deletion(unit="patch", steps=4)(batch_of(Tiny(total), patches(WEIGHTS), [WEIGHTS]))


def test_bf16_moves_the_scores_little(shapes):
    vit, images = shapes
    reduced = load_vit("vit_shapes", device="cpu", precision="bf16")
    explain = load_method("legrad")
    for name, metric in load_metrics("deletion", "insertion").items():
        full, half = (metric(Batch.of(each, explain, images)) for each in (vit, reduced))
        assert 0 < (full - half).abs().max().item() < 0.05, name


def test_rise_has_a_point_per_row_of_pixels():
    metrics = load_metrics("rise")
    assert {name: (m.steps, m.baseline) for name, m in metrics.items()} == {
        "deletion": (224, "zero"),
        "insertion": (224, "blur"),
    }
    assert (metrics["insertion"].kernel, metrics["insertion"].sigma) == (11, 5.0)
    assert math.isclose(interior(224, 224 * 224)[0], 224)
