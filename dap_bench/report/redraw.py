"""Explain a few stored images again, for pictures, with the options that their cells had."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from dap_bench import config
from dap_bench.data.images import decode
from dap_bench.data.samples import SampleSet, load
from dap_bench.errors import UserError
from dap_bench.explainers.base import Explanation
from dap_bench.isolation import copied, explained
from dap_bench.report.rows import CellRows

log = logging.getLogger(__name__)


def stored_samples(cell: CellRows) -> SampleSet | None:
    """The images of a cell, where they are in this machine's cache."""
    cache = config.compose().cache_dir
    return load(Path(cache).expanduser(), cell.info["identity"].get("samples"))


def weights(tag: str) -> str | None:
    """A file of a model's weights in the assets folder, where there is one."""
    folder = os.environ.get("DAP_BENCH_ASSETS")
    file = Path(folder) / "weights" / f"{tag}.safetensors" if folder else None
    return str(file) if file is not None and file.is_file() else None


class Redraw:
    """The model, the images and the explainers of the cells of one model and sampling.

    They are made from the configs in conf/, or in a folder that the user named, that the cells' configs came from;
    what no such config can be found for is named and left out.
    """

    def __init__(self, cells: Sequence[CellRows], samples: SampleSet, device: str) -> None:
        self.samples = samples
        rows = pd.concat([cell.rows for cell in cells])
        rows = rows[rows["status"] == "ok"]
        self.rows = rows.drop_duplicates("sample_id").set_index("sample_id")
        settings = cells[0].info["config"]
        model = config.restored("model", settings.get("model"), cells[0].names["model"])
        if model is None:
            raise UserError(f"no config of yours makes the model of {cells[0].folder}; name its folder: --config-dir.")
        if model.get("checkpoint") is None:
            model.checkpoint = weights(model.tag)
        self.vit = config.instantiate(model, device=device)
        if cells[0].info["identity"].get("explain_precision") == "fp64":
            self.vit = self.vit.double()
        self.cells = {cell.names["method"]: cell for cell in cells}
        self._made: dict[str, Any] = {}

    @classmethod
    def of(cls, cells: Sequence[CellRows], device: str = "auto") -> "Redraw | None":
        """None where the images or the weights are not on this machine; the first cell's rows give the titles."""
        samples = stored_samples(cells[0])
        if samples is None:
            return None
        try:
            return cls(cells, samples, device)
        except UserError as error:
            log.warning("single images are not explained again: %s", error)
            return None

    def explainer(self, method: str) -> Any:
        """As its cell had it, or as conf/method has it where there is no cell; None where it cannot be made."""
        try:
            if method not in self.cells:
                return config.load_method(method)
            node = config.restored("method", self.cells[method].info["config"].get("method"), method)
            if node is None:
                raise UserError("no config of yours makes it; name its folder: --config-dir FOLDER")
            return config.instantiate_method(node)
        except UserError as error:
            log.warning("%s is left out of pictures: %s", method, error)
            return None

    def title(self, name: str) -> str:
        row = self.rows.loc[name]
        predicted = self.vit.class_name(int(row["predicted"]))
        return f"{predicted}\nTCC {row['tcc']:.2f}" if pd.notna(row.get("tcc")) else predicted

    def layers(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The photo, and the heatmaps [L,H,W] as far as each layer of every method that has them."""
        image, classes = self._input(name)
        found = {}
        for method, explain in self._explainers(methods):
            out = self._explain(method, explain, image, classes, name, layers=True)
            if out is not None and out.layers is not None:
                found[method] = self._heatmaps(Explanation(out.layers[0], out.grid, upsample=out.upsample))
        return self._photo(image), found

    def heatmaps(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The photo, and each method's heatmap [H,W]."""
        image, classes = self._input(name)
        found = {m: self._explain(m, explain, image, classes, name) for m, explain in self._explainers(methods)}
        return self._photo(image), {m: self._heatmaps(out)[0] for m, out in found.items() if out is not None}

    def maps(self, name: str) -> dict[str, tuple[np.ndarray, bool]]:
        """The map of every cell's method as [rows, columns], and whether it is smoothed when it is enlarged."""
        image, classes = self._input(name)
        made = self._explainers(list(self.cells))
        found = {method: self._explain(method, explain, image, classes, name) for method, explain in made}
        return {
            method: (out.maps[0].unflatten(0, out.grid).float().cpu().numpy(), out.upsample != "nearest")
            for method, out in found.items()
            if out is not None
        }

    def _explain(
        self, method: str, explain: Any, image: torch.Tensor, classes: torch.Tensor, name: str, layers: bool = False
    ) -> Any:
        """None where it raises: the row of this image says so too."""
        try:
            return explained(explain, copied(self.vit), image, classes, [name], layers)
        except Exception as error:
            log.warning("%s is left out of a picture: %s: %s", method, type(error).__name__, error)
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
        data, _ = self.samples.read([self.samples.ids.index(name)])[0]
        image = self.vit.transform(decode(data))[None].to(self.vit.device, self.vit.dtype)
        return image, torch.tensor([int(self.rows.loc[name, "predicted"])], device=image.device)

    def _heatmaps(self, explanation: Any) -> np.ndarray:
        return explanation.heatmaps(self.vit.image_size).float().cpu().numpy()

    def _photo(self, image: torch.Tensor) -> np.ndarray:
        return self.vit.pixels(image)[0].permute(1, 2, 0).cpu().numpy()
