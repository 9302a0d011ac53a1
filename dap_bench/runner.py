"""A cell (model x method x sampler x metrics) -> rows: batching, progress, resume.

torch is imported only when there is something to compute: a finished cell answers at once.
"""

import logging
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import isnan
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dap_bench import __version__, files, identity, reuse, store
from dap_bench import config as configs
from dap_bench.data.images import BadImage
from dap_bench.data.samples import SampleSet, frozen
from dap_bench.errors import Interrupted, UserError, path
from dap_bench.report.layouts import label, ordered

if TYPE_CHECKING:
    from torch import Tensor


log = logging.getLogger(__name__)


CHUNK_CPU, CHUNK_CUDA = 16, 128  # perturbed images scored at a time, unless chunk_size says otherwise
LARGEST_BATCH = 64  # that batch_size=auto takes: a larger one is no faster
BAR = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
PICTURES_IN_MEMORY = 2**30  # bytes of decoded images kept for the next cell of a sweep


class Sweep:
    """What the cells of one process share: the model, the decoded pictures, what it says of unchanged ones.

    One of each, for the settings that were last asked for.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Any]] = {}

    def forget(self) -> None:
        """Let go of everything that is kept."""
        self._kept.clear()

    def get(self, kind: str, settings: Any, make: Callable[[], Any]) -> Any:
        """What was made for the same settings before, or a new one in its place.

        Args:
            kind: What is shared, such as "model".
            settings: What it depends on; other settings make a new one.
            make: Makes it.

        Returns:
            The shared object.
        """
        if kind not in self._kept or self._kept[kind][0] != settings:
            self._kept.pop(kind, None)  # let go of the old one before the new one is made
            self._kept[kind] = settings, make()
        return self._kept[kind][1]


SWEEP = Sweep()


def run(cfg: DictConfig, names: dict[str, str], overrides: Sequence[str] = (), sweep: Sweep = SWEEP) -> store.Cell:
    """Compute what is missing of a cell.

    Args:
        cfg: The cell's config.
        names: The names of its model, method, sampler and data.
        overrides: How it was asked for on the command line, so that it can be repeated. Defaults to ().
        sweep: What the cells of this process share. Defaults to `SWEEP`.

    Returns:
        The cell with its rows.

    Raises:
        UserError: If an option is wrong, or none of the first images can be measured.
        Interrupted: If a signal asked to stop; every finished batch is saved.
    """
    configs.check(cfg)
    cache = path("cache_dir", cfg.cache_dir)
    samples = sample_set(cfg)
    mine = shard(len(samples), cfg.shard)
    identified = identity.identify(cfg, samples.digest, cache)
    results = path("results_dir", cfg.results_dir)
    cell = store.Cell.at(results, names, identity.fingerprint(identified))
    todo = missing(cfg, cell, identified, samples, mine)
    if todo:
        files.write_text(results / "samples" / f"{samples.digest}.csv", samples.manifest())
        work = _Work(cfg, names, cell, samples, identified, sweep)
        cell.describe({**work.info, "turn": turn(cell), "command": command_line(overrides)})
        # batches are cut before what is done is left out: a resumed run computes the very batches of an undisturbed one
        size = work.batch_size
        batches = [mine[at : at + size] for at in range(0, len(mine), size)]
        left = work.take_over(todo)
        batches = [[index for index in batch if index in left] for batch in batches]
        work.compute([batch for batch in batches if batch], len(mine), todo)
        cell.compact()
    elif cell.parts():
        cell.describe(cell.info | {"turn": turn(cell)})
    _conclude(cell, samples, mine, title(names))
    return cell


def title(names: dict[str, str]) -> str:
    """What a cell is called in messages.

    Args:
        names: The names of its model, method, sampler and data.

    Returns:
        Model, method and sampler.
    """
    return " ".join(names[key] for key in ("model", "method", "sampler"))


def turn(cell: store.Cell) -> int:
    """A number that is larger the later a setting of a cell was asked for: of those beside it the newest counts.

    Args:
        cell: The cell.

    Returns:
        The number that it has now.
    """
    turns = {}
    for file in cell.folder.parent.glob("*/cell.json"):
        with suppress(UserError):  # a damaged one is named by who reads its rows
            turns[file.parent] = store.Cell(file.parent).info.get("turn", 0)
    own = turns.pop(cell.folder, 0)
    return max([own, *(other + 1 for other in turns.values())])


def command_line(overrides: Sequence[str]) -> str:
    """The command that computes a cell, without what says only where and how fast.

    Args:
        overrides: The arguments that asked for the cell.

    Returns:
        The command.
    """
    aside = ("shard", "overwrite", "device", "batch_size", "chunk_size", "workers", "cache_dir", "debug")
    kept = [text for text in overrides if text.lstrip("+~").split("=")[0] not in aside]
    return shlex.join(["python", "-m", "dap_bench", *kept])


def missing(
    cfg: DictConfig, cell: store.Cell, identified: dict[str, Any], samples: SampleSet, mine: list[int]
) -> dict[int, dict[str, Any]]:
    """The images of a cell without a complete row.

    Args:
        cfg: The cell's config.
        cell: The cell.
        identified: Its identity.
        samples: Its sample set.
        mine: Positions of the images of this shard.

    Returns:
        For each such image what is known of it already, here or in a cell beside this one, by position.
    """
    if cfg.overwrite is True:
        return {index: {} for index in mine}
    wanted = kept_of(cfg)
    table = cell.table(["sample_id", "status", "kept"], set_aside=True)
    columns = (table.column(name).to_pylist() for name in ("sample_id", "status", "kept"))
    found = {sample: (status, set((kept or "").split(","))) for sample, status, kept in zip(*columns, strict=True)}
    new, lacking = [], []  # rows that are not there, or without all that is to be kept with them
    for index in mine:
        status, kept = found.get(samples.ids[index], (None, set()))
        if status is None or (status != "ok" and cfg.overwrite == "failed"):
            new.append(index)
        elif status == "ok" and not wanted <= kept:
            lacking.append(index)
    todo: dict[int, dict[str, Any]] = {index: {} for index in new}
    if new:
        todo |= reuse.known(cell, identified, samples, new)
    if lacking:
        rows = {row["sample_id"]: row for row in cell.rows() if row["status"] == "ok"}
        todo |= {index: rows[samples.ids[index]] for index in lacking}
    return todo


def kept_of(cfg: DictConfig) -> set[str]:
    """What is asked to be stored with each row besides its values.

    Args:
        cfg: The cell's config.

    Returns:
        Any of curves and maps.
    """
    return {name for name, asked in (("curves", cfg.keep_curves), ("maps", cfg.keep_maps)) if asked}


def sample_set(cfg: DictConfig) -> SampleSet:
    """The images that the config's source and sampler stand for, frozen.

    Args:
        cfg: The cell's config.

    Returns:
        The sample set, from the cache if it was drawn before.

    Raises:
        UserError: If the images cannot be drawn.
    """
    sampler = configs.undescribed(OmegaConf.to_container(cfg.sampler, resolve=True))
    source, draw = configs.instantiate(cfg.data), configs.instantiate(cfg.sampler)
    options = {str(key): value for key, value in sampler.items()}
    return frozen(source, draw, options, path("cache_dir", cfg.cache_dir))


def shard(n: int, text: str) -> list[int]:
    """The samples of one shard: every n-th.

    Args:
        n: How many samples there are.
        text: The shard: i/n, counted from 1.

    Returns:
        Their positions.

    Raises:
        UserError: If the text is no shard.
    """
    number, _, count = str(text).partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"shard={text} must be i/n with 1 <= i <= n, for example shard=1/4.")
    return list(range(int(number) - 1, n, int(count)))


def batch_size_of(vit: Any, double: bool, free: int | None = None) -> int:
    """How many images of a batch fit in memory; 32 without CUDA.

    Args:
        vit: The model.
        double: Whether explanations are in double precision.
        free: Free bytes; None asks the device. Defaults to None.

    Returns:
        The batch size, at most 64.
    """
    if free is None:
        import torch

        if vit.device.type != "cuda":
            return 32
        free = torch.cuda.mem_get_info(vit.device)[0]
    fits = int(0.8 * free / (bytes_per_image(vit) * (2 if double else 1)))
    return max(1, min(LARGEST_BATCH, fits))


def bytes_per_image(vit: Any) -> int:
    """What one image of a batch takes with a graph through all blocks: of Chefer, which takes most.

    Per block some 8 numbers for each entry of attention and 24 for each channel of each token (results/benchmark.md).

    Args:
        vit: The model.

    Returns:
        Bytes, in single precision.
    """
    heads, channels = vit.blocks[0].attn.num_heads, vit.model.embed_dim
    tokens = vit.patches + vit.layout.prefix
    return 4 * vit.depth * tokens * (8 * heads * tokens + 24 * channels)


class Bar(tqdm):
    """A progress line that stays whole: of some means it has the first three, or as many as there is room for."""

    means: tuple[str, ...] = ()

    @property
    def format_dict(self) -> dict[str, Any]:
        found = {**super().format_dict, "bar_format": BAR}
        for count in (3, 2, 1, 0):
            found["postfix"] = ", ".join(self.means[:count])
            line = self.format_meter(**{**found, "ncols": None})  # which has ten columns of bar; one must be left
            if not found["ncols"] or len(line) - 9 <= found["ncols"]:
                break
        return found


class _Work:
    """The part of a run that needs torch: the model, the explainer and the metrics, applied batch by batch."""

    def __init__(
        self,
        cfg: DictConfig,
        names: dict[str, str],
        cell: store.Cell,
        samples: SampleSet,
        identified: dict[str, Any],
        sweep: Sweep,
    ) -> None:
        from dap_bench.evaluation import Evaluation
        from dap_bench.isolation import copied

        self.names, self.cell, self.samples, self.kept = names, cell, samples, kept_of(cfg)
        where = (identified["model"], cfg.device, cfg.precision, cfg.compile)
        vit = sweep.get(
            "model", where, lambda: configs.instantiate(cfg.model, device=cfg.device, precision=cfg.precision)
        )
        explain, metrics = configs.instantiate_method(cfg.method), configs.instantiate_metrics(cfg.metric)
        taken = {*store.COLUMNS.names, "map"} & set(metrics)
        if taken:
            raise UserError(f"a metric cannot be called {taken.pop()}: rows already have a column of that name.")
        chunk = cfg.chunk_size or (CHUNK_CUDA if vit.device.type == "cuda" else CHUNK_CPU)
        known = sweep.get("known", (samples.digest, *where), dict)
        double = cfg.explain_precision == "fp64"
        scoring = copied(vit)
        scoring.compile = cfg.compile
        self.evaluate: Evaluation = Evaluation(
            scoring, explain, metrics, double, chunk, known, cfg.debug, self._companions
        )
        masked = "masks" in self.evaluate.needs
        self.pictures = sweep.get("pictures", (samples.digest, str(vit.transform), masked), dict)
        self.device = vit.device
        self.batch_size = batch_size_of(vit, double) if cfg.batch_size == "auto" else cfg.batch_size
        self.decoders = ThreadPoolExecutor(cfg.workers)
        self.info = {
            **names,
            "fingerprint": cell.folder.name,
            "identity": identified,
            "n": len(samples),
            "class_names": vit.class_names,
            "metrics": {name: metric.better for name, metric in metrics.items()},
            "crop": vit.crop,
            "grid": list(vit.grid),
            "versions": {"dap-bench": __version__},
            "config": OmegaConf.to_container(cfg, resolve=False),  # what the environment says stays there
        }

    def take_over(self, todo: dict[int, dict[str, Any]]) -> set[int]:
        """Write the rows of images on which nothing is left to compute; the other images."""
        whole = [index for index, row in todo.items() if self._lacking(row) is None]
        rows = [self._row(index, {"status": "ok", "seconds": 0.0}, todo[index]) for index in whole]
        if rows:
            self.cell.write(rows, self.evaluate.metrics)
        return todo.keys() - set(whole)

    def compute(self, batches: list[list[int]], total: int, todo: dict[int, dict[str, Any]]) -> None:
        sums: dict[str, list[float]] = {name: [] for name in self.evaluate.metrics}
        if not batches:
            return
        done = total - sum(map(len, batches))
        any_ok = done > 0 or any(todo.values())
        name = title(self.names)
        bar = Bar(total=total, initial=done, desc=name, unit="img", dynamic_ncols=True, smoothing=0.05)
        # the next batch is read and on its way to the device, and the last one's rows are written, beside the model
        threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        with bar, self.decoders, threads[0] as loader, threads[1] as writer, _interruptible(name) as interrupted:
            ahead = loader.submit(self._sent, batches[0])
            written: Future[None] | None = None
            for number, batch in enumerate(batches):
                loaded = ahead.result()
                if number + 1 < len(batches):
                    ahead = loader.submit(self._sent, batches[number + 1])
                rows = self._rows(batch, loaded, todo)
                any_ok = any_ok or any(row["status"] == "ok" for row in rows)
                tried = [row for row, item in zip(rows, loaded, strict=True) if not isinstance(item, BadImage)]
                if not any_ok and len(tried) > 1:
                    raise UserError(
                        f"none of the first {len(tried)} images could be measured: {tried[0]['reason']}; "
                        "debug=true shows where."
                    )
                if written is not None:
                    written.result()  # a disk that is full is known one batch later, and at the end
                written = writer.submit(self.cell.write, rows, self.evaluate.metrics)
                for metric, values in sums.items():
                    values += _defined(row[metric] for row in rows if row["status"] == "ok")
                bar.means = tuple(_mean(metric, values) for metric, values in sums.items() if values)
                bar.update(len(batch))
                if interrupted or number + 1 == len(batches):
                    written.result()
                if interrupted:
                    _stop(interrupted.pop())

    def _sent(self, batch: list[int]) -> "list[tuple[Tensor, Tensor | None] | BadImage]":
        """A batch with its pictures on the device, or on their way to it. Runs beside the model, in a thread."""
        import torch

        loaded = self._load(batch)
        pictures = [item[0] for item in loaded if not isinstance(item, BadImage)]
        if self.device.type != "cuda" or not pictures:
            return loaded
        there = iter(torch.stack(pictures).pin_memory().to(self.device, non_blocking=True))
        return [item if isinstance(item, BadImage) else (next(there), item[1]) for item in loaded]

    def _companions(self, ids: Sequence[str], count: int) -> "Tensor":
        """For each image that many others of the sample set, of other classes: the next ones that can be read."""
        import torch

        found = []
        for sample in ids:
            own = self.samples.ids.index(sample)
            labels = {self.samples.labels[own]}
            pictures: list[Tensor] = []
            for index in (*range(own + 1, len(self.samples)), *range(own)):
                if len(pictures) == count:
                    break
                if self.samples.labels[index] in labels:
                    continue
                (item,) = self._load([index])
                if not isinstance(item, BadImage):
                    labels.add(self.samples.labels[index])
                    pictures.append(item[0])
            if len(pictures) < count:
                raise UserError(
                    f"grids need images of {count + 1} classes, but the sample has {len(labels)}; draw more, such as "
                    "sampler.n=100, or leave grid_pointing out."
                )
            found.append(torch.stack(pictures))
        return torch.stack(found)

    def _load(self, batch: list[int]) -> "list[tuple[Tensor, Tensor | None] | BadImage]":
        """Decoded pictures with their object masks, or why not."""
        found = [self.pictures.get(index) for index in batch]
        if any(item is None for item in found):
            found = list(self.decoders.map(self.evaluate.load, *zip(*self.samples.read(batch), strict=True)))
            size = sum(item[0].nbytes for item in found if isinstance(item, tuple))
            if size * len(self.samples) / len(batch) <= PICTURES_IN_MEMORY:
                self.pictures.update(zip(batch, found, strict=True))
        return found

    def _rows(
        self,
        batch: list[int],
        loaded: "list[tuple[Tensor, Tensor | None] | BadImage]",
        todo: dict[int, dict[str, Any]],
    ) -> list[dict[str, Any]]:
        from dap_bench.evaluation import Loaded, failure

        measured: dict[int, dict[str, Any]] = {}
        alike: dict[tuple[str, ...] | None, list[tuple[int, Any]]] = {}  # images that lack the same metrics
        for index, item in zip(batch, loaded, strict=True):
            if isinstance(item, BadImage):
                measured[index] = failure(item)
            else:
                alike.setdefault(self._lacking(todo[index]), []).append((index, item))
        for lacking, some in alike.items():
            ids, labels = self.samples.ids, self.samples.labels
            images = [Loaded(ids[index], image, mask, labels[index]) for index, (image, mask) in some]
            found = self.evaluate(images, lacking or (), "curves" in self.kept, "maps" in self.kept)
            measured |= {index: row for (index, _), row in zip(some, found, strict=True)}
        return [self._row(index, measured[index], todo[index]) for index in batch]

    def _lacking(self, row: dict[str, Any]) -> tuple[str, ...] | None:
        """The metrics to compute for an image of which a row is known; None if there is nothing to compute at all."""
        kept = _kept(row)
        every = not row or ("curves" in self.kept and "curves" not in kept)
        lacking = tuple(name for name in self.evaluate.metrics if every or row.get(name) is None)
        return lacking if lacking or ("maps" in self.kept and "maps" not in kept) else None

    def _row(self, index: int, measured: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        """A whole row: who it is of, and what was measured now or before."""
        kept = set(self.kept)
        if measured["status"] != "ok":
            old, kept = {}, set()
        elif old:
            computed = [name for name in self.evaluate.metrics if name in measured]
            kept = _kept(old) | (kept & {"maps"})
            if len(computed) == len(self.evaluate.metrics):
                kept |= self.kept
            elif computed:  # of only some metrics there may be no curves
                kept -= {"curves"} - self.kept
            measured = {**measured, "seconds": measured["seconds"] + (old.get("seconds") or 0)}
        return {
            **old,
            "sample_id": self.samples.ids[index],
            "label": self.samples.labels[index],
            **self.names,
            "fingerprint": self.cell.folder.name,
            **measured,
            "kept": ",".join(sorted(kept)),
        }


def _kept(row: dict[str, Any]) -> set[str]:
    return {name for name in (row.get("kept") or "").split(",") if name}


STOP = ("SIGINT", "SIGTERM", "SIGHUP")  # Ctrl-C, a scheduler, a closed terminal; Windows has no SIGHUP
REQUEUE = ("SIGUSR1", "SIGUSR2")  # what submitit has Slurm send before a job's time is over


def _numbers(names: Sequence[str]) -> list[int]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


@contextmanager
def _interruptible(name: str) -> Iterator[list[int]]:
    """The first signal to stop lets the batch finish, the second stops at once.

    Signals of `STOP` where nobody else has made arrangements for them, those of `REQUEUE` where somebody has: what a
    handler raises in the middle of a batch would be taken for a failure of the method.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    caught: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        restore()
        tqdm.write(f"{name}: finishing this batch; a second signal stops at once", file=sys.stderr)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    ours = [n for n in _numbers(STOP) if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    for number in [*ours, *(n for n in _numbers(REQUEUE) if callable(signal.getsignal(n)))]:
        before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        restore()


def _stop(number: int) -> None:
    """Between batches: stop, or let whoever has arranged for the signal decide; submitit queues the job again."""
    handler = signal.getsignal(number)
    if number in _numbers(REQUEUE) and callable(handler):
        handler(number, None)
    else:
        raise Interrupted(number)


def _defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not isnan(value)]


def _mean(metric: str, values: list[float]) -> str:
    return f"{label(metric)} {sum(values) / len(values):.3f}"


def _conclude(cell: store.Cell, samples: SampleSet, mine: list[int], name: str) -> None:
    """Say what there is of the cell: images, the means of all metrics, where, and what failed."""
    metrics = ordered(set(cell.info["metrics"]) & set(cell.columns)) if cell.parts() else []
    table = cell.table(["sample_id", "status", "reason", "fallback", *metrics])
    table = table.filter(pc.is_in(table.column("sample_id"), store.pa.array([samples.ids[index] for index in mine])))
    ok = pc.equal(table.column("status"), "ok")
    failed, table = table.filter(pc.invert(ok)), table.filter(ok)
    fallbacks = pc.sum(table.column("fallback")).as_py() or 0
    found = {metric: _defined(table.column(metric).to_pylist()) for metric in metrics}
    means = [_mean(metric, values) for metric, values in found.items() if values]
    counts = [f"{len(table)} of {len(mine)} images"]
    counts += [f"{count} {what}" for count, what in ((len(failed), "failed"), (fallbacks, "by a fallback")) if count]
    print(f"{name}: {', '.join([*counts, *means])}\n  {cell.folder}")
    for row in failed.slice(0, 3).to_pylist():
        print(f"  {row['sample_id']}: {row['reason']}")
    if len(failed) > 3:
        print(f"  and {len(failed) - 3} more (status and reason are in the rows)")
