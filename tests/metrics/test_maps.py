"""Metrics of the map itself: CS, AFS, LDA, localisation, and the ranks they rest on."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import rankdata, spearmanr

from dap_bench import UserError, load_method, load_metrics, load_vit
from dap_bench.data.shapes import draw
from dap_bench.explainers.base import Explanation
from dap_bench.metrics.afs import FlowSparsity
from dap_bench.metrics.base import Batch, ranks, spearman
from dap_bench.metrics.cs import ClassSensitivity
from dap_bench.metrics.lda import DecisionAlignment, raw_attention
from dap_bench.metrics.localisation import MassInside, Pointing


class Toy:
    model = torch.nn.Identity()
    grid, image_size, patches = (2, 2), (4, 4), 4


def batch_of(predicted, alternative=None, layers=None, masks=(), upsample="nearest"):
    def explain(vit, images, classes, layers=False):
        maps = predicted if classes[0] == 0 else alternative
        return Explanation(torch.tensor(maps), (2, 2), layer_maps, upsample=upsample)

    layer_maps = torch.tensor(layers) if layers is not None else None
    n = len(predicted)
    zeros = torch.zeros(n, dtype=torch.long)
    return Batch(Toy(), explain, torch.zeros(n, 3, 4, 4), zeros, zeros + 1, torch.ones(n), masks=list(masks))


@settings(max_examples=60, deadline=None)
@given(arrays(np.int64, (3, 17), elements=st.integers(0, 6)), arrays(np.int64, (3, 17), elements=st.integers(0, 6)))
def test_spearman_is_scipys_with_ties(a, b):
    np.testing.assert_array_equal(ranks(torch.from_numpy(a)).numpy(), rankdata(a, axis=1) - 1)
    ours = spearman(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    for row in range(3):
        if np.ptp(a[row]) == 0 or np.ptp(b[row]) == 0:
            assert np.isnan(ours[row])
        else:
            assert ours[row] == pytest.approx(spearmanr(a[row], b[row]).statistic, abs=1e-12)


def test_cs_by_hand():
    """Ranks 0 1 2 3 against 0 1 3 2: rho = 1 - 6 * 2 / (4 * 15) = 0.8; the opposite order: -1."""
    batch = batch_of([[1.0, 2.0, 3.0, 4.0]] * 3, [[1.0, 2.0, 4.0, 3.0], [9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 4.0]])
    assert ClassSensitivity(unit="patch")(batch).tolist() == pytest.approx([0.1, 1.0, 0.0])
    assert ClassSensitivity(unit="patch", formula="as_printed")(batch).tolist() == pytest.approx([0.6, 1.5, 0.5])
    # four equal pixels of each patch share a mean rank: the same correlation
    assert ClassSensitivity(unit="pixel")(batch).tolist() == pytest.approx([0.1, 1.0, 0.0])


def test_afs_by_hand():
    """Scaled to 0 .25 .5 1 (sum 1.75): the top patch of four has 1/1.75; the top two 1.5/1.75."""
    batch = batch_of([[2.0, 3.0, 4.0, 6.0]])
    assert FlowSparsity(unit="patch")(batch).item() == pytest.approx(1 / 1.75)
    assert FlowSparsity(unit="patch", fraction=0.5)(batch).item() == pytest.approx(1.5 / 1.75)
    curve = FlowSparsity(unit="patch").with_curve(batch)[1][
        0
    ]  # 0, 5, ... 100 % of four patches are 0, 0, 0, 1, 1, ... 4 of them
    assert curve[[0, 2, 5, 10, 15, 20]].tolist() == pytest.approx([0, 0, 1 / 1.75, 1.5 / 1.75, 1, 1])
    # 16 pixels of the nearest heatmap, four for each patch: the top 10 % are two of the four largest
    assert FlowSparsity(unit="pixel")(batch).item() == pytest.approx(2 / 7)
    assert FlowSparsity(unit="pixel", rounding="floor")(batch).item() == pytest.approx(1 / 7)


def test_a_constant_map_has_no_value():
    batch = batch_of([[1.0, 1.0, 1.0, 1.0]], [[1.0, 2.0, 3.0, 4.0]], masks=[torch.ones(4, 4, dtype=torch.bool)])
    for metric in (ClassSensitivity(), FlowSparsity(), MassInside(), Pointing()):
        assert torch.isnan(metric(batch)).all(), metric


def lda(**options):
    return DecisionAlignment(prior=load_method("gradcam"), **options)


def test_lda_by_hand():
    """Layer 1 in the opposite order of the final map, layer 2 with one swap, layer 3 the final map itself."""
    final = [1.0, 2.0, 3.0, 4.0]
    layers = [[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 4.0, 3.0], final]
    batch = batch_of([final], layers=[layers])
    assert lda()(batch).item() == pytest.approx((-1 + 0.8 + 1) / 3)
    assert lda().with_curve(batch)[1][0].tolist() == pytest.approx([-1, 0.8, 1])
    assert lda(layers="all_but_last")(batch).item() == pytest.approx((-1 + 0.8) / 2)
    assert lda(unit="pixel")(batch).item() == pytest.approx((-1 + 0.8 + 1) / 3)
    # what the layers add: 4 3 2 1, then -3 -1 2 2, then 0 0 -1 1
    added = [-1, spearmanr([-3, -1, 2, 2], final).statistic, spearmanr([0, 0, -1, 1], final).statistic]
    assert lda(intermediate="added")(batch).item() == pytest.approx(np.mean(added))
    assert lda(similarity="pearson")(batch).item() == pytest.approx((-1 + 0.8 + 1) / 3)
    scaled = [(np.array(layer) - 1) / 3 for layer in layers]  # maps are scaled to 0..1 first
    cosines = [v @ scaled[2] / np.linalg.norm(v) / np.linalg.norm(scaled[2]) for v in scaled]
    assert lda(similarity="cosine")(batch).item() == pytest.approx(np.mean(cosines))
    assert lda(similarity="overlap")(batch).item() == pytest.approx((0 + 0 + 1) / 3)  # the top one of four


def test_lda_of_a_constant_layer_has_no_value():
    for similarity in ("spearman", "pearson", "cosine", "overlap"):
        batch = batch_of([[1.0, 2.0, 3.0, 4.0]], layers=[[[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]]])
        assert torch.isnan(lda(similarity=similarity)(batch)).all(), similarity


def test_lda_without_layer_maps_has_no_value():
    assert torch.isnan(lda()(batch_of([[1.0, 2.0, 3.0, 4.0]]))).all()


def test_lda_readings_on_a_vit():
    vit = load_vit("vit_shapes", device="cpu")
    images = torch.stack([vit.transform(draw(index)[0]) for index in range(2)])
    batch = Batch.of(vit, load_method("dap"), images, layers=True)
    attention = [a.mean(1)[:, 0, 1:] for a in vit.trace(images).attention]
    out, prior = batch.explanation, load_method("gradcam")(vit, images, batch.predicted).maps

    def mean_rho(maps, reference):
        rhos = [[spearmanr(m[at], reference[at]).statistic for m in maps] for at in range(2)]
        return pytest.approx(np.mean(rhos, 1).tolist(), abs=1e-6)

    layers, single = out.layers.unbind(1), out.single.unbind(1)
    assert lda()(batch).tolist() == mean_rho(layers, out.maps)
    assert lda(reference="prior")(batch).tolist() == mean_rho(layers, prior)
    by_layer = partial(load_method("gradcam", relu=False), at="output", layer=-2)
    blocks = [by_layer(vit, images, batch.predicted, layer=block).maps for block in range(5)]
    rhos = [[spearmanr(m[at], r[at]).statistic for m, r in zip(layers, blocks, strict=False)] for at in range(2)]
    found = DecisionAlignment(by_layer, reference="prior_layers", layers="all_but_last")(batch).tolist()
    assert found == pytest.approx(np.mean(rhos, 1).tolist(), abs=1e-6)
    later = Batch.of(vit, load_method("ar", start_layer=1), images, layers=True)  # has no map for the first block
    pairs = list(zip(later.explanation.layers.unbind(1), blocks[1:], strict=False))
    rhos = [[spearmanr(m[at], r[at]).statistic for m, r in pairs] for at in range(2)]
    found = DecisionAlignment(by_layer, reference="prior_layers", layers="all_but_last")(later).tolist()
    assert found == pytest.approx(np.mean(rhos, 1).tolist(), abs=1e-6)
    rhos = [[spearmanr(block[at], out.maps[at]).statistic for block in blocks] for at in range(2)]
    found = DecisionAlignment(by_layer, intermediate="prior", layers="all_but_last")(batch).tolist()
    assert found == pytest.approx(np.mean(rhos, 1).tolist(), abs=1e-6)
    with pytest.raises(UserError, match="one map per layer"):
        DecisionAlignment(lambda *_, layers: out.__class__(out.maps, out.grid), reference="prior_layers")(batch)
    assert lda(reference="last_attention")(batch).tolist() == mean_rho(layers, attention[-1])
    assert lda(intermediate="single")(batch).tolist() == mean_rho(single, out.maps)
    assert lda(intermediate="raw_attention")(batch).tolist() == mean_rho(attention, out.maps)


def test_lda_with_a_wrong_option():
    with pytest.raises(UserError, match="LDA's reference must be one of"):
        lda(reference="first")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClassSensitivity(unit="pixels"),
        lambda: ClassSensitivity(formula="half"),
        lambda: FlowSparsity(rounding="up"),
        lambda: FlowSparsity(fraction=1.5),
        lambda: FlowSparsity(upsample="cubic"),
        lambda: Pointing(upsample="x"),
    ],
)
def test_a_wrong_option_is_refused(make):
    with pytest.raises(UserError, match="must be one of|must be above 0"):
        make()


def test_localisation_by_hand():
    """The object is the right half. Scaled maps 0 1 .5 .5 and 1 0 0 .25; 1.5/2 and .25/1.25 of their mass is inside."""
    inside = torch.zeros(4, 4, dtype=torch.bool)
    inside[:, 2:] = True
    batch = batch_of([[0.0, 2.0, 1.0, 1.0], [4.0, 0.0, 0.0, 1.0]], masks=[inside, inside])
    assert Pointing()(batch).tolist() == [1.0, 0.0]
    assert MassInside()(batch).tolist() == pytest.approx([0.75, 0.2])


@pytest.mark.parametrize("mask", [None, torch.zeros(4, 4, dtype=torch.bool)])
def test_localisation_without_an_object_has_no_value(mask):
    batch = batch_of([[0.0, 2.0, 1.0, 1.0]], masks=[mask])
    assert torch.isnan(Pointing()(batch)).all()
    assert torch.isnan(MassInside()(batch)).all()


def test_presets():
    paper = load_metrics("paper")
    assert list(paper) == ["deletion", "insertion", "cs", "tcc", "afs", "lda", "lda_prior"]
    assert [m.better for m in paper.values()] == ["lower"] + ["higher"] * 6
    assert (paper["lda"].reference, paper["lda_prior"].reference) == ("prior_layers", "prior")
    assert (paper["deletion"].unit, paper["deletion"].baseline) == ("pixel", "zero")
    assert (paper["insertion"].baseline, paper["insertion"].kernel, paper["insertion"].sigma) == ("blur", 51, 8.0)
    assert (paper["tcc"].unit, paper["tcc"].baseline, paper["cs"].unit, paper["afs"].unit) == (
        "patch",
        "zero",
        "pixel",
        "pixel",
    )
    printed = load_metrics("as_printed")
    assert list(printed) == list(paper)[:-1]
    assert printed["cs"].formula == "as_printed"
    assert printed["lda"].reference == "own_final"
    assert {printed[name].unit for name in printed} == {"patch"}


def test_in_double_every_map_is_explained_in_double():
    vit, gradcam, seen = load_vit("vit_shapes", device="cpu"), load_method("gradcam"), []

    def spy(vit, images, classes, layers=False):
        seen.append((vit.dtype, images.dtype))
        return gradcam(vit, images, classes, layers=layers)

    images = torch.stack([vit.transform(draw(index)[0]) for index in range(2)])
    batch = Batch.of(vit, spy, images, layers=True, double=True)
    ClassSensitivity()(batch)
    for reference in ("prior", "prior_layers"):
        DecisionAlignment(prior=spy, reference=reference)(batch)
    assert seen == [(torch.float64, torch.float64)] * 4  # both classes, two references
    assert raw_attention(batch)[-1].dtype == torch.float64
    direct = gradcam(vit.double(), images.double(), batch.predicted).maps
    assert torch.equal(batch.explanation.maps, direct)
    assert vit.dtype == torch.float32
