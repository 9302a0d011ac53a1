"""What does it cost? FLOPs of every method and metric in forward passes of the bare model: python scripts/cost.py

Counted per image, by torch's own formulas, on models without weights (torch's meta device): the numbers are the same on
every machine. What is counted is matrix products and convolutions, nearly all of a ViT's work; what sorts, interpolates
and adds is not, nor are ROAD's sparse systems, which SciPy solves. In brackets: how much of it is in double precision,
which consumer GPUs do at 1/64 of the speed.

A backward pass costs a little more than a forward pass, not twice as much: the weights need no gradient.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from dap_bench import ViT, load_method, load_metrics
from dap_bench.app import TOLD
from dap_bench.command import command
from dap_bench.config import choices, compose, sweep
from dap_bench.explainers.base import Explanation
from dap_bench.explainers.rise import CHUNK
from dap_bench.isolation import Given, call, copied
from dap_bench.metrics.base import Batch
from dap_bench.report.markdown import table
from dap_bench.vit import double_of
from dap_bench.vit.loading import blueprint

MODELS = ("vit_t", "vit_s", "vit_b", "vit_l")
META = torch.device("meta")
CARDS = {  # FLOPs a second, as their maker has them: fp32, bf16 on tensor cores (dense, summed in fp32), fp64
    "RTX 3090": (35.6e12, 71e12, 0.556e12),
    "RTX 4090": (82.6e12, 165.2e12, 1.29e12),
    "A100": (19.5e12, 312e12, 9.7e12),
    "H100 SXM": (67e12, 989e12, 34e12),
}
REPEATED = {  # what says how often, and how many are done at a time
    "beyond_intuition": ("steps", 1),
    "integrated_gradients": ("steps", 1),
    "rise": ("samples", CHUNK),
    "smoothgrad": ("samples", 1),
}
aten = torch.ops.aten


@dataclass(frozen=True)
class Cost:
    """Forward passes of the bare model that something is worth."""

    forward: float
    backward: float
    double: float = 0.0  # how much of both is in double precision
    explanations: float = 0  # asked of the method besides, whose cost is its own

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def on(self, next_one: "Cost", steps: float) -> "Cost":
        """The cost as many steps further, when it is `next_one` after the first of them."""
        pairs = [(getattr(self, each.name), getattr(next_one, each.name)) for each in fields(self)]
        return Cost(*(here + steps * (there - here) for here, there in pairs))

    def __str__(self) -> str:
        passes = f"{self.total:,.0f}" if self.total >= 100 else f"{self.total:.2f}"
        double = f" ({self.double:,.0f})" if self.double >= 100 else f" ({self.double:.2f})"
        return passes + (double if self.double >= 0.005 else "")


class Flops(TorchDispatchMode):
    """Counts FLOPs by (backward, double) of what runs within, and answers questions that meta tensors cannot.

    A test for something wrong finds nothing, images are equal to themselves, and what comes to the CPU is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[bool, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if func.namespace == "aten" and _composite(func):  # in inference mode nobody has taken them apart before
            with self:
                return func.decompose(*args, **kwargs)
        found = self._answer(func, args, kwargs) if any(each.is_meta for each in tensors) else NotImplemented
        if found is NotImplemented:
            found = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            backward, double = torch._C._current_graph_task_id() != -1, tensors[0].dtype == torch.float64
            self.counted[backward, double] += flop_registry[func._overloadpacket](*args, **kwargs, out_val=found)
        return found

    @staticmethod
    def _answer(func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            return not hasattr(args[0], "any_of_flags") if args[0].dtype == torch.bool else 1
        if func in (aten.equal.default, aten.allclose.default):
            return True
        if func._overloadpacket is aten.any and args[0].dtype == torch.bool:  # any wrong one; of numbers: any at all
            found = func(*args, **kwargs)
            found.any_of_flags = True
            return found
        if func is aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1]):
            return args[0].new_empty(0, *args[0].shape[1:])  # what is wrong of a batch: nothing
        if func is aten._to_copy.default and kwargs.get("device", META).type == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return NotImplemented

    @property
    def total(self) -> int:
        return sum(self.counted.values())

    def cost(self, unit: int, explanations: int = 0) -> Cost:
        """What was counted, `unit` FLOPs a pass."""
        forward, backward = (sum(self.counted[side, wide] for wide in (False, True)) for side in (False, True))
        double = sum(self.counted[side, True] for side in (False, True))
        return Cost(forward / unit, backward / unit, double / unit, explanations)


@cache
def _composite(func: Any) -> bool:
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit)


@cache
def model(name: str) -> ViT:
    """A model of conf/model without weights."""
    return ViT(blueprint(compose(f"model={name}").model.tag).eval().requires_grad_(False))


def pictures(vit: ViT) -> Tensor:
    return torch.empty(1, 3, *vit.image_size, device=META)


@cache
def unit(name: str) -> int:
    """FLOPs of a forward pass of the bare model."""
    vit = model(name)
    with Flops() as flops, torch.no_grad():
        vit.model(pictures(vit))
    return flops.total


@cache
def method(name: str, of: str, double: bool = False, layers: bool = False) -> Cost:
    """An explanation of one image and class by a method of conf/method; `double` is explain_precision=fp64.

    Methods that repeat themselves are counted once and twice: every further step costs as much as the second.
    """
    if name not in REPEATED:
        return explanation(name, of, double, layers)
    option, step = REPEATED[name]
    once, twice = (explanation(name, of, double, layers, **{option: times * step}) for times in (1, 2))
    return once.on(twice, load_method(name).keywords[option] / step - 1)


def explanation(name: str, of: str, double: bool = False, layers: bool = False, **options: Any) -> Cost:
    """The same with other options, counted as it runs."""
    vit = copied(model(of), double)
    images = double_of(pictures(vit)) if double else pictures(vit)
    given = Given(images, torch.zeros(1, dtype=torch.long, device=META), ["image"], [])
    explain = load_method(name, **options)
    with Flops() as flops:
        call(explain, vit, given, layers)
    return flops.cost(unit(of))


@cache
def metric(name: str, of: str) -> Cost:
    """A metric of conf/metric, besides the pass that finds the predicted class and the explanation of that class."""
    vit, measure = model(of), load_metrics(name)[name]
    needs = getattr(measure, "needs", ())
    asked: list[Tensor] = []  # the classes of each explanation

    def explain(vit: ViT, images: Tensor, classes: Tensor, layers: bool = False) -> Explanation:
        asked.append(classes)
        maps = torch.empty(1, vit.patches, device=META)
        return Explanation(maps, vit.grid, maps[:, None].expand(-1, vit.depth, -1) if layers else None)

    with Flops() as before:
        batch = Batch.of(
            vit,
            explain,
            pictures(vit),
            layers="layers" in needs,
            masks=[torch.ones(vit.image_size, dtype=torch.bool)],
            labels=torch.zeros(1, dtype=torch.long, device=META),
            companions=lambda count: pictures(vit).expand(1, count, -1, -1, -1),
            chunk=128,
        )
    assert before.total <= unit(of), "more than one pass to find the class"
    with Flops() as flops:
        batch.explain_all("alternative" in needs, [measure])
        measure(batch)
    return flops.cost(unit(of), len(asked) - 1)


@cache
def cell(name: str, of: str) -> tuple[float, float]:
    """Forward passes of a cell of metric=paper, per image, and those of them that score an image."""
    vit, measures = model(of), load_metrics("paper")
    with Flops() as flops:
        batch = Batch.of(vit, load_method(name), pictures(vit), layers=True, chunk=128)
        before = flops.total
        batch.explain_all(True, measures.values())
        explaining = flops.total - before
        for measure in measures.values():
            measure(batch)
    return flops.total / unit(of), (flops.total - explaining) / unit(of)


# ---------------------------------------------------------------------- tables


def methods(models: Sequence[str], double: bool = False) -> str:
    """The table of methods, without `maps`, which reads files, and `oracle`, which is told."""
    names = [name for name in choices("method") if name not in TOLD]
    rows = [[f"`{name}`", *(str(method(name, of, double)) for of in models)] for name in names]
    return table(["method", *models], rows, right=True)


def metrics(models: Sequence[str]) -> str:
    """The table of metrics: passes, and E for each explanation that is asked of the method besides."""

    def cell(cost: Cost) -> str:
        return f"{cost} + {cost.explanations:g} E" if cost.explanations else str(cost)

    rows = [[f"`{name}`", *(cell(metric(name, of)) for of in models)] for name in load_metrics("all")]
    return table(["metric", *models], rows, right=True)


def cards(images: int = 800) -> str:
    """Hours of experiment=paper at the rates that makers publish: no program reaches them, a half is good."""
    scoring = explaining = 0.0
    for cell in sweep("experiment=paper"):
        asked = dict(part.split("=") for part in cell)
        of, name = asked["model"], asked["method"]
        passes = 1 + sum(metric(each, of).total for each in ("deletion", "insertion", "tcc"))
        references = sum(metric(each, of).total for each in ("lda", "lda_prior"))
        explained = method(name, of, layers=True).total + method(name, of).total + references
        scoring += images * passes * unit(of)
        explaining += images * explained * unit(of)
    rows = []
    for card, (single, half, double) in CARDS.items():
        hours = [scoring / a + explaining / b for a, b in ((single, single), (half, single), (half, double))]
        rows.append(
            [card, *(f"{rate / 1e12:g}" for rate in (single, half, double)), *(f"{x / 3600:.2f}" for x in hours)]
        )
    header = ["card", "fp32", "bf16", "fp64", "all in fp32", "`precision=bf16`", "and `explain_precision=fp64`"]
    passes = f"{(scoring + explaining) / 1e15:,.0f}"
    return f"{passes} PFLOPs; rates in TFLOPS, hours at these rates:\n\n" + table(header, rows, right=True)


@command()
def main(
    models: Annotated[tuple[str, ...], "of conf/model"] = MODELS,
    double: Annotated[bool, "explain in double precision, as explain_precision=fp64 does"] = False,
) -> None:
    sizes = ", ".join(f"{of} {unit(of) / 1e9:.2f}" for of in models)
    print(f"GFLOPs of a forward pass: {sizes}.\n")
    print(methods(models, double))
    print(metrics(models))
    print(f"The paper, `experiment=paper`: {cards()}")


if __name__ == "__main__":
    main()
