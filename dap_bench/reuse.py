"""A value belongs to an image, a model, a method and a metric: whatever draw it was computed for, it is computed once.

The cells of one model and method lie side by side. What another of them has measured on the same image, with the same
method, model and metric, is taken over; only the rest is computed. Another `sampler.n`, another draw, a metric more or
less and another list of metrics so cost what is new about them.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dap_bench import store
from dap_bench.data.samples import SampleSet
from dap_bench.errors import UserError

SAME = ("model", "method", "engine")  # what two cells must share for any value of one to be the other's
MEASURED = (
    "predicted",
    "alternative",
    "confidence",
    "fallback",
    "status",
    "seconds",
    "kept",
    "grid",
    "upsample",
    "map",
)


def known(
    cell: store.Cell, identity: dict[str, Any], samples: SampleSet, wanted: list[int]
) -> dict[int, dict[str, Any]]:
    """For images that this cell has no row of, what its siblings have measured on them.

    Args:
        cell: The cell.
        identity: Its identity, from `identity.identify`.
        samples: Its sample set.
        wanted: Positions of the images in the sample set.

    Returns:
        For each image that was found its row, as far as it can be taken over, by position.
    """
    found: dict[int, dict[str, Any]] = {}
    places = {samples.ids[index]: index for index in wanted}
    for other, metrics, hashes in _siblings(cell, identity):
        if not places.keys() & hashes.keys():
            continue
        curves = [f"{metric}_curve" for metric in metrics]
        table = other.table(["sample_id", *MEASURED, "map", *metrics, *curves])
        for row in table.to_pylist():
            index = places.get(row["sample_id"])
            if index is None or row["status"] != "ok" or hashes.get(row["sample_id"]) != _hashes(samples, index):
                continue
            row["kept"] = ",".join(sorted(set((row["kept"] or "").split(",")) - {""}))
            taken = {key: value for key, value in row.items() if value is not None and key not in ("sample_id",)}
            found[index] = _joined(found[index], taken) if index in found else taken
    return found


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two rows of one image with different metrics; only what both have kept was kept of all of it."""
    kept = set(one["kept"].split(",")) & set(other["kept"].split(","))
    kept |= {"maps"} & ({*one["kept"].split(","), *other["kept"].split(",")})
    return {**other, **one, "kept": ",".join(sorted(kept - {""}))}


def _siblings(
    cell: store.Cell, identity: dict[str, Any]
) -> Iterator[tuple[store.Cell, list[str], dict[str, tuple[str, str]]]]:
    """The cells of this model and method whose rows may serve, with the metrics they share and their images' hashes."""
    results = cell.folder.parents[3]
    for other in store.cells(cell.folder.parents[1]):
        if other.folder == cell.folder:
            continue
        try:
            theirs = other.info["identity"]
        except UserError:
            continue  # whoever reads its rows names it
        metrics = theirs.get("metrics")
        if not isinstance(metrics, dict) or any(theirs.get(key) != identity[key] for key in SAME):
            continue
        same = [name for name, digest in metrics.items() if identity["metrics"].get(name) == digest]
        manifest = results / "samples" / f"{theirs.get('samples')}.csv"
        if same and store.is_name(theirs.get("samples")) and manifest.is_file():
            yield other, same, _manifest(manifest)


def _manifest(file: Path) -> dict[str, tuple[str, str]]:
    """The hashes of each sample's image and mask."""
    with file.open(newline="") as text:
        return {line["sample_id"]: (line["sha256"], line["mask_sha256"]) for line in csv.DictReader(text)}


def _hashes(samples: SampleSet, index: int) -> tuple[str, str]:
    return samples.hashes[index], samples.mask_hashes[index]
