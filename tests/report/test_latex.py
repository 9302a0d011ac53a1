"""The tables in a real TeX: they compile in an article with the packages they name, and nothing sticks out."""

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dap_bench import __version__
from dap_bench.report import compare
from dap_bench.report.layouts import ordered, tables
from dap_bench.report.tables import write_tables

pytestmark = pytest.mark.skipif(
    not (shutil.which("pdflatex") and shutil.which("pdftotext")), reason="no TeX here; `make tools` installs one"
)
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


def compiled(folder, files):
    """The words of a document with these tables: page, text and height of each."""
    named = sorted({name for file in files for name in re.findall(r"% needs (\\usepackage\{.*\})", file.read_text())})
    body = [rf"\input{{{file.name}}}" for file in files]
    document = [r"\documentclass{article}", *named, r"\begin{document}", *body, r"\end{document}"]
    (folder / "all.tex").write_text("\n".join(document))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    for _ in range(2):  # longtable settles its columns in the second run
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
    boxes = subprocess.run(["pdftotext", "-bbox", "all.pdf", "-"], cwd=folder, capture_output=True, text=True).stdout
    words = re.findall(r'yMin="([\d.]+)" xMax="[\d.]+" yMax="([\d.]+)">(.*?)</word>', boxes)
    return [(unescape(text), round(float(bottom) - float(top), 1)) for top, bottom, text in words]


@pytest.mark.parametrize(("ci", "booktabs"), [(False, False), (True, True)])
def test_all_tables_compile(summary, tmp_path, ci, booktabs):
    files = write_tables(summary, tmp_path, ci, booktabs=booktabs)
    assert [file.stem for file in files] == ["localisation", "table1", "table2", "table3", "tableA1"]
    files.append(tmp_path / "compare.tex")
    files[-1].write_text(compare.latex(compare.compare(summary, compare.published(PAPER))))
    words = [text for text, _ in compiled(tmp_path, files)]
    assert "own&100%" in [text.removeprefix("my_") for text in words]
    assert words.count("Balanced") >= 5
    numbers = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "Table"]
    assert numbers == ["1:", "2:", "3:", "4:", "A.1:"]


def test_small_tables_have_the_size_of_the_text_and_wide_ones_smaller_print(summary, tmp_path):
    plain = summary[summary["method"] != "my_own&100%"].assign(missing=0, like_random=False, version=__version__)
    files = [file for file in write_tables(plain, tmp_path) if file.stem in ("table1", "tableA1")]
    sizes = {}
    for text, height in compiled(tmp_path, files):
        sizes.setdefault(text, set()).add(height)
    (text,) = sizes["images"]  # of the captions
    assert sizes["Grad-CAM"] == {text}  # in the small table
    (wide,) = sizes["Chefer"]
    assert 0.6 * text < wide < 0.75 * text
