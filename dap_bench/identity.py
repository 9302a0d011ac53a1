"""What a row's values depend on. Nothing else decides a fingerprint, and nothing else needs to know how it is made.

    model     the options and the weights, by content for a local file and by tag for the Hub's
    method    the options, and the source of the explainer with all that it imports
    metrics   the same for each metric by itself; of one with `companions`, the sample set these are taken from
    engine    the precisions, the source of what turns images into numbers, the versions of the libraries that do, and
              whether it is compiled
    samples   the images, labels and masks, by content

A source counts by its syntax tree: comments, formatting, docstrings and the texts of messages do not change a value,
and an option that does not act does not either. Where rows are computed (batch size, device, shard, folders) is no
part of it. A `_target_` whose source cannot be found is refused, because rows could not say what made them.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache, lru_cache
from hashlib import file_digest, sha256
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dap_bench import files
from dap_bench.config import DESCRIPTIONS
from dap_bench.errors import UserError
from dap_bench.hub import resolve_checkpoint

ENGINE = "dap_bench.evaluation"  # from images to numbers, with all that it imports
LIBRARIES = {"numpy": "numpy", "PIL": "pillow", "timm": "timm", "torch": "torch", "torchvision": "torchvision"}
COMPOSING = {"hydra", "omegaconf"}  # they make what a config names, and compute nothing
# modules of ours that decide no value: they check, fetch, compose, store or show
NEUTRAL = re.compile(
    r"dap_bench(\.(__main__|app|audit|checks|claim|command|compare|config|errors|explain|export|fetch|figures|files|hub"
    r"|identity|reuse|runner|settings|status|store|tables"
    r"|data(\.sa\w+)?|data\.sources(\.\w+)?|report(\.\w+)?))?"
)
# options of ours that act only beside a certain value of another one: (option, the other, its values)
INERT = (
    ("kernel", "baseline", ("blur",)),
    ("sigma", "baseline", ("blur",)),
    ("seed", "ties", ("random",)),
    ("noise", "variant", ("smooth",)),
    ("seed", "variant", ("smooth",)),
    ("steps", "variant", ("smooth", "integrated")),
    ("steps", "path", (True,)),
    ("target", "variant", ("target",)),
)
LARGE = 2**22  # bytes of a file whose hash is worth remembering
SAID_ONLY = {"class_names"}  # options that are shown, never computed with


def identify(cfg: DictConfig, samples: str, cache: Path | None = None) -> dict[str, Any]:
    """The identity of a cell's rows: a hash of each thing that decides their values.

    Args:
        cfg: The cell's config.
        samples: The digest of the sample set.
        cache: A folder that remembers hashes of large files. Defaults to None.

    Returns:
        Hashes of the model, the method, each metric, the engine and the samples; precisions, versions and code.

    Raises:
        UserError: If a file cannot be read, or a target has no source.
    """
    model, method, metric = (
        OmegaConf.to_container(cfg[key], resolve=True) if cfg.get(key) is not None else None
        for key in ("model", "method", "metric")
    )
    assert isinstance(model, dict)
    assert isinstance(metric, dict)
    if model.get("checkpoint"):
        model["checkpoint"] = checkpoint_hash(str(model["checkpoint"]), cache)
    method, metric = contents(method, cache), contents(metric, cache)
    code = {name: Sources.of(node) for name, node in {"model": model, "method": method, **metric}.items()}
    engine = Sources.of({"_target_": f"{ENGINE}.Evaluation"})
    precisions = {key: cfg[key] for key in ("precision", "explain_precision")}
    precisions |= {"compile": True} if cfg.get("compile") else {}
    libraries = {name: version(name) for name in LIBRARIES.values()}
    return {
        "model": _digest(acting(model), code["model"].digest),
        "method": _digest(acting(method), code["method"].digest),
        "metrics": {
            name: _digest(acting(node), code[name].digest, *([samples] if "companions" in node else ()))
            for name, node in metric.items()
        },
        "engine": _digest(precisions, libraries, engine.digest),
        "samples": samples,
        **precisions,
        "versions": dict(sorted({**libraries, **{k: v for each in code.values() for k, v in each.versions}}.items())),
        "code": {name: digest[:16] for each in (*code.values(), engine) for name, digest in each.modules},
    }


def fingerprint(identity: dict[str, Any]) -> str:
    """The hash of everything that decides a row's values.

    Args:
        identity: What `identify` returned.

    Returns:
        16 hexadecimal digits.
    """
    return _digest({key: identity[key] for key in ("model", "method", "metrics", "engine", "samples")})[:16]


def _digest(*parts: Any) -> str:
    return sha256(repr(_plain(parts)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Equal numbers as equal texts, dictionaries in one order."""
    if isinstance(value, dict):
        return sorted((str(key), _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def contents(node: Any, cache: Path | None) -> Any:
    """A config with the hash of what lies at each `path` in the path's place.

    Args:
        node: The config as plain data.
        cache: A folder that remembers hashes of large files, or None.

    Returns:
        The config with hashes; for a folder, a hash of each file in it.
    """
    if isinstance(node, list):
        return [contents(item, cache) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _content(value, cache) if key == "path" else contents(value, cache) for key, value in node.items()}


def _content(value: Any, cache: Path | None) -> Any:
    if not isinstance(value, str):
        return value
    place = Path(value).expanduser()
    if place.is_dir():
        inside = sorted(file for file in place.rglob("*") if file.is_file())
        return [[file.relative_to(place).as_posix(), file_hash(file, cache)] for file in inside]
    return file_hash(place, cache) if place.is_file() else value


def acting(node: Any) -> Any:
    """A config without the options that have no say in the values.

    Args:
        node: The config as plain data.

    Returns:
        The config without them, at any depth.
    """
    if isinstance(node, list):
        return [acting(item) for item in node]
    if not isinstance(node, dict):
        return node
    ours = str(node.get("_target_", "")).startswith("dap_bench.")
    idle = {option for option, of, values in INERT if ours and of in node and node[of] not in values}
    idle -= {option for option, of, values in INERT if ours and of in node and node[of] in values}
    idle |= (SAID_ONLY if ours else set()) | set(DESCRIPTIONS)
    return {key: acting(value) for key, value in node.items() if key not in idle}


def checkpoint_hash(checkpoint: str, cache: Path | None = None) -> str:
    """The SHA-256 of a file of weights.

    Args:
        checkpoint: The file, as `hub.resolve_checkpoint` takes it.
        cache: A folder that remembers hashes of large files. Defaults to None.

    Returns:
        The hash.

    Raises:
        UserError: If the file cannot be read.
    """
    path = resolve_checkpoint(checkpoint)
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        return file_hash(path, cache)
    except OSError as error:
        raise UserError(f"model.checkpoint={path} cannot be read ({error.strerror}).") from error


def file_hash(path: Path, cache: Path | None = None) -> str:
    """The SHA-256 of a file; of a large one it is computed once while the file stays as it is.

    Args:
        path: The file.
        cache: A folder that remembers hashes of large files. Defaults to None.

    Returns:
        The hash.
    """
    found = path.stat()
    key = sha256(repr((str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns)).encode())
    note = cache / "hashes" / key.hexdigest()[:20] if cache is not None and found.st_size > LARGE else None
    if note is not None and note.is_file():
        return note.read_text()
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if note is not None:
        with suppress(UserError):  # a cache that cannot be written is no reason to stop
            files.write_text(note, digest)
    return digest


# ---------------------------------------------------------------------- code


class Sources:
    """The modules that some targets rest on, and the versions of the libraries that foreign ones import."""

    def __init__(self, modules: dict[str, Path], libraries: Iterable[str]) -> None:
        self.modules = sorted((name, _source_hash(name, file)) for name, file in modules.items())
        self.versions = sorted((name, version(name)) for name in libraries)
        self.digest = _digest(self.modules, self.versions)

    @classmethod
    def of(cls, node: Any) -> "Sources":
        """The sources of all targets in a config, found without importing them.

        Args:
            node: The config as plain data.

        Returns:
            Their modules and libraries.

        Raises:
            UserError: If a target has no source that can be found.
        """
        modules: dict[str, Path] = {}
        libraries: set[str] = set()
        for target in targets(node):
            _follow(_module_of(target), modules, libraries)
        for text in _dotted(node):  # what hydra.utils.get_method and its like are told to fetch
            module = _find_module(text)
            if module is not None:
                _follow(module, modules, libraries)
        return cls(modules, libraries)


def targets(node: Any) -> set[str]:
    """Every `_target_` in a resolved config.

    Args:
        node: The config as plain data.

    Returns:
        The targets, at any depth.
    """
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = {str(node["_target_"])} if isinstance(node, dict) and "_target_" in node else set()
    return own.union(*map(targets, inner))


def _dotted(node: Any) -> Iterator[str]:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if key != "_target_":
                yield from _dotted(value)
    elif isinstance(node, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", node):
        yield node


def _module_of(target: str) -> str:
    """The module that holds a target, which may be an attribute of a class in it."""
    module = _find_module(target)
    if module is None:
        raise UserError(
            f"_target_: {target} has no source that can be found, so rows could not record their code; name a "
            "function in a Python file in this folder, in a folder of PYTHONPATH or in an installed package."
        )
    return module


def _find_module(dotted: str) -> str | None:
    parts = dotted.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((name for name in names if _file_of(name) is not None), None)


def _follow(module: str, found: dict[str, Path], libraries: set[str]) -> None:
    """Add a module with all that it imports of ours, of its own distribution and of no distribution at all."""
    home = module.partition(".")[0]
    queue = [module]
    while queue:
        module = queue.pop()
        root = module.partition(".")[0]
        if module in found or NEUTRAL.fullmatch(module) or root in LIBRARIES or root in COMPOSING:
            continue
        file = _file_of(module)
        if file is None or (root in sys.stdlib_module_names and root != home):
            continue
        if root not in (home, "dap_bench") and _installed(file):
            owners = _distributions(root)
            if owners and not owners & _distributions(home):
                if home != "dap_bench":
                    libraries |= owners
                continue
        found[module] = file
        if file.suffix == ".py" and root not in sys.stdlib_module_names:
            queue += _imports(module, file)


def _imports(module: str, file: Path) -> Iterator[str]:
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            found += [name, *(f"{name}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names]
    for name in found:  # importing a module runs its packages too
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))


@lru_cache(maxsize=1)
def _every_distribution() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _distributions(root: str) -> set[str]:
    return set(_every_distribution().get(root, ()))


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing it or its parents."""
    root, *inner = module.split(".")
    try:
        spec: ModuleSpec | None = find_spec(root) if root else None
    except (ValueError, ImportError):  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    places = [Path(folder).joinpath(*inner) for folder in spec.submodule_search_locations or ()]
    candidates = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    candidates += [file for place in places for file in sorted(place.parent.glob(f"{place.name}.*.so"))]
    return next((file for file in candidates if file.is_file()), None)


_seen: dict[Path, str] = {}  # hashes of sources, as this process first saw them


def _source_hash(module: str, file: Path) -> str:
    """The hash of a source, which must not change once it is imported: its rows would not be what they say."""
    found = _tree_hash(*_state(file)) if file.suffix == ".py" else sha256(file.read_bytes()).hexdigest()
    if _seen.setdefault(file, found) != found and module in sys.modules:
        raise UserError(
            f"{file} was changed during the sweep; repeat the command to compute the rest with the new one."
        )
    return found


def _state(file: Path) -> tuple[Path, int, int]:
    found = file.stat()
    return file, found.st_mtime_ns, found.st_size


def _tree(file: Path) -> ast.Module:
    return _parsed(*_state(file))


@cache
def _tree_hash(file: Path, *state: int) -> str:
    return sha256(repr(_shape(_Bare().visit(deepcopy(_parsed(file, *state))))).encode()).hexdigest()


@cache
def _parsed(file: Path, *state: int) -> ast.Module:
    """A file's syntax tree, read again when the file has changed."""
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not Python ({error}).") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from error


class _Bare(ast.NodeTransformer):
    """A syntax tree without what decides no value: docstrings, what is raised, what is logged or printed."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        speaks = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(SPEAKING)
        silent = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if speaks or silent else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise()


SPEAKING = ("log.", "logging.", "warnings.warn", "print", "tqdm.write")


def _shape(node: Any) -> Any:
    """A syntax tree as plain data, the same for every version of Python that reads it the same way."""
    if isinstance(node, ast.AST):
        fields = [(name, _shape(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return [type(node).__name__, *fields]
    return [_shape(item) for item in node] if isinstance(node, list) else repr(node)
