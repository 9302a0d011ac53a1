"""scripts/golden.py: it knows every golden array, says how to fetch the originals, and notices a difference."""

import importlib.util
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA

SCRIPT = Path(__file__).parents[1] / "scripts" / "golden.py"


@pytest.fixture
def golden():
    spec = importlib.util.spec_from_file_location("golden", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", ["nano", "beyond_intuition"])
def test_every_golden_array_has_an_original(golden, file):
    names = [name for entry in golden.ORIGINALS if entry.file == file for name in entry.arrays]
    assert len(names) == len(set(names))
    made = {golden.key(name, which) for name in names for which in ("pred", "alt")}
    assert made == {key for key in np.load(DATA / f"{file}.npz") if not key.startswith(golden.GIVEN)}


def test_the_classes_of_nano_are_its_two_most_likely():
    arrays = np.load(DATA / "nano.npz")
    order = arrays["logits"].argsort(1)
    assert (arrays["class/pred"] == order[:, -1]).all()
    assert (arrays["class/alt"] == order[:, -2]).all()


def test_without_arguments_it_says_how_to_fetch_the_originals(golden, tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not any(tmp_path.iterdir())
    for entry in golden.ORIGINALS:
        commit = golden.COMMITS[entry.repository]
        assert re.fullmatch("[0-9a-f]{40}", commit)
        assert f"git clone https://github.com/{entry.repository} " in done.stdout
        assert f"checkout {commit}\n" in done.stdout
    assert len(golden.COMMITS) == done.stdout.count("git clone")


def call(golden, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["golden.py", *arguments])
    golden.main()


def test_a_folder_without_the_checkouts(golden, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        call(golden, monkeypatch, f"repositories={tmp_path}")
    assert "is not hila-chefer/Transformer-Explainability at c3e578f" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "code"), [(1, 0), (1 + 1e-7, 1), (float("nan"), 1)])
def test_a_difference_is_printed_and_ends_in_code_1(golden, monkeypatch, capsys, tmp_path, factor, code):
    """With an original of our own, which gives the golden maps times a factor."""
    arrays = dict(np.load(DATA / "nano.npz"))

    def prepare(nano, checkout):
        assert nano.dtype == torch.float64
        rows = [torch.from_numpy(row) for which in ("pred", "alt") for row in arrays[f"attr/{which}"]]
        return lambda image, target: {"attr": rows.pop(0) * factor}

    entry = golden.Original("us/ours", ["attr"], "nano", torch.float64, 1e-10, prepare)
    monkeypatch.setattr(golden, "ORIGINALS", [entry])
    monkeypatch.setattr(golden, "COMMITS", {"us/ours": "0" * 40})
    monkeypatch.setattr(golden, "check", lambda folder: None)
    with nullcontext() if code == 0 else pytest.raises(SystemExit, match=str(code)):
        call(golden, monkeypatch, f"repositories={tmp_path}", f"write={tmp_path / 'new'}")
    shown = {1: "0.0e+00", 1 + 1e-7: "1.0e-07"}.get(factor, "nan")
    assert f"| attr | us/ours@0000000 | float64 | {shown} | 1e-10 |" in capsys.readouterr().out
    written = np.load(tmp_path / "new" / "nano.npz")
    assert set(written) == set(arrays)
    np.testing.assert_array_equal(written["attr/alt"], arrays["attr/alt"] * factor)
    assert torch.get_default_dtype() == torch.float32
