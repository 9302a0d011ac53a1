"""ROAD, SaCo and the perturbation tests, by hand and against plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_perturbation import WEIGHTS, Toy, batch_of, patches, total

from dap_bench import UserError
from dap_bench.metrics.perturbation_accuracy import NegativePerturbation, PositivePerturbation
from dap_bench.metrics.road import RemoveAndDebias, impute
from dap_bench.metrics.saco import SalienceCoefficient, coefficient


def test_one_pixel_is_the_weighted_mean_of_its_neighbours():
    image = torch.arange(25.0).view(1, 1, 5, 5).repeat(1, 3, 1, 1) ** 2
    hole = torch.zeros(1, 5, 5, dtype=torch.bool)
    hole[0, 2, 2] = True
    inner = impute(image, hole)[0, :, 2, 2]
    sides, corners = (7**2 + 11**2 + 13**2 + 17**2) / 6, (6**2 + 8**2 + 16**2 + 18**2) / 12
    assert inner.tolist() == pytest.approx([sides + corners] * 3)
    hole = torch.zeros(1, 5, 5, dtype=torch.bool)
    hole[0, 0, 0] = True  # at the border only the neighbours that are there count
    assert impute(image, hole)[0, 0, 0, 0].item() == pytest.approx((1 / 6 + 25 / 6 + 36 / 12) / (5 / 12))


def test_a_linear_ramp_is_imputed_as_itself():
    """Weighted means of all eight neighbours keep what is linear, inside the image."""
    ramp = (torch.arange(12.0)[:, None] * 3 + torch.arange(12.0) * 2).expand(2, 3, 12, 12).clone()
    hole = torch.zeros(2, 12, 12, dtype=torch.bool)
    hole[0, 3:9, 2:10] = True
    filled = impute(torch.where(hole[:, None], 0, ramp), hole)
    torch.testing.assert_close(filled, ramp, rtol=1e-5, atol=1e-4)
    assert torch.equal(filled[1], ramp[1])  # without a hole nothing changes


def test_every_removed_pixel_solves_its_equation():
    torch.manual_seed(0)
    image, hole = torch.randn(1, 3, 9, 7, dtype=torch.float64), torch.rand(1, 9, 7) < 0.6
    filled = impute(image, hole)[0].numpy()
    for row, column in np.argwhere(hole[0].numpy()):
        weights = values = 0
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                there = row + down, column + across
                if (down, across) != (0, 0) and 0 <= there[0] < 9 and 0 <= there[1] < 7:
                    weight = 1 / 6 if 0 in (down, across) else 1 / 12
                    weights, values = weights + weight, values + weight * filled[:, *there]
        assert filled[:, row, column] == pytest.approx(values / weights)


def test_systems_solved_side_by_side_are_those_solved_alone():
    torch.manual_seed(0)
    images, holes = torch.randn(6, 3, 20, 20), torch.rand(6, 20, 20) < torch.linspace(0, 1, 6)[:, None, None]
    alone = [impute(image[None], hole[None]) for image, hole in zip(images, holes, strict=True)]
    assert torch.equal(impute(images, holes), torch.cat(alone))
    assert torch.equal(alone[-1][0], images[-1])  # nothing is left to impute it from


def test_road_of_a_model_that_reads_one_patch():
    """p is the value of the first patch; removed, it becomes a mean of its neighbours, which is known here: 0.2."""
    image = patches([0.8, 0.2, 0.2, 0.2])
    vit = Toy(lambda images: images[:, 0, :2, :2].mean((1, 2)))
    metric = RemoveAndDebias(unit="patch", fractions=(0.25, 0.5), noise=0.0)
    right, wrong = (metric.with_curve(batch_of(vit, image, [maps])) for maps in ([4.0, 3, 2, 1], [1.0, 3, 2, 4]))
    assert right[1][0].tolist() == pytest.approx([0.3, 0.3], abs=1e-6)  # least first: 0.8, most first: 0.2
    assert right[0].item() == pytest.approx(0.3, abs=1e-6)
    assert wrong[1][0].tolist() == pytest.approx([-0.3, -0.3], abs=1e-6)
    noisy = RemoveAndDebias(unit="patch", fractions=(0.25,), noise=0.1)
    one, again, other = (noisy(batch_of(vit, image, [[4.0, 3, 2, 1]], ids=[name])).item() for name in "aab")
    assert one == again != other


def test_saco_by_hand():
    salience = torch.tensor([[0.5, 0.3, 0.1]])
    assert coefficient(salience, torch.tensor([[3.0, 2.0, 1.0]])).item() == 1
    assert coefficient(salience, torch.tensor([[1.0, 2.0, 3.0]])).item() == -1
    # pairs 0.2 and 0.2 in order, the pair of 0.4 not
    assert coefficient(salience, torch.tensor([[1.0, 0.0, 2.0]])).item() == pytest.approx((0.2 - 0.4 - 0.2) / 0.8)
    assert coefficient(salience, torch.tensor([[1.0, 1.0, 1.0]])).item() == 1  # equal effects do not contradict
    assert coefficient(torch.ones(1, 3), salience).isnan().all()


def test_saco_of_a_linear_model():
    """Each patch is worth its weight: the map of the weights is faithful, its opposite is not."""
    metric = SalienceCoefficient(unit="patch", groups=4, baseline="zero")
    for maps, expected in ((WEIGHTS, 1.0), ([-weight for weight in WEIGHTS], -1.0)):
        assert metric(batch_of(Toy(total), patches(WEIGHTS), [maps])).item() == pytest.approx(expected)
    # salience 1, 2/3, 1/3, 0 on effects .4 .2 .3 .1: only the middle pair is the other way round
    found = metric(batch_of(Toy(total), patches(WEIGHTS), [[3.0, 0.0, 1.0, 2.0]])).item()
    assert found == pytest.approx((1 / 3 + 2 / 3 + 1 - 1 / 3 + 2 / 3 + 1 / 3) / (10 / 3))
    pixels = SalienceCoefficient(unit="pixel", upsample="nearest", groups=4, baseline="zero")
    assert pixels(batch_of(Toy(total), patches(WEIGHTS), [[3.0, 0.0, 1.0, 2.0]])).item() == pytest.approx(found)


def test_accuracy_while_patches_are_removed():
    """p = sum, right while it is above one half: most first 1 .6 .3 .1, least first 1 .9 .7 .4."""
    image, options = patches(WEIGHTS), {"unit": "patch", "steps": 4, "baseline": "zero"}
    label = torch.tensor([0])
    batch = batch_of(Toy(total), image, [WEIGHTS], labels=label)
    value, curve = PositivePerturbation(**options).with_curve(batch)
    assert curve[0].tolist() == [1, 0, 0]
    assert value.item() == 0.25
    value, curve = NegativePerturbation(**options).with_curve(batch)
    assert curve[0].tolist() == [1, 1, 0]
    assert value.item() == 0.75
    wrong = batch_of(Toy(total), image, [WEIGHTS], labels=torch.tensor([1]))  # the model is right once it has changed
    assert PositivePerturbation(**options).with_curve(wrong)[1][0].tolist() == [0, 1, 1]
    for unknown in (None, torch.tensor([-1]), torch.tensor([7])):
        batch = batch_of(Toy(total), image, [WEIGHTS], labels=unknown)
        batch.vit.classes = 2
        assert PositivePerturbation(**options)(batch).isnan().all()


def test_the_true_class_may_be_explained():
    """The label's map has the opposite order: least first leaves .9 .7 .4, and the label is right below one half."""
    maps = {0: WEIGHTS, 1: [-weight for weight in WEIGHTS]}
    explain = lambda vit, images, classes, layers=False: torch.tensor([maps[each] for each in classes.tolist()])  # noqa: E731
    batch = replace(batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS], labels=torch.tensor([1])), explain=explain)
    options = {"unit": "patch", "steps": 4, "baseline": "zero"}
    curves = {
        (make, explained): make(explained=explained, **options).with_curve(batch)[1][0].tolist()
        for make in (PositivePerturbation, NegativePerturbation)
        for explained in ("predicted", "label")
    }
    assert curves[PositivePerturbation, "predicted"] == curves[NegativePerturbation, "label"] == [0, 1, 1]
    assert curves[PositivePerturbation, "label"] == curves[NegativePerturbation, "predicted"] == [0, 0, 1]


Toy.classes = 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: RemoveAndDebias(fractions=(0.2, 1.0)), "must lie between 0 and 1"),
        (lambda: RemoveAndDebias(noise=-1), "must not be negative"),
        (lambda: SalienceCoefficient(groups=1), "groups=1 must be an integer of at least 2"),
        (lambda: PositivePerturbation(explained="both"), "explained must be one of predicted, label"),
        (
            lambda: SalienceCoefficient(unit="patch", groups=5)(batch_of(Toy(total), patches(WEIGHTS), [WEIGHTS])),
            "4 pa",
        ),
    ],
)
def test_wrong_options(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
