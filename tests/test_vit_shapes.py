"""The embedded ViT knows its classes, and looks at the object to tell them."""

import pytest
import torch
from torch.nn.functional import max_pool2d

from dap_bench import load_vit
from dap_bench.config import compose
from dap_bench.data.shapes import CLASSES, draw, label_of

COUNT = 360


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


def test_the_config_names_the_classes():
    assert tuple(compose().model.class_names) == CLASSES


def test_the_weights_are_small():
    from dap_bench.config import resolve_checkpoint

    assert resolve_checkpoint(compose().model.checkpoint).stat().st_size < 4_000_000
