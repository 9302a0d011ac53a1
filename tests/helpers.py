"""What several tests need: the methods that look at the model, and one that does not like dark pictures."""

from dap_bench import config, load_method
from dap_bench.explainers.gradcam import gradcam
from dap_bench.report.layouts import group

TOO_DARK = 0.0
CONTROLS = [name for name in config.choices("method") if group(name) == "control"]
EXPLAINERS = [name for name in config.choices("method") if name not in (*CONTROLS, "maps")]
PIXELS = ("attnlrp", "input_x_gradient", "integrated_gradients", "rise", "smoothgrad")  # maps of pixels, no layers
FEW = {  # steps that are enough where only properties are looked at
    "beyond_intuition": {"steps": 3},
    "integrated_gradients": {"steps": 3},
    "rise": {"samples": 40, "cells": 3},
    "smoothgrad": {"samples": 3},
}


def quick(name, **options):
    """A shipped method, with few steps where it has steps."""
    return load_method(name, **{**FEW.get(name, {}), **options})


def picky(vit, images, classes, layers=False, **options):
    if (images.mean((1, 2, 3)) < TOO_DARK).any():
        raise ValueError("this picture is too dark")
    return gradcam(vit, images, classes, layers, **options)
