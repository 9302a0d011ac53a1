"""Every config composes and makes what it says; the defaults in YAML and in code are the same."""

import inspect
import os
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from dap_bench import UserError, config, load_method, load_metrics, load_vit

TAGS = {"vit_t": "tiny", "vit_s": "small", "vit_b": "base", "vit_l": "large"}


@pytest.mark.parametrize("method", config.choices("method"))
def test_every_method_instantiates_with_every_option_in_its_yaml(method):
    node = config.compose(f"method={method}", *["method.path=x"] * (method == "maps")).method
    explain = config.instantiate(node)
    signature = inspect.signature(explain.func)
    options = {name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY} - {"ids"}
    assert options == {name for name in node if not name.startswith("_")}
    if method not in ("dap_source", "dap_target", "dap_final", "dap_uniform"):
        defaults = {n: signature.parameters[n].default for n in options - {"prior", "path"}}
        assert defaults == {name: node[name] for name in options - {"prior", "path"}}


@pytest.mark.parametrize("prior", config.choices("method/prior"))
def test_every_prior_is_its_method(prior):
    assert (
        config.compose("method=dap", f"method/prior={prior}").method.prior == config.compose(f"method={prior}").method
    )


def test_every_explainer_can_be_a_prior():
    others = {m for m in config.choices("method") if not m.startswith("dap")}
    assert set(config.choices("method/prior")) == others - {"maps", "oracle"}  # which need files, or masks


@pytest.mark.parametrize("metric", config.choices("metric"))
def test_every_metric_instantiates_with_every_option_in_its_yaml(metric):
    node = config.compose(f"metric={metric}").metric
    for name, made in config.instantiate_metrics(node).items():
        assert made.better in ("higher", "lower")
        if is_dataclass(made) and metric not in ("protocol", "lda_readings"):  # which say only what differs
            assert {field.name for field in fields(made)} == {key for key in node[name] if not key.startswith("_")}


@pytest.mark.parametrize("group", ["data", "sampler", "model"])
def test_every_other_choice_composes(group):
    for choice in config.choices(group):
        node = config.compose(f"{group}={choice}")[group]
        assert hydra.utils.get_object(node._target_)


@pytest.mark.parametrize("name", TAGS)
def test_models_spell_their_tags_and_bring_imagenet(name):
    cfg = config.compose(f"model={name}")
    assert cfg.model.tag == f"vit_{TAGS[name]}_patch16_224.augreg_in21k_ft_in1k"
    assert (cfg.data.repo, cfg.data.split) == ("ILSVRC/imagenet-1k", "train")
    assert config.compose(f"model={name}", "data=parquet", "data.path=x").data.path == "x"


def test_the_papers_samplings():
    cfg = config.compose("model=vit_b", "sampler=balanced")
    assert (cfg.sampler.classes, cfg.sampler.per_class) == (200, 4)
    assert config.compose("model=vit_b", "sampler=non_balanced").sampler.n == 800


def test_without_arguments_the_embedded_default_is_run():
    cfg = config.compose()
    assert cfg.data._target_.endswith("Shapes")
    assert cfg.model.checkpoint == "package://weights/vit_shapes.safetensors"
    assert config.compose("sampler=balanced").sampler.classes == 12


def test_a_preset_may_set_any_key():
    cfg = config.compose("experiment=demo")
    assert (cfg.keep_curves, cfg.keep_maps, cfg.results_dir, cfg.sampler.per_class) == (True, True, "results/demo", 2)
    assert config.compose("experiment=demo", "results_dir=x").results_dir == "x"


def test_a_metric_must_say_what_is_better():
    cfg = config.compose("metric=[cs]", "metric.cs._target_=builtins.dict")
    with pytest.raises(UserError, match="metric 'cs' must say what is better"):
        config.instantiate_metrics(cfg.metric)


def test_a_metric_stands_below_its_name():
    with pytest.raises(UserError, match="its YAML needs the metric's name first"):
        config.instantiate_metrics(OmegaConf.create({"_target_": "mine.Metric"}))


def test_options_of_a_metric_that_is_not_chosen():
    cfg = config.compose("experiment=breadth", "metric=[cs]")
    with pytest.raises(UserError, match=r"randomisation has options but no _target_: .* '~metric.randomisation'"):
        config.instantiate_metrics(cfg.metric)


def test_a_method_by_the_name_of_its_function():
    explain = load_method("dap_bench.explainers.gradcam.gradcam", relu=False)
    assert (explain.func.__name__, explain.keywords) == ("gradcam", {"relu": False})


def test_a_prior_may_be_a_function():
    def mine(vit, images, classes):
        return None

    assert load_method("dap", prior=mine).keywords["prior"] is mine


def test_load_method_chooses_sub_configs_by_name():
    explain = load_method("dap", prior="legrad", variant="source")
    assert explain.keywords["prior"].func.__name__ == "legrad"
    assert explain.keywords["variant"] == "source"


def test_load_metrics_by_name_and_by_preset():
    assert list(load_metrics("afs", "cs")) == ["afs", "cs"]
    assert {"cs", "afs"} <= set(load_metrics("paper"))


def test_load_vit_by_timm_tag():
    vit = load_vit(
        "vit_tiny_patch16_224", device="cpu", checkpoint="package://weights/vit_shapes.safetensors", **small()
    )
    assert (vit.depth, vit.classes) == (6, 12)


def small():
    node = OmegaConf.to_container(config.compose().model)
    return {key: node[key] for key in ("num_classes", "embed_dim", "depth", "num_heads")}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: load_method("dapp"), "there is no method=dapp; did you mean dap.*\\? There are agcam, ar"),
        (
            lambda: load_vit("vit_tinny_patch16_224", device="cpu"),
            "timm has no model .* did you mean vit_tiny_patch16_224",
        ),
        (lambda: load_vit("vit_shapes", device="cpu", checkpoint="nowhere"), "nowhere does not exist"),
        (lambda: load_vit("vit_shapes", device="cuda:99"), "device=cuda:99 was asked for"),
        (lambda: load_vit("vit_shapes", device="gpu"), "device=gpu is unknown; use auto, cpu, cuda"),
        (lambda: load_vit("vit_shapes", device="cpu", precision="fp8"), "precision=fp8 is unknown"),
        (lambda: load_vit("vit_shapes", device="cpu", depth=5), "does not fit"),
    ],
)
def test_mistakes_are_sentences(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_a_pickle_is_never_executed(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="cannot be read .* expected safetensors"):
        load_vit("vit_shapes", device="cpu", checkpoint=str(tmp_path / "evil.pth"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which the built wheel is installed, without what it depends on."""
    root, folder = Path(__file__).parents[1], tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("dap_bench", "conf", "results/paper"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile"]
    made = subprocess.run([*pip, "--target", str(folder / "here"), str(source)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder / "here"


def test_the_wheel_carries_code_configs_weights_and_published_numbers(installed):
    root = Path(__file__).parents[1]
    expected = {f"dap_bench/{name}" for name in ("py.typed", "report/page.html")}
    for place, inside, kinds in (
        ("dap_bench", "dap_bench", ("py", "safetensors")),
        ("conf", "dap_bench/conf", ("yaml",)),
        ("results/paper", "dap_bench/paper", ("csv",)),
    ):
        files = [file for kind in kinds for file in (root / place).rglob(f"*.{kind}")]
        expected |= {f"{inside}/{file.relative_to(root / place).as_posix()}" for file in files}
    found = {path.relative_to(installed).as_posix() for path in (installed / "dap_bench").rglob("*") if path.is_file()}
    assert found == expected


def test_the_console_commands_of_the_wheel_from_another_folder(installed, tmp_path):
    def run(*arguments):
        program = [sys.executable, str(installed / "bin" / "dap-bench"), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(installed), "DAP_BENCH_CACHE": str(tmp_path / "cache")}
        return subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment)

    (tmp_path / "my_method.py").write_text(
        "from dap_bench.explainers.ar import ar as rollout\n"
        "import dap_bench, sys\nprint(dap_bench.__file__, file=sys.stderr)\n"
    )
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text("_target_: my_method.rollout\n_partial_: true\n")
    done = run("--config-dir", "conf", "method=mine", "sampler.n=2", "metric=[afs]", "device=cpu")
    assert done.stdout.startswith("vit_shapes mine non_balanced: 2 of 2 images, AFS 0."), done.stderr
    assert str(installed) in done.stderr
    done = run("compare")
    last = done.stdout.splitlines()[-1]
    assert last == "Of the published numbers 0 agree, 0 differ, 418 are not measured.", done.stderr
    done = run("tabels")
    assert (done.returncode, done.stderr) == (2, "dap-bench: tabels is not a command; did you mean tables?\n")
