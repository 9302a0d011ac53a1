"""Small cells of the bundled default, and what their rows say."""

import sys

import pytest

from dap_bench import config, runner

FAST = ["sampler.n=12", "batch_size=3", "metric=[cs,afs]", "device=cpu"]
NAMES = {"model": "vit_shapes", "sampler": "non_balanced", "data": "shapes"}


def run(folder, cache, *overrides, method="gradcam"):
    cfg = config.compose(*FAST, f"method={method}", f"results_dir={folder}", f"cache_dir={cache}", *overrides)
    return runner.run(cfg, {**NAMES, "method": method})


def command(folder, cache, *overrides):
    """The same as a command line, for another process."""
    where = [f"results_dir={folder}", f"cache_dir={cache}"]
    return [sys.executable, "-m", "dap_bench", *FAST, "method=gradcam", *where, *overrides]


def values(cell):
    """Every row without what may differ between runs, time; NaN as text, so that it equals itself."""
    return {
        row["sample_id"]: {k: "nan" if v != v else v for k, v in row.items() if k != "seconds"} for row in cell.rows()
    }


def close(one, other):
    return one == other or one == pytest.approx(other, abs=1e-4)
