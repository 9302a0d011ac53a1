"""scripts/breadth.py: what the page of all methods x all metrics says of known rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rows import cell

SCRIPT = Path(__file__).parents[2] / "scripts" / "breadth.py"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """AR's deletion is below both controls' on all of 40 images, DAP's between them; by AFS all are noise."""
    folder, values = tmp_path_factory.mktemp("results"), 0.5 + np.arange(40) / 1000
    noise = np.random.default_rng(0).random((4, 40))
    for at, (method, shift) in enumerate({"ar": -0.2, "dap": 0.05, "random": 0.1, "edges": 0.0}.items()):
        cell(folder / "toy", method, (values + shift).tolist(), more=["afs"], afs=noise[at].tolist())
    subprocess.run([sys.executable, str(SCRIPT), f"results={folder}"], check=True, capture_output=True)
    return (folder / "README.md").read_text(), folder


def test_values_have_their_intervals(page):
    text, folder = page
    (line,) = (line for line in text.splitlines() if line.startswith("| AR | 0.3"))
    assert line.startswith("| AR | 0.320 [0.316, 0.323] |")
    assert (folder / "matrix-vit_t.png").stat().st_size > 10_000


def test_methods_are_held_against_every_control(page):
    text, _ = page
    assert "| Del | AR | DAP |" in text  # DAP beats the random map, but not the edges
    assert "| AFS | none | AR, DAP |" in text
    assert (
        "Metrics that do not tell the controls from the methods: by AFS none of the methods beat every control." in text
    )
    assert "python -m dap_bench method=ar\n" in text
