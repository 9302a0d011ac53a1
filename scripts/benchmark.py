"""How fast is it? Ratios measured in one run: python scripts/benchmark.py checkpoint=FILE only=limit,peers

Absolute times depend on the machine; what is compared here ran on the same machine, turn by turn, so that a noisy
neighbour hits both sides. The tables go to results/benchmark.md. The peers need `pip install .[benchmark]`.
"""

import ast
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Literal, NamedTuple, get_args

import cost as cost_of
import numpy as np
import torch

from dap_bench import ViT, files, load_method, load_metrics, load_vit
from dap_bench.app import TOLD
from dap_bench.command import Device, command
from dap_bench.config import choices, compose
from dap_bench.data import shapes
from dap_bench.evaluation import Evaluation, Loaded
from dap_bench.isolation import copied
from dap_bench.metrics import base, perturbation
from dap_bench.metrics.base import Batch
from dap_bench.metrics.deletion import Deletion, Insertion
from dap_bench.report.layouts import paper_methods
from dap_bench.report.markdown import table
from dap_bench.report.summary import CHANCE
from dap_bench.runner import CHUNK_CPU, CHUNK_CUDA, batch_size_of, bytes_per_image
from dap_bench.vit.loading import blueprint

Section = Literal[
    "limit", "peers", "cells", "explainers", "growth", "precision", "memory", "long_run", "download", "cost"
]
SECTIONS: tuple[Section, ...] = get_args(Section)
STEPS = 16  # divides the number of pixels, so that torch-cam's points fall on ours
SLOW = 50  # forward passes: methods that take more of them by design are not timed
QUANTUS_STEPS = 12  # Quantus takes channels one by one, and only step sizes that divide the number of pixels


class Options(NamedTuple):
    """What sections have to know."""

    model: str
    checkpoint: str
    device: str
    images: int
    repeats: int
    long: int


@command()
def main(
    model: str = "vit_t",
    checkpoint: Annotated[str, "local weights; without them they are random"] = "",
    device: Device = "auto",
    images: Annotated[int, "in a batch"] = 8,
    repeats: Annotated[int, "turns that a median is of"] = 5,
    out: Annotated[Path, "a folder for the tables one by one; all of them go to the file of that name and .md"] = Path(
        "results/benchmark"
    ),
    only: Annotated[tuple[Section, ...], "tables to make; by default all"] = (),
    long: Annotated[int, "how many images the long run has"] = 5000,
    peak: Annotated[str, "a method: print the peak memory of a batch of `images`, and nothing else"] = "",
    measure: Annotated[tuple[int, ...], "images, steps, batch size: print seconds and memory, and nothing else"] = (),
) -> None:
    options = Options(model, checkpoint, device, images, repeats, long)
    vit = load(options)
    if peak:
        print(memory_of(vit, peak, images))
        return
    if measure:
        print(*growth_of(vit, *measure))
        return
    for section in only or SECTIONS:
        text = f"{globals()[section](vit, options)}\n{machine(vit, options, section)}\n"
        files.write_text(out / f"{section}.md", text.lstrip())
        print(text, flush=True)
    parts = [out / f"{section}.md" for section in SECTIONS]
    whole = "\n".join(part.read_text() for part in parts if part.exists())
    about = __doc__.split("\n\n", 1)[1].split("The tables")[0]
    files.write_text(out.with_suffix(".md"), f"# Benchmark\n\n{about}\n{whole}")


def load(options: Options) -> ViT:
    if options.checkpoint:
        return load_vit(options.model, device=options.device, checkpoint=options.checkpoint)
    import timm

    from dap_bench.vit import choose_device

    torch.manual_seed(0)
    tag = compose(f"model={options.model}").model.tag
    return ViT(timm.create_model(tag, pretrained=False).eval().to(choose_device(options.device)))


def machine(vit: ViT, options: Options, section: str) -> str:
    device = vit.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu()}, {os.cpu_count()} cores"
    model = f"{options.model}, {'pretrained' if options.checkpoint else 'random'} weights"
    repeats = f"Medians of {options.repeats} turns, {options.images} images"
    if section == "explainers":
        repeats = f"Medians of 3 turns, {options.images} images"
    if section in ("growth", "precision", "memory", "long_run", "download", "cost"):
        repeats = "Once"
    if section == "memory":
        model = "random weights"
    if section == "long_run":
        model = "vit_shapes"
    if section in ("download", "cost"):
        model = "no weights"
    return (
        f"*{model}, on {name}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads. "
        f"{repeats}: "
        f"`python scripts/benchmark.py {' '.join(sys.argv[1:])}`*"
    )


def cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def pictures(vit: ViT, count: int) -> torch.Tensor:
    return torch.stack([vit.transform(shapes.draw(index)[0]) for index in range(count)]).to(vit.device)


def chunk_size(images: torch.Tensor) -> int:
    return CHUNK_CUDA if images.is_cuda else CHUNK_CPU


def turns(repeats: int, **candidates: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each candidate, turn by turn, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, candidate in candidates.items():
            synchronise()
            start = time.perf_counter()
            candidate()
            synchronise()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- sections


def limit(vit: ViT, options: Options) -> str:
    """Del + Ins + TCC against the same number of plain forward passes."""
    images = pictures(vit, options.images)
    metrics = load_metrics("deletion", "insertion", "tcc")
    explain = load_method("dap")
    explanation = explain(vit, images, vit.score(images).argmax(1).clone())
    chunk = chunk_size(images)

    def ours() -> None:
        batch = Batch.of(vit, lambda *_, **__: explanation, images, chunk=chunk)
        for metric in metrics.values():
            metric(batch)

    steps = metrics["deletion"].steps
    forwards = options.images * (2 * (steps - 1) + 4)  # between the ends; clean, grey, blurred, TCC

    def plain(size: int) -> Callable[[], None]:
        batch = images.repeat(1 + size // len(images), 1, 1, 1)[:size]

        @torch.inference_mode()
        def run() -> None:
            for done in range(0, forwards, size):
                vit.model(batch[: min(size, forwards - done)])

        return run

    sizes = [size for size in ((4, 8, 16, 32, 64) if not images.is_cuda else (64, 128, 256, 512)) if size <= forwards]
    tried = turns(2, **{f"plain {size}": plain(size) for size in sizes})
    best = min(tried, key=lambda name: min(tried[name]))
    compiled = copied(vit)
    compiled.compile = True

    def ours_compiled() -> None:
        batch = Batch.of(compiled, lambda *_, **__: explanation, images, chunk=chunk)
        for metric in metrics.values():
            metric(batch)

    candidates = {"ours": ours, "ours, compile=true": ours_compiled, best: plain(int(best.split()[1]))}
    seconds = turns(options.repeats, **candidates)
    medians = {name: statistics.median(times) for name, times in {**tried, **seconds}.items()}
    ratios = [mine / theirs for mine, theirs in zip(seconds["ours"], seconds[best], strict=True)]
    faster = [mine / theirs for mine, theirs in zip(seconds["ours, compile=true"], seconds[best], strict=True)]
    rows = [[name, f"{time:.2f}", f"{1000 * time / forwards:.1f}"] for name, time in medians.items()]
    return (
        f"\n## Distance to the limit\n\nDel + Ins ({steps} steps) + TCC: {forwards} forward passes, against as many of "
        f"the bare timm model at several batch sizes.\n\n"
        + table(["", "seconds", "ms per forward"], rows)
        + f"\n**{statistics.median(ratios):.3f}** times the bare model at its best batch size "
        f"({best.split()[1]}); by turn {min(ratios):.3f} to {max(ratios):.3f}. With `compile=true` "
        f"{statistics.median(faster):.3f}.\n"
    )


def cells(vit: ViT, options: Options) -> str:
    """A batch of a metric=paper cell against the scoring that is in it."""
    count = 4 * options.images
    loaded = [Loaded(str(at), image, None, 0) for at, image in enumerate(pictures(vit, count))]
    rows = []
    for name in (*paper_methods(), CHANCE):
        metrics, scoring = load_metrics("paper"), Stopwatch()
        ratios = []
        for turn in range(options.repeats + 1):
            evaluation = Evaluation(copied(vit), load_method(name), metrics, chunk=chunk_size(loaded[0].image))
            with scoring.of(perturbation, "scored"), scoring.of(base, "_best_two"):
                scoring.seconds = 0.0
                start = time.perf_counter()
                evaluation(loaded, list(metrics))
                synchronise()
                whole = time.perf_counter() - start
            if turn:
                ratios.append((whole / scoring.seconds, whole, scoring.seconds))
        ratio, whole, scored = sorted(ratios)[len(ratios) // 2]
        passes, scoring_passes = cost_of.cell(name, options.model)
        rows.append([name, f"{whole:.2f}", f"{scored:.2f}", f"{ratio:.3f}", f"{passes / scoring_passes:.3f}"])
    title = (
        f"\n## Whole cells\n\nOne batch of {count} images, `metric=paper`: all of it, and the scoring in it. The last "
        "column is the ratio by FLOPs alone (`scripts/cost.py`), which no program with the same passes can beat.\n\n"
    )
    return title + table(["method", "seconds", "of which scoring", "ratio", "by FLOPs"], rows)


class Stopwatch:
    """Seconds spent in some functions."""

    seconds = 0.0

    @contextlib.contextmanager
    def of(self, module: ModuleType, name: str) -> Iterator[None]:
        function = getattr(module, name)

        def timed(*arguments: object, **others: object) -> object:
            synchronise()
            start = time.perf_counter()
            found = function(*arguments, **others)
            synchronise()
            self.seconds += time.perf_counter() - start
            return found

        setattr(module, name, timed)
        try:
            yield
        finally:
            setattr(module, name, function)


def peers(vit: ViT, options: Options) -> str:
    """The same maps, model, steps and baseline in other programs."""
    images = pictures(vit, options.images)
    classes = vit.score(images).argmax(1).clone()
    explanation = load_method("legrad")(vit, images, classes)
    heatmaps = explanation.heatmaps(vit.image_size)
    model, softmax = vit.model.eval(), lambda logits: logits.softmax(1)
    options_ = {"steps": STEPS, "baseline": "zero"}
    scores: dict[str, tuple[float, float | None]] = {}

    def ours() -> None:
        batch = Batch.of(vit, lambda *_, **__: explanation, images, chunk=chunk_size(images))
        deletion, insertion = Deletion(**options_)(batch), Insertion(**options_)(batch)
        scores["dap_bench"] = deletion.mean().item(), insertion.mean().item()

    def ours_deletion() -> None:
        batch = Batch.of(vit, lambda *_, **__: explanation, images, chunk=chunk_size(images))
        scores["dap_bench, Del only"] = Deletion(steps=QUANTUS_STEPS)(batch).mean().item(), None

    @torch.no_grad()
    def loop() -> None:
        """RISE as one writes it first: an image at a time, a step at a time."""
        areas = []
        for image, heat, label in zip(images, heatmaps, classes, strict=True):
            order = heat.flatten().argsort(descending=True, stable=True)
            for start, end in ((image, torch.zeros_like(image)), (torch.zeros_like(image), image)):
                current, curve, done = start.clone(), [], 0
                for step in range(STEPS + 1):
                    count = round(step * len(order) / STEPS)
                    current.view(3, -1)[:, order[done:count]] = end.view(3, -1)[:, order[done:count]]
                    curve.append(model(current[None]).softmax(1)[0, label].item())
                    done = count
                areas.append(np.trapezoid(curve, dx=1 / STEPS))
        scores["plain loop"] = float(np.mean(areas[::2])), float(np.mean(areas[1::2]))

    candidates: dict[str, Callable[[], object]] = {"dap_bench": ours, "plain loop": loop}
    with named("torchcam"):
        from torchcam.metrics import DeletionInsertionMetric

        extractor = SimpleNamespace(model=model, _hooks_off=contextlib.nullcontext, fuse_cams=lambda cams: cams[0])
        call = type("Extractor", (SimpleNamespace,), {"__call__": lambda *_, **__: [heatmaps]})(**vars(extractor))

        def torchcam() -> None:
            metric = DeletionInsertionMetric(call, softmax, steps=STEPS, batch_size=32)
            with torch.inference_mode():
                metric.update(images, classes.tolist())
            found = metric.summary()
            scores["torch-cam"] = found["deletion_auc"], found["insertion_auc"]

        candidates["torch-cam"] = torchcam
    with named("quantus"):
        import quantus

        features = images[0].numel() // QUANTUS_STEPS
        flip = quantus.PixelFlipping(
            features_in_step=features, perturb_baseline=0.0, normalise=False, disable_warnings=True
        )

        def pixel_flipping() -> None:
            curves = flip(
                model=model,
                x_batch=images.cpu().numpy(),
                y_batch=classes.cpu().numpy(),
                a_batch=heatmaps[:, None].cpu().numpy(),
                device=str(images.device),
                softmax=True,
                batch_size=options.images,
                channel_first=True,
            )
            clean = vit.score(images).softmax(1).gather(1, classes[:, None]).cpu().numpy()
            whole = np.concatenate([clean, np.array(curves)], 1)  # Quantus leaves out the clean image
            scores["Quantus, Del only"] = float(np.trapezoid(whole, dx=1 / QUANTUS_STEPS, axis=1).mean()), None

        candidates |= {"dap_bench, Del only": ours_deletion, "Quantus, Del only": pixel_flipping}
    seconds = turns(options.repeats, **candidates)
    rows = []
    for name, times in seconds.items():
        base = "dap_bench, Del only" if "Quantus" in name else "dap_bench"
        ratio = statistics.median(theirs / mine for theirs, mine in zip(times, seconds[base], strict=True))
        deletion, insertion = scores.get(name, (None, None))
        cells = ["-" if value is None else f"{value:.5f}" for value in (deletion, insertion)]
        speed = "" if name.startswith("dap_bench") else f"{ratio:.2f} x as long"
        rows.append([name, f"{statistics.median(times):.2f}", speed, *cells])
    title = (
        f"\n## Against what people use\n\nDel + Ins in {STEPS} steps (against Quantus: Del in {QUANTUS_STEPS}), "
        "zero baseline, LeGrad's maps.\n\n"
    )
    return title + table(["", "seconds", "compared", "Del", "Ins"], rows)


@contextlib.contextmanager
def named(peer: str) -> Iterator[None]:
    """Do without a peer that is not installed, but say so."""
    try:
        yield
    except ImportError:
        print(f"{peer} is not installed: pip install -c constraints.txt -e '.[benchmark]'", file=sys.stderr)


def explainers(vit: ViT, options: Options) -> str:
    """Images per second of every method, in a batch, one by one and in double precision."""
    images = pictures(vit, options.images)
    classes = vit.score(images).argmax(1).clone()
    rows = []
    for name in choices("method"):
        if name in TOLD or cost_of.method(name, "vit_t").total > SLOW:
            continue
        explain = load_method(name)
        single = [(images[at : at + 1], classes[at : at + 1]) for at in range(len(images))]
        seconds = turns(
            min(3, options.repeats),
            batch=lambda explain=explain: explain(vit, images, classes),
            single=lambda explain=explain, single=single: [explain(vit, *pair) for pair in single],
            double=lambda explain=explain: explain(vit.double(), images.double(), classes),
        )
        batch, *others = (len(images) / statistics.median(seconds[key]) for key in ("batch", "single", "double"))
        rows.append([name, f"{batch:.1f}", *(text for x in others for text in (f"{x:.1f}", f"{batch / x:.2f}"))])
    return (
        f"\n## Explainers\n\nImages per second, {len(images)} in a batch, one by one, and in a batch with "
        "`explain_precision=fp64`; ratios to the first.\n\n"
    ) + table(["method", "batch", "one by one", "ratio", "in double", "ratio"], rows)


def growth(vit: ViT, options: Options) -> str:
    """Time and peak memory as images, steps and batch size grow; each in a process of its own."""
    rows = []
    for images, steps, batch in (
        (16, 10, 8),
        (32, 10, 8),
        (64, 10, 8),
        (16, 20, 8),
        (16, 40, 8),
        (16, 10, 16),
        (16, 10, 4),
    ):
        weights = f"checkpoint={options.checkpoint}"
        seconds, memory = apart(options, f"model={options.model}", f"measure={images},{steps},{batch}", weights)
        forwards = images * (2 * (steps - 1) + 4)
        rows.append([str(images), str(steps), str(batch), seconds, f"{1000 * float(seconds) / forwards:.1f}", memory])
    return "\n## Growth\n\nDAP with Del, Ins and TCC.\n\n" + table(
        ["images", "steps", "batch and chunk size", "seconds", "ms per forward", "peak memory, MiB"], rows
    )


def growth_of(vit: ViT, images: int, steps: int, size: int) -> tuple[str, str]:
    """Seconds and peak memory of a small evaluation in this process."""
    explain = load_method("dap")
    metrics = [Deletion(steps=steps), Insertion(steps=steps), *load_metrics("tcc").values()]
    start = time.perf_counter()
    for first in range(0, images, size):
        drawn = [vit.transform(shapes.draw(index)[0]) for index in range(first, min(images, first + size))]
        batch = Batch.of(vit, explain, torch.stack(drawn).to(vit.device), chunk=size)
        for metric in metrics:
            metric(batch)
    synchronise()
    seconds = time.perf_counter() - start
    return f"{seconds:.1f}", f"{peak_memory(vit):.0f}"


def peak_memory(vit: ViT) -> float:
    """MiB that this process had at most, on the device."""
    if vit.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    # not getrusage: it counts what the parent process had before this program was started in its place
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def apart(options: Options, *arguments: str) -> list[str]:
    """What this script prints with these arguments in a process of its own."""
    own = [sys.executable, __file__, f"device={options.device}", *arguments]
    return subprocess.run(own, check=True, capture_output=True, text=True).stdout.split()


def memory(vit: ViT, options: Options) -> str:
    """What one more image in the batch costs an explainer, for every ViT of the paper (random weights)."""
    rows = []
    for model in ("vit_t", "vit_s", "vit_b", "vit_l"):
        cells = [model]
        for method in ("ar", "gradcam", "dap", "attr", "chefer"):  # the last one takes most
            few, many = (float(*apart(options, f"model={model}", f"peak={method}", f"images={n}")) for n in (2, 6))
            cells.append(f"{(many - few) / 4:.0f}")
        rows.append(cells)
    title = "\n## Memory\n\nMiB that each image of a batch adds to the peak of the process, random weights.\n\n"
    measured = title + table(["", "AR", "Grad-CAM", "DAP", "AttR", "Chefer"], rows)
    return measured + "\n" + BATCHES + table(["", "MiB per image", "8 GB", "16 GB", "24 GB"], batches())


BATCHES = """`batch_size=auto` reckons with more than Chefer takes, by the formula of `runner.bytes_per_image`.
With 1.5 GB for CUDA, and the weights three times, it takes in single (in double) precision:

"""


def batches() -> list[list[str]]:
    rows = []
    for model in ("vit_t", "vit_s", "vit_b", "vit_l"):
        vit = ViT(blueprint(compose(f"model={model}").model.tag))
        weights = 4 * sum(parameter.numel() for parameter in vit.model.parameters())
        cells = [model, f"{bytes_per_image(vit) / 2**20:.0f}"]
        for size in (8, 16, 24):
            room = [int((size - 1.5) * 2**30) - copies * weights for copies in (3, 5)]
            single, double = (batch_size_of(vit, double, max(0, free)) for double, free in enumerate(room))
            cells.append(f"{single} ({double})")
        rows.append(cells)
    return rows


def memory_of(vit: ViT, method: str, images: int) -> str:
    """Peak memory of explaining one batch in this process."""
    drawn = pictures(vit, images)
    load_method(method)(vit, drawn, torch.zeros(images, dtype=torch.long, device=drawn.device))
    return f"{peak_memory(vit):.0f}"


def long_run(vit: ViT, options: Options) -> str:
    """Memory and open files of the program itself while it goes through many images, watched from outside."""
    rows, size = [], 32
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"sampler.n={options.long}", f"data.size={options.long}", "metric=[cs,tcc,afs]"]
        arguments += [f"batch_size={size}", f"results_dir={folder}/rows", f"cache_dir={folder}/cache"]
        program = [sys.executable, "-m", "dap_bench", *arguments]
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        status, opened = Path(f"/proc/{process.pid}/status"), Path(f"/proc/{process.pid}/fd")
        while process.poll() is None:
            time.sleep(0.05)
            done = size * len(list(Path(folder).rglob("part-*.parquet")))
            if done >= (len(rows) + 1) * options.long / 10:
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    now = int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024
                    rows.append([f"{done:,}", f"{now:.0f}", str(len(list(opened.iterdir())))])
        if process.returncode:
            raise SystemExit(f"{' '.join(program)} failed")
    title = f"\n## A long run\n\n{options.long:,} images of the bundled default, DAP, batches of {size}.\n\n"
    return title + table(["images done", "memory, MiB", "open files"], rows)


def cost(vit: ViT, options: Options) -> str:
    """FLOPs of methods and metrics in forward passes, and what that means for the paper on some cards."""
    script = Path(__file__).parent / "cost.py"
    found = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout
    about = ast.get_docstring(ast.parse(script.read_text())) or ""
    return f"\n## Cost\n\n{about.split(chr(10), 2)[2]}\n\n{found}"


def download(vit: ViT, options: Options) -> str:
    """Images from a Hub on this machine, with one request at a time and with many."""
    script = Path(__file__).parent / "download.py"
    found = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True).stdout
    return f"\n## Download\n\n{found}"


def precision(vit: ViT, options: Options) -> str:
    """How far scores move when perturbed images are scored in a lower precision."""
    images = pictures(vit, options.images)
    explain, rows = load_method("legrad"), []
    metrics = load_metrics("deletion", "insertion", "tcc")
    full = {name: metric(Batch.of(vit, explain, images)) for name, metric in metrics.items()}
    for reduced in ("tf32", "bf16"):
        lower = ViT(vit.model, reduced)
        for name, metric in metrics.items():
            moved = metric(Batch.of(lower, explain, images)) - full[name]
            rows.append([reduced, name, f"{moved.mean().item():+.5f}", f"{moved.abs().max().item():.5f}"])
    return "\n## Precision\n\nChange of scores against fp32 (tf32 changes nothing on a CPU).\n\n" + table(
        ["precision", "metric", "mean change", "largest change of an image"], rows
    )


if __name__ == "__main__":
    main()
