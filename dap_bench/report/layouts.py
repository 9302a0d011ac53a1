"""What tables look like and what things are called, as YAML says it: once, beside what it is about.

    conf/report/NAME.yaml                               a table: its caption, methods, metrics, samplers and models
    conf/method|metric|model|sampler/NAME.yaml          _label_, _title_, _order_ and _group_ of what it configures

A folder that the user names with --config-dir may have the same, so that a method, metric or table of one's own is in
the reports like any other. What is not described is shown by its name, after what is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from dap_bench.config import CONF, DESCRIPTIONS, config_folders
from dap_bench.errors import UserError

GROUPS = ("model", "sampler", "method", "metric")


@dataclass(frozen=True)
class Layout:
    """One table: models and methods down, samplings and metrics across."""

    caption: str
    metrics: tuple[str, ...]
    methods: tuple[str, ...] = ()  # none: all that have rows
    models: tuple[str, ...] = ()
    samplers: tuple[str, ...] = ("balanced", "non_balanced")
    open: bool = True  # are methods and models of one's own added
    number: str = ""  # of the table, where it should not be counted with the others

    @classmethod
    def read(cls, file: Path) -> "Layout":
        """A table from its YAML.

        Args:
            file: The YAML.

        Returns:
            The table.

        Raises:
            UserError: If the file describes no table.
        """
        said = _load(file)
        unknown = set(said) - set(cls.__dataclass_fields__)
        if unknown or "metrics" not in said:
            raise UserError(
                f"{file} describes no table: it needs caption, metrics and may have methods, models, "
                f"samplers, open, number{'; not ' + ', '.join(sorted(unknown)) if unknown else ''}."
            )
        lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
        return cls(**{"caption": "", **lists})


def tables() -> dict[str, Layout]:
    """Every table that conf/report, or a folder of the user's, describes."""
    return {file.stem: Layout.read(file) for file in _files("report")}


def paper(name: str) -> Layout:
    """A table of the paper.

    Args:
        name: Its name in conf/report, such as "table1".

    Returns:
        The table.
    """
    return tables()[name]


def paper_methods() -> tuple[str, ...]:
    """The methods that the paper compares, in its order."""
    return tuple(ordered({*paper("table1").methods, *paper("table3").methods}))


def label(name: str) -> str:
    """What a thing is called in tables and figures.

    Args:
        name: The name of a method, metric, model or sampler.

    Returns:
        Its `_label_`, or the name itself.
    """
    return _described().get(name, {}).get("_label_", name)


def labels() -> dict[str, str]:
    """All that is called otherwise than by its name."""
    return {name: found["_label_"] for name, found in _described().items() if "_label_" in found}


def titles() -> dict[str, str]:
    """What labels stand for, in words."""
    return {name: found["_title_"] for name, found in _described().items() if "_title_" in found}


def group(name: str) -> str:
    """What kind of method it is: attention, gradient, ablation, control ...

    Args:
        name: The method's name.

    Returns:
        Its `_group_`, or "".
    """
    return str(_described().get(name, {}).get("_group_", ""))


def is_ours(method: str) -> bool:
    """Whether the project itself has such a method.

    Args:
        method: The method's name.

    Returns:
        True if it is in conf/method.
    """
    return (CONF / "method" / f"{method}.yaml").is_file()


def ordered(found: Iterable[str], listed: Iterable[str] = ()) -> list[str]:
    """Names in the order of tables and figures.

    Args:
        found: The names.
        listed: Names that come first, in this order. Defaults to ().

    Returns:
        The names of `found`, each once: the listed ones, then the described ones by `_order_`, then the others.
    """
    first = {name: at for at, name in enumerate(dict.fromkeys(listed))}
    described = _described()

    def place(name: str) -> tuple[Any, ...]:
        return name not in first, first.get(name, 0), described.get(name, {}).get("_order_", 10**6), name

    return sorted(set(found), key=place)


def _described() -> dict[str, dict[str, Any]]:
    return _read_all(tuple(config_folders()))


@lru_cache(maxsize=4)
def _read_all(folders: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """The description of every model, sampler, method and metric by its name."""
    found: dict[str, dict[str, Any]] = {}
    for kind in GROUPS:
        for file in _files(kind):
            said = _load(file)
            inside = said if kind == "metric" else {file.stem: said}  # a metric's YAML has its name first
            for name, node in inside.items():
                own = {key: node[key] for key in DESCRIPTIONS if isinstance(node, dict) and key in node}
                if own:
                    found[str(name)] = own
    return found


def _files(kind: str) -> list[Path]:
    return [file for folder in config_folders() for file in sorted((folder / kind).glob("*.yaml"))]


def _load(file: Path) -> dict[str, Any]:
    try:
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file} is not YAML ({' '.join(str(error).split())}).") from error
    return said if isinstance(said, dict) else {}
