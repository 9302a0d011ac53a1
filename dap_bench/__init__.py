"""dap_bench: a benchmark for explainers of Vision Transformers."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see of the names below
    from dap_bench.config import load_method, load_metrics, load_vit
    from dap_bench.errors import UserError
    from dap_bench.explainers.base import Explanation
    from dap_bench.isolation import generator
    from dap_bench.report.summary import summarize
    from dap_bench.vit import ViT

try:
    __version__ = version("dap-bench")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["Explanation", "UserError", "ViT", "generator", "load_method", "load_metrics", "load_vit", "summarize"]

_HOMES = {
    "Explanation": "dap_bench.explainers.base",
    "UserError": "dap_bench.errors",
    "ViT": "dap_bench.vit",
    "generator": "dap_bench.isolation",
    "load_method": "dap_bench.config",
    "load_metrics": "dap_bench.config",
    "load_vit": "dap_bench.config",
    "summarize": "dap_bench.report.summary",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line answers before torch has loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dap_bench' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
