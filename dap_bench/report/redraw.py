"""Explain a few stored images again, for pictures: from a cell's own config, so with the very model and options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from dap_bench import config
from dap_bench.data.images import decode
from dap_bench.data.samples import SampleSet, load
from dap_bench.errors import UserError
from dap_bench.explainers.base import Explanation
from dap_bench.report.summary import CellRows


class Redraw:
    """The model and the images of a cell."""

    def __init__(self, cell: CellRows, samples: SampleSet, device: str) -> None:
        self.samples = samples
        self.rows = cell.rows.set_index("sample_id")
        self.metrics = list(cell.info["metrics"])
        self.vit = config.instantiate(OmegaConf.create(cell.info["config"]["model"]), device=device)

    @classmethod
    def of(cls, cell: CellRows, device: str) -> "Redraw | None":
        """None where the images are not on this machine."""
        folder = Path(cell.info["config"]["cache_dir"]).expanduser() / "samples" / cell.info.get("sample_set", "-")
        samples = load(folder)
        return cls(cell, samples, device) if samples is not None else None

    def title(self, name: str) -> str:
        row = self.rows.loc[name]
        predicted = self.vit.class_name(int(row["predicted"]))
        return f"{predicted}\nTCC {row['tcc']:.2f}" if "tcc" in self.metrics else predicted

    def layers(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The photo, and each method's heatmaps [L,H,W] as far as each layer."""
        image, classes = self._input(name)
        found = {}
        for method in methods:
            out = config.load_method(method)(self.vit, image, classes, layers=True)
            found[method] = self._heatmaps(Explanation(out.layers[0], out.grid, upsample=out.upsample))
        return self._photo(image), found

    def heatmaps(self, name: str, methods: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The photo, and each method's heatmap [H,W]; methods that are not in conf/method are left out."""
        image, classes = self._input(name)
        known = [method for method in methods if method in config.choices("method")]
        maps = {m: self._heatmaps(config.load_method(m)(self.vit, image, classes))[0] for m in known}
        return self._photo(image), maps

    def _input(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in self.samples.ids:
            raise UserError(f"{name} is not an image of these rows.")
        data, _ = self.samples.read([self.samples.ids.index(name)])[0]
        image = self.vit.transform(decode(data))[None].to(self.vit.parameter.device)
        return image, torch.tensor([int(self.rows.loc[name, "predicted"])], device=image.device)

    def _heatmaps(self, explanation: Any) -> np.ndarray:
        return explanation.heatmaps(self.vit.image_size).float().cpu().numpy()

    def _photo(self, image: torch.Tensor) -> np.ndarray:
        return self.vit.pixels(image)[0].permute(1, 2, 0).cpu().numpy()
