"""The paper's tables as data: which rows and columns, in which order, under which names.

Methods and models that are not listed here are shown by their names, after the listed ones; the summary and the page
show every metric.
"""

from dataclasses import dataclass

LABELS = {
    "vit_t": "ViT-T",
    "vit_s": "ViT-S",
    "vit_b": "ViT-B",
    "vit_l": "ViT-L",
    "vit_shapes": "ViT-shapes",
    "ar": "AR",
    "attr": "AttR",
    "chefer": "Chefer",
    "gmar": "GMAR",
    "gradcam": "Grad-CAM",
    "cdam": "CDAM",
    "agcam": "AGCAM",
    "legrad": "LeGrad",
    "dap": "DAP",
    "dap_uniform": "Uniform",
    "dap_source": "Source-only",
    "dap_target": "Target-only",
    "dap_final": "Final-only",
    "deletion": "Del",
    "insertion": "Ins",
    "cs": "CS",
    "tcc": "TCC",
    "afs": "AFS",
    "lda": "LDA",
    "lda_prior": "LDA (prior)",
    "abpc": "ABPC",
    "pointing": "Pointing",
    "mass_inside": "Mass inside",
    "balanced": "Balanced",
    "non_balanced": "Non-balanced",
}
MODELS = ("vit_t", "vit_s", "vit_b", "vit_l")
SAMPLERS = ("balanced", "non_balanced")
METHODS = ("ar", "attr", "chefer", "gmar", "gradcam", "cdam", "agcam", "legrad", "dap")
ABLATION = ("dap_uniform", "dap_target", "dap_final", "dap")
METRICS = ("deletion", "insertion", "cs", "tcc", "afs", "lda")


@dataclass(frozen=True)
class Layout:
    """One table: models and methods down, samplings and metrics across."""

    caption: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    models: tuple[str, ...] = MODELS
    samplers: tuple[str, ...] = SAMPLERS
    open: bool = True  # are methods and models of one's own added


TABLES = {
    "table1": Layout("DAP and attention-based explainers.", ("ar", "attr", "chefer", "gmar", "dap"), METRICS),
    "table2": Layout(
        "How the decision prior enters propagation.",
        ABLATION,
        ("cs", "tcc", "lda_prior", "afs"),
        samplers=("balanced",),
        open=False,
    ),
    "table3": Layout("DAP and gradient-based explainers.", ("gradcam", "cdam", "agcam", "legrad", "dap"), METRICS[:5]),
    "tableA1": Layout(
        "DAP, GMAR and Grad-CAM.", ("gmar", "gradcam", "dap"), METRICS[:5], samplers=("balanced",), open=False
    ),
}


def label(name: str) -> str:
    return LABELS.get(name, name)


def ordered(found: set[str], listed: tuple[str, ...]) -> list[str]:
    """The names of `found`: the listed ones in their order, then the others by name."""
    return [name for name in dict.fromkeys(listed) if name in found] + sorted(found - set(listed))
