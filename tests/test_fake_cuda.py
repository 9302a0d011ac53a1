"""Every explainer, metric and precision on a device beside the CPU: nothing mixes the two, and values are the CPU's.

There is no such device here: see fake_cuda.py. What it cannot show is what CUDA's own kernels round differently.
"""

from concurrent.futures import Future
from copy import deepcopy
from functools import cache, partial

import numpy as np
import pytest
import torch
from cells import run
from fake_cuda import fake_cuda, on_cpu
from helpers import CONTROLS, EXPLAINERS
from helpers import quick as composed
from layouts import LAYOUTS, SIZE, build
from torch._subclasses.fake_tensor import FakeTensorMode

from dap_bench import UserError, ViT, config, runner
from dap_bench.evaluation import Evaluation, Loaded
from dap_bench.explainers.base import Explanation
from dap_bench.explainers.maps import maps
from dap_bench.isolation import copied, explained
from dap_bench.metrics.deletion import Deletion, Insertion
from dap_bench.metrics.grid_pointing import GridPointing
from dap_bench.metrics.perturbation_accuracy import NegativePerturbation
from dap_bench.metrics.randomisation import Randomisation
from dap_bench.metrics.road import RemoveAndDebias
from dap_bench.metrics.saco import SalienceCoefficient
from dap_bench.metrics.segmentation import IntersectionOverUnion
from dap_bench.vit import choose_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")

quick, load_metrics = cache(composed), cache(config.load_metrics)
HEIGHT, WIDTH = SIZE
IDS = ["a", "b"]
VARIANTS = {
    "ar": {"discard_ratio": 0.5},
    "attnlrp": {"gamma": 0.05, "gamma_patches": 0.25},
    "attr": {"path": True, "steps": 2},
    "beyond_intuition": {"perception": "head"},
    "cdam": {"variant": "smooth", "steps": 2},
    "chefer": {"dtype": "float64"},
    "dap": {"smooth": True, "prior": "random"},
    "gmar": {"source": "attention"},
    "integrated_gradients": {"baseline": "black"},
    "legrad": {"readout": "mean"},
}


@pytest.fixture(scope="module")
def vits():
    return on_both(build("plain").eval())


@pytest.fixture(scope="module")
def pictures():
    torch.manual_seed(1)
    return torch.randn(6, 3, *SIZE)


@pytest.fixture(scope="module")
def mask():
    found = torch.zeros(SIZE, dtype=torch.bool)
    found[: HEIGHT // 2, : WIDTH // 2] = True
    return found


def on_both(model):
    """The model on the CPU and on the device."""
    with fake_cuda():
        there = ViT(deepcopy(model).to(choose_device("auto")))
    assert there.device == torch.device("cuda", 0)
    return ViT(model), there


def both(work, vits, precision="fp32"):
    """What `work` gives for the model on the CPU and on the device, and what was waited for on the device."""
    for vit in vits:
        vit.precision = precision
    with fake_cuda() as device:
        there = work(vits[1])
    return work(vits[0]), there, device.waits


# ---------------------------------------------------------------------- the device itself


@pytest.mark.parametrize(
    "expression",
    [
        "x + c",
        "x + n",
        "x + 1.5",
        "x.sum() + c.sum()",
        "x @ c.T",
        "x.add_(c)",
        "x.copy_(c)",
        "c.copy_(x)",
        "x.to(c)",
        "c.to(x.device)",
        "x.cpu() + c",
        "x.double()",
        "torch.cat([x, c])",
        "torch.stack([x, c])",
        "torch.where(x > 0, x, c)",
        "torch.where(x > 0, x, n)",
        "torch.where(x > 0, x, 0)",
        "torch.where(c > 0, x, 0)",
        "x.masked_fill(x > 0, n)",
        "x.masked_fill(c > 0, 1.0)",
        "x[i]",
        "x[i.to(x.device)]",
        "x.gather(1, i[:, None])",
        "x.index_select(0, i)",
        "x.scatter(1, i[:, None].to(x.device), c)",
        "nn.functional.linear(x, c)",
        "nn.functional.linear(c, x)",
        "nn.functional.layer_norm(x, (3,), c[0])",
        "torch.arange(3, device=x.device) + x",
        "torch.tensor([1.0, 2.0, 3.0], device=x.device) + x",
        "torch.tensor([1.0, 2.0, 3.0]) + x",
        "torch.zeros_like(x) + x",
        "torch.zeros(2, 3) + x",
        "x.new_zeros(2, 3) + x",
        "torch.eye(3, device=x.device) @ x.T",
    ],
)
def test_the_device_refuses_what_torchs_own_fake_one_refuses(expression):
    """The same expressions under FakeTensorMode, which has the rules from torch but no numbers."""

    def outcome():
        names = {
            "x": torch.ones(2, 3, device="cuda"),
            "c": torch.ones(2, 3),
            "n": torch.tensor(2.0),
            "i": torch.tensor([0, 1]),
        }
        try:
            return eval(expression, {"torch": torch, "nn": torch.nn, **names}).device.type
        except RuntimeError:
            return "refused"

    with fake_cuda():
        ours = outcome()
    with FakeTensorMode():
        assert outcome() == ours


def test_indices_on_the_device_do_not_choose_from_the_cpu():
    with fake_cuda(), pytest.raises(RuntimeError, match="indices on cuda:0"):
        torch.ones(2, 3)[torch.tensor([0, 1]).to("cuda")]


def test_what_is_waited_for():
    with fake_cuda() as device:
        numbers = torch.arange(4.0).to("cuda", non_blocking=True)
        assert not device.waits
        expected = {
            "read": [
                lambda: numbers.sum().item(),
                lambda: bool(numbers.any()),
                lambda: torch.equal(numbers, numbers),
                lambda: torch.allclose(numbers, numbers),
                lambda: float(numbers[1]),
            ],
            "to cpu": [lambda: numbers.cpu(), lambda: numbers.tolist(), lambda: torch.zeros(4).copy_(numbers)],
            "to cuda": [
                lambda: torch.ones(4).to(numbers),
                lambda: torch.tensor([1.0, 2.0], device="cuda"),
                lambda: numbers[torch.tensor([1, 2])],
                lambda: numbers.copy_(torch.ones(4)),
            ],
            "size": [
                lambda: numbers[numbers > 1],
                lambda: numbers.nonzero(),
                lambda: numbers.unique(),
                lambda: torch.where(numbers > 1),
                lambda: numbers.masked_select(numbers > 1),
            ],
            None: [lambda: numbers.double().clamp(0, 1).softmax(0), lambda: numbers[:2], lambda: numbers.argmax()],
        }
        for kind, works in expected.items():
            for work in works:
                device.waits.clear()
                work()
                assert [found for found, _ in device.waits.elements()] == ([kind] if kind else [])
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            numbers.numpy()


def test_gradients_are_those_of_the_cpu():
    weight = torch.randn(3, 4)

    def slope(x):
        y = torch.nn.functional.linear(x.requires_grad_(), weight.to(x.device)).softmax(1)[:, 0].sum()
        return torch.autograd.grad(y, x)[0]

    x = torch.randn(2, 4)
    with fake_cuda():
        there = slope(x.to("cuda"))
        assert there.device.type == "cuda"
    assert torch.equal(on_cpu(there), slope(x))


# ---------------------------------------------------------------------- explainers


def explain_both(explain, vits, pictures, mask, double=False, layers=(False, True)):
    """Explanations here and there, without layers and with them."""
    images, classes = pictures[:2], torch.tensor([2, 5])

    def work(vit):
        inputs = images.to(vit.device)
        given = inputs.double() if double else inputs
        twin = copied(vit, double)
        return [explained(explain, twin, given, classes.to(vit.device), IDS, each, [mask, mask]) for each in layers]

    return list(zip(*both(work, vits)[:2], strict=True))


def assert_alike(here, there):
    for name in ("maps", "layers", "single", "fallback"):
        one, other = getattr(here, name), getattr(there, name)
        if one is None:
            assert other is None
            continue
        assert other.device.type == "cuda", name
        assert other.dtype == one.dtype, name
        tolerance = 1e-5 * max(1.0, float(one.double().abs().max()))
        torch.testing.assert_close(on_cpu(other), one, rtol=0, atol=tolerance)


@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("method", [*EXPLAINERS, *CONTROLS])
def test_every_explainer(vits, pictures, mask, method, double):
    options = {"samples": 4} if method == "rise" else {}
    for here, there in explain_both(quick(method, **options), vits, pictures, mask, double):
        assert_alike(here, there)


@pytest.mark.parametrize("method", VARIANTS)
def test_variants_of_explainers(vits, pictures, mask, method):
    for here, there in explain_both(quick(method, **VARIANTS[method]), vits, pictures, mask):
        assert_alike(here, there)


def test_given_maps(vits, pictures, mask, tmp_path):
    for name in IDS:
        np.savez(tmp_path / f"{name}.npz", predicted=np.arange(12.0), alternative=np.arange(12.0)[::-1])
    for here, there in explain_both(partial(maps, path=str(tmp_path)), vits, pictures, mask):
        assert_alike(here, there)


def test_no_method_is_left_out():
    assert {*EXPLAINERS, *CONTROLS, "maps"} == set(config.choices("method"))


def test_an_explainer_that_draws_from_the_global_generator(vits, pictures, mask):
    def drawn(vit, images, classes):
        return torch.rand(len(images), vit.patches, device=images.device)

    for here, there in explain_both(lambda *given, layers=False: drawn(*given), vits, pictures, mask):
        assert_alike(here, there)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, pictures, mask):
    vits = on_both(build(layout).eval())
    for method in ("attnlrp", "dap"):
        for here, there in explain_both(quick(method), vits, pictures, mask, layers=[True]):
            assert_alike(here, there)
    here, there, _ = both(lambda vit: vit.score(pictures[:2].to(vit.device)), vits)
    torch.testing.assert_close(on_cpu(there), here, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- metrics

OPTIONS = {
    "patches": Deletion(unit="patch", ties="random", steps=4),
    "mean": Insertion(baseline="mean", upsample="nearest", steps=4, auc="mean"),
    "few": RemoveAndDebias(unit="patch", ties="random", fractions=(0.3,)),
    "groups": SalienceCoefficient(unit="patch", groups=4, baseline="blur", kernel=5),
    "label": NegativePerturbation(unit="patch", steps=3, explained="label", baseline="zero"),
    "depths": Randomisation(unit="pixel", upsample="bicubic", depths=2),
    "threshold": IntersectionOverUnion(threshold=0.5),
    "grid": GridPointing(companions=3, seed=1),
}


def evaluation(vit, method, metrics, pictures, double=False):
    def companions(ids, count):
        return pictures[2 : 2 + count].expand(len(ids), -1, -1, -1, -1)

    explain = quick(method) if isinstance(method, str) else method
    return Evaluation(vit, explain, metrics, double, chunk=16, debug=True, companions=companions)


def evaluate(vit, method, metrics, pictures, mask, double=False):
    """The rows of two images, one of them without an object and without a label."""
    loaded = [Loaded("a", pictures[0], mask, 2), Loaded("b", pictures[1], None, -1)]
    return evaluation(vit, method, metrics, pictures, double)(loaded, list(metrics), curves=True, maps=True)


def assert_same_rows(here, there, tolerance):
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"seconds"}:
            if isinstance(one[name], str | bool):
                assert other[name] == one[name], name
            else:
                np.testing.assert_allclose(other[name], one[name], tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("preset", "method", "precision", "double"),
    [
        ("all", "dap", "fp32", False),
        ("all", "input_x_gradient", "tf32", True),
        ("faithfulness", "ar", "tf32", False),
        ("faithfulness", "attr", "bf16", True),
        ("paper", "input_x_gradient", "bf16", False),
        ("as_printed", "generic_attention", "fp32", False),
        ("rise", "centre", "fp32", False),
        ("protocol", "gradcam", "fp32", False),
        ("lda_readings", "dap", "fp32", True),
        (None, "legrad", "fp32", False),
    ],
)
def test_every_metric(vits, pictures, mask, preset, method, precision, double):
    """As a run does it: batches go from the CPU to the device, numbers come back."""
    metrics = load_metrics(preset) if preset else OPTIONS
    work = lambda vit: evaluate(vit, method, metrics, pictures, mask, double)  # noqa: E731
    here, there, _ = both(work, vits, precision)
    assert all(row["status"] == "ok" for row in there)
    if precision == "bf16":  # CUDA rounds at other places: what is near is near, but a class may be another
        for row in there:
            assert {name for name in metrics if row[name] != row[name]} <= {
                name for name in metrics if here[0][name] != here[0][name] or here[1][name] != here[1][name]
            }
        for name in {"deletion", "insertion", "tcc"} & set(metrics):
            assert [row[name] for row in there] == pytest.approx([row[name] for row in here], abs=0.02)
    else:
        assert_same_rows(here, there, 1e-5)


def test_bfloat16_is_used_on_the_device(vits, pictures):
    def widths(vit):
        seen = []
        handle = vit.blocks[0].mlp.fc1.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
        vit.score(pictures[:1].to(vit.device))
        handle.remove()
        return seen

    assert both(widths, vits, "bf16")[1] == [torch.bfloat16]
    assert both(widths, vits, "tf32")[1] == [torch.float32]


class Inline:
    """An executor of this thread, the only one that has the device."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *given):
        done = Future()
        done.set_result(work(*given))
        return done

    def map(self, work, *given):
        return map(work, *given)


def test_a_whole_run(tmp_path, monkeypatch):
    """From the config to the rows: the model and each batch are sent, what is written is what the CPU gives."""
    few = ["sampler.n=4", "batch_size=2", "debug=true", "metric=[cs,tcc,pointing,positive]"]
    here = run(tmp_path / "cpu", tmp_path / "cache", *few)
    monkeypatch.setattr(runner, "ThreadPoolExecutor", Inline)
    with fake_cuda() as device:
        there = run(tmp_path / "cuda", tmp_path / "cache", *few, "device=auto")
        runner.SWEEP.forget()
    assert device.waits["to cpu", "evaluation.py:_metric"] == 2 * 5  # of two batches: values, and one curve
    assert not [place for kind, place in device.waits if place == "runner.py:_sent"]  # pinned, so nobody waits for it
    found = [{row["sample_id"]: row for row in cell.rows()} for cell in (here, there)]
    assert len(found[1]) == 4
    for name in found[0]:
        for metric in ("cs", "tcc", "pointing", "positive", "confidence"):
            assert found[1][name][metric] == pytest.approx(found[0][name][metric], abs=1e-5, nan_ok=True)


# ---------------------------------------------------------------------- it can fail


def _constant(vit, images, classes, layers=False):
    return images[:, 0, ::16, ::16].flatten(1) + torch.linspace(0, 1, vit.patches)


def _returned(vit, images, classes, layers=False):
    return Explanation(images[:, 0, ::16, ::16].flatten(1).cpu(), vit.grid)


def _layers(vit, images, classes, layers=False):
    maps = images[:, 0, ::16, ::16].flatten(1)
    return Explanation(maps, vit.grid, layers=torch.stack([maps, maps], 1).cpu())


def _numpy(vit, images, classes, layers=False):
    return torch.from_numpy(images.numpy()[:, 0, ::16, ::16].reshape(len(images), -1).copy()).to(images)


def _position(vit, images, classes, layers=False):
    attention = vit.trace(images).attention[-1].mean(1)[:, 0, 1:]
    return attention * torch.eye(vit.patches).sum(0)


class _Metric:
    better, needs = "higher", ()

    def __init__(self, value):
        self.value = value

    def __call__(self, batch):
        return self.value(batch)


WRONG_METRICS = {
    "constant": _Metric(lambda batch: batch.confidence + torch.arange(len(batch.images))),
    "half on the CPU": _Metric(lambda batch: batch.explanation.maps.mean(1) * batch.confidence.cpu()),
    "index": _Metric(lambda batch: batch.images.flatten(1).gather(1, torch.zeros(2, 1, dtype=torch.long))[:, 0]),
    "mask": _Metric(lambda batch: (batch.images[:, 0] * torch.ones(SIZE)).mean((1, 2))),
}


@pytest.mark.parametrize("explain", [_constant, _returned, _layers, _numpy, _position])
def test_wrong_explainers_are_caught_here_and_nowhere_else(vits, pictures, mask, explain):
    metrics = load_metrics("afs")
    assert evaluate(vits[0], explain, metrics, pictures, mask)[0]["status"] == "ok"
    with pytest.raises(
        (RuntimeError, TypeError, UserError), match=r"same device|is on cpu|device type tensor to numpy"
    ):
        both(lambda vit: evaluate(vit, explain, metrics, pictures, mask), vits)


@pytest.mark.parametrize("name", WRONG_METRICS)
def test_wrong_metrics_are_caught_here_and_nowhere_else(vits, pictures, mask, name):
    metrics = {name: WRONG_METRICS[name]}
    assert evaluate(vits[0], "ar", metrics, pictures, mask)[0]["status"] == "ok"
    with pytest.raises(RuntimeError, match="same device"):
        both(lambda vit: evaluate(vit, "ar", metrics, pictures, mask), vits)


# ---------------------------------------------------------------------- what a batch waits for

# (what, where) -> how often in a batch of `metric=paper`, however many images it has and chunks they are scored in
AR = {
    # which classes and how sure: written into the row, and remembered for the next method
    ("to cpu", "evaluation.py:_measure"): 3,
    ("to cpu", "metrics/base.py:once"): 3,  # clean images and two baselines
    ("to cuda", "evaluation.py:_measure"): 1,  # labels
    # four explanations: AR of two classes, LDA's prior with layers and without
    ("size", "explainers/base.py:check"): 4,  # classes out of range
    ("read", "explainers/base.py:check"): 4,  # images that are not finite
    ("read", "explainers/base.py:checked"): 7,  # maps, layers and single layers that are not finite
    ("read", "explainers/gradcam.py:gradcam"): 2,  # patches without a gradient
    ("read", "isolation.py:altered"): 2,  # before the model is used again: after LDA's priors, after the first class
    ("read", "vit/model.py:_same"): 3,  # is there a trace of these images
    ("to cpu", "vit/trace.py:gradients"): 2,  # are there gradients of these classes
    # three curves: deletion, insertion, TCC
    ("to cuda", "metrics/perturbation.py:curve"): 3,  # counts of pixels
    ("to cuda", "metrics/perturbation.py:patch_of_pixel"): 1,  # of TCC
    ("to cuda", "metrics/perturbation.py:_marks"): 3,  # random weights, and ranks as marks of them:
    ("to cpu", "metrics/perturbation.py:_marks"): 3,  # is the curve known
    ("to cpu", "metrics/perturbation.py:curve"): 3,  # remembered for the next method
    # seven metrics
    ("read", "evaluation.py:_metric"): 7,  # infinite values
    ("to cpu", "evaluation.py:_metric"): 12,  # the values, and the curves of five, whether they are kept or not
}
DAP = {
    **AR,
    # two more explanations, the prior of each class
    ("size", "explainers/base.py:check"): 6,
    ("read", "explainers/base.py:check"): 6,
    ("read", "explainers/base.py:checked"): 11,
    ("read", "explainers/gradcam.py:gradcam"): 4,
    ("read", "vit/model.py:_same"): 5,
    ("to cpu", "vit/trace.py:gradients"): 4,
    ("to cpu", "evaluation.py:_measure"): 4,  # and where it fell back
}


def waits(vits, pictures, mask, method, metrics):
    """What a batch of images waits for that the runner has sent ahead."""

    def work(vit):
        images = pictures.to(vit.device, non_blocking=True)
        loaded = [Loaded(str(number), image, mask, 2) for number, image in enumerate(images)]
        evaluation(vit, method, metrics, pictures)(loaded, list(metrics))

    return both(work, vits)[2]


def changes(found, expected):
    return [
        f"{kind} in {place}: {found[kind, place]} times, not {expected.get((kind, place), 0)}"
        for kind, place in sorted(found.keys() | expected)
        if found[kind, place] != expected.get((kind, place), 0)
    ]


@pytest.mark.parametrize(("method", "expected"), [("ar", AR), ("dap", DAP)])
def test_a_batch_waits_for_nothing_new(vits, pictures, mask, method, expected):
    """The GPU runs dry whenever Python waits for it. Who adds to the list should know, and who can shorten it may."""
    new = changes(waits(vits, pictures, mask, method, load_metrics("paper")), expected)
    assert not new, "\n".join(["a batch waits for the device otherwise than the list says:", *new])


def test_a_new_wait_is_named(vits, pictures, mask):
    def asking(vit, images, classes, layers=False):
        return quick("ar")(vit, images * images.amax().item(), classes, layers)

    metrics = load_metrics("afs")
    before = waits(vits, pictures, mask, "ar", metrics)
    assert changes(waits(vits, pictures, mask, asking, metrics), before) == [
        "read in isolation.py:call: 1 times, not 0"
    ]
