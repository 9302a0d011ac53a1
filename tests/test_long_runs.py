"""Nothing grows with the number of images."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest


@pytest.mark.slow
def test_memory_and_open_files_over_five_thousand_images(tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "benchmark.py"
    command = [sys.executable, str(script), "only=long_run", f"out={tmp_path / 'out'}"]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "out" / "long_run.md").read_text()
    curve = [tuple(map(int, line)) for line in re.findall(r"\| ([\d]+) \| (\d+) \| (\d+) \|", text.replace(",", ""))]
    assert len(curve) >= 9
    memory, files = [line[1] for line in curve], [line[2] for line in curve]
    assert median(memory[5:]) <= 1.05 * median(memory[1:5])  # it goes up and down by some per cent
    assert max(files) <= files[0] + 4
