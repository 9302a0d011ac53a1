"""Controls by hand: they know nothing of the model, on any layout of tokens."""

import math
from dataclasses import replace

import pytest
import torch
from cells import run
from helpers import CONTROLS
from layouts import LAYOUTS, SIZE, build

from dap_bench import UserError, ViT, load_method, load_vit
from dap_bench.data.images import BadImage, decode
from dap_bench.data.sources import Shapes
from dap_bench.explainers.controls import centre, edges, oracle, random, sobel
from dap_bench.explainers.random_pixels import random_pixels
from dap_bench.isolation import explained, generator
from dap_bench.metrics.base import Batch

NONE = torch.zeros(1, dtype=torch.long)
MADE = {name: load_method(name) for name in CONTROLS}


@pytest.fixture(scope="module")
def vit():
    return ViT(build("plain").eval())  # 64 x 48 pixels, 4 x 3 patches of 16


def grey(plane):
    """A picture [H,W] of 0..1, without colour."""
    return plane.expand(1, 3, *plane.shape)


def shown(vit, pixels):
    """Pixels of 0..1 as the model takes them."""
    black, white = vit.normalised(0.0), vit.normalised(1.0)
    return black + pixels * (white - black)


def test_centre_is_a_gaussian_over_the_grid(vit):
    maps = centre(vit, torch.zeros(2, 3, *SIZE), torch.zeros(2, dtype=torch.long), sigma=0.5).maps.view(2, 4, 3)
    # patch (0, 2) is 1.5 rows of 4 above the centre and 1 column of 3 beside it
    assert maps[0, 0, 2].item() == pytest.approx(math.exp(-((1.5 / 4) ** 2 + (1 / 3) ** 2) / (2 * 0.5**2)), rel=1e-6)
    assert maps[1, 1, 1].item() == pytest.approx(math.exp(-((0.5 / 4) ** 2) / 0.5), rel=1e-6)
    assert torch.equal(maps, maps.flip(1))
    assert torch.equal(maps, maps.flip(2))


def test_sobel_of_a_step_and_of_a_ramp():
    step = torch.zeros(1, 5, 6)
    step[:, :, 3:] = 0.5
    assert sobel(step).tolist() == [[[0, 0, 2, 2, 0, 0]] * 5]  # 4 x the height, on both sides of it
    assert torch.equal(sobel(step.transpose(1, 2)), sobel(step).transpose(1, 2))
    ramp = torch.arange(6.0).expand(1, 5, 6)
    assert sobel(ramp)[0, 2].tolist() == [4, 8, 8, 8, 8, 4]
    both = ramp + 0.75 * torch.arange(5.0)[:, None]
    assert sobel(both)[0, 2, 2].item() == pytest.approx(math.hypot(8, 6))


def test_edges_are_pooled_to_patches(vit):
    plane = torch.zeros(SIZE)
    plane[:, 20:] = 0.5  # columns 19 and 20 have 2, both in the second column of patches
    maps = edges(vit, shown(vit, grey(plane)), NONE).maps.view(4, 3)
    torch.testing.assert_close(maps, torch.tensor([[0, 2 * 2 / 16, 0]]).expand(4, 3), rtol=1e-5, atol=1e-6)


def test_edges_see_luminance(vit):
    plane = torch.zeros(1, 3, *SIZE)
    plane[:, 1, :, 20:] = 0.5  # green alone
    maps = edges(vit, shown(vit, plane), NONE).maps.view(4, 3)
    torch.testing.assert_close(maps[:, 1], torch.full((4,), 0.587 * 4 / 16), rtol=1e-5, atol=1e-6)


def test_oracle_is_the_share_of_each_patch_inside_the_object(vit):
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[8:32, 16:36] = True
    maps = oracle(vit, torch.zeros(1, 3, *SIZE), NONE, masks=[mask]).maps
    assert maps.view(4, 3).tolist() == [[0, 0.5, 0.125], [0, 1, 0.25], [0, 0, 0], [0, 0, 0]]


def test_oracle_without_a_mask(vit):
    images = torch.zeros(2, 3, *SIZE)
    with pytest.raises(BadImage, match="^no mask is known for this image$"):
        explained(oracle, vit, images, NONE.repeat(2), masks=[torch.ones(SIZE, dtype=torch.bool), None])
    with pytest.raises(BadImage, match="no mask is known"):
        explained(oracle, vit, images, NONE.repeat(2))
    with pytest.raises(UserError, match="pass masks, one"):
        oracle(vit, images, NONE.repeat(2))


def test_random_belongs_to_the_image(vit):
    images, classes, ids = torch.randn(5, 3, *SIZE), torch.arange(5), list("abcde")
    whole = explained(random, vit, images, classes, ids).maps
    assert torch.equal(whole[3], torch.rand(12, generator=generator("d/0")))
    assert len(set(whole[:, 0].tolist())) == 5
    backwards = explained(random, vit, images.flip(0), classes, ids[::-1]).maps
    assert torch.equal(backwards.flip(0), whole)
    alone = [explained(random, vit, images[at : at + 1], classes[at : at + 1], [ids[at]]).maps for at in range(5)]
    assert torch.equal(torch.cat(alone), whole)
    assert torch.equal(explained(random, vit, images.double(), classes, ids).maps, whole.double())
    other = explained(load_method("random", seed=1), vit, images, classes, ids).maps
    assert torch.equal(other[0], torch.rand(12, generator=generator("a/1")))


def test_random_pixels_belong_to_the_image(vit):
    images, classes, ids = torch.randn(2, 3, *SIZE), torch.arange(2), ["a", "b"]
    found = explained(random_pixels, vit, images, classes, ids)
    assert found.grid == SIZE
    assert torch.equal(found.maps[1], torch.rand(SIZE[0] * SIZE[1], generator=generator("b/0")))
    alone = explained(load_method("random_pixels", seed=1), vit, images[1:], classes[1:], ids[1:]).maps
    assert torch.equal(alone[0], torch.rand(SIZE[0] * SIZE[1], generator=generator("b/1")))


def test_random_as_a_prior_goes_by_the_picture(vit):
    images, classes = torch.randn(2, 3, *SIZE), torch.arange(2)
    dap = load_method("dap", prior="random")
    one, both = dap(vit, images[1:], classes[1:]).maps[0], dap(vit, images, classes).maps[1]
    torch.testing.assert_close(one, both)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gets_the_same_maps_whatever_the_class(layout):
    vit, images = ViT(build(layout).eval()), torch.randn(2, 3, *SIZE)
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[:20] = True
    for explain in MADE.values():
        found, other = (
            explained(explain, vit, images, torch.tensor(classes), ["a", "b"], True, [mask, mask])
            for classes in ([0, 1], [3, 2])
        )
        assert (found.maps.shape, found.layers) == ((2, found.grid[0] * found.grid[1]), None)
        assert torch.equal(found.maps, other.maps)
        assert (found.maps.amax(1) > found.maps.amin(1)).all()


@pytest.mark.parametrize(
    ("name", "option"), [("centre", {"sigma": 0}), ("random", {"seed": -1}), ("random_pixels", {"seed": -1})]
)
def test_options_out_of_range(vit, name, option):
    with pytest.raises(UserError, match=f"{next(iter(option))}="):
        load_method(name, **option)(vit, torch.zeros(1, 3, *SIZE), NONE)


def test_rows_of_the_oracle(tmp_path, tmp_path_factory, monkeypatch):
    """Masks reach it though no metric asks for them; an image without one fails alone and says why."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    whole = run(tmp_path, cache, "metric=[afs]", "sampler.n=4", "keep_maps=true", method="oracle").rows()
    vit = load_vit("vit_shapes", device="cpu")
    (record,) = Shapes().fetch([int(whole[0]["sample_id"].rsplit("-", 1)[1])])
    mask = decode(record.mask, vit.mask).float()
    assert whole[0]["map"] == mask.unflatten(0, (14, 16)).unflatten(2, (14, 16)).mean((1, 3)).flatten().tolist()

    masked = Shapes.fetch

    def fetch(self, positions):
        for at, record in enumerate(masked(self, positions)):
            yield replace(record, mask=None) if at == 1 else record

    monkeypatch.setattr(Shapes, "fetch", fetch)
    some = run(tmp_path / "some", tmp_path / "cache", "metric=[afs]", "sampler.n=4", method="oracle").rows()
    assert [row["status"] for row in some].count("ok") == 3
    assert [row["reason"] for row in some if row["status"] == "failed"] == ["no mask is known for this image"]


def test_a_metric_may_ask_the_oracle(vit):
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[:16, :16] = True
    batch = Batch.of(vit, load_method("centre"), torch.randn(1, 3, *SIZE), masks=[mask])
    assert batch.explained_by(load_method("oracle")).maps[0].tolist() == [1.0] + [0.0] * 11
