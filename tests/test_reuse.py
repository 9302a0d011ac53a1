"""A value belongs to an image, a model, a method and a metric: it is computed once, whatever draw asks for it."""

import pytest
from cells import close, run, values

from dap_bench.evaluation import Evaluation

PLAIN = ("sample_id", "label", "predicted", "alternative", "confidence", "cs", "afs", "tcc", "deletion", "status")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "cache"


@pytest.fixture
def computed(monkeypatch):
    """What is computed: (images, metrics) of every batch."""
    found, call = [], Evaluation.__call__

    def watched(self, loaded, metrics, *options):
        found.append(({name for name, *_ in loaded}, tuple(metrics)))
        return call(self, loaded, metrics, *options)

    monkeypatch.setattr(Evaluation, "__call__", watched)
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for sample, row in one.items():
        assert all(close(row.get(key), other[sample].get(key)) for key in PLAIN), sample


def test_more_images_cost_the_new_ones(tmp_path, cache, computed):
    first = values(run(tmp_path / "rows", cache, "sampler.n=6"))
    computed.clear()
    cell = run(tmp_path / "rows", cache, "sampler.n=12")
    images = set().union(*(images for images, _ in computed))
    assert len(images) == 6
    assert not images & first.keys()
    found = values(cell)
    same(found, values(run(tmp_path / "fresh", cache, "sampler.n=12")))
    for sample, row in first.items():
        assert {key: found[sample][key] for key in PLAIN if key in row} == {
            key: row[key] for key in PLAIN if key in row
        }


def test_fewer_images_cost_nothing(tmp_path, cache, computed):
    run(tmp_path / "rows", cache, "sampler.n=12")
    computed.clear()
    few = values(run(tmp_path / "rows", cache, "sampler.n=6"))
    assert len(few) == 6
    assert not computed


def test_another_metric_costs_that_metric(tmp_path, cache, computed):
    run(tmp_path / "rows", cache, "metric=[cs]")
    computed.clear()
    more = values(run(tmp_path / "rows", cache, "metric=[cs,afs,tcc]"))
    assert {metrics for _, metrics in computed} == {("afs", "tcc")}
    same(more, values(run(tmp_path / "fresh", cache, "metric=[cs,afs,tcc]")))
    computed.clear()
    same(
        values(run(tmp_path / "rows", cache, "metric=[tcc,cs]")),
        values(run(tmp_path / "rows", cache, "metric=[cs,tcc]")),
    )
    assert not computed


def test_layers_asked_for_by_one_metric_change_no_other(tmp_path, cache):
    """With LDA in the list the method makes layer maps too; the map itself is the same to the last digit."""
    options = ["explain_precision=fp32", "sampler.n=4"]
    alone = values(run(tmp_path / "alone", cache, "metric=[afs]", *options, method="dap"))
    both = values(run(tmp_path / "both", cache, "metric=[afs,lda]", *options, method="dap"))
    assert {sample: row["afs"] for sample, row in alone.items()} == {sample: row["afs"] for sample, row in both.items()}


@pytest.mark.parametrize("override", ["method.relu=false", "metric.afs.fraction=0.2", "data.seed=3", "precision=bf16"])
def test_what_is_not_the_same_is_not_taken(tmp_path, cache, computed, override):
    run(tmp_path, cache, "sampler.n=3", "metric=[afs]")
    computed.clear()
    run(tmp_path, cache, "sampler.n=3", "metric=[afs]", override)
    assert sum(len(images) for images, _ in computed) == 3


def test_an_image_of_the_same_name_and_another_content_is_not_taken(tmp_path, cache, computed):
    from dap_bench.data.sources import Shapes

    for folder, first in (("one", 0), ("two", 1)):
        for at, record in enumerate(Shapes(size=5).fetch(range(first, first + 4))):
            path = tmp_path / folder / "class" / f"{at}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record.data)
    options = ["data=imagefolder", "sampler.n=4", "metric=[afs]"]
    run(tmp_path / "rows", cache, *options, f"data.path={tmp_path / 'one'}")
    computed.clear()
    run(tmp_path / "rows", cache, *options, f"data.path={tmp_path / 'two'}")
    assert sum(len(images) for images, _ in computed) == 4


def test_curves_and_maps_are_taken_where_all_are_there(tmp_path, cache, computed):
    run(tmp_path, cache, "metric=[afs]", "sampler.n=3", "keep_curves=true", "keep_maps=true")
    computed.clear()
    rows = run(tmp_path, cache, "metric=[afs,cs]", "sampler.n=3", "keep_curves=true", "keep_maps=true").rows()
    assert {metrics for _, metrics in computed} == {("cs",)}
    assert all(row["kept"] == "curves,maps" and len(row["afs_curve"]) == 21 and len(row["map"]) == 196 for row in rows)
    computed.clear()
    rows = run(tmp_path, cache, "metric=[afs,cs,tcc]", "sampler.n=3").rows()
    assert {metrics for _, metrics in computed} == {("tcc",)}
    assert all(row["kept"] == "maps" for row in rows)  # of TCC no curve was asked for


def test_a_failed_row_is_not_taken_over(tmp_path, cache, monkeypatch):
    import os

    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    target = ["method._target_=helpers.picky"]
    first = values(run(tmp_path, cache, *target))
    assert any(row["status"] == "failed" for row in first.values())
    monkeypatch.setattr("helpers.TOO_DARK", -9.0)
    again = values(run(tmp_path, cache, *target, "metric=[afs]"))
    assert all(row["status"] == "ok" for row in again.values())
