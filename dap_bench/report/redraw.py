"""Explain a few stored images again, for pictures, with the options that their cells had."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf
from PIL import Image

from dap_bench import config, runner
from dap_bench.data.images import decode
from dap_bench.data.samples import SampleSet, load
from dap_bench.errors import UserError, path
from dap_bench.explainers.base import Explanation
from dap_bench.isolation import copied, explained
from dap_bench.report.rows import CellRows

log = logging.getLogger(__name__)
LARGEST = 10**6  # pictures of a source that is drawn again for a report


def sample_set(cell: CellRows) -> SampleSet:
    """The images of a cell: from this machine's cache, or else drawn again from a source that is on it.

    Args:
        cell: The cell.

    Returns:
        The sample set.

    Raises:
        UserError: If the images are not on this machine, or not the same.
    """
    cache = config.compose().cache_dir
    digest = cell.info["identity"].get("samples")
    found = load(Path(cache).expanduser(), digest)
    if found is None:
        name = cell.names["data"]
        beside = [f"data={name}"] if name in config.choices("data") else []
        source, sampler = _source(cell, cache), _restored("sampler", cell, *beside)
        plain = OmegaConf.to_container(sampler, resolve=True)
        found = runner.sample_set(OmegaConf.create({"data": source, "sampler": plain, "cache_dir": cache}))
        if found.digest != digest:
            raise UserError(f"{source.get('path', 'the source')} gives other images than the rows were measured on.")
    return found


def _source(cell: CellRows, cache: str) -> Any:
    """The config of a source that needs no network; what a row says of paths is not looked at."""
    stored = cell.info["config"].get("data")
    target = stored.get("_target_") if isinstance(stored, dict) else None
    if target == "dap_bench.data.sources.Shapes":
        source = _restored("data", cell)
        if not isinstance(source.size, int) or source.size > LARGEST:
            raise UserError(f"the images are not in the cache ({cache}), and there are too many to draw them again.")
        return OmegaConf.to_container(source, resolve=True)
    folder = assets()
    if target != "dap_bench.data.sources.Parquet" or folder is None:
        raise UserError(
            f"the images are not in the cache ({cache}); repeat the command of one of these cells to restore "
            "them, or, for rows of local Parquet files, set DAP_BENCH_ASSETS=FOLDER with imagenet/ and weights/."
        )
    split, boxes = stored.get("split"), stored.get("boxes")
    if not isinstance(split, str) or re.fullmatch(r"\w{1,32}", split) is None:
        raise UserError(f"the rows of {cell.folder} do not say which split their images are from.")
    place = folder / "imagenet"
    marks = str(place / f"{split}_boxes.csv") if boxes else None
    return {"_target_": target, "path": str(place), "split": split, "boxes": marks}


def _restored(group: str, cell: CellRows, *beside: str) -> Any:
    """The config of the user's own that a cell's was made from."""
    node = config.restored(group, cell.info["config"].get(group), cell.names[group], *beside)
    if node is None:
        raise UserError(f"none of your configs makes the {group} of {cell.folder}; use --config-dir FOLDER.")
    return node


def assets() -> Path | None:
    """The folder with weights/ and imagenet/ that the user has named."""
    folder = os.environ.get("DAP_BENCH_ASSETS")
    return path("DAP_BENCH_ASSETS", folder) if folder else None


def weights(tag: str) -> str | None:
    """A file of a model's weights in the assets folder, where there is one.

    Args:
        tag: timm's tag of the model.

    Returns:
        The file, or None.
    """
    folder = assets()
    file = folder / "weights" / f"{tag}.safetensors" if folder else None
    return str(file) if file is not None and file.is_file() else None


class Redraw:
    """The model, the images and the explainers of the cells of one model and sampling.

    They are made from the configs in conf/, or in a folder that the user named, that the cells' configs came from;
    what no such config can be found for is named and left out.
    """

    def __init__(self, cells: Sequence[CellRows], device: str = "auto") -> None:
        """UserError says what is not on this machine: images or weights. The first cell's rows give the titles."""
        self.samples = sample_set(cells[0])
        rows = pd.concat([cell.rows for cell in cells])
        rows = rows[rows["status"] == "ok"]
        self.rows = rows.drop_duplicates("sample_id").set_index("sample_id")
        model = _restored("model", cells[0])
        if model.get("checkpoint") is None:
            model.checkpoint = weights(model.tag)
        try:
            self.vit = config.instantiate(model, device=device)
        except UserError as error:
            where = f"DAP_BENCH_ASSETS=FOLDER with weights/{model.tag}.safetensors gives them"
            raise UserError(f"the weights are not on this machine; {where} ({error})") from error
        if cells[0].info["identity"].get("explain_precision") == "fp64":
            self.vit = self.vit.double()
        self.cells = {cell.names["method"]: cell for cell in cells}
        self.left_out: dict[str, str] = {}  # methods that could not be made again, and why
        self._made: dict[str, Any] = {}

    @classmethod
    def of(cls, cells: Sequence[CellRows], device: str = "auto") -> "Redraw | None":
        """Make a Redraw where that is possible.

        Args:
            cells: The cells of one model and sampling.
            device: auto, cpu, cuda, cuda:N or mps. Defaults to "auto".

        Returns:
            The Redraw, or None where the images or the weights are not on this machine.
        """
        try:
            return cls(cells, device)
        except UserError as error:
            log.warning("single images are not explained again: %s", error)
            return None

    def explainer(self, method: str) -> Any:
        """The explainer of a method: as its cell had it, or as conf/method has it where there is no cell.

        Args:
            method: The method's name.

        Returns:
            The explainer, or None where it cannot be made; `left_out` then says why.
        """
        try:
            if method not in self.cells:
                return config.load_method(method)
            return config.instantiate_method(_restored("method", self.cells[method]))
        except UserError as error:
            self._leave_out(method, str(error))
            return None

    def _leave_out(self, method: str, why: str) -> None:
        if method not in self.left_out:
            log.warning("%s is left out of pictures: %s", method, why)
        self.left_out.setdefault(method, why)

    def title(self, name: str) -> str:
        """An image's predicted class, and its TCC where rows have one.

        Args:
            name: The image's id.

        Returns:
            The title.
        """
        row = self.rows.loc[name]
        predicted = self.vit.class_name(int(row["predicted"]))
        return f"{predicted}\nTCC {row['tcc']:.2f}" if pd.notna(row.get("tcc")) else predicted

    def layers(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The maps of an image by layer.

        Args:
            name: The image's id.
            methods: The methods.

        Returns:
            The photo [H,W,3] in 0..1, and the heatmaps as far as each layer [L,H,W] of every method that has them.

        Raises:
            UserError: If these rows have not measured the image.
        """
        image, classes = self._input(name)
        found = {}
        for method, explain in self._explainers(methods):
            out = self._explain(method, explain, image, classes, name, layers=True)
            if out is not None and out.layers is not None:
                found[method] = self._heatmaps(Explanation(out.layers[0], out.grid, upsample=out.upsample))
        return self._photo(image), found

    def heatmaps(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The heatmaps of an image.

        Args:
            name: The image's id.
            methods: The methods.

        Returns:
            The photo [H,W,3] in 0..1, and the heatmap [H,W] of every method that could be made again.

        Raises:
            UserError: If these rows have not measured the image.
        """
        image, classes = self._input(name)
        found = {m: self._explain(m, explain, image, classes, name) for m, explain in self._explainers(methods)}
        return self._photo(image), {m: self._heatmaps(out)[0] for m, out in found.items() if out is not None}

    def maps(self, name: str, methods: Sequence[str]) -> dict[str, list[tuple[np.ndarray, bool]]]:
        """The maps of an image, of the predicted class and of the runner-up as far as there is one.

        Args:
            name: The image's id.
            methods: The methods.

        Returns:
            For every method that could be made again its maps [rows,columns], each with whether it is smoothed when it
            is enlarged.

        Raises:
            UserError: If these rows have not measured the image.
        """
        image, classes = self._input(name)
        second = self.rows.loc[name].get("alternative")
        if pd.notna(second):
            image = image.expand(2, -1, -1, -1)
            classes = torch.cat([classes, classes.new_tensor([int(second)])])
        made = self._explainers(methods)
        found = {method: self._explain(method, explain, image, classes, name) for method, explain in made}
        return {
            method: [
                (each.unflatten(0, out.grid).float().cpu().numpy(), out.upsample != "nearest") for each in out.maps
            ]
            for method, out in found.items()
            if out is not None
        }

    def photo(self, name: str) -> Image.Image:
        """The picture as it was measured, whole.

        Args:
            name: The image's id.

        Returns:
            The picture.
        """
        data, _ = self.samples.read([self.samples.ids.index(name)])[0]
        return decode(data)

    def _explain(
        self, method: str, explain: Any, image: torch.Tensor, classes: torch.Tensor, name: str, layers: bool = False
    ) -> Any:
        """None where it raises: the row of this image says so too."""
        try:
            return explained(explain, copied(self.vit), image, classes, [name] * len(image), layers)
        except Exception as error:
            self._leave_out(method, f"{type(error).__name__}: {error}")
            return None

    def _explainers(self, methods: Sequence[str]) -> list[tuple[str, Any]]:
        for method in methods:
            if method not in self._made:
                self._made[method] = self.explainer(method)
        made = [(method, self._made[method]) for method in methods]
        return [(method, explain) for method, explain in made if explain is not None]

    def _input(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in self.samples.ids or name not in self.rows.index:
            raise UserError(f"{name} is not an image that these rows have measured.")
        image = self.vit.transform(self.photo(name))[None].to(self.vit.device, self.vit.dtype)
        return image, torch.tensor([int(self.rows.loc[name, "predicted"])], device=image.device)

    def _heatmaps(self, explanation: Any) -> np.ndarray:
        return explanation.heatmaps(self.vit.image_size).float().cpu().numpy()

    def _photo(self, image: torch.Tensor) -> np.ndarray:
        return self.vit.pixels(image)[0].permute(1, 2, 0).cpu().numpy()
