"""Our metrics beside other people's libraries, on the golden nano ViT. Run by `make test-oracles`.

Conventions are made equal where they differ: the same noise, the same randomised models, maps scaled to 0..1.
"""

import math

import numpy as np
import pytest
import torch

from dap_bench import load_method
from dap_bench.isolation import copied
from dap_bench.metrics.base import Batch
from dap_bench.metrics.concentration import Entropy, Gini
from dap_bench.metrics.max_sensitivity import MaxSensitivity
from dap_bench.metrics.randomisation import Randomisation
from dap_bench.metrics.road import RemoveAndDebias, impute

pytestmark = pytest.mark.oracle


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: make test-oracles installs it")


@pytest.fixture
def batch(nano32):
    images = nano32.images[:3]
    return Batch.of(nano32.vit, load_method("legrad"), images, ids=["a", "b", "c"][: len(images)])


def heat(batch, explanation):
    """Heatmaps [B,1,H,W] in 0..1, as Quantus takes them."""
    return batch.values(explanation, "pixel").view(-1, 1, *batch.vit.image_size).numpy()


def measured(theirs, batch, explain):
    """What a metric of Quantus gives for a batch."""
    given = {"x_batch": batch.images.numpy(), "y_batch": batch.predicted.numpy()}
    maps = heat(batch, batch.explanation)
    found = theirs(model=batch.vit.model, **given, a_batch=maps, explain_func=explain, channel_first=True)
    return np.array(found)


def test_roads_imputation_is_grad_cams(nano32):
    road = library("pytorch_grad_cam.metrics.road")
    torch.manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(2, 1, 7, 7), (224, 224), mode="bilinear")[:, 0]
    for share in (0.2, 0.5, 0.9):
        removed = smooth >= smooth.flatten(1).quantile(1 - share, dim=1)[:, None, None]
        ours = impute(nano32.images[:2], removed)
        for at in range(2):
            theirs = road.NoisyLinearImputer(noise=0)(nano32.images[at], (~removed[at]).float())
            assert (ours[at] - theirs).abs().max() < 1e-5


def test_road_is_grad_cams(batch, monkeypatch):
    """Their score is a target's output: the probability that ours is. Their shares are percentiles of the heatmap."""
    road, targets = library("pytorch_grad_cam.metrics.road"), library("pytorch_grad_cam.utils.model_targets")
    _, *others = road.NoisyLinearImputer.__init__.__defaults__
    monkeypatch.setattr(road.NoisyLinearImputer.__init__, "__defaults__", (0.0, *others))  # without noise
    maps = torch.rand(len(batch.images), 224, 224, generator=torch.Generator().manual_seed(1))  # without ties
    given = Batch.of(batch.vit, lambda *_, **__: maps, batch.images)
    ours = RemoveAndDebias(fractions=(0.25, 0.5, 0.75), noise=0.0)(given)
    wanted = [targets.ClassifierOutputSoftmaxTarget(label) for label in batch.predicted.tolist()]
    theirs = road.ROADCombined([25, 50, 75])(batch.images, maps.numpy(), wanted, batch.vit.model)
    assert np.abs(ours.numpy() - theirs).max() < 1e-5


def test_max_sensitivity_is_quantus(batch):
    quantus = library("quantus")
    ours = MaxSensitivity(unit="pixel", samples=4)
    noises = [noise.numpy() for noise in ours.noise(batch)]

    def explain(model, inputs, targets, **_):
        return heat(batch, batch.explain_anew(torch.from_numpy(inputs).float()))

    theirs = quantus.MaxSensitivity(
        nr_samples=4,
        perturb_func=lambda arr, indices, **_: arr + noises.pop(0).reshape(arr.shape),
        perturb_func_kwargs={},
        return_nan_when_prediction_changes=False,
        disable_warnings=True,
        display_progressbar=False,
        normalise=False,
    )
    found = measured(theirs, batch, explain)
    assert np.abs(found - ours(batch).numpy()).max() < 1e-5


def test_randomisation_is_quantus(batch, monkeypatch):
    """Given our randomised models; Quantus' own leave class token and position embedding as they were learned."""
    quantus = library("quantus")
    from quantus.helpers.model.pytorch_model import PyTorchModel

    ours = Randomisation(unit="pixel")
    models = [copied(model) for model in ours.models(batch.vit)]
    known = {id(vit.model): vit for vit in models}

    def generate(self, order="top_down", seed=42):
        yield from ((f"part {number}", vit.model) for number, vit in enumerate(models))

    def explain(model, inputs, targets, **_):
        return heat(batch, batch.explain_anew(vit=known.get(id(model))))

    monkeypatch.setattr(PyTorchModel, "get_random_layer_generator", generate)
    theirs = quantus.MPRT(
        similarity_func=quantus.similarity_func.correlation_spearman,
        return_average_correlation=True,
        skip_layers=False,
        normalise=False,
        disable_warnings=True,
        display_progressbar=False,
    )
    found = measured(theirs, batch, explain)
    depths = len(models)
    expected = (1 + depths * ours(batch).numpy()) / (depths + 1)  # Quantus counts the model as it was among the depths
    assert np.abs(found - expected).max() < 1e-5


def test_gini_and_entropy_are_quantus(batch):
    quantus = library("quantus")
    values = heat(batch, batch.explanation)
    given = {"model": batch.vit.model, "x_batch": batch.images.numpy(), "y_batch": batch.predicted.numpy()}
    options = {"normalise": False, "disable_warnings": True, "display_progressbar": False}
    gini = quantus.Sparseness(**options)(**given, a_batch=values, channel_first=True)
    entropy = quantus.Complexity(**options)(**given, a_batch=values, channel_first=True)
    assert np.abs(np.array(gini) - Gini()(batch).numpy()).max() < 1e-5
    ours = Entropy()(batch).numpy() * math.log(values[0].size)
    assert np.abs(np.array(entropy) - ours).max() < 1e-5
