"""Rows -> one line per cell and metric: mean with its interval, what it rests on, and how DAP compares."""

from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, norm, rankdata, wilcoxon

from dap_bench.report.rows import CELL, CellRows, load_rows, require_like

REFERENCE = "dap"  # the method that the others are tested against, unless another is named
CHANCE = "random"  # the control that a method should differ from
POWER = norm.ppf(0.975) + norm.ppf(0.80)  # of a two-sided test at 5 %: seen in 80 % of experiments
FEW = 13  # pairs whose signs can all be tried
SEED = 0  # of the bootstrap: the same rows give the same interval, always


def summarize(results: str | Path = "results/runs", data: str = "", reference: str = REFERENCE) -> pd.DataFrame:
    """One line per cell and metric: the mean with its interval, and how the method compares with the reference.

    Args:
        results: A folder with rows, or several: A,B. Defaults to "results/runs".
        data: The data source; "" takes all. Defaults to "".
        reference: The method that the others are tested against. Defaults to "dap".

    Returns:
        A table with the columns `data`, `sampler`, `model`, `method`, `metric` and `better` (higher or lower). `mean`
        has a 95 % bootstrap interval (`low`, `high`). `n` images were measured, of which `nan` have no value for the
        metric; `failed` images could not be measured and `missing` are not computed yet; `fallback` counts images for
        which the explainer fell back to another rule; `version` is the dap_bench that made the rows, `command` what
        computes them, and `fingerprint` their identity. `p` is the paired Wilcoxon test of the reference against the
        method, corrected after Holm over the methods of the same model, sampling and metric; `effect` is the
        rank-biserial correlation of the `pairs`, positive where the reference is better. `resolution` is the smallest
        difference from the reference that so many images can tell (paired, 5 %, in 80 % of experiments), and
        `like_random` says whether the difference from the control `random` is within its resolution.

    Raises:
        UserError: If there are no rows, or cells of one model and sampling differ in images, model or metrics.
    """
    cells = load_rows(results, data, columns=["fallback"])
    require_like(cells)
    lines = [line for cell in cells for line in _lines(cell)]
    table = pd.DataFrame(lines).sort_values([*CELL, "metric"], ignore_index=True)
    table = table.merge(_tests(cells, reference), how="left", on=[*CELL, "metric"])
    return table.merge(_against_chance(cells), how="left", on=[*CELL, "metric"])


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
    """The 95 % bootstrap interval of the mean.

    Args:
        values: The values of all images.

    Returns:
        Both bounds; NaN for fewer than two values.
    """
    if len(values) < 2:
        return np.nan, np.nan
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    batch = max(1, 10**7 // len(values))  # bounds memory
    random = np.random.default_rng(SEED)
    found = bootstrap((values,), np.mean, n_resamples=2000, batch=batch, method="percentile", rng=random)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _pairs(cells: list[CellRows], reference: str) -> Iterator[tuple[str, str, list[tuple[CellRows, pd.Series]]]]:
    """For every cell of the reference and every metric: the other methods, with what the reference gains over them."""
    for own in (cell for cell in cells if cell.names["method"] == reference):
        for metric, better in own.info["metrics"].items():
            family = []
            for other in cells:
                same = all(other.names[name] == own.names[name] for name in CELL[:3])
                if same and other is not own and metric in other.info["metrics"]:
                    pairs = pd.concat([own.values(metric), other.values(metric)], axis=1, join="inner").dropna()
                    gain = pairs.iloc[:, 0] - pairs.iloc[:, 1]
                    family.append((other, gain if better == "higher" else -gain))
            yield metric, better, family


def _tests(cells: list[CellRows], reference: str) -> pd.DataFrame:
    """The reference against every other method, image by image."""
    lines = []
    for metric, _, family in _pairs(cells, reference):
        tests = [paired(gain) for _, gain in family]
        for (other, gain), test, p in zip(family, tests, holm([test["p"] for test in tests]), strict=True):
            lines.append({**other.names, "metric": metric, **test, "p": p, "resolution": resolution(gain)})
    return pd.DataFrame(lines, columns=[*CELL, "metric", "p", "effect", "pairs", "resolution"])


def _against_chance(cells: list[CellRows]) -> pd.DataFrame:
    """Which methods these images cannot tell from a random map."""
    lines = []
    for metric, _, family in _pairs(cells, CHANCE):
        for other, gain in family:
            within = bool(abs(gain.mean()) <= resolution(gain)) if len(gain) > 1 else None
            lines.append({**other.names, "metric": metric, "like_random": within})
    return pd.DataFrame(lines, columns=[*CELL, "metric", "like_random"])


def resolution(differences: pd.Series) -> float:
    """The smallest mean of paired differences that as many images tell from zero, at 5 %, in 80 % of experiments.

    Args:
        differences: The difference of each image.

    Returns:
        That mean, or NaN for fewer than two images.
    """
    return POWER * float(differences.std()) / sqrt(len(differences)) if len(differences) > 1 else np.nan


def paired(gain: pd.Series) -> dict[str, float]:
    """Two-sided Wilcoxon test of paired gains; gains of zero are left out, as usual.

    Args:
        gain: The gain of each image.

    Returns:
        `p`, the rank-biserial correlation `effect`, and the number of `pairs`.
    """
    changed = gain[gain != 0].to_numpy()
    if len(changed) == 0:
        return {"p": 1.0 if len(gain) else np.nan, "effect": 0.0 if len(gain) else np.nan, "pairs": len(gain)}
    ranks = rankdata(np.abs(changed))
    effect = (ranks[changed > 0].sum() - ranks[changed < 0].sum()) / ranks.sum()
    p = _exact(ranks, changed > 0) if len(changed) <= FEW else float(wilcoxon(changed).pvalue)
    return {"p": p, "effect": float(effect), "pairs": len(gain)}


def _exact(ranks: np.ndarray, won: np.ndarray) -> float:
    """The test's p-value, ties or not, from all 2^n ways to give signs to ranks; scipy asks for them one by one."""
    signs = np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks)) & 1
    sums, found = signs @ ranks, ranks[won].sum()
    return float(min(1.0, 2 * (sums <= found).mean(), 2 * (sums >= found).mean()))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction; NaN stays NaN and does not count.

    Args:
        p_values: The p-values of one family of tests.

    Returns:
        The corrected p-values, in the same order.
    """
    p = np.array(p_values, dtype=float)
    corrected = np.full(len(p), np.nan)
    order = [at for at in np.argsort(p, kind="stable") if not np.isnan(p[at])]
    largest = 0.0
    for place, at in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p[at]))
        corrected[at] = largest
    return corrected.tolist()
