"""Rows as tables, one per cell, and whether they can be compared. A results folder is data: nothing in it is run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
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
        """The metric's value of every image that was measured, NaN where it is not defined."""
        ok = self.rows[self.rows["status"] == "ok"]
        return ok.set_index("sample_id")[metric].astype(float)


def load_rows(
    results: str | Path = "results/runs", data: str = "", columns: Sequence[str] | None = None
) -> list[CellRows]:
    """Every cell below a folder, or those of one data source; two settings of one cell are refused, never averaged.

    `columns` are those that are needed besides the samples, their status and the metrics; all by default.
    """
    found: dict[tuple[str, ...], CellRows] = {}
    for cell in store.cells(Path(results)):
        info = cell.info
        names = {name: info[name] for name in CELL}
        if data and names["data"] != data:
            continue
        key = tuple(names.values())
        if key in found:
            raise UserError(
                f"two settings are stored for {' '.join(key)}: {found[key].folder} and {cell.folder}; "
                "remove one, or give one another name with name=NAME when it is run."
            )
        found[key] = CellRows(names, info, _frame(cell, list(info["metrics"]), columns), cell.folder)
    if not found:
        raise UserError(f"{results} holds no rows; run `python -m dap_bench` first, or name another folder.")
    return list(found.values())


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


def require_like(cells: list[CellRows]) -> None:
    """Methods are compared on the same images, by the same model and the same metrics, or not at all.

    Metrics whose source was edited in between are named.
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
            known, other = first.setdefault(key, (value, cell))
            if known != value:
                raise UserError(
                    f"{other.folder} and {cell.folder} cannot be compared: they differ in {key[-1]}; "
                    "move one to another folder, or run it again with the other's options."
                )
    if edited:
        log.warning("some cells were measured before %s was edited, some after", " and ".join(sorted(edited)))
