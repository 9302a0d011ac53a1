"""The bundled ViTs know their classes, and look at the object to tell them."""

import pytest
import torch
from torch.nn.functional import max_pool2d

from dap_bench import load_vit
from dap_bench.config import choices, compose
from dap_bench.data.shapes import CLASSES, draw, label_of
from dap_bench.vit.loading import resolve_checkpoint

COUNT = 360
SIBLINGS = [name for name in choices("model") if name.startswith("vit_shapes_")]
FEW = 120  # pictures for each sibling


@pytest.fixture(scope="module")
def seen():
    """Unseen pictures of seed 0, their masks grown by 4 pixels, and their classes."""
    vit = load_vit("vit_shapes", device="cpu")
    pairs = [draw(index) for index in range(COUNT)]
    images = torch.stack([vit.transform(picture) for picture, _ in pairs])
    masks = torch.stack([vit.mask(mask) for _, mask in pairs])[:, None].float()
    return vit, images, max_pool2d(masks, 9, 1, 4), torch.tensor([label_of(index) for index in range(COUNT)])


def judge(vit, images, labels):
    """Accuracy and mean probability of the true class."""
    p = torch.cat([vit.score(chunk).softmax(1) for chunk in images.split(60)])
    return (p.argmax(1) == labels).float().mean().item(), p.gather(1, labels[:, None]).mean().item()


def test_it_is_accurate(seen):
    vit, images, _, labels = seen
    assert judge(vit, images, labels)[0] >= 0.97


def test_without_the_object_it_does_not_know(seen):
    vit, images, masks, labels = seen
    for fill in (torch.zeros(1), images.mean((2, 3), keepdim=True)):
        accuracy, confidence = judge(vit, torch.where(masks > 0, fill, images), labels)
        assert accuracy <= 0.25
        assert confidence <= 0.25


def test_without_as_much_background_it_still_knows(seen):
    vit, images, masks, labels = seen
    elsewhere = masks.roll((112, 112), (2, 3)) * (1 - masks)
    accuracy, confidence = judge(vit, torch.where(elsewhere > 0, torch.zeros(1), images), labels)
    assert accuracy >= 0.9
    assert confidence >= 0.8


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_siblings_see_the_same(seen, name):
    plain, images, masks, labels = seen
    vit = load_vit(name, device="cpu")
    assert str(vit.transform) == str(plain.transform)
    images, masks, labels = images[:FEW], masks[:FEW], labels[:FEW]
    assert judge(vit, images, labels)[0] >= 0.97
    accuracy, confidence = judge(vit, torch.where(masks > 0, torch.zeros(1), images), labels)
    assert accuracy <= 0.25
    assert confidence <= 0.25


def test_the_siblings_have_other_tokens():
    layouts = {name: load_vit(name, device="cpu").layout for name in SIBLINGS}
    assert {name: (layout.prefix, layout.head) for name, layout in layouts.items()} == {
        "vit_shapes_reg": (5, "class token"),
        "vit_shapes_avg": (0, "mean of patches"),
        "vit_shapes_avg_reg": (4, "mean of patches"),
        "vit_shapes_dist": (2, "class and distillation token"),
    }


@pytest.mark.parametrize("name", ["vit_shapes", *SIBLINGS])
def test_the_config_names_the_classes(name):
    assert tuple(compose(f"model={name}").model.class_names) == CLASSES


@pytest.mark.parametrize("name", ["vit_shapes", *SIBLINGS])
def test_the_weights_are_small(name):
    size = resolve_checkpoint(compose(f"model={name}").model.checkpoint).stat().st_size
    assert size < (4_000_000 if name == "vit_shapes" else 1_500_000)
