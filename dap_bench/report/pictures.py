"""Heatmaps over photos."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = "inferno"  # perceptually even, and readable without colour vision
OPACITY = 0.65


def overlay(axes: Axes, photo: np.ndarray, heatmap: np.ndarray | None = None) -> None:
    """A photo [H,W,3] in 0..1, under a heatmap [H,W] in 0..1 if one is given."""
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
    """Write a PNG: the photo, and a row of heatmaps for each (title, heatmaps), one for each named column."""
    figure = Figure(figsize=(2.3 * (1 + len(columns)), 2.6 * len(rows)), layout="constrained", dpi=150)
    axes = figure.subplots(len(rows), 1 + len(columns), squeeze=False)
    for number, (title, heatmaps) in enumerate(rows):
        overlay(axes[number, 0], photo)
        axes[number, 0].set_ylabel(title, fontsize=9, wrap=True)
        for at, heatmap in enumerate(heatmaps, 1):
            overlay(axes[number, at], photo, heatmap)
    for at, name in enumerate(["photo", *columns]):
        axes[0, at].set_title(name, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
