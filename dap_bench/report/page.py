"""One self-contained HTML page: results, the comparison with the paper, figures, a browser of images, configs."""

import base64
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import ImageOps
from tqdm import tqdm

from dap_bench import __version__, files
from dap_bench.data.images import BadImage, decode
from dap_bench.errors import UserError
from dap_bench.report.compare import count_verdicts, missing_cell_command, rank_agreement
from dap_bench.report.layouts import group, labels, ordered
from dap_bench.report.redraw import Redraw, stored_samples
from dap_bench.report.rows import CellRows
from dap_bench.report.summary import REFERENCE

THUMBNAIL = 160
MAP_SIDE = 56  # about how many rows and columns of a map the page holds
GROUP = ["data", "sampler", "model"]


def write_page(
    path: Path,
    cells: list[CellRows],
    summary: pd.DataFrame,
    compared: pd.DataFrame | None,
    figures: dict[str, Path],
    images: int,
    device: str = "auto",
    reference: str = REFERENCE,
) -> Path:
    """Write the page; `images` is how many samples of each model and sampling can be browsed."""
    counts = summary.groupby([*GROUP, "method"])["n"].first()
    content = {
        "about": f"{len(counts)} cells, {int(counts.sum()):,} rows. Made by dap_bench {__version__} from rows alone.",
        "labels": labels(),
        "reference": reference,
        "better": dict(zip(summary["metric"], summary["better"], strict=True)),
        "groups": list(_groups(summary)),
        "compared": [] if compared is None else _records(compared),
        "verdicts": "" if compared is None else count_verdicts(compared),
        "taus": [] if compared is None else _records(rank_agreement(compared)),
        "figures": [{"title": title, "src": _data_url(file.read_bytes(), "png")} for title, file in figures.items()],
        "samples": list(_samples(cells, images, device)),
        "cells": [_cell(cell) for cell in cells],
    }
    # whatever a class or a method is called, it cannot end the script that holds the data
    text = json.dumps(_plain(content), allow_nan=False).replace("<", "\\u003c")
    page = Path(__file__).with_name("page.html").read_text()
    script = page.split("<script>")[1].split("</script>")[0]
    # only the page's own script runs, and nothing is fetched
    allowed = base64.b64encode(sha256(script.encode()).digest()).decode()
    files.write_text(path, page.replace("SCRIPT-HASH", allowed).replace("/*DATA*/", text))
    return path


def _group_id(names: Any) -> str:
    return "/".join(str(names[key]) for key in GROUP)


def _groups(summary: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for key, part in summary.groupby(GROUP):
        names = dict(zip(GROUP, key, strict=True))
        metrics = ordered(set(part["metric"]))
        places = {m: _places(part[part["metric"] == m]) for m in metrics}
        rows = []
        for method in ordered(set(part["method"])):
            lines = part[part["method"] == method].set_index("metric")
            columns = ["mean", "low", "high", "nan", "p", "effect", "pairs", "resolution", "like_random"]
            values = {m: {**lines.loc[m, columns].to_dict(), "place": places[m].get(method, 0)} for m in lines.index}
            counts = lines.iloc[0][["n", "failed", "missing", "fallback"]].to_dict()
            version = str(lines.iloc[0]["version"])
            rows.append({"method": method, "values": values, **counts, "version": version})
        yield {**names, "id": _group_id(names), "metrics": metrics, "rows": rows}


def _places(part: pd.DataFrame) -> dict[str, int]:
    """1 for the best method of a metric, 2 for the second, of the cells that are whole."""
    whole = part[(part["missing"] == 0) & (part["failed"] == 0) & ~part["method"].map(group).eq("control")]
    order = whole.set_index("method")["mean"].rank(method="dense", ascending=part["better"].iloc[0] == "lower")
    return {str(method): int(place) for method, place in order.items() if place in (1, 2)}


def _samples(cells: list[CellRows], count: int, device: str) -> Iterator[dict[str, Any]]:
    """The first `count` images of each model and sampling, with every method's map and values."""
    groups: dict[str, list[CellRows]] = {}
    for cell in cells:
        groups.setdefault(_group_id(cell.names), []).append(cell)
    for name_of_group, members in groups.items():
        order = ordered({cell.names["method"] for cell in members})
        members.sort(key=lambda cell: order.index(cell.names["method"]))
        photos = _photos(members[0])
        bare = [c for c in members if "map" not in c.rows or c.rows.loc[c.rows["status"] == "ok", "map"].isna().any()]
        redraw = Redraw.of(bare, device) if bare and count else None
        tables = [(cell, cell.rows[cell.rows["status"] == "ok"].set_index("sample_id")) for cell in members]
        shown_rows = tables[0][1].head(count)
        again = redraw is not None and sys.stderr.isatty()  # takes a while
        for name, row in tqdm(shown_rows.iterrows(), "explaining again", len(shown_rows), disable=not again):
            maps = redraw.maps(str(name)) if redraw and name in redraw.rows.index else {}
            stored = {c.names["method"]: _stored_map(c, t.loc[name]) for c, t in tables if name in t.index}
            maps |= {method: found for method, found in stored.items() if found is not None}
            if not maps:
                continue
            shown = [(c, t.loc[name]) for c, t in tables if name in t.index and c.names["method"] in maps]
            yield {
                "group": name_of_group,
                "id": name,
                "label": _class_name(members[0], row["label"]),
                "predicted": _class_name(members[0], row["predicted"]),
                "confidence": row["confidence"],
                "photo": photos(str(name)),
                "methods": {c.names["method"]: _sample_of(c, line, maps[c.names["method"]]) for c, line in shown},
            }


def _stored_map(cell: CellRows, row: pd.Series) -> tuple[np.ndarray, bool] | None:
    """A map that is kept in the rows, as [rows, columns], and whether it is smoothed when it is enlarged."""
    found = row.get("map")
    if found is None or np.ndim(found) != 1:
        return None
    text = str(row.get("grid"))
    side = round(len(found) ** 0.5)
    rows, columns = map(int, text.split("x")) if re.fullmatch(r"\d{1,5}x\d{1,5}", text) else (side, side)
    if rows * columns != len(found):
        return None
    return np.asarray(found, dtype=float).reshape(rows, columns), row.get("upsample") != "nearest"


def _sample_of(cell: CellRows, row: pd.Series, found: tuple[np.ndarray, bool]) -> dict[str, Any]:
    scaled, smooth = _small(found[0]), found[1]
    spread = np.ptp(scaled)
    scaled = (scaled - scaled.min()) / spread if spread else np.zeros_like(scaled)
    return {
        "map": base64.b64encode((255 * scaled).round().astype(np.uint8).tobytes()).decode(),
        "grid": list(scaled.shape),
        "smooth": smooth,
        "values": {metric: row[metric] for metric in ordered(set(cell.info["metrics"]))},
    }


def _small(values: np.ndarray) -> np.ndarray:
    """A map of pixels as a smaller one, which is all that is seen of it: means of blocks."""
    rows, columns = (max(1, side // MAP_SIDE) for side in values.shape)
    height, width = values.shape[0] // rows * rows, values.shape[1] // columns * columns
    return values[:height, :width].reshape(height // rows, rows, width // columns, columns).mean((1, 3))


def _class_name(cell: CellRows, label: Any) -> str:
    names = cell.info.get("class_names") or []
    if pd.isna(label):
        return "no class"
    return str(names[int(label)]) if 0 <= int(label) < len(names) else f"class {int(label)}"


def _photos(cell: CellRows) -> Callable[[str], str | None]:
    """From a sample's id to a small JPEG as a data address, or to None where the images are not on this machine."""
    samples = stored_samples(cell)
    cut = (1 - cell.info.get("crop", 1.0)) / 2  # what the model does not see at each side
    places = {name: at for at, name in enumerate(samples.ids)} if samples else {}

    def photo(name: str) -> str | None:
        if samples is None or name not in places:
            return None
        try:
            image = decode(samples.read([places[name]])[0][0])
        except (BadImage, UserError):
            return None
        buffer = io.BytesIO()
        ImageOps.fit(image, (THUMBNAIL, THUMBNAIL), bleed=cut).save(buffer, "JPEG", quality=80)
        return _data_url(buffer.getvalue(), "jpeg")

    return photo


def _cell(cell: CellRows) -> dict[str, Any]:
    config = {key: value for key, value in cell.info["config"].items() if key not in ("results_dir", "cache_dir")}
    return {
        **cell.names,
        "command": cell.info.get("command") or missing_cell_command(pd.Series(cell.names)),
        "config": json.dumps(config, indent=1, sort_keys=True),
    }


def _records(table: pd.DataFrame) -> list[Any]:
    return table.to_dict("records")


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _plain(value: Any) -> Any:
    """Without NumPy's kinds and without NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
