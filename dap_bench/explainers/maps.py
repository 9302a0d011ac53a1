"""Maps that another program has made, read from files: whatever made them, they are scored like any others.

    PATH/<sample id>.npy              the map for the predicted class
    PATH/<sample id>.npz              predicted, and alternative for the runner-up, which only CS asks for
    PATH.npz                          ids [n], predicted [n,...], alternative [n,...]
    PATH.parquet                      columns id, predicted (a list of numbers), alternative

A map is [P], [rows,columns] or [H,W]: of patches or of pixels, told apart by their number. `dap_bench.export` writes
the images, their ids and both classes. A sample without a map is a failed row; without one for the runner-up it has
no CS. `upsample` says how maps of patches are enlarged.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dap_bench.errors import UserError, one_of
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def maps(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    path: str,
    upsample: str = "bilinear",
    ids: Sequence[str],
) -> Explanation:
    """Maps that another program has made, read from files.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        path: A folder with a .npy or .npz for each id, or one .npz or .parquet with all of them.
        upsample: How maps of patches are enlarged: bilinear, nearest or bicubic. Defaults to "bilinear".
        ids: Names of the images, which their maps are found by.

    Returns:
        Maps of patches [B,P] or of pixels [B,H*W], told apart by their number: those stored for the runner-up where
        `classes` asks for it, else those for the predicted class. Zeros where only the runner-up's is not stored.

    Raises:
        UserError: If `path` holds no maps, or one has neither as many numbers as there are patches nor as pixels.
        ValueError: If an image has no map.
    """
    check(vit, images, classes)
    one_of("upsample", upsample, ("bilinear", "nearest", "bicubic"))
    _, runner_up = vit.score(images, full=True).topk(2, dim=1).indices.unbind(1)
    read = _reader(path)
    asked = zip(ids, (classes == runner_up).tolist(), strict=True)
    found = [_numbers(read(name), alternative, name, path) for name, alternative in asked]
    sizes = {prod(grid): grid for grid in (vit.image_size, vit.grid)}
    for name, values in zip(ids, found, strict=True):
        if values is not None and values.size not in sizes:
            raise UserError(
                f"the map of {name} in {path} has {values.size} numbers, expected {vit.patches} (patches) or "
                f"{prod(vit.image_size)} (pixels)."
            )
    size = next((values.size for values in found if values is not None), vit.patches)
    rows = [np.zeros(size) if values is None else values.reshape(-1) for values in found]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("maps of patches and of pixels in one batch")
    return Explanation(torch.from_numpy(np.stack(rows)).to(images), sizes[size], upsample=upsample)


def _numbers(entry: dict[str, Any] | None, alternative: bool, name: str, path: str) -> np.ndarray | None:
    """One sample's map for the class that is asked about; None where the runner-up has none."""
    if entry is None or entry.get("predicted") is None:
        raise ValueError(f"{path} has no map of {name}")
    values = entry.get("alternative") if alternative else entry["predicted"]
    return None if values is None else np.asarray(values, dtype=float)


def _reader(path: str) -> Any:
    """A function from a sample's id to what is stored for it."""
    place = Path(path).expanduser()
    if place.is_dir():
        return lambda name: _from_folder(place, name)
    if not place.is_file():
        raise UserError(f"method.path={path} is neither a folder of maps nor a file (.npz, .parquet).")
    return _table(place, place.stat().st_mtime_ns).get


def _from_folder(folder: Path, name: str) -> dict[str, Any] | None:
    if ".." in Path(name).parts or Path(name).is_absolute():  # an id is data: it stays in its folder
        return None
    single, both = folder / f"{name}.npy", folder / f"{name}.npz"
    if single.is_file():
        return {"predicted": np.load(single, allow_pickle=False)}
    if both.is_file():
        with np.load(both, allow_pickle=False) as arrays:
            return dict(arrays)
    return None


@lru_cache(maxsize=4)
def _table(file: Path, version: int) -> dict[str, dict[str, Any]]:
    """All maps of one file by id."""
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = pq.read_table(file).to_pylist()
            return {str(row["id"]): row for row in rows}
        with np.load(file, allow_pickle=False) as arrays:
            columns = {key: arrays[key] for key in arrays if key != "ids"}
            return {str(name): {k: v[at] for k, v in columns.items()} for at, name in enumerate(arrays["ids"])}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"method.path={file} holds no maps by id ({type(error).__name__}: {error}).") from error
