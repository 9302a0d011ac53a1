"""Rows -> one line per cell and metric: mean with its interval, what it rests on, and how DAP compares."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, rankdata, wilcoxon

from dap_bench.report.rows import CELL, CellRows, load_rows, require_like

REFERENCE = "dap"  # the method that the others are tested against
SEED = 0  # of the bootstrap: the same rows give the same interval, always


def summarize(results: str | Path = "results/runs", data: str = "") -> pd.DataFrame:
    """One line per cell and metric, of all cells below a folder or of those of one data source.

    `mean` with its 95 % bootstrap interval (`low`, `high`). `n` images were measured, of which `nan` have no value for
    the metric; `failed` images could not be measured and `missing` are not computed yet; `fallback` counts images for
    which the explainer fell back to another rule; `version` is the dap_bench that made the rows. `p` is the paired
    Wilcoxon test of DAP against the method, corrected after Holm over the methods of the same model, sampling and
    metric; `effect` the rank-biserial correlation of the pairs, positive where DAP is better.
    """
    cells = load_rows(results, data, columns=["fallback"])
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
