"""Rows -> statistics -> LaTeX, with values known by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import wilcoxon

from dap_bench import UserError, __version__, summarize
from dap_bench.report.layouts import tables
from dap_bench.report.rows import settings
from dap_bench.report.summary import FEW, holm, paired
from dap_bench.report.tables import escape, latex, mark_best, write_tables
from dap_bench.report.terminal import means
from dap_bench.store import Cell


def cell(
    folder,
    method,
    values,
    n=None,
    metric="cs",
    better="higher",
    failed=0,
    fingerprint="f",
    model="vit_t",
    version=None,
    **more,
):
    names = {"model": model, "method": method, "sampler": "balanced", "data": "toy"}
    made = Cell.at(folder, names, fingerprint)
    info = {"n": n or len(values) + failed, "metrics": {metric: better}, "fingerprint": fingerprint}
    info["turn"] = more.get("turn", 0)
    identity = {"versions": {"dap-bench": version or __version__}, **more.get("identity", {})}
    made.describe(
        {**names, **info, "identity": identity, "config": {"metric": more.get("options", {}), **more.get("config", {})}}
    )
    rows = [
        {"sample_id": str(at), "status": "ok", "fallback": False, metric: v, **names} for at, v in enumerate(values)
    ]
    rows += [{"sample_id": f"bad{at}", "status": "failed", **names} for at in range(failed)]
    if rows:
        made.write([rows[at] for at in more.get("order", range(len(rows)))], [metric])


def test_means_intervals_and_counts(tmp_path):
    cell(tmp_path, "a", [0.1, 0.2, 0.3, np.nan], failed=2, n=9)
    (line,) = summarize(tmp_path).to_dict("records")
    assert line["mean"] == pytest.approx(0.2)
    assert (line["n"], line["nan"], line["failed"], line["missing"], line["fallback"]) == (4, 1, 2, 3, 0)
    assert 0.1 <= line["low"] < 0.2 < line["high"] <= 0.3


def test_the_interval_is_the_bootstraps_and_repeatable(tmp_path):
    values = np.random.RandomState(0).normal(0.5, 0.1, 400)
    cell(tmp_path, "a", values.tolist())
    first, again = summarize(tmp_path).iloc[0], summarize(tmp_path).iloc[0]
    assert (first["low"], first["high"]) == (again["low"], again["high"])
    error = values.std() / 20  # of the mean of 400
    assert first["low"] == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert first["high"] == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_constant_and_missing_values(tmp_path):
    cell(tmp_path, "same", [0.0, 0.0, 0.0])
    cell(tmp_path, "none", [np.nan, np.nan])
    table = summarize(tmp_path).set_index("method")
    assert tuple(table.loc["same", ["mean", "low", "high"]]) == (0, 0, 0)
    assert table.loc["none", ["mean", "low", "high"]].isna().all()
    assert table.loc["none", "nan"] == 2


def test_of_two_settings_of_one_cell_the_newest_counts_and_the_other_is_named(tmp_path, caplog):
    cell(tmp_path, "a", [0.1], turn=3, config={"sampler": {"n": 24}})
    cell(tmp_path, "a", [0.2], turn=4, fingerprint="g", config={"sampler": {"n": 48}})
    cell(tmp_path, "a", [], n=3, turn=5, fingerprint="h")  # a first attempt that failed has no rows
    assert summarize(tmp_path)["mean"].tolist() == [0.2]
    (line,) = caplog.messages
    assert line.endswith("vit_t/a/toy-balanced/f (1 of 1 rows), older: sampler.n 24, now 48")
    assert [(each.newest, each.info["turn"]) for each in settings(tmp_path)] == [(True, 4), (False, 3)]


def test_what_settings_differ_in(tmp_path):
    code = {"mine.method": "1"}
    cell(tmp_path, "a", [0.1], turn=1, identity={"code": code})
    cell(tmp_path, "a", [0.2], turn=2, fingerprint="g", identity={"code": {"mine.method": "2"}})
    assert [each.difference for each in settings(tmp_path)] == ["", "another mine.method"]


def test_rows_of_two_folders_stand_side_by_side_and_the_first_goes_first(tmp_path, caplog):
    cell(tmp_path / "mine", "mine", [0.1, 0.2])
    cell(tmp_path / "mine", "ar", [0.5, 0.5])
    cell(tmp_path / "theirs", "ar", [0.3, 0.3])
    cell(tmp_path / "theirs", "dap", [0.4, 0.4])
    table = summarize(f"{tmp_path / 'mine'},{tmp_path / 'theirs'}").set_index("method")["mean"]
    assert table.to_dict() == pytest.approx({"ar": 0.5, "dap": 0.4, "mine": 0.15})
    assert "theirs/vit_t/ar" in caplog.text


def test_any_method_can_be_the_reference(tmp_path):
    rng = np.random.RandomState(0)
    values = {name: rng.normal(mean, 0.1, 40) for name, mean in (("dap", 0.5), ("mine", 0.6), ("ar", 0.4))}
    for name, found in values.items():
        cell(tmp_path, name, found.tolist())
    table = summarize(tmp_path, reference="mine").set_index("method")
    assert np.isnan(table.loc["mine", "p"])
    raw = {name: wilcoxon(values["mine"] - values[name]).pvalue for name in ("ar", "dap")}
    expected = holm([raw["ar"], raw["dap"]])
    assert table.loc[["ar", "dap"], "p"].tolist() == pytest.approx(expected)
    assert (table.loc[["ar", "dap"], "effect"] > 0).all()


def test_a_test_of_few_pairs_by_hand():
    """Ranks 2, 2, 2 give sums of 0, 2, 4 and 6 in 1, 3, 3 and 1 of 8 ways; gains of zero are left out."""
    assert paired(pd.Series([1.0, 1, -1, 0]))["p"] == 1
    assert paired(pd.Series([1.0, 1, 1, 0]))["p"] == 2 / 8
    assert paired(pd.Series([-5.0, 1, -2, -3, -4]))["p"] == 2 * 2 / 32  # sums of 0 and 1


@pytest.mark.parametrize("pairs", [FEW, FEW + 1])
def test_a_test_is_scipys(pairs):
    gain = np.random.default_rng(3).integers(1, 6, pairs) - 2.5  # ties
    assert paired(pd.Series(gain))["p"] == pytest.approx(wilcoxon(gain).pvalue, abs=1e-12)


def test_the_resolution_is_the_smallest_difference_that_images_can_tell(tmp_path):
    """1.96 + 0.84 standard errors of the paired difference."""
    rng = np.random.RandomState(0)
    dap, ar = rng.normal(0.5, 0.1, 100), rng.normal(0.5, 0.1, 100)
    cell(tmp_path, "dap", dap.tolist())
    cell(tmp_path, "ar", ar.tolist())
    table = summarize(tmp_path).set_index("method")
    assert table.loc["ar", "resolution"] == pytest.approx(2.8016 * (dap - ar).std(ddof=1) / 10, rel=1e-4)
    assert table["like_random"].isna().all()  # there is no such control here


def test_what_cannot_be_told_from_chance_is_marked_and_controls_take_no_place(tmp_path):
    rng = np.random.RandomState(0)
    noise = rng.normal(0.3, 0.1, 60)
    for name, values in (
        ("random", noise),
        ("ar", noise + rng.normal(0, 0.1, 60)),
        ("dap", noise + 0.2),
        ("oracle", noise + 0.6),
    ):
        cell(tmp_path, name, values.tolist())
    table = summarize(tmp_path)
    assert table.set_index("method")["like_random"].drop("random").to_dict() == {
        "ar": True,
        "dap": False,
        "oracle": False,
    }
    text = latex(table, tables()["table1"], controls=True)
    assert r"$^\circ$ \\" in next(line for line in text.splitlines() if "AR &" in line)
    assert r"\textbf{0.5" in next(line for line in text.splitlines() if "DAP" in line)  # the oracle is beside the race
    assert "oracle" in text.lower()
    assert "not distinguishable from a random map" in text
    assert "oracle" not in latex(table, tables()["table1"]).lower()


def test_a_cell_that_is_not_whole_takes_no_place_from_those_that_are(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3])
    cell(tmp_path, "ar", [0.9, 0.9], n=5)
    cell(tmp_path, "gmar", [0.15, 0.15])
    lines = latex(summarize(tmp_path), tables()["table1"]).splitlines()
    assert [line.split("&")[-1].strip() for line in lines if " & " in line and "0." in line] == [
        r"0.900* \\",
        r"\underline{0.150} \\",
        r"\textbf{0.200} \\",
    ]


def test_a_table_of_ones_own(tmp_path, monkeypatch):
    from dap_bench import config

    (tmp_path / "conf" / "report").mkdir(parents=True)
    (tmp_path / "conf" / "method").mkdir()
    (tmp_path / "conf" / "report" / "mine.yaml").write_text(
        "caption: Mine.\nmethods: [mine, ar]\nmetrics: [peak]\nsamplers: [balanced]\nopen: false\nmodels: [vit_t]"
    )
    (tmp_path / "conf" / "method" / "mine.yaml").write_text("_label_: My Method\n_target_: mine.explain")
    monkeypatch.setattr(config, "_folders", [tmp_path / "conf"])
    cell(tmp_path / "rows", "mine", [0.1], metric="peak")
    cell(tmp_path / "rows", "ar", [0.2], metric="peak")
    written = write_tables(summarize(tmp_path / "rows"), tmp_path / "tables")
    assert [path.name for path in written] == ["mine.tex"]
    text = written[0].read_text()
    assert r"\multirow{2}{*}{ViT-T} & My Method & \underline{0.100} \\" in text
    assert r"\caption{Mine. 1 images per cell.}" in text


def test_a_table_that_is_none_is_a_sentence(tmp_path, monkeypatch):
    from dap_bench import config

    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mine.yaml").write_text("captoin: Mine.")
    monkeypatch.setattr(config, "_folders", [tmp_path])
    with pytest.raises(UserError, match="describes no table: it needs caption, metrics .*not captoin"):
        tables()


def test_cells_that_differ_in_more_than_the_method_are_refused(tmp_path):
    cell(tmp_path, "a", [0.1], identity={"samples": "x"}, options={"cs": {"unit": "pixel"}})
    cell(tmp_path, "b", [0.2], identity={"samples": "x"}, options={"cs": {"unit": "pixel"}})
    summarize(tmp_path)
    cell(tmp_path, "c", [0.3], identity={"samples": "x"}, options={"cs": {"unit": "patch"}})
    with pytest.raises(UserError, match="vit_t/a/.* and .*vit_t/c/.* cannot be compared: they differ in metric cs"):
        summarize(tmp_path)
    cell(tmp_path / "more", "a", [0.1], identity={"samples": "x"})
    cell(tmp_path / "more", "b", [0.1], identity={"samples": "y"})
    with pytest.raises(UserError, match="they differ in samples"):
        summarize(tmp_path / "more")
    cell(tmp_path / "precise", "a", [0.1], identity={})
    cell(tmp_path / "precise", "b", [0.1], identity={"explain_precision": "fp32"})
    summarize(tmp_path / "precise")
    cell(tmp_path / "precise", "c", [0.1], identity={"explain_precision": "fp64"})
    with pytest.raises(UserError, match="they differ in explain_precision"):
        summarize(tmp_path / "precise")


def test_metrics_that_were_edited_between_two_cells_are_named(tmp_path, caplog):
    code = {"dap_bench.metrics.cs": "1", "dap_bench.explainers.ar": "1"}
    cell(tmp_path, "a", [0.1], identity={"code": code})
    cell(tmp_path, "b", [0.2], identity={"code": {**code, "dap_bench.explainers.ar": "2"}})
    summarize(tmp_path)
    assert caplog.messages == []
    cell(tmp_path, "c", [0.3], identity={"code": {**code, "dap_bench.metrics.cs": "2"}})
    summarize(tmp_path)
    assert caplog.messages == ["some cells were measured before dap_bench.metrics.cs was edited, some after"]


def test_the_order_of_rows_does_not_matter(tmp_path):
    values = np.random.RandomState(0).normal(0.5, 0.1, 50).tolist()
    cell(tmp_path / "one", "a", values)
    cell(tmp_path / "two", "a", values, order=np.random.RandomState(1).permutation(50))
    one, two = (summarize(tmp_path / name).drop(columns="command") for name in ("one", "two"))
    assert one.equals(two)


def test_no_rows(tmp_path):
    with pytest.raises(UserError, match="holds no rows"):
        summarize(tmp_path)


def test_best_and_second_are_decided_before_rounding():
    import pandas as pd

    values = pd.Series([0.12341, 0.12349, 0.5, np.nan, 0.12341])
    lower, higher = mark_best(values, "lower").tolist(), mark_best(values, "higher").tolist()
    assert lower == [r"\textbf{0.123}", r"\underline{0.123}", "0.500", "--", r"\textbf{0.123}"]
    assert higher == ["0.123", r"\underline{0.123}", r"\textbf{0.500}", "--", "0.123"]


def test_the_table_byte_for_byte(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3], better="lower")
    cell(tmp_path, "ar", [0.5, 0.5], better="lower", failed=1)
    cell(tmp_path, "my_own", [0.4, np.nan], better="lower")
    expected = r"""% needs \usepackage{multirow,graphicx}
\begin{table}[t]
\centering
{\normalsize\setlength{\tabcolsep}{6pt}%
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
\begin{tabular}{c|c|c}
\hline
\multirow{2}{*}{Model} & \multirow{2}{*}{Method} & \multicolumn{1}{c}{Balanced} \\
\cline{3-3}
& & CS\,$\downarrow$ \\
\hline
\multirow{3}{*}{ViT-T} & AR & 0.500* \\
 & DAP & \textbf{0.200} \\
 & my\_own & \underline{0.400} \\
\hline
\end{tabular}}}
\caption{DAP and attention-based methods. 2 images per cell. 1 entry lacks values of some images (at most 1). *: some images failed or are not computed yet. The smallest detectable difference is 0.280.}
\end{table}
"""  # noqa: E501
    assert latex(summarize(tmp_path), tables()["table1"]) == expected
    written = write_tables(summarize(tmp_path), tmp_path / "tables")
    # table 3 has the method of one's own and DAP too; the ablation and A.1 only have DAP
    assert [path.name for path in written] == ["table1.tex", "table2.tex", "table3.tex", "tableA1.tex"]
    assert written[0].read_text() == expected
    assert "my" not in written[1].read_text()


def test_a_minus_is_a_minus():
    import pandas as pd

    assert mark_best(pd.Series([-0.5, 0.5, -0.25]), "higher").tolist() == [
        "$-$0.500",
        r"\textbf{0.500}",
        r"\underline{$-$0.250}",
    ]


def test_booktabs_have_no_vertical_lines(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3])
    lines = latex(summarize(tmp_path), tables()["table1"], booktabs=True).splitlines()
    assert lines[0] == r"% needs \usepackage{multirow,graphicx,booktabs}"
    assert lines[5:-4] == [
        r"\begin{tabular}{ccc}",
        r"\toprule",
        r"\multirow{2}{*}{Model} & \multirow{2}{*}{Method} & \multicolumn{1}{c}{Balanced} \\",
        r"\cmidrule(lr){3-3}",
        r"& & CS\,$\uparrow$ \\",
        r"\midrule",
        r"\multirow{1}{*}{ViT-T} & DAP & \textbf{0.200} \\",
    ]


def test_half_the_interval_stands_beside_the_mean(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3])  # whose bootstrap means are 0.1, 0.2 and 0.3
    assert r"DAP & \textbf{0.200} {\tiny$\pm$0.100} \\" in latex(summarize(tmp_path), tables()["table1"], ci=True)


def test_means_in_the_terminal(tmp_path):
    cell(tmp_path, "my_own", [0.4, np.nan], better="lower")
    cell(tmp_path, "dap", [-0.1, -0.3], better="lower")
    cell(tmp_path, "ar", [0.5, 0.5], better="lower", failed=1, n=4)
    cell(tmp_path, "ar", [0.25] * 3, model="vit_shapes", metric="deletion")
    assert means(summarize(tmp_path)).splitlines() == [
        "ViT-T, Balanced (toy), mean ± half the 95 % interval",
        "",
        "        n  failed  missing           CS ↓",
        "AR      2       1        1   0.500 ±0.000",
        "DAP     2       0        0  -0.200 ±0.100",
        "my_own  2       0        0          0.400",
        "",
        "ViT-shapes, Balanced (toy), mean ± half the 95 % interval",
        "",
        "    n         Del ↑",
        "AR  3  0.250 ±0.000",
    ]


def test_the_terminal_has_120_columns(tmp_path):
    names = {"model": "vit_t", "method": "dap", "sampler": "balanced", "data": "toy"}
    made = Cell.at(tmp_path, names, "f")
    metrics = [f"metric{at}" for at in range(20)]
    identity = {"versions": {"dap-bench": __version__}}
    info = {"n": 2, "metrics": dict.fromkeys(metrics, "higher"), "fingerprint": "f", "identity": identity}
    made.describe({**names, **info, "config": {}})
    rows = [{"sample_id": str(at), "status": "ok", **dict.fromkeys(metrics, 0.5), **names} for at in range(2)]
    made.write(rows, metrics)
    lines = means(summarize(tmp_path)).splitlines()
    assert max(map(len, lines)) == 118
    assert [line.count("metric") for line in lines if "metric" in line] == [8, 8, 4]


def test_rows_of_another_version_are_marked(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3])
    cell(tmp_path, "ar", [0.5, 0.5], version="0.0.9")
    text = latex(summarize(tmp_path), tables()["table1"])
    assert r" & DAP & \underline{0.200} \\" in text
    assert r"AR & \textbf{0.500}$^\dagger$ \\" in text
    assert rf"$\dagger$: rows of dap\_bench 0.0.9, not {__version__}." in text


def test_names_are_escaped():
    assert escape(r"50%_&\x~") == r"50\%\_\&\textbackslash{}x\textasciitilde{}"
