"""Every metric on every layout of tokens."""

import pytest
import torch
from layouts import LAYOUTS, SIZE, build

from dap_bench import ViT, load_method
from dap_bench.config import compose, instantiate_metrics
from dap_bench.metrics.base import Batch

FEW = ["metric.max_sensitivity.samples=2", "metric.randomisation.depths=2"]
FEW += [f"metric.{name}.steps=4" for name in ("deletion", "insertion", "abpc", "positive", "negative")]
METRICS = instantiate_metrics(compose("metric=all", *FEW).metric)
EXPLAIN = load_method("dap")


def measure(vit, images):
    height, width = SIZE
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[: height // 2, : width // 2] = True
    given = {"masks": [mask] * len(images), "labels": torch.tensor([2] * len(images)), "companions": companions(images)}
    batch = Batch.of(vit, EXPLAIN, images, layers=True, chunk=7, **given)
    return {name: metric(batch) for name, metric in METRICS.items()}


def companions(images):
    return lambda count: images.flip(3)[:, None].expand(-1, count, -1, -1, -1)


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
