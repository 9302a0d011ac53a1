"""Every metric on every layout of tokens."""

import pytest
import torch
from layouts import LAYOUTS, SIZE, build

from dap_bench import ViT, load_method, load_metrics
from dap_bench.config import choices
from dap_bench.metrics.base import Batch

PRESETS = ("paper", "localisation", "lda_readings", "protocol", "rise", "as_printed")
METRICS = load_metrics(*(name for name in choices("metric") if name not in PRESETS))
EXPLAIN = load_method("dap")


def measure(vit, images):
    height, width = SIZE
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[: height // 2, : width // 2] = True
    batch = Batch.of(vit, EXPLAIN, images, layers=True, masks=[mask] * len(images), chunk=7)
    return {name: metric(batch) for name, metric in METRICS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_metric_on_every_layout(name):
    torch.manual_seed(3)
    vit, images = ViT(build(name)).double(), torch.randn(3, 3, *SIZE, dtype=torch.float64)
    whole = measure(vit, images)
    assert set(whole) == set(METRICS)
    alone = measure(vit, images[2:])
    for metric, values in whole.items():
        assert values.isfinite().all(), metric
        assert values.shape == (3,)
        torch.testing.assert_close(alone[metric][0], values[2], rtol=1e-6, atol=1e-9, msg=metric)
