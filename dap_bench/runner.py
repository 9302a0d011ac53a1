"""A cell (model x method x sampler x metrics) -> rows: batching, progress, resume.

torch is imported only when there is something to compute: a finished cell answers at once.
"""

import json
import logging
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from hashlib import file_digest, sha256
from importlib.metadata import version
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dap_bench import __version__, store
from dap_bench import config as configs
from dap_bench.data.images import BadImage, decode
from dap_bench.data.samples import SampleSet, frozen
from dap_bench.errors import UserError, one_of, path, whole

if TYPE_CHECKING:
    from torch import Tensor

    from dap_bench.vit import ViT

log = logging.getLogger(__name__)


CHUNK_CPU, CHUNK_CUDA = 16, 128  # perturbed images scored at a time, unless chunk_size says otherwise
PICTURES_IN_MEMORY = 2**30  # bytes of decoded images kept for the next cell of a sweep


def run(cfg: DictConfig, names: dict[str, str], overrides: Sequence[str] = ()) -> store.Cell:
    """Compute what is missing of the cell that `cfg` describes; `names` are the names of its choices.

    `overrides` are how it was asked for on the command line, for those who want to repeat it.
    """
    whole("batch_size", cfg.batch_size)
    whole("workers", cfg.workers)
    if cfg.chunk_size is not None:
        whole("chunk_size", cfg.chunk_size)
    one_of("precision", cfg.precision, ("fp32", "tf32", "bf16"))
    one_of("explain_precision", cfg.explain_precision, ("fp32", "fp64"))
    one_of("overwrite", cfg.overwrite, (True, False, "failed"))
    samples = sample_set(cfg)
    mine = shard(len(samples), cfg.shard)
    identity = identify(cfg, samples)
    results = path("results_dir", cfg.results_dir)
    cell = store.Cell.at(results, names, store.fingerprint(identity))
    rows = [] if cfg.overwrite is True else cell.rows(set_aside=True)
    kept = {name for name, asked in (("curves", cfg.keep_curves), ("maps", cfg.keep_maps)) if asked}
    done = {row["sample_id"] for row in rows if _is_done(row, kept, retry=cfg.overwrite == "failed")}
    missing = {index for index in mine if samples.ids[index] not in done}
    if missing:
        store.write_text(results / "samples" / f"{samples.digest}.csv", samples.manifest())
        # batches are cut before what is done is left out: a resumed run computes the very batches of an undisturbed one
        batches = [mine[at : at + cfg.batch_size] for at in range(0, len(mine), cfg.batch_size)]
        batches = [[index for index in batch if index in missing] for batch in batches]
        work = _Work(cfg, names, cell, samples, identity)
        cell.describe({**work.info, "command": command(overrides)})
        work.compute([batch for batch in batches if batch], len(mine), rows)
        cell.compact(work.metrics)
    _conclude(cell, samples, mine)
    return cell


def command(overrides: Sequence[str]) -> str:
    """The command that computes a cell, without what says only where and how fast."""
    aside = ("shard", "overwrite", "device", "batch_size", "chunk_size", "workers", "cache_dir")
    kept = [text for text in overrides if text.lstrip("+~").split("=")[0] not in aside]
    return shlex.join(["python", "-m", "dap_bench", *kept])


def _is_done(row: dict[str, Any], kept: set[str], retry: bool) -> bool:
    """Does a row spare us its image? Not if what is asked to be kept with it was not."""
    if row["status"] != "ok":
        return not retry
    return kept <= set((row["kept"] or "").split(","))


def sample_set(cfg: DictConfig) -> SampleSet:
    """The images that the config's source and sampler stand for, frozen."""
    sampler = OmegaConf.to_container(cfg.sampler, resolve=True)
    assert isinstance(sampler, dict)
    source, draw = configs.instantiate(cfg.data), configs.instantiate(cfg.sampler)
    options = {str(key): value for key, value in sampler.items()}
    return frozen(source, draw, options, path("cache_dir", cfg.cache_dir))


def shard(n: int, text: str) -> list[int]:
    """The samples of shard `i/n`: every n-th, beginning with the i-th."""
    number, _, count = str(text).partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"shard={text} must be i/n with 1 <= i <= n, for example shard=1/4.")
    return list(range(int(number) - 1, n, int(count)))


def identify(cfg: DictConfig, samples: SampleSet) -> dict[str, Any]:
    """Everything that decides a row's values; batch size, device and shard do not."""
    identity: dict[str, Any] = {
        key: OmegaConf.to_container(cfg[key], resolve=True) for key in ("model", "method", "metric")
    }
    if identity["model"].get("checkpoint"):
        identity["model"]["checkpoint"] = _checkpoint_hash(identity["model"]["checkpoint"])
    files = {module: file for t in configs.targets(identity) for module, file in configs.source_files(t).items()}
    identity["code"] = {module: _source_hash(module, file) for module, file in files.items()}
    identity["precision"], identity["explain_precision"] = cfg.precision, cfg.explain_precision
    identity["samples"] = samples.digest
    identity["versions"] = {"dap-bench": __version__, "timm": version("timm"), "torch": version("torch")}
    return identity


_sources: dict[Path, str] = {}  # as this process first saw them


def _source_hash(module: str, file: Path) -> str:
    """The hash of a source file, which must not change once it is imported: its rows would not be what they say."""
    found = sha256(file.read_bytes()).hexdigest()
    if _sources.setdefault(file, found) != found and module in sys.modules:
        raise UserError(
            f"{file} was changed during the sweep; repeat the command to compute the rest with the new one."
        )
    return found


def _checkpoint_hash(checkpoint: str) -> str:
    file_path = configs.resolve_checkpoint(checkpoint)
    try:
        with file_path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"model.checkpoint={file_path} cannot be read ({error.strerror}).") from error


class _Work:
    """The part of a run that needs torch: the model, the explainer and the metrics, applied batch by batch."""

    def __init__(
        self, cfg: DictConfig, names: dict[str, str], cell: store.Cell, samples: SampleSet, identity: dict[str, Any]
    ) -> None:
        self.names, self.cell, self.samples = names, cell, samples
        self.keep_curves, self.keep_maps = cfg.keep_curves, cfg.keep_maps
        self.double = cfg.explain_precision == "fp64"
        model = json.dumps(OmegaConf.to_container(cfg.model, resolve=True))
        weights = json.dumps(identity["model"])
        self.vit = _load_vit(model, weights, cfg.device, cfg.precision)
        self.explain = configs.instantiate(cfg.method)
        self.metrics = configs.instantiate_metrics(cfg.metric)
        taken = {*store.COLUMNS.names, "map"} & set(self.metrics)
        if taken:
            raise UserError(f"a metric cannot be called {taken.pop()}: rows have another column of that name.")
        self.needs = {need for metric in self.metrics.values() for need in getattr(metric, "needs", ())}
        self.chunk = cfg.chunk_size or (CHUNK_CUDA if self.vit.device.type == "cuda" else CHUNK_CPU)
        self.pictures = _pictures(samples.digest, str(self.vit.transform), "masks" in self.needs)
        self.decoders = ThreadPoolExecutor(cfg.workers)
        self.known = _known(samples.digest, weights, cfg.device, cfg.precision)
        self.info = {
            **names,
            "fingerprint": cell.folder.name,
            "identity": identity,
            "n": len(samples),
            "sample_set": samples.folder.name,
            "class_names": self.vit.class_names,
            "metrics": {name: metric.better for name, metric in self.metrics.items()},
            "crop": self.vit.crop,
            "grid": self.vit.grid,
            "config": OmegaConf.to_container(cfg, resolve=True),
        }

    def compute(self, batches: list[list[int]], total: int, rows: list[dict[str, Any]]) -> None:
        any_ok = any(row["status"] == "ok" for row in rows)
        sums: dict[str, list[float]] = {name: [] for name in self.metrics}
        done = total - sum(map(len, batches))
        title = f"{self.names['model']} {self.names['method']} {self.names['sampler']}"
        bar = tqdm(total=total, initial=done, desc=title, unit=" images", dynamic_ncols=True, smoothing=0.05)
        with bar, self.decoders, ThreadPoolExecutor(1) as loader, _interruptible() as interrupted:
            ahead = loader.submit(self._load, batches[0])
            for number, batch in enumerate(batches):
                loaded = ahead.result()
                if number + 1 < len(batches):
                    ahead = loader.submit(self._load, batches[number + 1])
                rows = self._rows(batch, loaded)
                any_ok = any_ok or any(row["status"] == "ok" for row in rows)
                tried = [row for row, item in zip(rows, loaded, strict=True) if not isinstance(item, BadImage)]
                if not any_ok and len(tried) > 1:
                    raise UserError(f"none of the first {len(tried)} images could be measured: {tried[0]['reason']}")
                self.cell.write(rows, self.metrics)
                for name, values in sums.items():
                    values += [row[name] for row in rows if row["status"] == "ok" and not isnan(row[name])]
                bar.set_postfix({name: f"{sum(v) / len(v):.3f}" for name, v in sums.items() if v}, refresh=False)
                bar.update(len(batch))
                if interrupted:
                    raise KeyboardInterrupt

    def _load(self, batch: list[int]) -> "list[tuple[Tensor, Tensor | None] | BadImage]":
        """Decoded pictures with their object masks, or why not. Runs beside the model, in a thread."""
        found = [self.pictures.get(index) for index in batch]
        if any(item is None for item in found):
            found = list(self.decoders.map(self._decode, *zip(*self.samples.read(batch), strict=True)))
            size = sum(item[0].nbytes for item in found if isinstance(item, tuple))
            if size * len(self.samples) / len(batch) <= PICTURES_IN_MEMORY:
                self.pictures.update(zip(batch, found, strict=True))
        return found  # type: ignore[return-value]

    def _decode(self, data: bytes, mask: bytes | None) -> "tuple[Tensor, Tensor | None] | BadImage":
        try:
            picture = self.vit.transform(decode(data))
            picture = picture.pin_memory() if self.vit.device.type == "cuda" else picture
            return picture, self.vit.mask(decode(mask)) if mask and "masks" in self.needs else None
        except BadImage as error:
            return error

    def _rows(self, batch: list[int], loaded: "list[tuple[Tensor, Tensor | None] | BadImage]") -> list[dict[str, Any]]:
        good = [at for at, item in enumerate(loaded) if not isinstance(item, BadImage)]
        usable = [(self.samples.ids[batch[at]], *loaded[at]) for at in good]  # type: ignore[misc]
        measured = dict(zip(good, self._measure(usable), strict=True)) if good else {}
        return [
            {
                "sample_id": self.samples.ids[index],
                "label": self.samples.labels[index],
                **self.names,
                "fingerprint": self.cell.folder.name,
                **(measured[at] if at in measured else _failed(loaded[at])),
            }
            for at, index in enumerate(batch)
        ]

    def _measure(self, loaded: "list[tuple[str, Tensor, Tensor | None]]") -> list[dict[str, Any]]:
        """The measured part of each row. A batch that fails, or is too large for memory, is halved."""
        try:
            return self._measure_batch(loaded)
        except UserError:
            raise
        except Exception as error:
            failed = _failed(error)  # its text only: the error itself would keep the batch in memory
            log.debug("a batch of %d failed", len(loaded), exc_info=True)
        if len(loaded) == 1:
            return [failed]
        half = len(loaded) // 2
        return self._measure(loaded[:half]) + self._measure(loaded[half:])

    def _measure_batch(self, loaded: "list[tuple[str, Tensor, Tensor | None]]") -> list[dict[str, Any]]:
        import torch

        from dap_bench.metrics.base import Batch

        start = time.perf_counter()
        device = self.vit.device
        ids, pictures, masks = zip(*loaded, strict=True)
        images = torch.stack([picture.to(device, non_blocking=True) for picture in pictures])
        batch = Batch.of(
            self.vit,
            self.explain,
            images,
            layers="layers" in self.needs,
            double=self.double,
            masks=list(masks),
            chunk=self.chunk,
            ids=list(ids),
            known=self.known,
        )
        with batch.explained[0].shared_traces():  # left before perturbed images are scored: traces need the most memory
            if not batch.explanation.maps.float().isfinite().all():
                raise ValueError("the explanation is not finite")
            if "alternative" in self.needs:
                _ = batch.alternative_explanation
        values = {}
        for name, metric in self.metrics.items():
            batch.metric = name
            values[name] = metric(batch).double().cpu().tolist()
        fallback = batch.explanation.fallback
        columns: dict[str, list[Any]] = {
            "predicted": batch.predicted.tolist(),
            "alternative": batch.alternative.tolist(),
            "confidence": batch.confidence.tolist(),
            "fallback": fallback.tolist() if fallback is not None else [False] * len(loaded),
            **values,
        }
        if self.keep_curves:
            columns |= {f"{name}_curve": points.tolist() for name, points in batch.curves.items()}
        if self.keep_maps:
            columns["map"] = batch.explanation.maps.float().tolist()
        self.chunk = batch.chunk  # smaller after running out of memory
        seconds = (time.perf_counter() - start) / len(loaded)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        kept = [name for name, kept in (("curves", self.keep_curves), ("maps", self.keep_maps)) if kept]
        return [{"status": "ok", "seconds": seconds, "kept": ",".join(kept), **row} for row in rows]


def _failed(error: Any) -> dict[str, Any]:
    return {
        "status": "failed",
        "reason": str(error) if isinstance(error, BadImage) else f"{type(error).__name__}: {error}",
    }


@lru_cache(maxsize=1)
def _load_vit(model: str, weights: str, device: str, precision: str) -> "ViT":
    """The model stays loaded for the next cell of a sweep, unless its file has changed."""
    return configs.instantiate(OmegaConf.create(json.loads(model)), device=device, precision=precision)


@lru_cache(maxsize=1)
def _pictures(digest: str, transform: str, masks: bool) -> dict[int, Any]:
    """Decoded pictures of one sample set, kept for the next cell of a sweep."""
    return {}


@lru_cache(maxsize=1)
def _known(digest: str, weights: str, device: str, precision: str) -> dict[Any, Any]:
    """What the model says of whole and of blank images, kept for the next explainer of a sweep."""
    return {}


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C lets the batch finish, the second stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)
        tqdm.write("finishing this batch; press Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def _conclude(cell: store.Cell, samples: SampleSet, mine: list[int]) -> None:
    ids = {samples.ids[index] for index in mine}
    rows = [row for row in cell.rows() if row["sample_id"] in ids]
    failed = [row for row in rows if row["status"] != "ok"]
    fallbacks = sum(row["fallback"] is True for row in rows)
    print(f"{cell.folder}: n={len(rows)}, failed={len(failed)}" + (f", fallback={fallbacks}" if fallbacks else ""))
    for row in failed[:3]:
        print(f"  {row['sample_id']}: {row['reason']}")
    if len(failed) > 3:
        print(f"  and {len(failed) - 3} more (status and reason are in the rows)")
