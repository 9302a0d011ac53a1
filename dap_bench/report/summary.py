"""Rows -> one line per cell and metric: mean with its interval, what it rests on, and how DAP compares."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, rankdata, wilcoxon

from dap_bench import __version__, store
from dap_bench.errors import UserError

log = logging.getLogger(__name__)
CELL = ["data", "sampler", "model", "method"]
REFERENCE = "dap"  # the method that the others are tested against
SEED = 0  # of the bootstrap: the same rows give the same interval, always


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
        return str(self.info.get("identity", {}).get("versions", {}).get("dap-bench", "unknown"))

    @property
    def mark(self) -> str:
        """* where images failed or are not computed yet, a dagger where another version of dap_bench made the rows."""
        whole = (self.rows["status"] == "ok").sum() == self.info["n"]
        return ("" if whole else "*") + ("" if self.version == __version__ else "†")

    def values(self, metric: str) -> pd.Series:
        """The metric's value of every image that was measured, NaN where it is not defined."""
        ok = self.rows[self.rows["status"] == "ok"]
        return ok.set_index("sample_id")[metric].astype(float)


def load_rows(results: str | Path = "results/runs", data: str = "") -> list[CellRows]:
    """Every cell below a folder, or those of one data source; two settings of one cell are refused, never averaged."""
    found: dict[tuple[str, ...], CellRows] = {}
    for cell in store.cells(Path(results)):
        try:
            info = cell.info
            names = {name: str(info[name]) for name in CELL}
            found_rows = cell.rows()
            extra = sorted({name for row in found_rows for name in row} - {*store.COLUMNS.names, *info["metrics"]})
            rows = pd.DataFrame(found_rows, columns=[*store.COLUMNS.names, *info["metrics"], *extra])
            rows = rows.sort_values("sample_id", ignore_index=True)  # in whatever order they were computed
            complete = {"n", "fingerprint"} <= set(info)
        except (ValueError, KeyError, TypeError):
            complete = False
        if not complete:
            raise UserError(f"{cell.folder}/cell.json is damaged or of another version; remove that folder.")
        if data and names["data"] != data:
            continue
        key = tuple(names.values())
        if key in found:
            raise UserError(
                f"two settings are stored for {' '.join(key)}: {found[key].folder} and {cell.folder}; "
                "remove one, or give one another name with name=NAME when it is run."
            )
        found[key] = CellRows(names, info, rows, cell.folder)
    if not found:
        raise UserError(f"{results} holds no rows; run `python -m dap_bench` first, or name another folder.")
    return list(found.values())


def require_like(cells: list[CellRows]) -> None:
    """Methods are compared on the same images, by the same model and the same metrics, or not at all.

    Metrics whose source was edited in between are named: a comment does no harm, a formula does.
    """
    first: dict[tuple[str, ...], tuple[Any, CellRows]] = {}
    edited: set[str] = set()
    for cell in cells:
        identity = cell.info.get("identity", {})
        group = tuple(cell.names[name] for name in CELL[:3])
        conditions = {(*group, key): identity.get(key) for key in ("samples", "model", "precision")}
        conditions[(*group, "explain_precision")] = identity.get("explain_precision", "fp32")  # older rows do not say
        metrics = identity.get("metric", {})
        conditions |= {(*group, f"metric {name}"): options for name, options in metrics.items()}
        for module, digest in identity.get("code", {}).items():
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


def summarize(results: str | Path = "results/runs", data: str = "") -> pd.DataFrame:
    """One line per cell and metric, of all cells below a folder or of those of one data source.

    `mean` with its 95 % bootstrap interval (`low`, `high`). `n` images were measured, of which `nan` have no value for
    the metric; `failed` images could not be measured and `missing` are not computed yet; `fallback` counts images for
    which the explainer fell back to another rule; `version` is the dap_bench that made the rows. `p` is the paired
    Wilcoxon test of DAP against the method, corrected after Holm over the methods of the same model, sampling and
    metric; `effect` the rank-biserial correlation of the pairs, positive where DAP is better.
    """
    cells = load_rows(results, data)
    require_like(cells)
    lines = [line for cell in cells for line in _lines(cell)]
    table = pd.DataFrame(lines).sort_values([*CELL, "metric"], ignore_index=True)
    return table.merge(_tests(cells), how="left", on=[*CELL, "metric"])


def _lines(cell: CellRows) -> Iterator[dict[str, Any]]:
    ok = cell.rows["status"] == "ok"
    for metric, better in cell.info["metrics"].items():
        values = cell.values(metric)
        defined = values.dropna().to_numpy()
        low, high = interval(defined)
        yield {
            **cell.names,
            "metric": metric,
            "better": better,
            "mean": defined.mean() if len(defined) else np.nan,
            "low": low,
            "high": high,
            "n": int(ok.sum()),
            "nan": int(values.isna().sum()),
            "failed": int((~ok).sum()),
            "missing": cell.info["n"] - len(cell.rows),
            "fallback": int((cell.rows["fallback"] == True).sum()),  # noqa: E712  null is neither
            "version": cell.version,
            "command": cell.info.get("command", ""),
            "fingerprint": cell.info["fingerprint"],
        }


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean."""
    if len(values) < 2:
        return np.nan, np.nan
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    batch = max(1, 10**7 // len(values))  # bounds memory
    random = np.random.default_rng(SEED)
    found = bootstrap((values,), np.mean, n_resamples=2000, batch=batch, method="percentile", rng=random)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _tests(cells: list[CellRows]) -> pd.DataFrame:
    """DAP against every other method, image by image."""
    lines = []
    for reference in (cell for cell in cells if cell.names["method"] == REFERENCE):
        for metric, better in reference.info["metrics"].items():
            family = []
            for other in cells:
                same = all(other.names[name] == reference.names[name] for name in CELL[:3])
                if same and other is not reference and metric in other.info["metrics"]:
                    pairs = pd.concat([reference.values(metric), other.values(metric)], axis=1, join="inner").dropna()
                    gain = pairs.iloc[:, 0] - pairs.iloc[:, 1]
                    family.append({**other.names, "metric": metric, **paired(gain if better == "higher" else -gain)})
            for line, p in zip(family, holm([line["p"] for line in family]), strict=True):
                lines.append({**line, "p": p})
    return pd.DataFrame(lines, columns=[*CELL, "metric", "p", "effect", "pairs"])


def paired(gain: pd.Series) -> dict[str, float]:
    """Two-sided Wilcoxon test of paired gains, and their rank-biserial correlation; zeros are left out, as usual."""
    changed = gain[gain != 0].to_numpy()
    if len(changed) == 0:
        return {"p": 1.0 if len(gain) else np.nan, "effect": 0.0 if len(gain) else np.nan, "pairs": len(gain)}
    ranks = rankdata(np.abs(changed))
    effect = (ranks[changed > 0].sum() - ranks[changed < 0].sum()) / ranks.sum()
    return {"p": float(wilcoxon(changed).pvalue), "effect": float(effect), "pairs": len(gain)}


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction; NaN stays NaN and does not count."""
    p = np.array(p_values, dtype=float)
    corrected = np.full(len(p), np.nan)
    order = [at for at in np.argsort(p, kind="stable") if not np.isnan(p[at])]
    largest = 0.0
    for place, at in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p[at]))
        corrected[at] = largest
    return corrected.tolist()
