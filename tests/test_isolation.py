"""Whatever a method does to what it is given, its rows and those of the next method are what they should be."""

import sys

import pytest
import torch
from cells import run, values

from dap_bench import UserError, load_method, load_vit, runner
from dap_bench.data.shapes import draw
from dap_bench.explainers.base import Explanation
from dap_bench.explainers.gradcam import gradcam
from dap_bench.isolation import copied, explained, generator, global_state
from dap_bench.metrics.base import Batch

SCORED = ["metric=[deletion,tcc,cs]", "metric.deletion.steps=4", "sampler.n=6"]


def hook(vit, images, classes, layers=False):
    found = gradcam(vit, images, classes, layers)
    vit.blocks[0].register_forward_hook(lambda module, inputs, output: output * 1.1)
    return found


def weights(vit, images, classes, layers=False):
    found = gradcam(vit, images, classes, layers)
    for parameter in vit.model.parameters():
        parameter.data.mul_(0.9)
    return found


def pixels(vit, images, classes, layers=False):
    found = gradcam(vit, images, classes, layers)
    images.mul_(0.3)
    classes.zero_()
    return found


def default_dtype(vit, images, classes, layers=False):
    found = gradcam(vit, images, classes, layers)
    torch.set_default_dtype(torch.float64)
    return found


def switches(vit, images, classes, layers=False):
    found = gradcam(vit, images, classes, layers)
    vit.model.train()
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(2)
    torch.set_default_device("meta")
    torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    return found


def draws(vit, images, classes, layers=False):
    """Unseeded, and for the whole batch at once."""
    return Explanation(torch.rand(len(images), vit.patches), vit.grid)


def draws_by_id(vit, images, classes, layers=False, *, ids):
    return Explanation(torch.stack([torch.rand(vit.patches, generator=generator(name)) for name in ids]), vit.grid)


def mine(function):
    """Overrides that put a function of this file in Grad-CAM's place."""
    return [
        *(f"~method.{key}" for key in ("layer", "at", "relu", "tokens")),
        f"method._target_=test_isolation.{function}",
    ]


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setitem(sys.modules, "test_isolation", sys.modules[__name__])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "cache"


@pytest.fixture(scope="module")
def clean(tmp_path_factory, cache):
    return {m: _plain(run(tmp_path_factory.mktemp(m), cache, *SCORED, method=m)) for m in ("gradcam", "ar")}


def _plain(cell):
    return {name: {k: v for k, v in row.items() if k != "fingerprint"} for name, row in values(cell).items()}


@pytest.mark.parametrize("harm", ["hook", "weights", "pixels", "default_dtype", "switches"])
def test_a_careless_method_changes_neither_its_rows_nor_those_of_the_next(tmp_path, cache, clean, harm):
    options = [
        "~method.layer",
        "~method.at",
        "~method.relu",
        "~method.tokens",
        f"method._target_=test_isolation.{harm}",
    ]
    assert _plain(run(tmp_path, cache, *SCORED, *options)) == clean["gradcam"]
    assert _plain(run(tmp_path, cache, *SCORED, method="ar")) == clean["ar"]


def test_global_state_is_put_back():
    threads, generators = torch.get_num_threads(), torch.get_rng_state()
    with global_state():
        switches(load_vit("vit_shapes", device="cpu"), torch.zeros(1, 3, 224, 224), torch.tensor([0]))
        torch.manual_seed(5)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads
    assert torch.get_default_device().type == "cpu"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    assert torch.equal(torch.get_rng_state(), generators)
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("method", ["draws", "draws_by_id"])
def test_random_numbers_belong_to_the_image(tmp_path, cache, method):
    """The same rows whatever the batch, the shard and the state of the generators."""
    options = [*mine(method), "metric=[afs]"]
    torch.manual_seed(1)
    whole = _plain(run(tmp_path / "whole", cache, *options))
    assert len({row["afs"] for row in whole.values()}) == 12  # every image has its own
    torch.manual_seed(2)
    for shard in ("1/2", "2/2"):
        cell = run(tmp_path / "shards", cache, *options, "batch_size=5", f"shard={shard}")
    assert _plain(cell) == whole


@pytest.fixture(scope="module")
def shapes():
    vit = load_vit("vit_shapes", device="cpu")
    return vit, torch.stack([vit.transform(draw(index)[0]) for index in range(2)])


def _with(value, **parts):
    """Grad-CAM with something else in some of its tensors."""

    def explain(vit, images, classes, layers=False):
        found = gradcam(vit, images, classes, True)
        tensors = {"maps": found.maps, "layers": found.layers, "single": found.layers.clone()}
        return Explanation(grid=vit.grid, **{**tensors, **{k: make(tensors[k], value) for k, make in parts.items()}})

    return explain


def _spoiled(tensor, value):
    tensor = tensor.clone()
    tensor[0].view(-1)[7] = value
    return tensor


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("part", ["maps", "layers", "single"])
def test_a_number_that_is_none_anywhere_in_an_explanation(shapes, part, value):
    vit, images = shapes
    if value == 1e300:
        vit, images = vit.double(), images.double()  # finite in double precision only
    explain = _with(value, **{part: _spoiled})
    with pytest.raises(ValueError, match=f"the explanation's {part} is not finite"):
        explained(explain, copied(vit), images, torch.tensor([0, 1]), layers=True)


def test_a_map_of_the_alternative_that_is_not_finite_fails_its_row(shapes):
    vit, images = shapes

    def explain(vit, images, classes, layers=False):
        found = gradcam(vit, images, classes, layers)
        maps = torch.where((classes == batch.alternative[:1])[:, None], torch.nan, found.maps)
        return Explanation(maps, vit.grid)

    batch = Batch.of(vit, explain, images[:1])
    with pytest.raises(ValueError, match="not finite"):
        batch.explain_all(alternative=True)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([[1.0]], "returned a list; return an Explanation, or maps"),
        (torch.ones(2, 195), "maps has shape \\[2, 195\\], expected \\[2, 196\\]"),
        (torch.ones(1, 196), "maps has shape \\[1, 196\\], expected \\[2, 196\\]"),
        (torch.ones(2, 196, dtype=torch.long), "maps holds torch.int64, expected floating-point"),
        (torch.ones(2, 196, device="meta"), "maps is on meta, its images on cpu"),
        (Explanation([1.0], (14, 14)), "maps must be a tensor, not a list"),
        (Explanation(torch.ones(2, 196), (14, 14), layers=torch.ones(2, 196)), "layers has shape .* \\[2, L, 196\\]"),
        (
            Explanation(torch.ones(2, 196), (14, 14), fallback=torch.ones(3)),
            "fallback has shape",
        ),
    ],
)
def test_mistakes_in_what_a_method_returns_are_sentences(shapes, found, words):
    vit, images = shapes
    with pytest.raises(UserError, match=words):
        explained(lambda *_: found, vit, images, torch.tensor([0, 1]))


def test_a_plain_tensor_of_patches_will_do(shapes):
    vit, images = shapes
    found = explained(lambda vit, images, classes: torch.ones(2, 196), vit, images, torch.tensor([0, 1]))
    assert (found.grid, found.maps.tolist()) == ((14, 14), [[1.0] * 196] * 2)


def test_scoring_holds_another_model_than_explainers_do(tmp_path, cache, shapes, monkeypatch):
    seen = []
    monkeypatch.setattr(sys.modules[__name__], "draws_by_id", lambda vit, *_, **__: seen.append(vit) or 1 / 0)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        run(tmp_path, cache, *mine("draws_by_id"))
    model = runner.SWEEP._kept["model"][1]
    assert seen
    assert all(vit is not model and vit.model is not model.model for vit in seen)
    theirs = {parameter.data_ptr() for vit in seen for parameter in vit.model.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in model.model.parameters()}


def test_methods_of_ours_need_no_protection(shapes):
    """They change nothing, so that a library user may call them on a model of his own."""
    vit, images = shapes
    before = {name: tensor.clone() for name, tensor in vit.model.state_dict().items()}
    for method in ("ar", "chefer", "dap", "agcam", "legrad"):
        load_method(method)(vit, images, torch.tensor([0, 1]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in vit.model.modules())
