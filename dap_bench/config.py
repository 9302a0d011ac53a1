"""Configs, and objects made from them: what `conf/` says is what the command line and a notebook both get."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dap_bench.errors import UserError, keep_private, one_of, path, require_int
from dap_bench.hub import resolve_checkpoint as resolve_checkpoint

if TYPE_CHECKING:  # torch is loaded when something is made, not when a command line is read
    from dap_bench.data.sources.base import Source
    from dap_bench.explainers.base import Explainer
    from dap_bench.metrics.base import Metric
    from dap_bench.vit import ViT

COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # what goes wrong while a config is put together
GROUPS = ("model", "method", "sampler", "data", "metric", "experiment")
DESCRIPTIONS = ("_label_", "_title_", "_order_", "_group_")  # for reports: no options of what is configured

# in an installed wheel conf/ is inside the package, in a source tree beside it
CONF = next(
    folder for folder in (Path(__file__).with_name("conf"), Path(__file__).parents[1] / "conf") if folder.is_dir()
)


def _methods(*tables: str) -> str:
    """The methods of some tables of conf/report, each once: `${methods:table1,table3}` in an experiment."""
    said = [yaml.safe_load((CONF / "report" / f"{table}.yaml").read_text(encoding="utf-8")) for table in tables]
    return ",".join(dict.fromkeys(method for table in said for method in table["methods"]))


OmegaConf.register_new_resolver("methods", _methods, replace=True)

_folders: list[Path] = []  # of configs that the user has named besides conf/


def config_folders() -> list[Path]:
    """Where configs are: conf/, and what the user has named besides."""
    return [CONF, *_folders]


def add_folder(folder: str) -> None:
    """Find configs in another folder too, as --config-dir does, and their functions beside it.

    Args:
        folder: The folder.

    Raises:
        UserError: If there is no such folder.
    """
    place = path("--config-dir", folder)
    if not place.is_dir():
        raise UserError(f"--config-dir {folder} is not a folder.")
    _folders.append(place.resolve())
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # where `python -m dap_bench` finds a method of one's own


def folders() -> list[str]:
    """The arguments that name these folders, as seen from here."""
    return [part for folder in _folders for part in ("--config-dir", os.path.relpath(folder))]


def compose(*overrides: str) -> DictConfig:
    """The config that `python -m dap_bench OVERRIDES` would run.

    Args:
        *overrides: As on the command line: "model=vit_t", "sampler.n=24".

    Returns:
        The config, resolved when it is read.

    Raises:
        UserError: If there is no such choice or key.
    """
    check_overrides(overrides)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra.compose("config", [*_searchpath(), *overrides])
    except COMPOSING as error:
        raise UserError(sentence(error, overrides)) from error


def compose_cell(*overrides: str) -> tuple[DictConfig, dict[str, str]]:
    """The config that `python -m dap_bench OVERRIDES` would run, and the names that its rows would have.

    Args:
        *overrides: As on the command line: "model=vit_t", "sampler.n=24".

    Returns:
        The config, and the names of model, method, sampler and data.

    Raises:
        UserError: If there is no such choice or key.
    """
    cfg = compose(*overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        described = hydra.compose("config", [*_searchpath(), *overrides], return_hydra_config=True)
    return cfg, names_of(cfg, described.hydra.runtime.choices)


def sweep(*overrides: str, aside: Sequence[str] = ()) -> list[list[str]]:
    """The overrides of each cell that `python -m dap_bench -m OVERRIDES` would run.

    Args:
        *overrides: As on the command line: "model=vit_t,vit_b", "experiment=paper".
        aside: Keys and groups to leave out, such as "method". Defaults to ().

    Returns:
        A list of overrides for each cell.

    Raises:
        UserError: If there is no such choice or key.
    """
    check_overrides(overrides)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            single = [text for text in overrides if text.startswith("experiment=")]  # brings keys to sweep over
            described = hydra.compose("config", [*_searchpath(), *single], return_hydra_config=True)
            params = described.hydra.sweeper.params or {}
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            given = parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *overrides])
            values: dict[str, list[str]] = {}  # what is said last of a key counts
            for override in given:
                key = override.get_key_element()
                if override.key_or_group.replace("/", ".").split(".")[0] in aside:
                    continue
                several = override.is_sweep_override()
                found = override.sweep_string_iterator() if several else [override.get_value_string()]
                values[key] = [f"{key}={value}" for value in found]
            return [list(cell) for cell in product(*values.values())]
    except COMPOSING as error:
        raise UserError(sentence(error, overrides)) from error


def names_of(cfg: DictConfig, chosen: Mapping[str, Any]) -> dict[str, str]:
    """The names that a cell's rows have, by what was chosen of each group.

    Args:
        cfg: The cell's config.
        chosen: The name chosen of each group, as Hydra knows it.

    Returns:
        The names of model, method, sampler and data.
    """
    names = {name: str(chosen[name]) for name in ("model", "method", "sampler", "data")}
    names["method"] = str(cfg.name or names["method"])
    if names["model"] == "timm":  # rows should say which one
        names["model"] = str(cfg.model.tag)
    return names


def choices(group: str) -> list[str]:
    """The names that `group=` takes.

    Args:
        group: A folder of conf/: model, method, sampler, data, metric or experiment.

    Returns:
        The names, those of folders that the user has named among them.
    """
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group, config_name="config", overrides=_searchpath())


def _searchpath() -> list[str]:
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in _folders)}]"] if _folders else []


def restored(group: str, stored: Any, name: str = "", *beside: str) -> DictConfig | None:
    """The config in conf/, or in a folder that the user named, which a stored one was made from.

    What is stored is data: of it only plain options are taken, numbers and words, never a target or a path.

    Args:
        group: A folder of conf/, such as "method".
        stored: The stored config.
        name: The name to try first. Defaults to "".
        *beside: Overrides of other groups, which options may take their defaults from.

    Returns:
        The config with the stored options, or None if there is none that fits.
    """
    folders = tuple(_folders)
    for choice in sorted(_names(group, folders), key=lambda choice: choice != name):
        node = deepcopy(_composed(group, choice, folders, *beside))
        if _restore(node, stored):
            return node
    return None


@cache
def _names(group: str, folders: tuple[Path, ...]) -> list[str]:
    return choices(group)


@cache
def _composed(group: str, choice: str, folders: tuple[Path, ...], *beside: str) -> DictConfig:
    return compose(f"{group}={choice}", *beside)[group]


def _restore(node: DictConfig, stored: Any) -> bool:
    """Give a config the plain options of a stored one; False where the two are not of one kind."""
    aside = {"class_names", "checkpoint", *DESCRIPTIONS}  # the model's own, and what only reports read
    if not isinstance(stored, dict) or set(stored) - aside - {str(key) for key in node}:
        return False
    written = OmegaConf.to_container(node, resolve=False)
    assert isinstance(written, dict)
    for key, value in stored.items():
        if key in aside:
            continue
        own: Any = None if OmegaConf.is_missing(node, key) else node[key]
        if value in (own, written[key]):  # the same value, or the same reference to another key
            continue
        if key == "prior":
            value = restored("method", value)
        elif OmegaConf.is_dict(own):
            value = own if _restore(own, value) else None
        elif key.startswith("_") or not (value is None or isinstance(value, bool | int | float) or _is_word(value)):
            return False
        if value is None and OmegaConf.is_dict(own):
            return False
        node[key] = value
    return True


def _is_word(value: Any) -> bool:
    """Whether a text can be an option's choice or a timm tag: it cannot be a path."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w+-]{0,63}(\.[\w-]{1,63})?", value) is not None


def load_vit(name: str, device: str = "auto", precision: str = "fp32", **overrides: Any) -> "ViT":
    """A model of conf/model, or any timm tag: load_vit("vit_t", checkpoint="FILE.safetensors").

    Args:
        name: The name of a YAML there, or a timm tag.
        device: auto, cpu, cuda, cuda:N or mps. Defaults to "auto".
        precision: Of scoring: fp32, tf32 or bf16. Defaults to "fp32".
        **overrides: Other keys of the YAML, such as `checkpoint`, a local file of weights; others go to timm.

    Returns:
        The model, ready to be explained and scored.

    Raises:
        UserError: If there is no such model, it cannot be explained, or its weights cannot be had.
    """
    if name not in choices("model"):
        name, overrides = "timm", {"tag": name, **overrides}
    return instantiate(_node("model", name, overrides), device=device, precision=precision)


def load_method(name: str, **overrides: Any) -> "Explainer":
    """An explainer of conf/method, with other options if given: load_method("gradcam", relu=False).

    Args:
        name: The name of a YAML there; a name with a dot is that of a Python function, "my_method.norms".
        **overrides: Options of the explainer. DAP's `prior` may be a name or an explainer.

    Returns:
        A function (vit, images [B,3,H,W], classes [B], layers=False) -> Explanation.

    Raises:
        UserError: If there is no such method or option.
    """
    objects = {key: value for key, value in overrides.items() if callable(value)}  # a prior that is no config
    options = {key: value for key, value in overrides.items() if key not in objects}
    node = OmegaConf.create({"_target_": name, "_partial_": True, **options}) if "." in name else None
    explain = instantiate_method(node or _node("method", name, options))
    return partial(explain, **objects) if objects else explain


def load_source(name: str, **overrides: Any) -> "Source":
    """A source of images of conf/data: load_source("parquet", path="FOLDER").

    Args:
        name: The name of a YAML there.
        **overrides: Other keys of the YAML.

    Returns:
        The source; nothing is read yet.

    Raises:
        UserError: If there is no such source or option.
    """
    return instantiate(_node("data", name, overrides))


def load_metrics(*names: str) -> dict[str, "Metric"]:
    """Metrics of conf/metric, presets too: load_metrics("cs", "afs"), load_metrics("paper").

    Args:
        *names: Names of YAMLs there.

    Returns:
        The metrics by name, each a function of a `Batch` that gives a number per image [B].

    Raises:
        UserError: If there is no such metric.
    """
    return instantiate_metrics(compose(f"metric=[{','.join(names)}]").metric)


def instantiate_method(node: DictConfig) -> "Explainer":
    """The explainer that a config names.

    Args:
        node: The config of the method.

    Returns:
        The explainer.

    Raises:
        UserError: If the config names no function, or an option is wrong.
    """
    explain = instantiate(node) if OmegaConf.is_dict(node) else None
    if not callable(explain):
        raise UserError(
            f"the method's config ({str(node)[:80]}) names no function; its YAML needs _target_: MODULE.FUNCTION "
            "and _partial_: true."
        )
    prior = getattr(explain, "keywords", {}).get("prior", explain)
    if not callable(prior):
        raise UserError(f"the prior is a method, not {prior!r}; choose it with a slash: method/prior={prior}.")
    return explain


def instantiate_metrics(node: DictConfig) -> dict[str, "Metric"]:
    """The metrics that a config names, by the names they have in it.

    Args:
        node: The config, with a metric's own config below each name.

    Returns:
        The metrics by name.

    Raises:
        UserError: If one is no metric, or does not say what is better.
    """
    if not OmegaConf.is_dict(node) or not node:
        raise UserError(f"metric={node} is not a metric; use {', '.join(choices('metric'))}, or metric=[cs,afs].")
    for name, options in node.items():
        if not OmegaConf.is_dict(options):
            raise UserError(
                f"{name!s}: {options} is not a metric; its YAML needs the metric's name first, and _target_ below it."
            )
        if "_target_" not in options:
            raise UserError(
                f"metric.{name!s} has options but no _target_: add {name!s} to metric=[...], remove its options with "
                f"'~metric.{name!s}', or, if it is your own, name its class in its YAML."
            )
    metrics = {str(name): instantiate(options) for name, options in node.items()}
    for name, metric in metrics.items():
        if getattr(metric, "better", None) not in ("higher", "lower"):
            raise UserError(
                f"metric {name!r} must say what is better: give it an attribute better = 'higher' or 'lower'."
            )
    return metrics


def instantiate(node: DictConfig, **arguments: Any) -> Any:
    """Make what a config node names in `_target_`.

    Args:
        node: The config.
        **arguments: Further arguments of the target.

    Returns:
        What the target returns.

    Raises:
        UserError: If a value is missing, or an option or the target is wrong.
    """
    from hydra.errors import InstantiationException

    for key in sorted(OmegaConf.missing_keys(node)):
        raise UserError(f"Missing mandatory value: {key}; set it with {key}=VALUE.")
    try:
        plain = OmegaConf.to_container(node, resolve=True)
        return hydra.utils.instantiate(OmegaConf.create(undescribed(plain)), **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise UserError(sentence(error)) from error


def undescribed(node: Any) -> Any:
    """A config without what only reports read: DESCRIPTIONS.

    Args:
        node: The config as plain data.

    Returns:
        The config without these keys, at any depth.
    """
    if isinstance(node, list):
        return [undescribed(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: undescribed(value) for key, value in node.items() if key not in DESCRIPTIONS}


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
        if key not in list(node) and "_partial_" in node:  # `in node` is false for what must be given, ???
            options = ", ".join(str(option) for option in node if not str(option).startswith("_"))
            raise UserError(f"{group} {name!r} has no option {key!r}; it has {options or 'none'}.")
        OmegaConf.update(node, key, value, force_add=True)
    return node


# ---------------------------------------------------------------------- mistakes


def check(cfg: DictConfig) -> None:
    """Check the keys that say how to run.

    Args:
        cfg: The config of a cell.

    Raises:
        UserError: If a value is not allowed.
    """
    if cfg.batch_size != "auto":
        require_int("batch_size", cfg.batch_size)
    require_int("workers", cfg.workers)
    if cfg.chunk_size is not None:
        require_int("chunk_size", cfg.chunk_size)
    one_of("compile", cfg.compile, (True, False))
    one_of("precision", cfg.precision, ("fp32", "tf32", "bf16"))
    one_of("explain_precision", cfg.explain_precision, ("fp32", "fp64"))
    one_of("overwrite", cfg.overwrite, (True, False, "failed"))
    for key in ("keep_curves", "keep_maps", "debug"):
        one_of(key, cfg[key], (True, False))
    keep_private(set(re.findall(r"\$\{oc\.env:(\w+)", str(OmegaConf.to_container(cfg, resolve=False)))))


def check_overrides(overrides: Sequence[str]) -> None:
    """Catch mistakes in arguments that Hydra answers with an obscure message.

    Args:
        overrides: The arguments, as on the command line.

    Raises:
        UserError: If there is such a mistake.
    """
    for text in overrides:
        key, equals, value = text.partition("=")
        if equals and value.endswith(","):
            raise UserError(f"{text} ends in a comma; write a sweep without spaces: -m {key}=a,b.")
        if key in GROUPS and re.fullmatch(r"null|nan|[+-]?inf|true|false|[+-]?[\d.]+|\[\]|", value, re.IGNORECASE):
            raise UserError(f"{text}: {key} takes a name, one of {', '.join(choices(key))}.")
        if key in GROUPS and key != "metric" and value.startswith("["):
            raise UserError(f"{text}: {key} takes one name; for several cells write -m {key}={value.strip('[]')}.")


def sentence(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """An error in one line.

    Errors of Hydra and OmegaConf come without search paths and hints, but with the choices there are.

    Args:
        error: The error.
        overrides: The arguments that led to it, to suggest keys. Defaults to ().

    Returns:
        The text.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, yaml.YAMLError):
        return f"a config is not YAML: {' '.join(str(error).split())}"
    lines: list[str] = []
    for cause in (error, error.__cause__):
        for line in str(cause or "").split("Config search path")[0].splitlines():
            text = line.strip()
            if text and not text.startswith(("full_key:", "object_type=", "reference_type=")) and text not in lines:
                lines.append(text)
    text = " ".join(lines)
    missing = re.search(r"Could not (?:find|load) '([\w/]+)/([^'/]+)'", text)
    if missing:
        group, name = missing.groups()
        near = " or ".join(get_close_matches(name, choices(group), 3))
        meant = f"did you mean {near}? There are" if near else "there are"
        return f"there is no {group}={name}; {meant} {', '.join(choices(group))}."
    unknown = re.search(r"Could not override '([^']+)'", text)
    return f"there is no key {unknown[1]}{_near(unknown[1], overrides)}" if unknown else text


def _near(key: str, overrides: Sequence[str]) -> str:
    """The keys that may have been meant."""
    *parents, last = key.split(".")
    chosen = [text for text in overrides if text.partition("=")[0] in GROUPS and "," not in text]
    try:
        node: Any = compose(*chosen)
        for parent in parents:
            node = node[parent]
        keys = [str(name) for name in node if not str(name).startswith("_") and name != "hydra"]
    except (UserError, *COMPOSING, TypeError):
        return "."
    keys += [] if parents else ["experiment"]
    near = [".".join([*parents, name]) for name in get_close_matches(last, keys, 3)]
    listed = ", ".join(".".join([*parents, name]) for name in keys)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {listed}."
