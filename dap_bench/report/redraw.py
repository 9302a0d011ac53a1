"""Explain a few stored images again, for pictures: from a cell's own config, so with the very model and options."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf

from dap_bench import config
from dap_bench.data.images import decode
from dap_bench.data.samples import SampleSet, load
from dap_bench.errors import UserError
from dap_bench.explainers.base import Explanation
from dap_bench.report.summary import CellRows

log = logging.getLogger(__name__)


def stored_samples(cell: CellRows) -> SampleSet | None:
    """The images of a cell, where they are on this machine."""
    return load(Path(cell.info["config"]["cache_dir"]).expanduser() / "samples" / cell.info.get("sample_set", "-"))


class Redraw:
    """The model, the images and the explainers of the cells of one model and sampling."""

    def __init__(self, cells: Sequence[CellRows], samples: SampleSet, device: str) -> None:
        self.samples = samples
        rows = pd.concat([cell.rows for cell in cells])
        rows = rows[rows["status"] == "ok"]
        self.rows = rows.drop_duplicates("sample_id").set_index("sample_id")
        settings = cells[0].info["config"]
        self.vit = config.instantiate(OmegaConf.create(settings["model"]), device=device)
        if settings.get("explain_precision") == "fp64":
            self.vit = self.vit.double()
        self.configs = {cell.names["method"]: cell.info["config"]["method"] for cell in cells}

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
            if method in self.configs:
                return config.instantiate(OmegaConf.create(self.configs[method]))
            return config.load_method(method)
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
            out = self._explain(method, explain, image, classes, layers=True)
            if out is not None and out.layers is not None:
                found[method] = self._heatmaps(Explanation(out.layers[0], out.grid, upsample=out.upsample))
        return self._photo(image), found

    def heatmaps(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The photo, and each method's heatmap [H,W]."""
        image, classes = self._input(name)
        found = {m: self._explain(m, explain, image, classes) for m, explain in self._explainers(methods)}
        return self._photo(image), {m: self._heatmaps(out)[0] for m, out in found.items() if out is not None}

    def maps(self, name: str) -> dict[str, list[float]]:
        """The patch map of every cell's method."""
        image, classes = self._input(name)
        with self.vit.shared_traces():
            made = self._explainers(list(self.configs))
            found = {method: self._explain(method, explain, image, classes) for method, explain in made}
        return {method: out.maps[0].tolist() for method, out in found.items() if out is not None}

    def _explain(self, method: str, explain: Any, image: torch.Tensor, classes: torch.Tensor, **options: bool) -> Any:
        """None where it raises: the row of this image says so too."""
        try:
            return explain(self.vit, image, classes, **options)
        except Exception as error:
            log.warning("%s is left out of a picture: %s: %s", method, type(error).__name__, error)
            return None

    def _explainers(self, methods: Sequence[str]) -> list[tuple[str, Any]]:
        made = [(method, self.explainer(method)) for method in methods]
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
