"""The tables in a real TeX: they compile in an article with the packages they name, and nothing sticks out."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dap_bench import __version__
from dap_bench.report import compare
from dap_bench.report.layouts import ordered, tables
from dap_bench.report.tables import write_tables

pytestmark = pytest.mark.skipif(not shutil.which("pdflatex"), reason="no pdflatex here; `make tools` installs one")
PAPER = Path(__file__).parents[2] / "results" / "paper"


@pytest.fixture(scope="module")
def summary():
    """Every cell of the paper with every metric, and a method of one's own with a name that TeX would stumble over."""
    table = tables()["table1"]
    methods = [*ordered({name for each in tables().values() for name in each.methods}), "my_own&100%"]
    metrics = [*table.metrics, "lda_prior", "pointing", "mass_inside"]
    keys = [(s, m, e, k) for s in table.samplers for m in table.models for e in methods for k in metrics]
    table = pd.DataFrame(keys, columns=["sampler", "model", "method", "metric"])
    mean = np.random.RandomState(0).uniform(0, 1, len(table))
    mean[(table["method"] == "chefer") & (table["metric"] == "lda")] = np.nan
    lower = table["metric"] == "deletion"
    counts = {"n": 800, "nan": 0, "failed": 0, "missing": np.where(table["method"] == "ar", 3, 0), "data": "imagenet"}
    counts |= {"command": "", "resolution": 0.02, "like_random": table["method"] == "gmar"}
    counts["version"] = np.where(table["method"] == "gmar", "0.0.9", __version__)
    better = np.where(lower, "lower", "higher")
    return table.assign(mean=mean, low=mean - 0.01, high=mean + 0.01, better=better, **counts)


@pytest.mark.parametrize("ci", [False, True])
def test_all_tables_compile(summary, tmp_path, ci):
    files = write_tables(summary, tmp_path, ci)
    assert [file.stem for file in files] == ["localisation", "table1", "table2", "table3", "tableA1"]
    files.append(tmp_path / "compare.tex")
    files[-1].write_text(compare.latex(compare.compare(summary, compare.published(PAPER))))
    named = sorted({name for file in files for name in re.findall(r"% needs (\\usepackage\{.*\})", file.read_text())})
    body = [rf"\input{{{file.name}}}" for file in files]
    document = [r"\documentclass{article}", *named, r"\begin{document}", *body, r"\end{document}"]
    (tmp_path / "all.tex").write_text("\n".join(document))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    for _ in range(2):  # longtable settles its columns in the second run
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
    if shutil.which("pdftotext"):
        text = subprocess.run(["pdftotext", "-layout", "all.pdf", "-"], cwd=tmp_path, capture_output=True, text=True)
        assert "own&100%" in text.stdout
        assert text.stdout.count("Balanced") >= 3
