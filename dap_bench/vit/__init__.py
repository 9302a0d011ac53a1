"""A timm Vision Transformer one can look inside.

tokens.py knows the tokens and what the head reads of them, families.py what differs between timm's blocks, trace.py
looks inside, scoring.py is fast, loading.py finds weights, devices.py places for them; model.py puts them together.
"""

from dap_bench.vit.devices import choose_device, double_of
from dap_bench.vit.loading import load
from dap_bench.vit.model import ViT
from dap_bench.vit.scoring import PRECISIONS
from dap_bench.vit.tokens import Layout
from dap_bench.vit.trace import Trace

__all__ = ["PRECISIONS", "Layout", "Trace", "ViT", "choose_device", "double_of", "load"]
