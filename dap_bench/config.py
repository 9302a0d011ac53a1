"""Configs, and objects made from them: what `conf/` says is what the command line and a notebook both get."""

import ast
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dap_bench.errors import UserError
from dap_bench.hub import resolve_checkpoint as resolve_checkpoint

# in an installed wheel conf/ is inside the package, in a source tree beside it
CONF = next(
    folder for folder in (Path(__file__).with_name("conf"), Path(__file__).parents[1] / "conf") if folder.is_dir()
)


def compose(*overrides: str) -> DictConfig:
    """The config that `python -m dap_bench OVERRIDES` would run."""
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("config", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error


def choices(group: str) -> list[str]:
    """The names that `group=` takes."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return GlobalHydra.instance().config_loader().get_group_options(group)


def load_vit(name: str, device: str = "auto", precision: str = "fp32", **overrides: Any) -> Any:
    """The ViT of conf/model/NAME.yaml, or any timm tag: load_vit("vit_t", checkpoint="FILE.safetensors")."""
    if name not in choices("model"):
        name, overrides = "timm", {"tag": name, **overrides}
    return instantiate(_node("model", name, overrides), device=device, precision=precision)


def load_method(name: str, **overrides: Any) -> Any:
    """The explainer of conf/method/NAME.yaml, with other options if given: load_method("gradcam", relu=False).

    A name with a dot is that of a Python function: load_method("my_method.norms").
    """
    objects = {key: value for key, value in overrides.items() if callable(value)}  # a prior that is no config
    options = {key: value for key, value in overrides.items() if key not in objects}
    node = OmegaConf.create({"_target_": name, "_partial_": True, **options}) if "." in name else None
    explain = instantiate(node or _node("method", name, options))
    return partial(explain, **objects) if objects else explain


def load_metrics(*names: str) -> dict[str, Any]:
    """Metrics of conf/metric by name, presets too: load_metrics("cs", "afs"), load_metrics("paper")."""
    return instantiate_metrics(compose(f"metric=[{','.join(names)}]").metric)


def instantiate_metrics(node: DictConfig) -> dict[str, Any]:
    for name, options in node.items():
        if not OmegaConf.is_dict(options):
            raise UserError(
                f"{name!s}: {options} is no metric; its YAML has the metric's name first, and below it _target_."
            )
    metrics = {str(name): instantiate(options) for name, options in node.items()}
    for name, metric in metrics.items():
        if getattr(metric, "better", None) not in ("higher", "lower"):
            raise UserError(
                f"metric {name!r} must say what is better: give it an attribute better = 'higher' or 'lower'."
            )
    return metrics


def instantiate(node: DictConfig, **arguments: Any) -> Any:
    """Make what a config node names in `_target_`; a wrong option or target is the user's to put right."""
    from hydra.errors import InstantiationException

    try:
        return hydra.utils.instantiate(node, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise UserError(sentence(error)) from error


def _node(group: str, name: str, overrides: dict[str, Any]) -> DictConfig:
    """One group's part of the config. A text given for a sub-config chooses that sub-config by name."""
    node = compose(f"{group}={name}")[group]
    selections = [
        key for key, value in overrides.items() if isinstance(value, str) and OmegaConf.is_dict(node.get(key))
    ]
    if selections:
        node = compose(f"{group}={name}", *(f"{group}/{key}={overrides[key]}" for key in selections))[group]
    for key, value in overrides.items():
        if key in selections:
            continue
        if key not in node and "_partial_" in node:
            options = ", ".join(str(option) for option in node if not str(option).startswith("_"))
            raise UserError(f"{group} {name!r} has no option {key!r}; it has {options or 'none'}.")
        OmegaConf.update(node, key, value, force_add=True)
    return node


def targets(node: Any) -> set[str]:
    """Every `_target_` in a resolved config."""
    if not isinstance(node, dict):
        return set()
    own = {node["_target_"]} if "_target_" in node else set()
    return own.union(*(targets(value) for value in node.values()))


def source_files(target: str) -> dict[str, Path]:
    """The modules that a `_target_` rests on, found without importing them: its own, and what those import from
    dap_bench, from its own package and from its own folder."""
    found: dict[str, Path] = {}
    queue = [target.rpartition(".")[0]]
    home = _file_of(queue[0].partition(".")[0]) or _file_of(queue[0])
    while queue:
        module = queue.pop()
        file = None if module in found else _file_of(module)
        if file is None or ("site-packages" in file.parts and found and not module.startswith("dap_bench")):
            continue
        root = module.partition(".")[0]
        beside = home is not None and (file.parent == home.parent or root == target.partition(".")[0])
        if root != "dap_bench" and not beside:
            continue
        found[module] = file
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(_parsed(file)):
            if isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                name = ".".join(part for part in (base, node.module) if part)
                queue += [name, *(f"{name}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                queue += [each.name for each in node.names]
    return found


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not Python ({error}).") from error


def _file_of(module: str) -> Path | None:
    root, *inner = module.split(".")
    try:
        spec = find_spec(root) if root else None
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and Path(spec.origin).suffix == ".py" else None
    places = [Path(folder).joinpath(*inner) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def sentence(error: BaseException) -> str:
    """An error in one line; one of Hydra or OmegaConf without its search paths and hints, but with the choices."""
    if isinstance(error, UserError):
        return str(error)
    lines: list[str] = []
    for cause in (error, error.__cause__):
        for line in str(cause or "").split("Config search path")[0].splitlines():
            text = line.strip()
            if text and not text.startswith(("full_key:", "object_type=", "reference_type=")) and text not in lines:
                lines.append(text)
    text = " ".join(lines)
    missing = re.search(r"Could not load '([\w/]+)/\w+'", text)
    return f"{text} Available options: {', '.join(choices(missing[1]))}" if missing else text
