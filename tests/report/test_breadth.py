"""scripts/breadth.py: what the page of all methods x all metrics says of known rows."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rows import cell

from dap_bench import summarize
from dap_bench.report.layouts import label
from dap_bench.report.rows import CellRows

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "breadth.py"
SPEC = importlib.util.spec_from_file_location("breadth", SCRIPT)
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """AR's deletion is below the controls' of patches on all of 40 images, DAP's between them; by AFS all are noise.

    Maps of pixels are below those controls too, but not below noise per pixel; GMAR is below by next to nothing.
    """
    folder, values = tmp_path_factory.mktemp("results"), 0.5 + np.arange(40) / 1000
    shifts = {"ar": -0.2, "dap": 0.05, "gmar": -0.0009, "attnlrp": -0.3}
    shifts |= {"random": 0.1, "edges": 0.0, "random_pixels": -0.4}
    noise = np.random.default_rng(0).random((len(shifts), 40))
    for at, (method, shift) in enumerate(shifts.items()):
        grid = ["224x224" if method in ("attnlrp", "random_pixels") else "14x14"] * 40
        rest = {"afs": noise[at].tolist(), "lda": [0.5 if method == "ar" else np.nan] * 40}
        cell(folder / "toy", method, (values + shift).tolist(), more=["afs", "lda"], grid=grid, **rest)
    subprocess.run([sys.executable, str(SCRIPT), f"results={folder}"], check=True, capture_output=True)
    return (folder / "README.md").read_text(), folder


def test_values_have_their_intervals(page):
    text, folder = page
    (line,) = (line for line in text.splitlines() if line.startswith("| AR | 0.3"))
    assert line.startswith("| AR | 0.320 [0.316, 0.323] |")
    assert (folder / "matrix-vit_t.png").stat().st_size > 10_000


def test_methods_are_held_against_every_control(page):
    text, _ = page
    # DAP beats the random map, but not the edges, and AttnLRP both, but not random pixels
    assert "| Del | Random pixels 0.119, Edges 0.520 | AR | GMAR, DAP, AttnLRP |" in text
    assert re.search(r"\| AFS \| .* \| none \| all \|", text)
    assert "fewer than half of the methods beat every control: Del (1 of 4), AFS (none of 4).**" in text
    assert "Controls have no LDA.\n" in text


def test_commands_of_an_experiment_are_one_command(page):
    text, folder = page
    assert "python -m dap_bench method=ar\n" in text
    swept = [f"python -m dap_bench model={model} method=ar experiment=breadth" for model in ("vit_t", "vit_b")]
    others = [f"python -m dap_bench {of}method=ig experiment=zoo method.steps=9 '~a=null'" for of in ("", "model=b ")]
    expected = [
        "python -m dap_bench experiment=breadth",
        "python -m dap_bench method=ig experiment=zoo method.steps=9 '~a'",
    ]
    assert script.whole([*swept, *others]) == expected


def test_options_other_than_the_defaults_are_named():
    config = {
        "method": {"_label_": "IG", "_order_": 1, "steps": 10, "baseline": "zero"},
        "metric": {"max_sensitivity": {"samples": 4}},
    }
    names, info = {"method": "integrated_gradients"}, {"config": config, "metrics": ["max_sensitivity"], "command": "x"}
    said = script.made_by([CellRows(names, info, pd.DataFrame(), Path())])
    assert said.startswith("Options other than the defaults: Max-sens. with samples=4; IG with steps=10.\n")


def test_the_committed_page_is_what_the_rows_say():
    assert (ROOT / script.RESULTS / "README.md").read_text() == script.page(ROOT / script.RESULTS)


def test_the_front_page_says_what_the_rows_say():
    """Each number is a mean of a method and a metric that its sentence names."""
    section = " ".join(
        (ROOT / "README.md").read_text().split("## All methods, all metrics")[1].split("\n## ")[0].split()
    )
    table = summarize(ROOT / script.RESULTS / "vit_t")
    means = [(label(line.method), label(line.metric), f"{line.mean:z.3f}") for line in table.itertuples()]
    for point in section.split("- **")[1:]:
        for number in re.findall(r"-?\d\.\d{3}", point):
            assert any(value == number and one in point and other in point for one, other, value in means), number


def test_the_front_page_names_the_metrics_that_do_not_tell():
    front, page = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", script.RESULTS / "README.md"))
    listed = re.search(r"## ViT-T, .*? beat every control: (.*?)\.\*\*", page)[1]
    told = front.split("hardly tell controls from methods.**")[1].split("- **")[0]
    assert all(name in told for name in re.findall(r"([A-Z][\w. -]*(?: \(label\))?) \((?:none|\d+) of", listed))
    none = re.findall(r"([A-Z][\w. -]*(?: \(label\))?) \(none of", listed)
    assert all(name in told.split("fewer than half")[0] for name in none)
