"""What several tests need: the methods that look at the model, and one that does not like dark pictures."""

from dap_bench import config
from dap_bench.explainers.gradcam import gradcam

TOO_DARK = 0.0
CONTROLS = [name for name in config.choices("method") if "controls" in config.compose(f"method={name}").method._target_]
EXPLAINERS = [name for name in config.choices("method") if name not in (*CONTROLS, "maps")]


def picky(vit, images, classes, layers=False, **options):
    if (images.mean((1, 2, 3)) < TOO_DARK).any():
        raise ValueError("this picture is too dark")
    return gradcam(vit, images, classes, layers, **options)
