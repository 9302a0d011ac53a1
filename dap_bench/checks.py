"""What an audit measures of a method, one function per question; each gives a value, a verdict and what it means.

    change(a, b) = max_j |a_j - b_j| / (max a - min a)             0: the same map, 1: moved by its whole range
    rho(a, b)    = Spearman's rank correlation over patches        1: the same order of patches, 0: an unrelated one

Both are per image. The method is called as in a benchmark run (`isolation.explained`), on a fresh copy of the model
every time, except for questions about its own behaviour: whether it gives the same map twice, what it leaves behind and
what it costs. Those call it bare.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from dap_bench.errors import UserError
from dap_bench.evaluation import failure
from dap_bench.explainers.ar import ar
from dap_bench.explainers.base import checked
from dap_bench.isolation import Given, altered, call, copied, explained, generator, global_state, switches
from dap_bench.metrics.base import spearman
from dap_bench.metrics.randomisation import shuffle
from dap_bench.vit import ViT, double_of

ROUNDING = 1e-3  # change of a map that single precision may make
EXACT = 1e-6  # change that double precision may make
DIGIT = 1e-8  # of an input, far below what an image can hold
FLAT = 1e-6  # range of a map, as a share of its largest value, up to which it is constant
MUCH = 10  # times what AR takes
REPEATS = 3  # of which the fastest counts

Found = tuple[str, str, str]  # what was measured; pass, fail or note; what that means


class Undefined(Exception):
    """A question that has no answer for these maps."""


@dataclass(frozen=True)
class Check:
    """One line of an audit.

    Attributes:
        name: What was asked.
        value: What was found, in a word.
        verdict: pass, note or fail.
        says: The same in a sentence.
    """

    name: str
    value: str
    verdict: str
    says: str


class Subject:
    """A method on some images, with the classes that the model gives them."""

    def __init__(
        self, explain: Callable[..., Any], vit: ViT, given: Given, runner_up: Tensor, yardstick: "Yardstick"
    ) -> None:
        self.explain, self.vit, self.given, self.runner_up = explain, vit, given, runner_up
        self.yardstick = yardstick

    def maps(self, vit: ViT | None = None, double: bool = False, given: Given | None = None) -> Tensor:
        """Maps as a benchmark run has them, of this model and these images or of others.

        Args:
            vit: A model in place of the subject's. Defaults to None.
            double: Explain in double precision. Defaults to False.
            given: Images and classes in place of the subject's. Defaults to None.

        Returns:
            Maps [n,P] in double precision, on the CPU.
        """
        given = given or self.given
        images = double_of(given.images) if double else given.images
        twin = copied(vit or self.vit, double)
        found = explained(self.explain, twin, images, given.classes, given.ids, masks=given.masks)
        return double_of(found.maps).cpu()

    def bare(self) -> Tensor:
        """Maps as the method gives them when nobody seeds its random numbers."""
        found = call(self.explain, copied(self.vit), self.given)
        return double_of(checked(found, self.vit.grid, self.given.images).maps).cpu()

    @cached_property
    def alone(self) -> Tensor:
        """Maps made one by one; NaN where a map is not finite."""
        rows: list[Tensor | None] = []
        for at in range(len(self.given.ids)):
            try:
                rows.append(self.maps(given=self.given.of(at))[0])
            except ValueError as error:
                if "not finite" not in str(error):
                    raise
                rows.append(None)
        size = next((len(row) for row in rows if row is not None), 1)
        return torch.stack([torch.full((size,), torch.nan).double() if row is None else row for row in rows])

    @cached_property
    def finite(self) -> "Subject":
        """The same on the images whose maps are finite."""
        kept = self.alone.isfinite().all(1)
        places = kept.nonzero().flatten().tolist()
        if not places:
            raise Undefined("no image has a finite map")
        if kept.all():
            return self
        given = self.given
        ids, masks = ([values[at] for at in places] if values else [] for values in (given.ids, given.masks))
        some = Given(given.images[places], given.classes[places], ids, masks)
        return Subject(self.explain, self.vit, some, self.runner_up[places], self.yardstick)

    @cached_property
    def batched(self) -> Tensor:
        """Maps made in one batch."""
        return self.maps()

    @cached_property
    def in_double(self) -> Tensor:
        """Maps made in one batch, in double precision."""
        return self.maps(double=True)

    @cached_property
    def cost(self) -> "Cost":
        """What explaining these images costs."""
        twin = copied(self.vit)
        return cost(lambda: call(self.explain, twin, self.given), self.given)


def change(a: Tensor, b: Tensor) -> Tensor:
    """How far maps moved, as a share of their range.

    Args:
        a: Maps [n,P].
        b: Other maps of the same images [n,P].

    Returns:
        The largest difference of each map, divided by the range of `a` [n].
    """
    span = a.amax(1) - a.amin(1)
    return (a - b).abs().amax(1) / torch.where(span > 0, span, 1)


def _rho(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlations of the images for which there is one."""
    values = spearman(a, b)
    values = values[~values.isnan()]
    if not len(values):
        raise Undefined("a constant map has no order of patches")
    return values


# ---------------------------------------------------------------------- the questions


def finite(subject: Subject) -> Found:
    """Are the maps made of finite numbers?

    Args:
        subject: The method and its images.

    Returns:
        The number of images with a finite map, the verdict, and what it means.
    """
    good = subject.alone.isfinite().all(1)
    value = f"{int(good.sum())}/{len(good)}"
    if good.all():
        return value, "pass", "all maps are finite"
    return value, "fail", "some maps hold NaN or infinity; their images would be failed rows"


def varies(subject: Subject) -> Found:
    """Do the maps differ from place to place?

    Args:
        subject: The method and its images.

    Returns:
        The number of images whose map is not constant, the verdict, and what it means.
    """
    maps = subject.finite.alone
    flat = maps.amax(1) - maps.amin(1) <= FLAT * maps.abs().amax(1)
    value = f"{int((~flat).sum())}/{len(flat)}"
    if not flat.any():
        return value, "pass", "no map is constant"
    if flat.double().mean() <= 0.5:
        return value, "note", "some maps are constant: metrics rank their pixels by position alone"
    return value, "fail", "most maps are constant: metrics would rank pixels by position alone"


def batch(subject: Subject) -> Found:
    """Is an image's map the same whatever batch it comes in?

    Args:
        subject: The method and its images.

    Returns:
        The largest change of a map between batches, the verdict, and what it means.
    """
    value = _apart(subject.finite, double=False)
    if value <= ROUNDING:
        return _small(value), "pass", "the same maps one by one, in a batch and in another order"
    exact = _apart(subject.finite, double=True)
    if exact <= EXACT:
        return _small(value), "pass", f"rounding only: in double precision the difference is {_small(exact)}"
    return _small(value), "fail", "an image's map depends on its batch: rows would not be reproducible"


def _apart(subject: Subject, double: bool) -> float:
    """The largest change between one by one, a batch, and the batch in reverse."""
    given = subject.given
    reverse = Given(given.images.flip(0), given.classes.flip(0), given.ids[::-1], given.masks[::-1])
    turned = subject.maps(double=double, given=reverse).flip(0)
    if double:
        whole, one_by_one = subject.in_double, [subject.maps(None, True, given.of(at)) for at in range(len(given.ids))]
        return max(change(whole, other).max().item() for other in (torch.cat(one_by_one), turned))
    return max(change(subject.batched, other).max().item() for other in (subject.alone, turned))


def twice(subject: Subject) -> Found:
    """Are the maps the same when the method is called again?

    Args:
        subject: The method and its images.

    Returns:
        The largest change of a map between two calls, the verdict, and what it means.
    """
    with global_state():
        value = change(subject.finite.bare(), subject.finite.bare()).max().item()
    if value <= EXACT:
        return _small(value), "pass", "the same maps when it is called again"
    remedy = "draw from dap_bench.generator(id) for each of its `ids`"
    return _small(value), "fail", f"other maps when it is called again; if it draws random numbers, {remedy}"


def of_class(subject: Subject) -> Found:
    """Does the map depend on the class?

    Args:
        subject: The method and its images.

    Returns:
        CS of the predicted class and the runner-up, the verdict, and what it means.
    """
    subject = subject.finite
    other = subject.maps(given=replace(subject.given, classes=subject.runner_up))
    if torch.equal(subject.batched, other):
        return "0", "note", "the map does not depend on the class: it cannot explain a decision between two"
    value = (1 - _rho(subject.batched, other).mean().item()) / 2
    if value < 0.005:
        return f"{value:.3f}", "note", "CS of the runner-up: the class hardly changes the order of patches"
    return f"{value:.3f}", "pass", "CS of the runner-up: the map depends on the class (0: same order, 1: opposite)"


def head(subject: Subject) -> Found:
    """Does the map depend on the head's weights?

    Args:
        subject: The method and its images.

    Returns:
        The rank correlation with the maps of a model with a shuffled head, the verdict, and what it means.
    """
    value = _of_weights(subject.finite, "head")
    if value > 0.99:
        return f"{value:.2f}", "note", "rank correlation with the head's weights shuffled: it hardly uses the head"
    return f"{value:.2f}", "pass", "rank correlation with the head's weights shuffled: it depends on them"


def blocks(subject: Subject) -> Found:
    """Does the map depend on the blocks' weights?

    Args:
        subject: The method and its images.

    Returns:
        The rank correlation with the maps of a model with shuffled blocks, the verdict, and what it means.
    """
    value = _of_weights(subject.finite, "blocks")
    if value > 0.5:
        return f"{value:.2f}", "note", "rank correlation with the blocks' weights shuffled: much of it is not learned"
    return f"{value:.2f}", "pass", "rank correlation with the blocks' weights shuffled: it depends on them"


def _of_weights(subject: Subject, part: str) -> float:
    return _rho(subject.batched, subject.maps(shuffled(subject.vit, part))).mean().item()


def shuffled(vit: ViT, part: str) -> ViT:
    """A copy of a model with the numbers of each weight of its head or its blocks in another order.

    Their sizes stay as they are and what was learned goes, so such a model neither explodes nor says nothing.

    Args:
        vit: The model; it is not changed.
        part: What is shuffled: head or blocks.

    Returns:
        The copy.
    """
    twin, random = copied(vit), torch.Generator().manual_seed(0)
    heads = twin.model.get_classifier()
    modules = twin.blocks if part == "blocks" else heads if isinstance(heads, tuple | list) else [heads]
    for module in modules:
        for parameter in module.parameters():
            shuffle(parameter, random)
    return twin


def precision(subject: Subject) -> Found:
    """Is single precision enough?

    Args:
        subject: The method and its images.

    Returns:
        The lowest rank correlation of float32 with float64 maps, the verdict, and what it means.
    """
    value = _rho(subject.finite.batched, subject.finite.in_double).min().item()
    if value < 0.99:
        return f"{value:.3f}", "note", "lowest rank correlation of float32 with float64: use explain_precision=fp64"
    return f"{value:.3f}", "pass", "lowest rank correlation of float32 with float64: single precision is enough"


def digit(subject: Subject) -> Found:
    """Does the map stay when only the last digits of the pixels change?

    Args:
        subject: The method and its images.

    Returns:
        The largest change of a map in double precision, the verdict, and what it means.
    """
    subject = subject.finite
    images = double_of(subject.given.images)
    moved = replace(subject.given, images=images + DIGIT * _signs(subject.given, "digit").to(images))
    value = change(subject.in_double, subject.maps(double=True, given=moved)).max().item()
    if value > ROUNDING:
        return _small(value), "note", f"change of the map when pixels change by {DIGIT:.0e}: rounding decides it"
    return _small(value), "pass", f"change of the map when pixels change by {DIGIT:.0e}, in double precision"


def leaves_alone(subject: Subject) -> Found:
    """Are the model, the images and torch's global state as before?

    Args:
        subject: The method and its images.

    Returns:
        Yes or no, the verdict, and what was changed.
    """
    subject = subject.finite
    vit, given = copied(subject.vit), subject.given
    changed: dict[str, bool] = {}

    @wraps(subject.explain)
    def watched(vit: ViT, images: Tensor, classes: Tensor, **options: Any) -> Any:
        found = subject.explain(vit, images, classes, **options)
        changed["its images"] = not (torch.equal(images, given.images) and torch.equal(classes, given.classes))
        return found

    with global_state() as untouched:
        before = switches()
        call(watched, vit, given)
        changed["torch's settings"] = switches() != before
        changed["the state of random numbers"] = not untouched()
    changed["the model"] = altered(vit, subject.vit)
    names = [name for name, is_so in changed.items() if is_so]
    if not names:
        return "yes", "pass", "the model, the images and torch's global state are as before"
    return "no", "note", f"it changes {' and '.join(names)}; harmless here, where methods work on copies"


def shift(subject: Subject) -> Found:
    """Does the map stay when the picture moves by one pixel?

    Args:
        subject: The method and its images.

    Returns:
        The rank correlation with the maps of the moved images, the verdict, and what it means.
    """
    images = subject.finite.given.images
    return _moved(subject.finite, torch.cat([images[..., :1], images[..., :-1]], -1), "the picture moves by one pixel")


def noise(subject: Subject) -> Found:
    """Does the map stay when each pixel changes by the least that a file can hold?

    Args:
        subject: The method and its images.

    Returns:
        The rank correlation with the maps of the changed images, the verdict, and what it means.
    """
    given, vit = subject.finite.given, subject.vit
    step = (vit.normalised(1 / 255) - vit.normalised(0.0)).to(given.images)
    return _moved(
        subject.finite, given.images + step * _signs(given, "noise").to(given.images), "pixels change by 1/255"
    )


def _moved(subject: Subject, images: Tensor, what: str) -> Found:
    maps = subject.maps(given=replace(subject.given, images=images))
    value, size = _rho(subject.batched, maps).mean().item(), change(subject.batched, maps).mean().item()
    says = f"rank correlation when {what}; values change by up to {size:.0%} of their range"
    return f"{value:.2f}", "note" if value < 0.9 else "pass", says


def _signs(given: Given, what: str) -> Tensor:
    """+1 or -1 for every number of every image, the same whenever it is asked for."""
    shape = given.images.shape[1:]
    draws = [torch.randint(0, 2, shape, generator=generator(f"{name}/{what}")) for name in given.ids]
    return 2.0 * torch.stack(draws) - 1.0


def seconds(subject: Subject) -> Found:
    """How long does it take, in forward passes?

    Args:
        subject: The method and its images.

    Returns:
        The time in forward passes, the verdict, and what it means.
    """
    mine, forward, theirs = subject.finite.cost, subject.yardstick.forward, subject.yardstick.rollout
    passes, beside = mine.seconds / forward.seconds, theirs.seconds / forward.seconds
    says = f"time in forward passes, {1000 * mine.seconds:.1f} ms per image; AR takes {beside:.1f}"
    return f"{passes:.1f}", "note" if passes > MUCH * beside else "pass", says


def memory(subject: Subject) -> Found:
    """How much memory does it take, in forward passes?

    Args:
        subject: The method and its images.

    Returns:
        The peak memory in forward passes, the verdict, and what it means.
    """
    mine, forward, theirs = subject.finite.cost.bytes, subject.yardstick.forward.bytes, subject.yardstick.rollout.bytes
    if mine is None or forward is None or theirs is None:
        return "-", "note", "this device does not say how much memory is in use"
    says = f"memory in forward passes, {mine / 2**20:.1f} MiB per image; AR takes {theirs / forward:.1f}"
    return f"{mine / forward:.1f}", "note" if mine > MUCH * theirs else "pass", says


# ---------------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of a call, per image."""

    seconds: float
    bytes: float | None  # None where the device does not say


@dataclass(frozen=True)
class Yardstick:
    """What a forward pass and AR cost on the same images."""

    forward: Cost
    rollout: Cost

    @classmethod
    def of(cls, vit: ViT, given: Given) -> "Yardstick":
        """Measure what a forward pass and AR cost.

        Args:
            vit: The model.
            given: The images and classes.

        Returns:
            Both costs, per image.
        """
        twin = copied(vit)
        return cls(
            cost(lambda: twin.score(given.images), given),
            cost(lambda: call(ar, twin, given), given),
        )


def cost(function: Callable[[], object], given: Given) -> Cost:
    """The fastest of some calls, and the memory that one needs on top of what was there.

    Args:
        function: The call to measure, without arguments.
        given: The images it works on: they say how many there are, and on which device.

    Returns:
        Seconds and bytes per image.
    """
    images, device, taken = len(given.ids), given.images.device, []
    with global_state():
        for _ in range(REPEATS):
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
            taken.append(time.perf_counter() - start)
        peak = _peak(function, device)
    return Cost(min(taken) / images, None if peak is None else peak / images)


def _peak(function: Callable[[], object], device: torch.device) -> int | None:
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks to the terminal
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    recorded: Any = profile.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# ---------------------------------------------------------------------- all of them

QUESTIONS: dict[str, Callable[[Subject], Found]] = {
    "finite": finite,
    "varies": varies,
    "batch": batch,
    "twice": twice,
    "class": of_class,
    "head": head,
    "blocks": blocks,
    "fp64": precision,
    "digit": digit,
    "alone": leaves_alone,
    "shift": shift,
    "noise": noise,
    "time": seconds,
    "memory": memory,
}
HARD = ("finite", "varies", "batch", "twice")  # without these no row means anything
LEGEND = {
    "finite": "images whose map is made of numbers",
    "varies": "images whose map is not constant",
    "batch": "largest change of a map between one by one, a batch and the batch in reverse, as a share of its range",
    "twice": "largest change of a map when the method is called again",
    "class": "CS: (1 - rank correlation of the maps of the predicted class and the runner-up) / 2",
    "head": "rank correlation with the map when the head's weights are shuffled",
    "blocks": "rank correlation with the map when the weights of all blocks are shuffled",
    "fp64": "lowest rank correlation of the float32 with the float64 map",
    "digit": f"largest change of the float64 map when every pixel changes by {DIGIT:.0e}",
    "alone": "whether the model, the images and torch's global state are left alone",
    "shift": "rank correlation with the map when the picture moves by one pixel",
    "noise": "rank correlation with the map when every pixel changes by 1/255",
    "time": "time on the batch, in forward passes of it",
    "memory": "peak memory on the batch, in forward passes of it",
}


def audit(subject: Subject, tick: Callable[[str], object] = lambda name: None) -> list[Check]:
    """Run all checks of a method.

    Args:
        subject: The method and its images.
        tick: A function that is told the name of each check before it begins. Defaults to one that does nothing.

    Returns:
        One line per check, in the order of `QUESTIONS`.

    Raises:
        UserError: If the method cannot explain the images at all.
    """
    found = []
    for name, question in QUESTIONS.items():
        tick(name)
        try:
            value, verdict, says = question(subject)
        except Exception as error:
            reason = str(error) if isinstance(error, UserError | Undefined) else failure(error)["reason"]
            if name == "finite":  # nothing else could be asked
                raise UserError(f"these images cannot be explained: {reason}") from error
            verdict = "fail" if name in HARD and not isinstance(error, Undefined) else "note"
            value, says = "-", f"not measured: {reason}"
        found.append(Check(name, value, verdict, says))
    return found


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}" if value < 0.01 else f"{value:.2f}"
