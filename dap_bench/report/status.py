"""How far are the cells? Done, part, failed or missing, and how long the rest will take."""

import csv
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from dap_bench import store
from dap_bench.errors import UserError
from dap_bench.report.layouts import label, ordered
from dap_bench.report.terminal import aligned

IMAGES = 800  # of a cell of the paper


@dataclass(frozen=True)
class Progress:
    """One cell: how many of its `n` images have rows, and what a row took."""

    names: dict[str, str]
    n: int
    done: int
    failed: int
    seconds: float | None  # per image
    shards: tuple[str, ...] = ()  # those with images still missing, where the cell was divided
    changed: float | None = None  # when a file of it was last written: does a job still work on it?

    @property
    def state(self) -> str:
        """How far the cell is, in a word or a fraction."""
        if self.done < self.n:
            return f"{self.done}/{self.n}"
        if self.failed:
            return f"{self.failed} failed"
        return "done" if self.n == IMAGES else f"done, n={self.n}"

    def __str__(self) -> str:
        where = f" (shard {', '.join(self.shards)})" if self.shards else ""
        when = "" if self.changed is None else f", last change {_duration(max(0, time.time() - self.changed))} ago"
        return f"{' '.join(self.names.values())}: {self.n - self.done} of {self.n} images are missing{where}{when}"


def progress(results: str | Path = "results/runs") -> list[Progress]:
    """How far every cell below a folder is, of whatever settings.

    Args:
        results: The results folder. Defaults to "results/runs".

    Returns:
        The progress of each cell that can be read.
    """
    found = []
    for cell in store.cells(Path(results)):
        try:
            info = cell.info
            rows = cell.table(["sample_id", "status", "seconds"]).to_pandas()
            names = {name: info[name] for name in store.NAMES}
            ok = rows[rows["status"] == "ok"]["seconds"].dropna()
            # RESULTS/model/method/data-sampler/fingerprint
            shards = tuple(missing_shards(cell.folder.parents[3], info, set(rows["sample_id"])))
            failed = int((rows["status"] != "ok").sum())
            seconds = median(ok) if len(ok) else None
            found.append(Progress(names, info["n"], len(rows), failed, seconds, shards, _changed(cell)))
        except (UserError, OSError, ValueError):
            continue  # the tables name a damaged cell; here it counts as missing
    return found


def _changed(cell: store.Cell) -> float:
    """When cell.json or a part was last written. Parts may vanish meanwhile: a run that ends merges them."""
    times = []
    for file in (cell.folder / "cell.json", *cell.parts()):
        with suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return max(times)


def missing_shards(results: Path, info: dict[str, object], having: set[str]) -> list[str]:
    """Which of the shards that a cell was divided into are not complete.

    Args:
        results: The results folder, which holds the lists of samples.
        info: The cell's cell.json.
        having: Ids of the samples that have rows.

    Returns:
        The shards, such as "2/4"; none where the cell was not divided or its list of samples is not there.
    """
    config, identity = info.get("config"), info.get("identity")
    if not isinstance(config, dict) or not isinstance(identity, dict):
        return []
    text = str(config.get("shard", "1/1")).partition("/")[2]
    count = int(text) if text.isdecimal() else 1
    manifest = results / "samples" / f"{identity.get('samples')}.csv"
    if count == 1 or not store.is_name(identity.get("samples")) or not manifest.is_file():
        return []
    with manifest.open(newline="") as file:
        ids = [line["sample_id"] for line in csv.DictReader(file)]
    if len(ids) != info.get("n") or count > len(ids):
        return []
    return [f"{at + 1}/{count}" for at in range(count) if not having.issuperset(ids[at::count])]


def grid(cells: list[Progress], wanted: set[tuple[str, str, str]]) -> str:
    """A table per sampling, methods down and models across, then what is left to do.

    Args:
        cells: The progress of each cell.
        wanted: Cells that should be there: model, sampler and method.

    Returns:
        The text.
    """
    states: dict[tuple[str, str, str], list[Progress]] = {}
    for cell in cells:
        states.setdefault((cell.names["model"], cell.names["sampler"], cell.names["method"]), []).append(cell)
    every = wanted | set(states)
    lines = []
    for sampler in ordered({key[1] for key in every}):
        models = ordered({key[0] for key in every if key[1] == sampler})
        methods = ordered({key[2] for key in every if key[1] == sampler})
        table = [[label(sampler), *(label(model) for model in models)]]
        for method in methods:
            keys = [(model, sampler, method) for model in models]
            table.append([label(method), *(_state(states.get(key, []), key in wanted) for key in keys)])
        lines += [*aligned(table), ""]
    return "\n".join([*lines, *_left(cells, every - set(states))])


def _state(found: list[Progress], wanted: bool) -> str:
    if not found:
        return "missing" if wanted else ""
    return found[0].state if len(found) == 1 else f"{len(found)} settings"


def _left(cells: list[Progress], missing: set[tuple[str, str, str]]) -> list[str]:
    whole = [cell for cell in cells if cell.done >= cell.n]
    part = [cell for cell in cells if cell.done < cell.n]
    failed = sum(cell.failed for cell in cells)
    lines = [f"{len(whole)} cells done, {len(part)} partly done, {len(missing)} missing; {failed} images failed."]
    lines += [f"  {cell}" for cell in part]
    left, unknown = 0.0, 0
    for cell in part:
        left += (cell.n - cell.done) * (cell.seconds or 0)
        unknown += cell.seconds is None
    for model, _, method in missing:
        alike = [c for c in cells if c.seconds is not None and (c.names["model"], c.names["method"]) == (model, method)]
        alike = alike or [c for c in cells if c.seconds is not None and c.names["model"] == model]
        if alike:
            left += IMAGES * mean(c.seconds for c in alike if c.seconds is not None)
        unknown += not alike
    if part or len(missing) > unknown:
        lines.append(f"About {_duration(left)} left in one process, at the speed of the rows so far.")
    if unknown:
        lines.append(f"No estimate for {unknown} of the missing cells.")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{round(seconds)} seconds"
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{round(seconds / 60)} minutes"
