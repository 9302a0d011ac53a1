"""python -m dap_bench.claim: a sentence over settings, recomputed with scipy."""

import os
import sys

import numpy as np
import pandas as pd
import pytest
from rows import cell
from scipy.stats import rankdata, wilcoxon

from dap_bench import UserError, claim, store
from dap_bench.claim import Claim, Setting, judge, read, settings, variants


def run(monkeypatch, capsys, *arguments):
    """What the command prints and its exit code."""
    monkeypatch.setattr(sys, "argv", ["claim", *map(str, arguments)])
    try:
        claim.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def results(tmp_path):
    """Three methods on forty images: `a` is better than `b` wherever the model is right, and worse elsewhere."""
    random = np.random.default_rng(0)
    base, luck = random.uniform(0.3, 0.7, 40), random.normal(0, 0.05, 40)
    labels = [1 if at < 30 else 0 for at in range(40)]  # rows.cell says that 1 is predicted
    gain = np.where(np.array(labels) == 1, 0.04, -0.10) + luck
    for method, values in (("a", base - gain), ("b", base), ("same", base)):
        cell(tmp_path / "results", method, values.tolist(), labels=labels)
    return tmp_path / "results", gain


def test_a_claim_is_a_sentence():
    assert Claim.of("dap > ar on deletion") == Claim("dap", "ar", "deletion")
    assert Claim.of(" dap<my.own on cs* ") == Claim("my.own", "dap", "cs*")
    for text in ("dap on deletion", "dap > dap on cs", "dap > ar", "dap >= ar on cs", "a > b on c d"):
        with pytest.raises(UserError, match="is not a claim; write one in quotes"):
            Claim.of(text)


def test_values_of_each_setting(results):
    folder, gain = results
    found = settings(read(str(folder)), Claim("a", "b", "deletion"))
    assert [(each.described["images"], len(each.gain)) for each in found] == [("all", 40), ("right", 30)]
    table = judge(found)
    for line, values in zip(table.to_dict("records"), (gain, gain[:30]), strict=True):
        ranks = rankdata(np.abs(values))
        assert line["gain"] == pytest.approx(values.mean())  # lower is better: b - a
        assert line["p"] == pytest.approx(wilcoxon(values).pvalue, rel=1e-9)
        assert line["effect"] == pytest.approx((ranks[values > 0].sum() - ranks[values < 0].sum()) / ranks.sum())
        assert line["low"] < line["gain"] < line["high"]
    one, two = sorted(table["p"])
    assert sorted(table["corrected"]) == pytest.approx([min(1, 2 * one), max(min(1, 2 * one), two)])


def test_verdicts_of_all_kinds(results, monkeypatch, capsys):
    folder, gain = results
    p = [wilcoxon(gain).pvalue, wilcoxon(gain[:30]).pvalue]
    assert p[1] * 2 < 0.05 < p[0]  # what the fixture is made for
    code, out, _ = run(
        monkeypatch, capsys, "a > b on deletion; b > a on deletion", "same < a on deletion", f"results={folder}"
    )
    ends = [line for line in out.splitlines() if "settings;" in line]
    assert code == 0
    assert ends == [
        "holds in 1 of 2 settings; contradicted in 0; undecided in 1",
        "holds in 0 of 2 settings; contradicted in 1; undecided in 1",
        "holds in 1 of 2 settings; contradicted in 0; undecided in 1",
    ]
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "vit_t" in out  # settings that differ in their images only are named in full


def test_methods_without_a_difference_are_undecided(results):
    table = judge(settings(read(str(results[0])), Claim("b", "same", "deletion")))
    assert table[["gain", "effect", "corrected", "verdict"]].values.tolist() == [[0, 0, 1, "undecided"]] * 2


def test_holm_over_many_settings():
    random = np.random.default_rng(1)
    many = [Setting({}, pd.Series(random.normal(mean, 1, 25))) for mean in (0.0, 0.4, 0.5, 0.8, -0.9)]
    table = judge(many)
    p = sorted(wilcoxon(each.gain.to_numpy()).pvalue for each in many)
    expected = np.maximum.accumulate([min(1, (5 - at) * value) for at, value in enumerate(p)])
    assert sorted(table["corrected"]) == pytest.approx(expected.tolist())
    assert table["verdict"].iloc[-1] == "contradicted"


def _setting(folder, method, values, baseline, fingerprint="f", samples="x", metric="deletion"):
    names = {"model": "vit_t", "method": method, "sampler": "balanced", "data": "toy"}
    made = store.Cell.at(folder, names, fingerprint)
    config = {"metric": {metric: {"_target_": "os.system", "baseline": baseline}}, "sampler": {"n": len(values)}}
    info = {"n": len(values), "metrics": {metric: "higher"}, "fingerprint": fingerprint}
    made.describe({**names, **info, "identity": {"samples": samples}, "config": config})
    rows = [{"sample_id": f"s{at}", "status": "ok", metric: value, **names} for at, value in enumerate(values)]
    made.write(rows, [metric])
    return made.folder


def test_settings_are_what_rows_differ_in(tmp_path, monkeypatch, capsys):
    """Options of the metric beside each other, in one folder or in two; what has no partner does not count."""
    for at, baseline in enumerate(("zero", "black")):
        for method, gain in (("a", 1.0), ("b", 0.0)):
            values = [value + gain * (-1) ** at for value in np.linspace(0, 1, 12)]
            _setting(tmp_path / "one", method, values, baseline, f"f{at}")
    for method in "ab":
        _setting(tmp_path / "two", method, [0.5] * 9, "zero", samples="y")
    _setting(tmp_path / "two", "a", [0.5] * 12, "blur", "lonely")
    both = f"results={tmp_path / 'one'},{tmp_path / 'two'}"
    code, out, _ = run(monkeypatch, capsys, "a > b on deletion", both)
    assert code == 0
    assert "holds in 1 of 3 settings; contradicted in 1; undecided in 1" in out
    words = " ".join(out.split())
    for said in ("sampler n 12, baseline zero", "sampler n 12, baseline black", "sampler n 9, baseline zero"):
        assert said in words
    table = judge(settings(read(both.removeprefix("results=")), Claim("a", "b", "deletion")))
    assert table["effect"].tolist() == [1, -1, 0]
    assert table["corrected"].tolist() == pytest.approx([3 * wilcoxon(np.ones(12)).pvalue] * 2 + [1])
    assert "os.system" not in out


def test_a_pattern_takes_several_metrics(tmp_path):
    for method, value in (("a", 0.6), ("b", 0.5)):
        for metric in ("deletion_black", "deletion_blur", "tcc"):
            _setting(tmp_path / metric, method, [value] * 6, "x", metric=metric)
    found = settings(read(str(tmp_path)), Claim("a", "b", "deletion*"))
    assert [each.described["metric"] for each in found] == ["deletion_black", "deletion_blur"]


def test_the_newest_of_two_settings_of_a_method_counts(tmp_path, caplog):
    old = _setting(tmp_path, "a", [0.0] * 8, "zero", "old")
    _setting(tmp_path, "a", [1.0] * 8, "zero", "new")
    _setting(tmp_path, "b", [0.5] * 8, "zero")
    os.utime(old / "cell.json", (1, 1))
    (found,) = settings(read(str(tmp_path)), Claim("a", "b", "deletion"))
    assert found.gain.tolist() == [0.5] * 8
    assert "old is left out" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["results=x"], "state a claim in quotes"),
        (["a > b on"], "'a > b on' is not a claim"),
        (["a > b on cs", "results=nowhere"], "nowhere holds no rows"),
        (["a > b on cs", "sampler.n=3"], "sampler.n=3 is not an option here; options of a run need compute=true."),
        (["a > b on cs", "compute=yes"], "compute must be one of true, false, not yes"),
        (["a > b on cs*", "compute=true"], "takes one metric, not the pattern"),
        (["gradcam > nope on cs", "compute=true"], "there is no method=nope"),
        (["gradcam > ar on paper", "compute=true"], "holds no metric of that name"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_methods_that_are_not_there(results, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "a > c on deletion", f"results={results[0]}")
    assert code == 2
    assert "the rows have methods a, b, same and metrics deletion" in err


def test_which_settings_are_computed():
    options = {"_target_": "x", "baseline": "blur", "unit": "pixel", "steps": 20, "sigma": 3}
    assert variants(options, "each") == [
        {},
        {"baseline": "zero"},
        {"baseline": "black"},
        {"baseline": "mean"},
        {"unit": "patch"},
        {"steps": 10},
    ]
    every = variants(options, "all")
    assert len(every) == 4 * 2 * 2
    assert {"baseline": "mean", "unit": "patch", "steps": 10} in every
    assert variants({"formula": "x"}, "each") == [{}]


def test_computed_settings_are_rows_like_any_other(tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cache = f"cache_dir={tmp_path_factory.getbasetemp() / 'cache'}"
    arguments = ["gradcam > ar on cs", "compute=true", "sampler.n=12", "device=cpu", cache]
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "holds in 2 of 2 settings" in out  # AR does not look at the class
    assert sorted(folder.name for folder in (tmp_path / "results" / "claims").iterdir()) == ["cs", "cs-unit-patch"]
    cells = store.cells(tmp_path / "results" / "claims")
    assert len(cells) == 4
    assert all(len(cell.rows()) == 12 for cell in cells)
    monkeypatch.setattr("dap_bench.runner._Work", None)  # nothing is left to compute
    assert run(monkeypatch, capsys, *arguments)[1].splitlines()[-1] == out.splitlines()[-1]
    code, again, _ = run(monkeypatch, capsys, "gradcam > ar on cs", "results=results/claims")
    assert (code, again.splitlines()[-1]) == (0, out.splitlines()[-1])
