"""An explainer for tests of failure: Grad-CAM that does not like dark pictures."""

from dap_bench.explainers.gradcam import gradcam

TOO_DARK = 0.0


def picky(vit, images, classes, layers=False, **options):
    if (images.mean((1, 2, 3)) < TOO_DARK).any():
        raise ValueError("this picture is too dark")
    return gradcam(vit, images, classes, layers, **options)
