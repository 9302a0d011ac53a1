"""One self-contained HTML page: a browser of images, results, the comparison with the paper, curves, ranks, configs."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dap_bench import __version__, files
from dap_bench.errors import UserError
from dap_bench.report import compare, figures, tables
from dap_bench.report.browser import browse, note
from dap_bench.report.layouts import group, label, labels, ordered, titles
from dap_bench.report.rows import CellRows
from dap_bench.report.summary import REFERENCE

GROUP = ["data", "sampler", "model"]
SOURCES = {"imagenet": "ImageNet", "parquet": "local Parquet files", "imagefolder": "a folder of images"}
DASHES = {"-": "", "--": "6 3", "-.": "6 3 1 3", ":": "2 3"}  # of SVG, for the figures' lines


@dataclass(frozen=True)
class Options:
    """How much is shown: images to browse and images with pictures, of each model and sampling."""

    images: int = 1000
    pictures: int = 0
    device: str = "auto"
    reference: str = REFERENCE
    again: str = "python -m dap_bench.report pictures=24"  # the command that adds pictures


def write_page(
    path: Path,
    cells: list[CellRows],
    summary: pd.DataFrame,
    compared: pd.DataFrame | None,
    pictures: dict[str, Path],
    options: Options,
) -> Path:
    """Write the page.

    Args:
        path: The file to write.
        cells: The cells with their rows, from `load_rows`.
        summary: The table from `summarize`.
        compared: The table from `compare`; None leaves the comparison out.
        pictures: PNGs to show, by title.
        options: How much is shown.

    Returns:
        The file written.

    Raises:
        UserError: If it cannot be written.
    """
    counts = summary.groupby([*GROUP, "method"])["n"].first()
    downloads, missing = _downloads(summary, compared)
    content = {
        "about": f"{len(counts)} cells, {int(counts.sum()):,} rows. Made by dap_bench {__version__} from rows alone.",
        "labels": labels(),
        "titles": titles(),
        "reference": options.reference,
        "better": dict(zip(summary["metric"], summary["better"], strict=True)),
        "groups": list(_groups(cells, summary, options)),
        "compared": None if compared is None else _records(compared.drop_duplicates(compare.KEY)),
        "verdicts": "" if compared is None else compare.count_verdicts(compared),
        "taus": [] if compared is None else _records(compare.rank_agreement(compared)),
        "unmeasured": [] if compared is None else compare.missing_commands(compared),
        "downloads": downloads,
        "missing": missing,
        "pictures": [{"title": title, "src": _png(file)} for title, file in pictures.items()],
    }
    # whatever a class or a method is called, it cannot end the script that holds the data
    text = json.dumps(_plain(content), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_name("page.html").read_text()
    script = page.split("<script>")[1].split("</script>")[0]
    # only the page's own script runs, and nothing is fetched
    allowed = base64.b64encode(sha256(script.encode()).digest()).decode()
    files.write_text(path, page.replace("SCRIPT-HASH", allowed).replace("/*DATA*/", text))
    return path


def _groups(cells: list[CellRows], summary: pd.DataFrame, options: Options) -> Iterator[dict[str, Any]]:
    """All that is shown of each model and sampling."""
    for key, part in summary.groupby(GROUP):
        names = dict(zip(GROUP, map(str, key), strict=True))
        members = [cell for cell in cells if all(cell.names[name] == names[name] for name in GROUP)]
        methods = ordered({cell.names["method"] for cell in members})
        members.sort(key=lambda cell: methods.index(cell.names["method"]))
        source = SOURCES.get(names["data"], names["data"])
        shown = figures.panels(members)
        browser = browse(members, options.images, options.pictures, options.device, options.again)
        yield {
            **names,
            "id": "-".join(names.values()),
            "title": f"{label(names['model'])}, {label(names['sampler']).lower()} draw of {source}",
            **browser,
            "rows": list(_rows(part)),
            "looks": {method: _look(methods, method, options.reference) for method in methods},
            "panels": [{**panel, "bands": {m: b.round(4) for m, b in panel["bands"].items()}} for panel in shown],
            "ranks": list(_ranks(members)),
            "missing": [*browser["notes"], *_gaps(part, bool(shown))],
            "cells": [_cell(cell) for cell in members],
        }


def _rows(part: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A line of the table of results for each method."""
    places = {metric: _places(lines) for metric, lines in part.groupby("metric")}
    for method in ordered(set(part["method"])):
        lines = part[part["method"] == method].set_index("metric")
        columns = ["mean", "low", "high", "nan", "p", "effect", "pairs", "resolution", "like_random"]
        values = {m: {**lines.loc[m, columns].to_dict(), "place": places[m].get(method, 0)} for m in lines.index}
        counts = lines.iloc[0][["n", "failed", "missing", "fallback", "version"]].to_dict()
        yield {"method": method, "values": values, **counts, "older": counts["version"] != __version__}


def _places(part: pd.DataFrame) -> dict[str, int]:
    """1 for the best method of a metric, 2 for the second, of the cells that are whole."""
    whole = part[(part["missing"] == 0) & (part["failed"] == 0) & ~part["method"].map(group).eq("control")]
    order = whole.set_index("method")["mean"].rank(method="dense", ascending=part["better"].iloc[0] == "lower")
    return {str(method): int(place) for method, place in order.items() if place in (1, 2)}


def _look(methods: list[str], method: str, reference: str) -> dict[str, Any]:
    """A method's line in the curves, and whether it is there before anybody asks."""
    look = figures.style(methods, method, reference)
    beside = group(method) in ("ablation", "control")
    return {"colour": look["color"], "width": look["linewidth"], "dash": DASHES[look["linestyle"]], "beside": beside}


def _ranks(cells: list[CellRows]) -> Iterator[dict[str, Any]]:
    """Mean ranks of the methods by metric, with the critical difference, ablations and controls not counted."""
    proper = [cell for cell in cells if group(cell.names["method"]) not in ("ablation", "control")]
    for metric in ordered({metric for cell in proper for metric in cell.info["metrics"]}):
        found = figures.mean_ranks(proper, metric)
        if found is not None:
            ranks, difference, count = found
            yield {"metric": metric, "ranks": ranks.to_dict(), "difference": difference, "images": count}


def _gaps(part: pd.DataFrame, curves: bool) -> list[dict[str, str]]:
    """What these rows lack, and what adds it."""
    said = []
    for _, line in part.drop_duplicates("method").iterrows():
        failed, missing = int(line["failed"]), int(line["missing"])
        if failed or missing:
            texts = [f"{failed} failed"] * bool(failed) + [f"{missing} are not computed yet"] * bool(missing)
            said.append(note(f"{label(line['method'])}: of its images {' and '.join(texts)}.", line["command"]))
    if not curves:
        text = "There are no curves: the rows were made without them. Of one method this adds them:"
        said.append(note(text, f"{part['command'].iloc[0]} keep_curves=true".strip()))
    return said


def _downloads(summary: pd.DataFrame, compared: pd.DataFrame | None) -> tuple[list[Any], list[Any]]:
    """Files that the page offers, and why some are not there."""
    made = [("results.csv", "All results as CSV", summary.to_csv(index=False, float_format="%.6f"))]
    missing = []
    for name, layout in tables.tables().items():
        try:
            text = tables.latex(summary, layout)
        except UserError as error:
            missing.append(note(f"There is no LaTeX of {_words(name)}: {error}"))
            continue
        if text is not None:
            made.append((f"{name}.tex", f"{_words(name)} as LaTeX", text))
    if compared is None:
        missing.append(note("There is no comparison: the published numbers are not here; paper=FOLDER names them."))
    elif compared["mean"].notna().any():
        made.append(("comparison.csv", "The comparison as CSV", compared.to_csv(index=False, float_format="%.6f")))
        made.append(("comparison.tex", "The comparison as LaTeX", compare.latex(compared)))
    return [{"file": file, "title": title, "text": text} for file, title, text in made], missing


def _words(name: str) -> str:
    """table1 as Table 1."""
    start = name.removeprefix("table")
    return f"Table {start}" if start != name else name.capitalize()


def _cell(cell: CellRows) -> dict[str, Any]:
    config = {key: value for key, value in cell.info["config"].items() if key not in ("results_dir", "cache_dir")}
    return {
        "method": cell.names["method"],
        "command": cell.info.get("command") or compare.missing_cell_command(pd.Series(cell.names)),
        "config": json.dumps(config, indent=1, sort_keys=True),
    }


def _records(table: pd.DataFrame) -> list[Any]:
    return table.to_dict("records")


def _png(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _plain(value: Any) -> Any:
    """Without NumPy's kinds and without NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
