"""What a row's values depend on changes its fingerprint, and nothing else does."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cells import FAST, run

import dap_bench
from dap_bench import UserError, config, identity
from dap_bench.identity import NEUTRAL, Sources, identify

PACKAGE = Path(dap_bench.__file__).parent


def fingerprint(*overrides, samples="s"):
    return identity.fingerprint(identify(config.compose(*FAST, *overrides), samples))


def modules(target):
    return {name for name, _ in Sources.of({"_target_": target}).modules}


@pytest.mark.parametrize(
    "override",
    [
        "batch_size=5",
        "chunk_size=2",
        "workers=1",
        "shard=2/4",
        "keep_curves=true",
        "debug=true",
        "results_dir=elsewhere",
        "model.class_names=[a,b]",
        "metric.cs.upsample=null",
        "metric.afs.fraction=1e-1",
    ],
)
def test_what_does_not_change_values_does_not_change_the_fingerprint(override):
    assert fingerprint(override) == fingerprint()


@pytest.mark.parametrize(
    "override",
    [
        "precision=bf16",
        "explain_precision=fp64",
        "compile=true",
        "metric.afs.fraction=0.2",
        "method=ar",
        "model.depth=5",
        "metric=[cs]",
    ],
)
def test_what_changes_values_changes_the_fingerprint(override):
    assert fingerprint(override) != fingerprint()
    assert fingerprint(samples="t") != fingerprint()


@pytest.mark.parametrize(
    ("cell", "idle", "acting"),
    [
        (["metric=[deletion]"], "metric.deletion.kernel=5", "metric.deletion.baseline=blur"),
        (["metric=[deletion]"], "metric.deletion.sigma=3", "metric.deletion.baseline=blur"),
        (["metric=[tcc]"], "metric.tcc.seed=3", "metric.tcc.ties=random"),
        (["method=cdam"], "method.noise=0.5", "method.variant=smooth"),
        (["method=cdam"], "method.seed=5", "method.variant=smooth"),
        (["method=cdam"], "method.steps=5", "method.variant=integrated"),
        (["method=attr"], "method.steps=5", "method.path=true"),
        (["method=dap"], "method.target=zero_rows", "method.variant=target"),
    ],
)
def test_an_option_counts_where_it_acts(cell, idle, acting):
    assert fingerprint(*cell, idle) == fingerprint(*cell)
    assert fingerprint(*cell, acting, idle) != fingerprint(*cell, acting)


def test_equal_numbers_are_equal():
    assert fingerprint("metric=[insertion]", "metric.insertion.sigma=8") == fingerprint("metric=[insertion]")


SOURCE = """
import logging

log = logging.getLogger(__name__)


def explain(vit, images, classes):
    if len(images) == 0:
        raise ValueError("no images")
    return 2 * images
"""
SAME = """
\"\"\"Twice the images.\"\"\"
import logging
log = logging.getLogger(__name__)  # speaks
def explain(vit, images, classes):
    \"\"\"Twice.\"\"\"
    if len(images) == 0:
        raise ValueError(f"give me {1} image")
    log.warning("working on %d", len(images))
    return (2
            * images)
"""


def test_a_source_counts_by_what_it_computes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "counted.py"
    found = []
    for text in (SOURCE, SAME, SOURCE.replace("2 *", "3 *"), SOURCE.replace("== 0", "== 1")):
        file.write_text(text)
        found.append(fingerprint("method=ar", "method._target_=counted.explain"))
    assert found[0] == found[1]
    assert len(set(found)) == 3


def copy_of_the_project(folder, module, old, new):
    """The package with one line edited, and what a finished cell's fingerprint is there."""
    tree = folder / "project"
    if not tree.exists():
        subprocess.run(["cp", "-r", str(PACKAGE), str(tree / "dap_bench")], check=not tree.mkdir(parents=True))
        subprocess.run(["cp", "-r", str(config.CONF), str(tree / "conf")], check=True)
    file = tree / "dap_bench" / module
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    code = (
        "from dap_bench import config, identity; cfg = config.compose('metric=[cs]');"
        "print(identity.fingerprint(identity.identify(cfg, 's')))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    file.write_text(text)
    return out.stdout


def test_edits_of_our_own_code(tmp_path):
    plain = copy_of_the_project(tmp_path, "errors.py", '"""Errors', '"""Errors')
    for module, old, new, counts in (
        ("data/images.py", 'return image.convert("RGB")', 'return ImageOps.invert(image.convert("RGB"))', True),
        ("evaluation.py", "torch.stack(", "0.5 * torch.stack(", True),
        ("isolation.py", "images.clone()", "images.clone() * 2", True),
        ("hub.py", "PAUSES = (1, 2)", "PAUSES = (1, 2, 4)", False),
        ("errors.py", "shown as one sentence", "shown as two sentences", False),
        ("runner.py", "PICTURES_IN_MEMORY = 2**30", "PICTURES_IN_MEMORY = 2**20", False),
        ("metrics/cs.py", "CS, class sensitivity", "Class sensitivity", False),
        ("metrics/cs.py", "(1 - rho) / 2", "(1 - rho) / 3", True),
    ):
        assert (copy_of_the_project(tmp_path, module, old, new) != plain) == counts, (module, new)


def test_every_module_that_computes_is_part_of_the_identity(tmp_path):
    """All of ours that a run imports, but for those that only check, fetch, compose, store or show."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from cells import run;"
        "cell = run(sys.argv[2], sys.argv[3], 'sampler.n=2');"
        "print(*cell.info['identity']['code']); print(*[m for m in sys.modules if m.startswith('dap_bench')])"
    )
    arguments = [sys.executable, "-c", code, os.path.dirname(__file__), str(tmp_path / "rows"), str(tmp_path / "cache")]
    out = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    hashed, imported = (set(line.split()) for line in out[-2:])
    packages = {"dap_bench.explainers", "dap_bench.metrics"}
    assert {name for name in imported - packages if not NEUTRAL.fullmatch(name)} - {"dap_bench.data.shapes"} <= hashed
    assert "dap_bench.data.images" in hashed


def test_versions_of_the_libraries_count(monkeypatch):
    before, version = fingerprint(), identity.version
    for library in ("pillow", "torchvision", "torch", "timm", "numpy"):
        monkeypatch.setattr(identity, "version", lambda name, one=library: "0.0" if name == one else version(name))
        assert fingerprint() != before, library


# ---------------------------------------------------------------------- targets


def test_code_is_followed_through_every_kind_of_import(tmp_path, monkeypatch):
    (tmp_path / "space").mkdir()  # a package without __init__.py
    (tmp_path / "space" / "parts.py").write_text("x = 1")
    (tmp_path / "space" / "method.py").write_text("from .parts import x\nfrom . import parts")
    (tmp_path / "sibling.py").write_text("y = 1")
    (tmp_path / "alone.py").write_text("import sibling, numpy, os")
    monkeypatch.syspath_prepend(tmp_path)
    assert modules("space.method.explain") == {"space.method", "space.parts"}
    assert modules("alone.explain") == {"alone", "sibling"}


def test_a_method_does_not_rest_on_the_others():
    found = modules("dap_bench.explainers.dap.dap")
    assert {"dap_bench.explainers.ar", "dap_bench.explainers.base"} <= found
    assert not {"dap_bench.explainers.legrad", "dap_bench.report", "dap_bench.runner"} & found


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "mine.method.Methods.explain"},  # an attribute of a class
        {"_target_": "dap_bench.explainers.dap.dap", "prior": [{"_target_": "mine.method.explain"}]},
        {"_target_": "hydra.utils.get_method", "path": "mine.method.explain"},
        {"_target_": "functools.partial", "_args_": [{"_target_": "hydra.utils.get_object", "path": "mine.method.M"}]},
    ],
)
def test_a_target_is_found_wherever_it_is_written(tmp_path, monkeypatch, node):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "parts.py").write_text("scale = 1")
    (tmp_path / "mine" / "method.py").write_text("from mine.parts import scale")
    monkeypatch.syspath_prepend(tmp_path)
    first = Sources.of(node)
    assert {"mine.method", "mine.parts"} <= {name for name, _ in first.modules}
    (tmp_path / "mine" / "parts.py").write_text("scale = 2")
    assert Sources.of(node).digest != first.digest


def test_an_installed_method_with_its_helpers(tmp_path, monkeypatch):
    """Modules of its own distribution count by content, other libraries by their version."""
    site = tmp_path / "site-packages"
    for name, text in {
        "their_method.py": "import their_helper, loose_helper, their_package.deep, pandas",
        "their_helper.py": "scale = 1",
        "loose_helper.py": "scale = 1",
        "their_package/__init__.py": "",
        "their_package/deep.py": "scale = 1",
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/top_level.txt": "their_method\ntheir_helper\ntheir_package\n",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(site)
    identity._every_distribution.cache_clear()
    importlib.invalidate_caches()
    first = Sources.of({"_target_": "their_method.explain"})
    expected = {"their_method", "their_helper", "loose_helper", "their_package", "their_package.deep"}
    assert {name for name, _ in first.modules} == expected
    assert [name for name, _ in first.versions] == ["pandas"]
    for name in ("their_helper.py", "loose_helper.py", "their_package/deep.py"):
        (site / name).write_text("scale = 2")
        second = Sources.of({"_target_": "their_method.explain"})
        assert second.digest != first.digest
        first = second
    identity._every_distribution.cache_clear()


@pytest.mark.parametrize("target", ["builtins.eval", "nowhere.explain", "explain", ""])
def test_a_target_without_a_source_is_refused(target):
    with pytest.raises(UserError, match="has no source that can be found"):
        Sources.of({"_target_": target})


def test_a_source_that_changes_during_a_sweep_or_is_no_python_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "swept.py"
    source.write_text("def explain(): ...")
    overrides = ["method=ar", "method._target_=swept.explain"]
    fingerprint(*overrides)
    importlib.import_module("swept")
    fingerprint(*overrides)
    source.write_text("def explain(): return 1")
    with pytest.raises(UserError, match="swept.py was changed during the sweep; repeat the command"):
        fingerprint(*overrides)
    source.write_text("def explain(:")
    with pytest.raises(UserError, match=r"swept.py is not Python \(.*line 1"):
        fingerprint(*overrides)


def test_weights_count_by_content_and_are_hashed_once(tmp_path, monkeypatch):
    file = tmp_path / "w.safetensors"
    monkeypatch.setattr(identity, "LARGE", 2)
    file.write_bytes(b"one")
    first = identity.checkpoint_hash(str(file), tmp_path / "cache")
    opened, hashed = [], identity.file_digest
    monkeypatch.setattr(identity, "file_digest", lambda *a: (opened.append(1), hashed(*a))[1])
    assert identity.checkpoint_hash(str(file), tmp_path / "cache") == first
    assert not opened
    found = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert identity.checkpoint_hash(str(file), tmp_path / "cache") != first
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot be read"):
        identity.checkpoint_hash(str(tmp_path / "pipe"))


def test_what_the_environment_says_is_not_stored(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MY_PRIVATE_THING", "hush-hush-42")
    cache = tmp_path_factory.getbasetemp() / "cache"
    options = ["sampler.n=2", "+model.note=${oc.env:MY_PRIVATE_THING}", "method=ar"]
    with pytest.raises(UserError) as failed:  # a model has no such option, and its value is not repeated
        run(tmp_path, cache, *options)
    assert "hush-hush-42" not in str(failed.value)
    run(tmp_path, cache, "sampler.n=2", "+nowhere=${oc.env:MY_PRIVATE_THING}")
    stored = "".join(file.read_text() for file in tmp_path.rglob("cell.json"))
    assert "${oc.env:MY_PRIVATE_THING}" in stored
    assert "hush-hush-42" not in stored
