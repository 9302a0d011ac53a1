"""What `help()` says: everything public is described, every option is named with its default, and types are real."""

import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dap_bench
from dap_bench import config
from dap_bench.data.sources.base import Source

MODULES = sorted({module.name for module in pkgutil.walk_packages(dap_bench.__path__, "dap_bench.")} | {"dap_bench"})
SCRIPTS = ("dap_bench.__main__", "dap_bench.report.__main__")
NOTHING = (inspect.Signature.empty, None, "None", Iterator[None])  # annotations of what returns or yields nothing


def public(module):
    """The public functions and classes that a module defines, and the methods of its classes."""
    for name, found in inspect.getmembers(module):
        own = getattr(found, "__module__", None) == module.__name__ and not name.startswith("_")
        if not own or name == "main":  # what a command does is said by its module, which --help shows
            continue
        if inspect.isroutine(found) or inspect.isclass(found):
            yield f"{module.__name__}.{name}", found
        if inspect.isclass(found):
            for part, member in vars(found).items():
                method = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
                if not part.startswith("_") and (method or type(member).__name__ == "cached_property"):
                    yield f"{module.__name__}.{name}.{part}", getattr(found, part)


def doc(name, found):
    """A docstring; a method without one of its own has that of the method it overrides, or that `Source` asks for."""
    protocol = getattr(Source, name.rpartition(".")[2], None) if ".data.sources." in name else None
    return inspect.getdoc(found) or (protocol and inspect.getdoc(protocol)) or ""


def described(name, found):
    if inspect.isclass(found):
        made_up = tuple(f"{base.__name__}(" for base in found.__mro__)  # what dataclasses write by themselves
        return bool(inspect.getdoc(found)) and not inspect.getdoc(found).startswith(made_up)
    return bool(doc(name, found))


@pytest.mark.parametrize("name", [name for name in MODULES if name not in SCRIPTS])
def test_everything_public_is_described(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert [each for each, found in public(module) if not described(each, found)] == []


def test_the_walk_sees_functions_classes_methods_and_properties():
    from dap_bench.vit import model

    names = {name.removeprefix("dap_bench.vit.model.") for name, _ in public(model)}
    assert {"ViT", "ViT.trace", "ViT.blocks", "name_of"} <= names
    assert not described("a.Bare", dataclasses.make_dataclass("Bare", ["x"]))


def entries(docstring):
    """What the sections Args and Attributes say of each name, in one line each."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    found = re.findall(r"^    \*{0,2}(\w+): (.*(?:\n {5,}.*)*)", "\n".join(sections), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def undocumented(name, found):
    """The parameters of a function or method that Args does not name, or without their default, and Returns."""
    signature = inspect.signature(found)
    parameters = {each.name: each.default for each in signature.parameters.values() if each.name != "self"}
    if not parameters:  # its summary says what it returns
        return []
    text = doc(name, found)
    said = entries(text)
    lacking = [
        each
        for each, default in parameters.items()
        if each not in said or ("Defaults to " in said[each]) != (default is not inspect.Parameter.empty)
    ]
    returns = signature.return_annotation not in NOTHING
    return lacking + ["Returns"] * (returns and not re.search(r"^(Returns|Yields):\n    \S", text, re.MULTILINE))


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_and_what_is_returned_are_described(name):
    found = [each for each in public(importlib.import_module(name)) if not inspect.isclass(each[1])]
    lacking = {each: undocumented(each, function) for each, function in found if callable(function)}  # no properties
    assert {each: names for each, names in lacking.items() if names} == {}


def test_what_a_docstring_lacks_is_found():
    def bare(a: int, b: int = 1, *c: int, d: int = 2) -> int:
        """A sum.

        Args:
            a: A number.
            b: Another.
            *c: More numbers.
        """

    assert undocumented("bare", bare) == ["b", "d", "Returns"]


def assert_described(said, defaults):
    """Each option has an entry, which ends in its default, if it has one."""
    assert set(said) >= set(defaults)
    for name, default in defaults.items():
        stated = re.search(r"Defaults to (.*)\.$", said[name])
        if default is inspect.Parameter.empty or default is dataclasses.MISSING:
            assert stated is None, name
        else:
            assert stated, name
            assert stated[1] == repr(default).replace("'", '"'), name


def target_of(node):
    module, _, name = node._target_.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", config.choices("method"))
def test_every_option_of_a_method_is_named_with_its_default(name):
    node = config.compose(f"method={name}").method
    function = target_of(node)
    parameters = inspect.signature(function).parameters
    said = entries(inspect.getdoc(function))
    assert list(said) == list(parameters)
    assert_described(said, {each.name: each.default for each in parameters.values()})
    assert {str(key) for key in node if not str(key).startswith("_")} <= set(said)
    assert "[B,3,H,W]" in said["images"]
    assert re.search(r"^Returns:\n    Maps of (patches \[B,P\]|pixels \[B,H\*W\])", inspect.getdoc(function), re.M)


@pytest.mark.parametrize("name", config.choices("metric"))
def test_every_field_of_a_metric_is_named_with_its_default(name):
    for node in config.compose(f"metric={name}").metric.values():
        metric = target_of(node)
        said = entries(inspect.getdoc(metric))
        assert_described(said, {field.name: field.default for field in dataclasses.fields(metric)})


def test_help_of_dap_tells_options_and_shapes():
    import pydoc

    text = pydoc.plain(pydoc.render_doc("dap_bench.explainers.dap.dap"))
    for words in ("Args:", "Returns:", "Raises:", "[B,3,H,W]", "[B,P]", "[B,L,P]", "pairwise", "zero_rows", "fallback"):
        assert words in text


SNIPPET = """
from dap_bench import Explanation, load_method, load_metrics, load_vit, summarize
from dap_bench.config import load_source
reveal_type(load_vit("x"))
reveal_type(load_method("x"))
reveal_type(load_metrics("x"))
reveal_type(load_source("x"))
reveal_type(load_vit("x").trace)
reveal_type(Explanation.heatmaps)
load_vit(3)
"""


@pytest.mark.slow
def test_types_are_real_for_those_who_import_the_package(tmp_path):
    """As a type checker sees them from outside: py.typed promises that."""
    (tmp_path / "snippet.py").write_text(SNIPPET)
    root = Path(dap_bench.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "snippet.py"]
    environment = {**os.environ, "MYPYPATH": str(root), "MYPY_CACHE_DIR": str(root / ".mypy_cache")}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    kinds = re.findall(r'Revealed type is "(.*)"', said)
    assert kinds[0] == "dap_bench.vit.model.ViT"
    assert kinds[1].endswith("-> dap_bench.explainers.base.Explanation")
    assert re.fullmatch(r"(builtins\.)?dict\[(builtins\.)?str, dap_bench\.metrics\.base\.Metric\]", kinds[2])
    assert kinds[3] == "dap_bench.data.sources.base.Source"
    assert kinds[4].endswith("-> dap_bench.vit.trace.Trace")
    assert kinds[5].endswith("-> torch._tensor.Tensor")
    assert re.search(r"snippet\.py:10: error: .*has incompatible type .*int.*; expected .*str", said)
    assert said.count("error") == 2  # that one, and how many there are
    assert (root / "dap_bench" / "py.typed").is_file()


def test_configs_are_composed_and_names_are_known_without_torch():
    code = "import sys, dap_bench, dap_bench.config; print('torch' in sys.modules, 'load_vit' in dap_bench.__all__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == [
        "False",
        "True",
    ]
