"""Rows as tables, one per cell, and whether they can be compared. A results folder is data: nothing in it is run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dap_bench import __version__, store
from dap_bench.errors import UserError
from dap_bench.identity import acting

log = logging.getLogger(__name__)
CELL = ["data", "sampler", "model", "method"]
# keys of a config that decide values
VALUES = ("compile", "data", "explain_precision", "method", "metric", "model", "precision", "sampler")


@dataclass(frozen=True)
class CellRows:
    """A cell's rows as a table with one line per image, and its cell.json."""

    names: dict[str, str]
    info: dict[str, Any]
    rows: pd.DataFrame
    folder: Path

    @property
    def version(self) -> str:
        """Of the dap_bench that made the rows."""
        said = self.info.get("versions") or self.info["identity"].get("versions")
        return str(said.get("dap-bench", "unknown")) if isinstance(said, dict) else "unknown"

    @property
    def mark(self) -> str:
        """* where images failed or are not computed yet, a dagger where another version of dap_bench made the rows."""
        whole = (self.rows["status"] == "ok").sum() == self.info["n"]
        return ("" if whole else "*") + ("" if self.version == __version__ else "†")

    def values(self, metric: str) -> pd.Series:
        """The metric's value of every image that was measured.

        Args:
            metric: The metric's name.

        Returns:
            The values by sample id, NaN where the metric is not defined.
        """
        ok = self.rows[self.rows["status"] == "ok"]
        return ok.set_index("sample_id")[metric].astype(float)


@dataclass(frozen=True)
class Setting:
    """One of the settings that a cell was run with: its folder, what it holds, and how it differs from the newest."""

    cell: store.Cell
    info: dict[str, Any]
    n: int  # rows
    newest: bool = True
    difference: str = ""

    @property
    def names(self) -> dict[str, str]:
        """The cell's data, sampler, model and method."""
        return {name: self.info[name] for name in CELL}

    def __str__(self) -> str:
        what = f"{' '.join(self.names.values())}: {self.cell.folder} ({self.n} of {self.info['n']} rows)"
        return what if self.newest else f"{what}, older: {self.difference}"


def settings(results: str | Path = "results/runs") -> list[Setting]:
    """Every cell with rows, with all settings that it was run with.

    The newest setting is the one that was last asked for. Where two folders hold the same cell, the first folder's
    counts.

    Args:
        results: A folder, or several: A,B. Defaults to "results/runs".

    Returns:
        The settings; of one cell the newest comes first.

    Raises:
        UserError: If a cell.json is damaged.
    """
    found: dict[tuple[str, ...], list[Setting]] = {}
    for folder in str(results).split(","):
        here: dict[tuple[str, ...], list[Setting]] = {}
        for cell in store.cells(Path(folder)):
            info, n = cell.info, len(cell.table(store.KEYS))
            if n:
                here.setdefault(tuple(info[name] for name in CELL), []).append(Setting(cell, info, n))
        for key, some in here.items():
            some.sort(key=lambda setting: -setting.info.get("turn", 0))
            found.setdefault(key, []).extend(some)
    for some in found.values():
        some[1:] = [replace(old, newest=False, difference=difference(old.info, some[0].info)) for old in some[1:]]
    return [setting for some in found.values() for setting in some]


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What two settings of a cell differ in, in a few words.

    Args:
        old: The content of one cell.json.
        new: That of the other.

    Returns:
        The differences, at most four of them in full.
    """
    one, other = (_flat(info["config"]) for info in (old, new))
    keys = sorted(key for key in {*one, *other} if key.split(".")[0] in VALUES and one.get(key) != other.get(key))
    texts = [f"{key} {one.get(key, 'not there')}, now {other.get(key, 'not there')}" for key in keys]
    for kind in ("code", "versions"):
        theirs, ours = (info["identity"].get(kind) for info in (old, new))
        if isinstance(theirs, dict) and isinstance(ours, dict):
            changed = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            texts += [f"another {name}" for name in changed]
    if len(texts) > 4:
        texts[4:] = [f"and {len(texts) - 4} more"]
    return "; ".join(texts) or "other images or weights"


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    inner = [_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in node.items()]
    return {key: value for part in inner for key, value in part.items()}


def load_rows(
    results: str | Path = "results/runs", data: str = "", columns: Sequence[str] | None = None
) -> list[CellRows]:
    """The rows of every cell below a folder, or of those of one data source.

    Of several settings of a cell the newest counts, and the others are named in a warning.

    Args:
        results: A folder, or several: A,B. Defaults to "results/runs".
        data: The data source; "" takes all. Defaults to "".
        columns: Columns that are needed besides the samples, their status and the metrics; None takes all. Defaults to
            None.

    Returns:
        The cells with their rows.

    Raises:
        UserError: If there are no rows, or a cell.json is damaged.
    """
    found = []
    for setting in settings(results):
        if data and setting.names["data"] != data:
            continue
        if not setting.newest:
            log.warning("left out: %s", setting)
            continue
        rows = _frame(setting.cell, list(setting.info["metrics"]), columns)
        found.append(CellRows(setting.names, setting.info, rows, setting.cell.folder))
    if not found:
        raise UserError(f"{results} holds no rows; run `python -m dap_bench` first, or name another folder.")
    return found


def _frame(cell: store.Cell, metrics: list[str], columns: Sequence[str] | None) -> pd.DataFrame:
    """A cell's rows, by sample whatever the order they were computed in; NaN for a metric that they do not have."""
    wanted = [name for name in cell.columns if name not in store.CONSTANT] if columns is None else [*columns, *metrics]
    table = cell.table(wanted)
    for metric in metrics:
        kind = table.schema.field(metric).type if metric in table.schema.names else pa.float64()
        if metric in store.COLUMNS.names or kind != pa.float64():
            raise UserError(f"{cell.folder}/cell.json calls {metric} a metric, but rows hold something else there.")
    samples = table.column("sample_id")
    if not pc.all(pc.less_equal(samples.slice(0, max(0, len(samples) - 1)), samples.slice(1))).as_py():
        table = table.sort_by("sample_id")
    frame = table.to_pandas(split_blocks=True, self_destruct=True)
    del table  # it has given its memory away
    own = [name for name in store.COLUMNS.names if name not in store.CONSTANT and (columns is None or name in wanted)]
    own = [*dict.fromkeys((*store.KEYS, *own))]
    extra = sorted(set(frame.columns) - {*own, *metrics})
    return frame.reindex(columns=[*own, *metrics, *extra])


def require_like(cells: list[CellRows], apart_from: Sequence[str] = ()) -> None:
    """Methods are compared on the same images, by the same model and the same metrics, or not at all.

    Metrics whose source was edited in between are named in a warning.

    Args:
        cells: The cells to compare.
        apart_from: What may differ, because the comparison is about it: samples, model, precision, explain_precision or
            metric NAME. Defaults to ().

    Raises:
        UserError: If two cells differ in anything else.
    """
    first: dict[tuple[str, ...], tuple[Any, CellRows]] = {}
    edited: set[str] = set()
    for cell in cells:
        identity = cell.info["identity"]
        group = tuple(cell.names[name] for name in CELL[:3])
        conditions = {(*group, key): identity.get(key) for key in ("samples", "model", "precision")}
        conditions[(*group, "explain_precision")] = identity.get("explain_precision", "fp32")  # older rows do not say
        metrics = cell.info["config"].get("metric")
        for name, options in (metrics if isinstance(metrics, dict) else {}).items():
            conditions[(*group, f"metric {name}")] = acting(options)
        code = identity.get("code")
        for module, digest in (code if isinstance(code, dict) else {}).items():
            if module.startswith("dap_bench.metrics."):
                known, _ = first.setdefault((*group, module), (digest, cell))
                edited |= {module} if known != digest else set()
        for key, value in conditions.items():
            if key[-1] in apart_from:
                continue
            known, other = first.setdefault(key, (value, cell))
            if known != value:
                raise UserError(
                    f"{other.folder} and {cell.folder} cannot be compared: they differ in {key[-1]}; "
                    "move one to another folder, or run it again with the other's options."
                )
    if edited:
        log.warning("some cells were measured before %s was edited, some after", " and ".join(sorted(edited)))
