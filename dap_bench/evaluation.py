"""From images to numbers: all that decides the values of a row, and nothing else.

encoded bytes -> picture -> tensor -> explanations, on a copy of the model -> metrics -> the measured part of a row
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dap_bench.data.images import BadImage, decode
from dap_bench.errors import UserError, redacted
from dap_bench.isolation import global_state, takes
from dap_bench.metrics.base import Batch
from dap_bench.vit import ViT

log = logging.getLogger(__name__)
HERE = Path(__file__).parent


class Loaded(NamedTuple):
    """A sample as it is measured.

    Attributes:
        id: Its name.
        image: The normalised image [3,H,W].
        mask: Where its object is [H,W] bool; None where that is not known or not needed.
        label: Its true class.
    """

    id: str
    image: Tensor  # [3,H,W], normalised
    mask: Tensor | None  # [H,W] bool, where its object is
    label: int


class Evaluation:
    """A model, an explainer and metrics by name, applied to batches of images.

    Args:
        vit: The model.
        explain: The explainer.
        metrics: Metrics by name.
        double: Explain in double precision. Defaults to False.
        chunk: How many perturbed images are scored at a time; halved when memory runs out. Defaults to 16.
        known: What is the same for all explainers of an image; None begins with nothing. Defaults to None.
        debug: Raise errors instead of making failed rows of them. Defaults to False.
        companions: Other images of the sample set for some ids, that many each [B,n,3,H,W]. Defaults to None.
    """

    def __init__(
        self,
        vit: ViT,
        explain: Callable[..., Any],
        metrics: Mapping[str, Any],
        double: bool = False,
        chunk: int = 16,
        known: dict[Any, Any] | None = None,
        debug: bool = False,
        companions: Callable[[Sequence[str], int], Tensor] | None = None,
    ) -> None:
        self.vit, self.explain, self.metrics, self.double = vit, explain, metrics, double
        self.chunk, self.known, self.debug = chunk, known if known is not None else {}, debug
        self.layered = True  # whether the explainer has maps by layer, as far as is known
        self.companions = companions  # other images of the sample set for some ids, that many each [B,n,3,H,W]
        self.needs = self._needs(metrics) | ({"masks"} if takes(explain, "masks") else set())

    def _needs(self, metrics: Iterable[str]) -> set[str]:
        """What some of the metrics need besides the explanation."""
        return {need for name in metrics for need in getattr(self.metrics[name], "needs", ())}

    def load(self, data: bytes, mask: bytes | None) -> tuple[Tensor, Tensor | None] | BadImage:
        """An encoded picture and its object's mask as the model takes them.

        Args:
            data: The picture's file.
            mask: The mask's file, if there is one.

        Returns:
            The image [3,H,W] and the mask [H,W] bool or None; or what is wrong with them.
        """
        try:
            picture = decode(data, self.vit.transform)
            return picture, decode(mask, self.vit.mask) if mask and "masks" in self.needs else None
        except BadImage as error:
            return error

    def __call__(
        self, loaded: Sequence[Loaded], metrics: Sequence[str], curves: bool = False, maps: bool = False
    ) -> list[dict[str, Any]]:
        """The measured part of each image's row, of some metrics. A batch that fails, or is too large, is halved."""
        try:
            return self._measure(loaded, metrics, curves, maps)
        except UserError:
            raise
        except Exception as error:
            if self.debug:
                raise
            failed = failure(error)  # its text only: the error itself would keep the batch in memory
            log.debug("a batch of %d failed", len(loaded), exc_info=True)
        if len(loaded) == 1:
            return [failed]
        half = len(loaded) // 2
        return self(loaded[:half], metrics, curves, maps) + self(loaded[half:], metrics, curves, maps)

    def _measure(
        self, loaded: Sequence[Loaded], metrics: Sequence[str], curves: bool, maps: bool
    ) -> list[dict[str, Any]]:
        start = time.perf_counter()
        ids, pictures, masks, labels = zip(*loaded, strict=True)
        images = torch.stack([picture.to(self.vit.device, non_blocking=True) for picture in pictures])
        companions = self.companions
        needs = self._needs(metrics)
        batch = Batch.of(
            self.vit,
            self.explain,
            images,
            layers="layers" in needs,
            double=self.double,
            masks=list(masks),
            labels=torch.tensor(labels).to(images.device),
            companions=None if companions is None else lambda count: companions(ids, count).to(images.device),
            chunk=self.chunk,
            ids=list(ids),
            known=self.known,
        )
        asking = [self.metrics[name] for name in metrics if self.layered or "layers" not in self._needs([name])]
        batch.explain_all("alternative" in needs, asking)
        self.layered = "layers" not in needs or batch.explanation.layers is not None
        columns: dict[str, list[Any]] = {
            "predicted": batch.predicted.tolist(),
            "alternative": batch.alternative.tolist(),
            "confidence": batch.confidence.tolist(),
        }
        for name in metrics:
            values, curve = self._metric(name, batch)
            columns[name] = values
            if curves and curve is not None:
                columns[f"{name}_curve"] = curve
        fallback = batch.explanation.fallback
        columns["fallback"] = fallback.bool().tolist() if fallback is not None else [False] * len(loaded)
        columns["grid"] = ["x".join(map(str, batch.explanation.grid))] * len(loaded)
        columns["upsample"] = [batch.explanation.upsample] * len(loaded)
        if maps:
            columns["map"] = batch.explanation.maps.float().tolist()
        self.chunk = batch.chunk  # smaller after running out of memory
        seconds = (time.perf_counter() - start) / len(loaded)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [{"status": "ok", "seconds": seconds, **row} for row in rows]

    def _metric(self, name: str, batch: Batch) -> tuple[list[float], list[list[float]] | None]:
        metric = self.metrics[name]
        with global_state():
            if hasattr(metric, "with_curve"):
                values, curve = metric.with_curve(batch)
            else:
                values, curve = metric(batch), None
        if not isinstance(values, Tensor) or values.shape != (len(batch.images),):
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise UserError(f"metric {name!r} gave {got}, expected one number per image: [{len(batch.images)}].")
        if values.isinf().any():
            raise ValueError(f"metric {name} is infinite")
        return values.cpu().double().tolist(), curve.tolist() if curve is not None else None


def failure(error: Exception) -> dict[str, Any]:
    """The row of an image that could not be measured; an exception is named with the line that it came from.

    Args:
        error: What went wrong.

    Returns:
        The columns `status` and `reason`.
    """
    said = str(error) if isinstance(error, BadImage) else f"{type(error).__name__}: {error}{_origin(error)}"
    return {"status": "failed", "reason": redacted(said)}


def _origin(error: Exception) -> str:
    """Where in the method an error arose: the last line of a file that is neither ours nor an installed package's."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        theirs = HERE not in file.parents and not {"site-packages", "dist-packages"} & set(file.parts)
        if theirs or file.parent.name in ("explainers", "metrics"):
            found = f" ({file.name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
