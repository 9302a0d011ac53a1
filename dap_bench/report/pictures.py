"""Heatmaps over photos."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dap_bench import files
from dap_bench.errors import UserError

COLOURS = "inferno"  # perceptually even, and readable without colour vision
OPACITY = 0.65


def overlay(axes: Axes, photo: np.ndarray, heatmap: np.ndarray | None = None) -> None:
    """Draw a photo, under a heatmap if one is given.

    Args:
        axes: Where to draw.
        photo: The photo [H,W,3] in 0..1.
        heatmap: The heatmap [H,W] in 0..1. Defaults to None.
    """
    if heatmap is None:
        axes.imshow(photo)
    else:
        axes.imshow(photo.mean(2), cmap="gray", vmin=0, vmax=1)
        axes.imshow(heatmap, cmap=COLOURS, vmin=0, vmax=1, alpha=OPACITY)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def grid(
    photo: np.ndarray, rows: Sequence[tuple[str, Sequence[np.ndarray]]], columns: Sequence[str], path: Path
) -> None:
    """Write a PNG with a photo and rows of heatmaps.

    Args:
        photo: The photo [H,W,3] in 0..1.
        rows: For each row its title and its heatmaps [H,W] in 0..1.
        columns: The titles of the columns of heatmaps.
        path: The file to write.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = Figure(figsize=(1.15 * (1 + len(columns)) + 0.3, 1.2 * len(rows) + 0.25), layout=layout, dpi=140)
    axes = figure.subplots(len(rows), 1 + len(columns), squeeze=False)
    for number, (title, heatmaps) in enumerate(rows):
        overlay(axes[number, 0], photo)
        axes[number, 0].set_ylabel(title, fontsize=8)
        for at, heatmap in enumerate(heatmaps, 1):
            overlay(axes[number, at], photo, heatmap)
    for at, name in enumerate(["photo", *columns]):
        axes[0, at].set_title(name, fontsize=9)
    with files.replacing(path) as draft:
        try:
            figure.savefig(draft, format=path.suffix[1:].lower() or "png")
        except ValueError as error:
            raise UserError(
                f"{path} is no picture that can be written: its name should end in .png or .pdf."
            ) from error
