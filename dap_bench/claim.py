"""Count the settings in which a claim holds: dap-bench claim 'dap > ar on deletion'

  'A > B on METRIC'       A is better than B, in the metric's own direction; A < B: worse; separate several with ;
                          METRIC may be a pattern: 'dap > ar on deletion*'

A setting is everything that rows can differ in besides the method: data, sampler, model, precision, the metric's
options, and whether all images count or only those that the model classifies correctly. In each one, per image i,

    gain_i = A_i - B_i, or B_i - A_i where lower is better        positive: supports the claim

The claim holds where the rank-biserial effect of the gains is positive and the paired Wilcoxon test, Holm-corrected
over the settings, has p < 0.05. It is contradicted where the effect is negative and p < 0.05, and undecided otherwise.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal

import pandas as pd

from dap_bench import config, store
from dap_bench.command import Results, command
from dap_bench.errors import UserError, path
from dap_bench.identity import acting
from dap_bench.report.rows import CellRows, load_rows
from dap_bench.report.summary import holm, interval, paired

ALPHA = 0.05
WIDTH = 100  # columns of a terminal
# what is changed of a metric when settings are computed, as far as it has such options
VARIED: dict[str, tuple[object, ...]] = {
    "baseline": ("zero", "black", "mean", "blur"),
    "unit": ("pixel", "patch"),
    "steps": (10, 20),
    "ties": ("stable", "random"),
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """`better` is better than `worse` on `metric`."""

    better: str
    worse: str
    metric: str

    @classmethod
    def of(cls, text: str) -> "Claim":
        """The claim that a text makes, such as `dap > ar on deletion`.

        Args:
            text: The claim in words.

        Returns:
            The claim, with the better method first.

        Raises:
            UserError: If the text is not a claim.
        """
        name = r"([\w.+-]+)"
        found = re.fullmatch(rf"\s*{name}\s*([<>])\s*{name}\s+on\s+([\w.+*?-]+)\s*", text)
        if not found or found[1] == found[3]:
            raise UserError(f"{text.strip()!r} is not a claim; write one in quotes, such as 'dap > ar on deletion'.")
        first, sign, second, metric = found.groups()
        return cls(first, second, metric) if sign == ">" else cls(second, first, metric)

    def __str__(self) -> str:
        return f"{self.better} > {self.worse} on {self.metric}"


@dataclass(frozen=True)
class Setting:
    """What was the same for both methods, and the gain of each image."""

    described: dict[str, str]
    gain: pd.Series


# ---------------------------------------------------------------------- from rows to verdicts


def judge(settings: Sequence[Setting]) -> pd.DataFrame:
    """Test a claim in every setting.

    Args:
        settings: The settings, with the gain of each image.

    Returns:
        One line per setting: `n`, the mean `gain` with its 95 % interval (`low`, `high`), the rank-biserial `effect`,
        `p`, `corrected` (p after Holm) and the `verdict`: holds, contradicted or undecided.
    """
    lines = []
    for setting in settings:
        low, high = interval(setting.gain.to_numpy())
        test = paired(setting.gain)
        lines.append({"n": len(setting.gain), "gain": setting.gain.mean(), "low": low, "high": high, **test})
    table = pd.DataFrame(lines)
    table["corrected"] = holm(table["p"].tolist())
    table["verdict"] = [_verdict(*pair) for pair in zip(table["effect"], table["corrected"], strict=True)]
    return table.drop(columns="pairs")


def _verdict(effect: float, p: float) -> str:
    if not p < ALPHA or effect == 0:
        return "undecided"
    return "holds" if effect > 0 else "contradicted"


def settings(cells: Sequence[CellRows], claim: Claim) -> list[Setting]:
    """The settings in which the rows of both methods can be compared.

    Args:
        cells: The cells with their rows.
        claim: The claim.

    Returns:
        The settings with the gain of each image: of all images, and of those that the model gets right where these are
        fewer.

    Raises:
        UserError: If there is none.
    """
    groups: dict[str, dict[str, CellRows]] = {}
    described: dict[str, tuple[str, dict[str, str]]] = {}
    for cell in cells:
        for metric in cell.info["metrics"]:
            if cell.names["method"] in (claim.better, claim.worse) and fnmatchcase(metric, claim.metric):
                key, words = _conditions(cell, metric)
                group = groups.setdefault(key, {})
                described[key] = metric, words
                group[cell.names["method"]] = _newest(cell, group.get(cell.names["method"]))
    found: list[Setting] = []
    for key, group in groups.items():
        if len(group) == 2:
            found += _gains(group[claim.better], group[claim.worse], *described[key])
    if not found:
        methods = sorted({cell.names["method"] for cell in cells})
        metrics = sorted({metric for cell in cells for metric in cell.info["metrics"]})
        raise UserError(
            f"no rows of {claim.better} and {claim.worse} on {claim.metric} can be compared; the rows have methods "
            f"{', '.join(methods)} and metrics {', '.join(metrics)}."
        )
    return found


def _conditions(cell: CellRows, metric: str) -> tuple[str, dict[str, str]]:
    """What must be the same for two methods to be compared, and the part of it that can be described in words.

    All of it is data from a results folder, and no more than compared and shown.
    """
    identity, metrics = cell.info["identity"], cell.info["config"].get("metric")
    options = acting(metrics.get(metric)) if isinstance(metrics, dict) else None
    plain = options if isinstance(options, dict) else {}
    precision = [identity.get("precision", "fp32"), identity.get("explain_precision", "fp32")]
    names = {name: cell.names[name] for name in ("data", "sampler", "model")}
    drawn = cell.info["config"].get("sampler")
    words = {**names, "metric": metric, "precision": "/".join(map(_word, precision))}
    for prefix, node in (("sampler ", drawn if isinstance(drawn, dict) else {}), ("", plain)):
        words |= {f"{prefix}{key}": _word(value) for key, value in node.items() if not str(key).startswith("_")}
    same = [names, metric, precision, options, identity.get("samples"), identity.get("model")]
    return json.dumps(same, sort_keys=True, default=str), words


def _word(value: Any) -> str:
    return "".join(letter for letter in str(value) if letter.isprintable())[:40]


def _newest(cell: CellRows, other: CellRows | None) -> CellRows:
    """Of two settings of one method that measure the same, the one written last."""
    if other is None:
        return cell
    older, newer = sorted((cell, other), key=lambda each: (each.folder / "cell.json").stat().st_mtime_ns)
    log.warning("%s is left out: %s is newer", older.folder, newer.folder)
    return newer


def _gains(better: CellRows, worse: CellRows, metric: str, described: dict[str, str]) -> Iterator[Setting]:
    """Of all images, and of those that the model gets right where these are fewer."""
    pairs = pd.concat([better.values(metric), worse.values(metric)], axis=1, join="inner").dropna()
    gain = pairs.iloc[:, 0] - pairs.iloc[:, 1]
    gain = gain if better.info["metrics"][metric] == "higher" else -gain
    yield Setting({**described, "images": "all"}, gain)
    rows = better.rows.set_index("sample_id")
    right = gain[(rows["label"] == rows["predicted"]).reindex(gain.index)]
    if 0 < len(right) < len(gain):
        yield Setting({**described, "images": "right"}, right)


def read(results: str) -> list[CellRows]:
    """Every cell below some folders; settings of one cell stand side by side here.

    Args:
        results: A folder, or several: A,B.

    Returns:
        The cells with their rows.

    Raises:
        UserError: If there are no rows.
    """
    folders = [path("results", text) for text in results.split(",")]
    found = [cell.folder for folder in folders for cell in store.cells(folder)]
    if not found:
        raise UserError(
            f"{results} holds no rows; run `python -m dap_bench` first, name another folder, or compute=true."
        )
    return [rows for folder in found for rows in load_rows(folder, columns=["label", "predicted"])]


# ---------------------------------------------------------------------- settings on request


def computed(claim: Claim, vary: str, out: Path, overrides: Sequence[str]) -> list[CellRows]:
    """Rows of both methods in every setting of the metric, by the ordinary runner.

    Args:
        claim: The claim; its metric must not be a pattern.
        vary: Vary each option of the metric by itself (each), or take all combinations (all).
        out: The folder for the rows; existing rows are reused.
        overrides: Other options of the runs, as on the command line: "model=vit_t", "sampler.n=200".

    Returns:
        The cells with their rows, two for each setting.

    Raises:
        UserError: If there is no such metric or method, or an option is wrong.
    """
    from dap_bench import runner

    if re.search(r"[*?]", claim.metric):
        raise UserError(f"compute=true takes one metric, not the pattern {claim.metric}.")
    first = [f"metric=[{claim.metric}]", *overrides]
    node = config.compose(*first).metric.get(claim.metric)
    if node is None:
        raise UserError(f"conf/metric/{claim.metric}.yaml holds no metric of that name; name a metric, not a preset.")
    planned = []  # all of it before anything is computed: a mistake in the last one should not come last
    for changes in variants({str(key): value for key, value in node.items()}, vary):
        name = "-".join([claim.metric, *(f"{key}-{value}" for key, value in changes.items())])
        place = [f"metric.{claim.metric}.{key}={value}" for key, value in changes.items()]
        for method in (claim.better, claim.worse):
            asked = [*first, f"method={method}", *place, f"results_dir={out / name}"]
            planned.append((*config.compose_cell(*asked), [*config.folders(), *asked]))
    found = [runner.run(cfg, names, asked).folder for cfg, names, asked in planned]
    return [rows for folder in found for rows in load_rows(folder, columns=["label", "predicted"])]


def variants(options: dict[str, Any], vary: str) -> list[dict[str, object]]:
    """Changes of a metric's options.

    Args:
        options: The options that the metric has, with their values.
        vary: Each option by itself (each), or all combinations (all).

    Returns:
        Options to change, with their new values, for each variant. The first changes nothing.
    """
    other = {key: [v for v in values if v != options[key]] for key, values in VARIED.items() if key in options}
    if vary == "each":
        return [{}, *({key: value} for key, values in other.items() for value in values)]
    combined = product(*([(key, None), *((key, value) for value in values)] for key, values in other.items()))
    return [{key: value for key, value in pairs if value is not None} for pairs in combined]


# ---------------------------------------------------------------------- the command


@command()
def main(
    *arguments: Annotated[str, "claims; with compute=true also options of a run: model=vit_t sampler.n=200"],
    results: Results = "results/runs",
    compute: Annotated[
        bool,
        "run both methods on one sample set instead, with the metric's options varied (baseline, unit, steps, ties)",
    ] = False,
    vary: Annotated[Literal["each", "all"], "with compute: vary each option by itself, or all combinations"] = "each",
    out: Annotated[Path, "with compute: folder for the rows; existing rows are reused"] = Path("results/claims"),
) -> None:
    texts = [text for text in arguments if re.search(r"[<>]", text)]
    overrides = [text for text in arguments if text not in texts]
    claims = [Claim.of(text) for text in ";".join(texts).split(";") if text.strip()]
    if not claims:
        raise UserError("state a claim in quotes: dap-bench claim 'dap > ar on deletion'.")
    if overrides and not compute:
        raise UserError(f"{overrides[0]} is not an option here; options of a run need compute=true.")
    cells = [] if compute else read(results)
    for claim in claims:
        rows = cells or computed(claim, vary, out, overrides)
        found = settings(rows, claim)
        print(f"\n{claim}\n\n{_shown(found, judge(found))}")


def _shown(found: Sequence[Setting], table: pd.DataFrame) -> str:
    """The table of a claim, and in how many settings it holds."""
    header = ["n", "gain [95 %]", "effect", "Holm p", ""]
    columns = [
        [str(n) for n in table["n"]],
        [f"{g:+.4f} [{a:+.4f}, {b:+.4f}]" for g, a, b in table[["gain", "low", "high"]].to_numpy()],
        [f"{effect:+.2f}" for effect in table["effect"]],
        [f"{p:.2g}" for p in table["corrected"]],
        list(table["verdict"]),
    ]
    widths = [max(map(len, (title, *column))) for title, column in zip(header, columns, strict=True)]
    rows = [header, *map(list, zip(*columns, strict=True))]
    right = ["  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in rows]
    names = ["setting", *_names(found)]
    room = min(max(map(len, names)), WIDTH - len(right[0]) - 2)
    lines = []
    for name, numbers in zip(names, right, strict=True):
        first, *rest = wrap(name, room) or [""]
        lines += [f"{first:<{room}}  {numbers}".rstrip(), *(f"  {line}" for line in rest)]
    counts = {verdict: int((table["verdict"] == verdict).sum()) for verdict in ("holds", "contradicted", "undecided")}
    end = (
        f"holds in {counts['holds']} of {len(table)} settings; contradicted in {counts['contradicted']}; "
        f"undecided in {counts['undecided']}"
    )
    return "\n".join([*lines, "", end])


def _names(found: Sequence[Setting]) -> list[str]:
    """Settings by what they differ in, of what all of them say."""
    keys = [key for key in found[0].described if all(key in setting.described for setting in found)]
    differ = [key for key in keys if len({setting.described[key] for setting in found}) > 1]
    bare = ("data", "sampler", "model", "metric")  # values that say by themselves what they are
    shown = [key for key in differ if key != "images"] or list(bare[:3])
    texts = [
        ", ".join(each.described[key] if key in bare else f"{key} {each.described[key]}" for key in shown)
        for each in found
    ]
    return [f"{text}, {setting.described['images']} images" for text, setting in zip(texts, found, strict=True)]


if __name__ == "__main__":
    main()
