"""Rows -> statistics -> LaTeX, with values known by hand."""

import numpy as np
import pytest

from dap_bench import UserError, __version__, summarize
from dap_bench.report.layouts import TABLES
from dap_bench.report.tables import escape, latex, mark_best, write_tables
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
    identity = {"versions": {"dap-bench": version or __version__}, **more.get("identity", {})}
    made.describe({**names, **info, "identity": identity, "config": {"metric": more.get("options", {})}})
    rows = [
        {"sample_id": str(at), "status": "ok", "fallback": False, metric: v, **names} for at, v in enumerate(values)
    ]
    rows += [{"sample_id": f"bad{at}", "status": "failed", **names} for at in range(failed)]
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


def test_two_settings_of_one_cell_are_refused(tmp_path):
    cell(tmp_path, "a", [0.1])
    cell(tmp_path, "a", [0.2], fingerprint="g")
    with pytest.raises(UserError, match="two settings are stored for toy balanced vit_t a: .*name=NAME"):
        summarize(tmp_path)


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
    assert lower == [r"\textbf{0.123}", r"\underline{0.123}", "0.500", "-", r"\textbf{0.123}"]
    assert higher == ["0.123", r"\underline{0.123}", r"\textbf{0.500}", "-", "0.123"]


def test_the_table_byte_for_byte(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3], better="lower")
    cell(tmp_path, "ar", [0.5, 0.5], better="lower", failed=1)
    cell(tmp_path, "my_own", [0.4, np.nan], better="lower")
    expected = r"""% needs \usepackage{multirow,graphicx}
\begin{table}[t]
\centering
\resizebox{\textwidth}{!}{%
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
\end{tabular}}
\caption{DAP and attention-based explainers. 2 images per cell. In 1 place some images have no value (at most 1). *: some images failed or are not computed yet.}
\end{table}
"""  # noqa: E501
    assert latex(summarize(tmp_path), TABLES["table1"]) == expected
    written = write_tables(summarize(tmp_path), tmp_path / "tables")
    # table 3 has the method of one's own and DAP too; the ablation and A.1 only have DAP
    assert [path.name for path in written] == ["table1.tex", "table2.tex", "table3.tex", "tableA1.tex"]
    assert written[0].read_text() == expected
    assert "my" not in written[1].read_text()


def test_rows_of_another_version_are_marked(tmp_path):
    cell(tmp_path, "dap", [0.1, 0.3])
    cell(tmp_path, "ar", [0.5, 0.5], version="0.0.9")
    text = latex(summarize(tmp_path), TABLES["table1"])
    assert r" & DAP & \underline{0.200} \\" in text
    assert r"AR & \textbf{0.500}$^\dagger$ \\" in text
    assert rf"$\dagger$: rows of dap\_bench 0.0.9, not {__version__}." in text


def test_names_are_escaped():
    assert escape(r"50%_&\x~") == r"50\%\_\&\textbackslash{}x\textasciitilde{}"
