"""RISE: masks against their definition, and the weighted mean by hand."""

from math import ceil

import numpy as np
import pytest
import torch
from layouts import SIZE, build

from dap_bench import ViT, load_method
from dap_bench.explainers.rise import CHUNK, draw

CLASSES = torch.tensor([0, 6])


@pytest.fixture(scope="module")
def vit():
    return ViT(build("plain").eval()).double()


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(1)
    return torch.randn(2, 3, *SIZE, dtype=torch.float64)


def all_masks(*arguments):
    return torch.cat(list(draw(*arguments)))


def test_masks_are_enlarged_cells_cut_at_a_random_place():
    """Each mask again: cells drawn, mirrored at the border, read off between their centres, and shifted."""
    cells, masks = 5, all_masks(40, 5, 0.4, 3, SIZE)
    numbers = torch.rand(40, 27, generator=torch.Generator().manual_seed(3), dtype=torch.float64).numpy()
    centres = np.arange(-1, cells + 1)
    for mask, (down, across, *shown) in zip(masks, numbers, strict=True):
        grid = np.pad((np.array(shown) < 0.4).astype(float).reshape(cells, cells), 1, mode="reflect")
        for axis, shift in enumerate((down, across)):
            cell = ceil(SIZE[axis] / cells)
            pixels = np.arange(SIZE[axis]) + int(shift * cell) + 0.5
            places = pixels / ((cells + 1) * cell) * cells - 0.5
            grid = np.apply_along_axis(lambda line, at=places: np.interp(at, centres, line), axis, grid)
        torch.testing.assert_close(mask, torch.from_numpy(grid))


def test_a_mask_depends_on_the_seed_and_its_number_alone():
    many = all_masks(2 * CHUNK + 5, 4, 0.5, 0, SIZE)
    assert torch.equal(all_masks(7, 4, 0.5, 0, SIZE), many[:7])
    assert not torch.equal(all_masks(7, 4, 0.5, 1, SIZE), many[:7])
    assert many.shape == (2 * CHUNK + 5, *SIZE)
    assert many.min() >= 0
    assert many.max() <= 1
    assert all_masks(2000, 4, 0.3, 0, SIZE).mean().item() == pytest.approx(0.3, abs=0.01)


def test_of_one_cell_by_hand(vit, images):
    """One cell shows everything or nothing: the map is p(y|x) times the share of the masks that show, over p."""
    shown = all_masks(50, 1, 0.25, 0, SIZE)[:, 0, 0]
    assert set(shown.tolist()) == {0.0, 1.0}
    out = load_method("rise", samples=50, cells=1, probability=0.25)(vit, images, CLASSES)
    p = vit.score(images).softmax(1).gather(1, CLASSES[:, None])
    torch.testing.assert_close(out.maps, (p * shown.mean() / 0.25).expand(2, SIZE[0] * SIZE[1]))


def test_with_everything_shown_the_map_is_the_probability(vit, images):
    out = load_method("rise", samples=3, cells=2, probability=1.0)(vit, images, CLASSES)
    p = vit.score(images).softmax(1).gather(1, CLASSES[:, None])
    torch.testing.assert_close(out.maps, p.expand_as(out.maps))
    assert out.grid == SIZE


def test_the_map_is_the_weighted_mean_of_its_masks(vit, images):
    masks = all_masks(40, 3, 0.5, 7, SIZE)
    out = load_method("rise", samples=40, cells=3, seed=7)(vit, images, CLASSES).maps
    for at, label in enumerate(CLASSES.tolist()):
        expected = 0
        for mask in masks:
            expected = expected + vit.score(images[at : at + 1] * mask).softmax(1)[0, label] * mask / (40 * 0.5)
        torch.testing.assert_close(out[at].unflatten(0, SIZE), expected)


def test_it_finds_the_one_patch_that_matters():
    """Expectation by hand: if p(y) is the mask's value at one pixel, the map there is E[M^2]/p, elsewhere E[M M']/p."""
    vit = ViT(build("plain").eval()).double()
    vit.score = lambda x, full: torch.stack([x[:, 0, 20, 20].log(), (1 - x[:, 0, 20, 20]).log()], 1)
    image = torch.ones(1, 3, *SIZE, dtype=torch.float64)
    maps = load_method("rise", samples=3000, cells=4)(vit, image, CLASSES[:1]).maps.unflatten(1, SIZE)[0]
    masks = all_masks(3000, 4, 0.5, 0, SIZE)
    torch.testing.assert_close(maps[20, 20], (masks[:, 20, 20] ** 2).mean() / 0.5)
    assert maps[60, 40].item() == pytest.approx(0.5, abs=0.03)  # independent of it: E[M] E[M'] / p = p
    assert maps[20, 20] > 0.6
    assert torch.equal(maps.flatten().argsort(descending=True)[:400] // SIZE[1] < 40, torch.ones(400, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_gives_the_maps_of_its_images_to_the_last_bit(dtype):
    vit = ViT(build("plain").eval().to(dtype))
    images = torch.randn(3, 3, *SIZE, dtype=dtype)
    explain = load_method("rise", samples=40, cells=3)
    whole = explain(vit, images, torch.tensor([0, 6, 3])).maps
    assert whole.dtype == dtype
    assert torch.equal(explain(vit, images[2:], torch.tensor([3])).maps[0], whole[2])
