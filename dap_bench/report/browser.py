"""What the page's browser of images shows: values of every image, and pictures of those that were asked for."""

import base64
import io
import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from PIL import ImageOps
from tqdm import tqdm

from dap_bench.data.images import BadImage
from dap_bench.errors import UserError
from dap_bench.report.layouts import label, ordered
from dap_bench.report.redraw import Redraw
from dap_bench.report.rows import CellRows

log = logging.getLogger(__name__)
THUMBNAIL = 192
MAP_SIDE = 28  # the most rows and columns of a map that the page holds: 800 images of 12 methods stay below 30 MB
Map = tuple[np.ndarray, bool]  # [rows, columns], and whether it is smoothed when it is enlarged


def browse(cells: list[CellRows], images: int, pictures: int, device: str, again: str) -> dict[str, Any]:
    """What the page shows of the images of one model and sampling.

    Args:
        cells: The cells of that model and sampling, one per method.
        images: How many images can be browsed, evenly spread.
        pictures: How many of them come with photo and maps.
        device: The device to explain them on: auto, cpu, cuda, cuda:N or mps.
        again: The command that adds pictures, for what the page says where there are none.

    Returns:
        Methods, metrics, class names, the samples with their values, and notes on what is missing.
    """
    tables = {cell.names["method"]: _lines(cell) for cell in cells}
    known = sorted({name for table in tables.values() for name, line in table.items() if line["status"] == "ok"})
    metrics = ordered({metric for cell in cells for metric in cell.info["metrics"]})
    samples = {name: _sample(name, tables, metrics) for name in spread(known, images)}
    notes = _draw(samples, cells, pictures, device, again)
    if len(samples) < len(known):
        text = f"{len(samples)} of {len(known)} images can be browsed, evenly spread; images=N changes how many."
        notes.append(note(text))
    names = cells[0].info.get("class_names") or []
    classes = list(map(str, names)) if isinstance(names, list) else []
    return {
        "methods": list(tables),
        "metrics": metrics,
        "classes": classes,
        "samples": list(samples.values()),
        "notes": notes,
    }


def note(text: str, command: str = "") -> dict[str, str]:
    """Something that the page says is missing, and what adds it.

    Args:
        text: What is missing.
        command: The command that adds it. Defaults to "".

    Returns:
        Both, by these names.
    """
    return {"text": text, "command": command}


def spread(names: Sequence[str], count: int) -> list[str]:
    """Some of the names, at even distances.

    Args:
        names: The names.
        count: How many; all if there are fewer.

    Returns:
        The names chosen, in their order.
    """
    places = np.linspace(0, len(names) - 1, min(count, len(names))).round().astype(int)
    return [names[place] for place in places]


def _lines(cell: CellRows) -> dict[str, dict[str, Any]]:
    """A cell's rows by image, without curves."""
    bare = cell.rows.drop(columns=[name for name in cell.rows if str(name).endswith("_curve")])
    return bare.set_index("sample_id").to_dict("index")


def _sample(name: str, tables: dict[str, dict[str, dict[str, Any]]], metrics: list[str]) -> dict[str, Any]:
    """An image as its rows have it: values and kept maps by method, and why a method has none."""
    lines = {method: table[name] for method, table in tables.items() if name in table}
    ok = {method: line for method, line in lines.items() if line["status"] == "ok"}
    first = next(iter(ok.values()))
    kept = {method: found for method, line in ok.items() if (found := _stored_map(line)) is not None}
    why = {method: "not computed yet" for method in tables if method not in lines}
    why |= {method: f"failed: {line['reason']}" for method, line in lines.items() if method not in ok}
    return {
        "id": name,
        **{key: _int(first[key]) for key in ("label", "predicted", "alternative")},
        "confidence": _rounded(first["confidence"]),
        "values": {method: [_rounded(line.get(metric)) for metric in metrics] for method, line in ok.items()},
        "maps": {method: [_encoded(found)] for method, found in kept.items()},
        "why": why,
    }


def _int(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _rounded(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else round(float(value), 5)


def _draw(
    samples: dict[str, dict[str, Any]], cells: list[CellRows], pictures: int, device: str, again: str
) -> list[dict[str, str]]:
    """Add photos, and maps that the rows do not keep, to some of the samples; returned is what could not be added."""
    if not pictures:
        whole = all(sample["maps"] for sample in samples.values())
        return [note(f"There are no {'photos' if whole else 'pictures'}: none were asked for. This adds some:", again)]
    try:
        redraw = Redraw(cells, device)
    except UserError as error:
        log.warning("single images are not explained again: %s", error)
        return [note(f"There are no pictures: {error}")]
    names = cells[0].names
    title = f"pictures of {names['model']} {names['sampler']}"
    crop = cells[0].info.get("crop")
    cut = (1 - crop) / 2 if isinstance(crop, float) else 0.0  # what the model does not see at each side
    for name in tqdm(spread(list(samples), pictures), title, disable=None):
        sample = samples[name]
        bare = [method for method in sample["values"] if method not in sample["maps"]]
        try:
            sample["photo"] = _thumbnail(redraw, name, cut)
            made = redraw.maps(name, bare)
        except (BadImage, UserError) as error:
            sample["why"] |= dict.fromkeys(bare, str(error))
            continue
        sample["maps"] |= {method: [_encoded(each) for each in maps] for method, maps in made.items()}
    lacking = [note(f"There are no maps of {label(method)}: {why}") for method, why in redraw.left_out.items()]
    if pictures < len(samples):
        more = f"pictures={len(samples)} adds the others."
        lacking.append(note(f"{pictures} of {len(samples)} images have pictures; {more}"))
    return lacking


def _thumbnail(redraw: Redraw, name: str, cut: float) -> str:
    """A small picture as a data address."""
    buffer = io.BytesIO()
    image = ImageOps.fit(redraw.photo(name), (THUMBNAIL, THUMBNAIL), bleed=cut)
    image.convert("RGB").save(buffer, "WEBP", quality=75)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _stored_map(row: dict[str, Any]) -> Map | None:
    """A map that is kept in a row."""
    found = row.get("map")
    if found is None or np.ndim(found) != 1:
        return None
    text = str(row.get("grid"))
    side = round(len(found) ** 0.5)
    rows, columns = map(int, text.split("x")) if re.fullmatch(r"\d{1,5}x\d{1,5}", text) else (side, side)
    if rows * columns != len(found):
        return None
    return np.asarray(found, dtype=float).reshape(rows, columns), row.get("upsample") != "nearest"


def _encoded(found: Map) -> str:
    """A map as text: its rows, columns, whether it is smoothed, and bytes from 0, its least, to 255, its most."""
    scaled, smooth = _small(found[0]), found[1]
    span = np.ptp(scaled)
    scaled = (scaled - scaled.min()) / span if span else np.zeros_like(scaled)
    data = base64.b64encode((255 * scaled).round().astype(np.uint8).tobytes()).decode()
    return f"{scaled.shape[0]} {scaled.shape[1]} {int(smooth)} {data}"


def _small(values: np.ndarray) -> np.ndarray:
    """A map of pixels as a smaller one, which is all that is seen of it: means of blocks."""
    rows, columns = (-(-side // MAP_SIDE) for side in values.shape)
    height, width = values.shape[0] // rows * rows, values.shape[1] // columns * columns
    return values[:height, :width].reshape(height // rows, rows, width // columns, columns).mean((1, 3))
