"""Figures of the paper, from rows: curves with bands, ranks, layer-wise maps, best and worst cases.

Curves are columns that runs with keep_curves=true have. Only the pictures of single images run a model again, for the
few images they show.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from scipy.stats import rankdata, studentized_range

from dap_bench import files
from dap_bench.report.layouts import group, label, ordered
from dap_bench.report.pictures import overlay
from dap_bench.report.rows import CellRows
from dap_bench.report.summary import REFERENCE, SEED

# Okabe and Ito's colours, told apart without colour vision, with wine for their yellow, which white paper swallows
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999", "#882255")
STYLES = ("-", "--", "-.", ":")
CURVES = (  # the column of rows with keep_curves=true, and how its figure is titled
    ("deletion_curve", "Deletion", "share of pixels removed", "p(y)"),
    ("insertion_curve", "Insertion", "share of pixels inserted", "p(y)"),
    ("afs_curve", "Saliency mass", "fraction of pixels, most relevant first", "share of the mass"),
    ("lda_curve", "Alignment by layer", "layer", "rank correlation"),
)
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (Rec. 601)
FONT: Any = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42}


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PDF and PNG, without a date in it, so that the same rows give the same bytes.

    Args:
        figure: The figure.
        path: The files to write, without suffix.

    Returns:
        The files written.
    """
    kinds: dict[str, Any] = {
        "pdf": {"metadata": {"CreationDate": None}},
        "png": {"metadata": {"Software": None}, "dpi": 200},
    }
    written = [path.with_name(f"{path.name}.{kind}") for kind in kinds]  # a model's name may have dots
    for file, (kind, options) in zip(written, kinds.items(), strict=True):
        with files.replacing(file) as draft:
            figure.savefig(draft, format=kind, **options)
    return written


def style(names: Sequence[str], name: str, reference: str = REFERENCE) -> dict[str, Any]:
    """The same colour and line for a method in every figure of the same methods; the reference is thick and red.

    Args:
        names: The methods of the figure, in order.
        name: The method.
        reference: The method to stand out. Defaults to "dap".

    Returns:
        Options of matplotlib's `plot`.
    """
    if name == reference:
        return {"color": COLOURS[1], "linestyle": "-", "linewidth": 2.2, "zorder": 5}
    others = [each for each in names if each != reference]
    colours = [colour for colour in COLOURS if colour != COLOURS[1]]
    at = others.index(name)
    return {
        "color": colours[at % len(colours)],
        "linestyle": STYLES[(at + at // len(colours)) % len(STYLES)],
        "linewidth": 1.2,
    }


# ---------------------------------------------------------------------- curves


def curves(cells: list[CellRows], path: Path, reference: str = REFERENCE) -> list[Path]:
    """Deletion, insertion, cumulative saliency mass and alignment by layer of one model's methods, with 95 % bands.

    Args:
        cells: The cells of one model and sampling.
        path: The files to write, without suffix.
        reference: The method to stand out. Defaults to "dap".

    Returns:
        The files written; none if the rows have no curves.
    """
    names = ordered({cell.names["method"] for cell in cells})
    shown = {cell.names["method"]: label(cell.names["method"]) + cell.mark for cell in cells}
    drawn = panels(cells)
    if not drawn:
        return []
    with rc_context(FONT):
        columns = min(2, len(drawn))
        rows = -(-len(drawn) // columns)
        figure = Figure(figsize=(3.4 * columns, 2.3 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, drawn, strict=False):
            for name in names:
                if name in panel["bands"]:
                    mean, low, high = panel["bands"][name]
                    look = style(names, name, reference)
                    axes.plot(panel["x"], mean, label=shown[name], **look)
                    axes.fill_between(panel["x"], low, high, color=look["color"], alpha=0.15, linewidth=0)
            axes.set(title=panel["title"], xlabel=panel["across"], ylabel=panel["up"])
            if panel["across"] == "layer":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in grid[len(drawn) :]:
            axes.set_visible(False)
        handles: dict[str, Any] = {}
        for axes in grid:
            handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        texts = [shown[name] for name in names if shown[name] in handles]
        figure.legend(
            [handles[text] for text in texts],
            texts,
            loc="outside lower center",
            ncols=5,
            frameon=False,
        )
        return save(figure, path)


def panels(cells: list[CellRows]) -> list[dict[str, Any]]:
    """The curves that rows have.

    Args:
        cells: The cells of one model and sampling.

    Returns:
        For each kind of curve its `title`, the axes (`across`, `up`), `x` [points], and in `bands` each method's mean
        with its band [3,points].
    """
    found = []
    for column, title, across, up in CURVES:
        kept = {cell.names["method"]: _column(cell, column) for cell in cells}
        bands = {name: band(values) for name, values in kept.items() if values is not None}
        if bands:
            points = next(iter(bands.values())).shape[1]
            x = np.arange(1, points + 1) if across == "layer" else np.linspace(0, 1, points)
            same = {name: each for name, each in bands.items() if each.shape[1] == points}
            found.append({"title": title, "across": across, "up": up, "x": x, "bands": same})
    return found


def band(values: np.ndarray) -> np.ndarray:
    """Mean curve and its 95 % bootstrap interval.

    Args:
        values: The curves [images,points]; NaN is left out.

    Returns:
        Mean, lower and upper bound [3,points].
    """
    known = ~np.isnan(values)
    filled, draws = np.where(known, values, 0.0), _draws(len(values))
    with np.errstate(invalid="ignore"):
        bounds = np.nanpercentile(draws @ filled / (draws @ known), [2.5, 97.5], axis=0)
        return np.stack([filled.sum(0) / known.sum(0), *bounds])


@lru_cache(maxsize=2)
def _draws(count: int) -> np.ndarray:
    """How often each of so many images is in each resample: 2000 of them, or fewer where memory would not do."""
    random = np.random.default_rng(SEED)
    return random.multinomial(count, np.full(count, 1 / count), min(2000, 10**7 // count + 1)).astype(float)


def _column(cell: CellRows, name: str) -> np.ndarray | None:
    """A list column as [images, points], or None where the rows do not have it."""
    if name not in cell.rows:
        return None
    kept = [values for values in cell.rows[name] if values is not None and np.ndim(values) == 1]
    return np.array(kept, dtype=float) if kept else None


# ---------------------------------------------------------------------- ranks


def ranks(cells: list[CellRows], path: Path) -> list[Path]:
    """Mean rank of the methods over images, per metric, with Nemenyi's critical difference (5 %).

    Args:
        cells: The cells of one model and sampling.
        path: The files to write, without suffix.

    Returns:
        The files written; none if there is nothing to rank.
    """
    metrics = ordered({metric for cell in cells for metric in cell.info["metrics"]})
    names = ordered({cell.names["method"] for cell in cells})
    drawn = [(metric, *found) for metric in metrics if (found := mean_ranks(cells, metric)) is not None]
    if not drawn:
        return []
    marks = {cell.names["method"]: cell.mark for cell in cells}
    with rc_context(FONT):
        columns = min(3, len(drawn))
        rows = -(-len(drawn) // columns)
        figure = Figure(figsize=(2.4 * columns, rows * (0.9 + 0.17 * len(names))), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (metric, found, difference, count) in zip(panels, drawn, strict=False):
            best_last = found.sort_values(ascending=False)
            y = np.arange(len(best_last))
            colours = [style(names, name)["color"] for name in best_last.index]
            axes.hlines(
                y, best_last - difference / 2, best_last + difference / 2, color=colours, linewidth=3, alpha=0.4
            )
            axes.scatter(best_last, y, color=colours, s=16, zorder=3)
            axes.set_yticks(y, [label(name) + marks[name] for name in best_last.index])
            axes.set_ylim(-0.5, len(y) - 0.5)
            axes.set(title=f"{label(metric)}, {count} images", xlabel="mean rank (1 is best)")
        for axes in panels[len(drawn) :]:
            axes.set_visible(False)
        return save(figure, path)


def mean_ranks(cells: list[CellRows], metric: str) -> tuple[pd.Series, float, int] | None:
    """Mean rank of each method, on the images that all of them have.

    Two methods whose mean ranks differ by more than the critical difference differ at the 5 % level (Nemenyi).

    Args:
        cells: The cells of one model and sampling.
        metric: The metric.

    Returns:
        Mean ranks by method (1 is best), the critical difference, and the number of images; None for fewer than two
        methods or images.
    """
    having = [cell for cell in cells if metric in cell.info["metrics"]]
    columns = {cell.names["method"]: cell.values(metric) for cell in having}
    table = pd.DataFrame({name: values for name, values in columns.items() if values.notna().any()}).dropna()
    if table.shape[1] < 2 or len(table) < 2:
        return None
    sign = 1 if having[0].info["metrics"][metric] == "lower" else -1
    found = pd.Series(rankdata(sign * table.to_numpy(), axis=1).mean(0), index=table.columns)
    k = table.shape[1]
    q = studentized_range.ppf(0.95, k, np.inf) / sqrt(2)
    return found, float(q * sqrt(k * (k + 1) / (6 * len(table)))), len(table)


# ---------------------------------------------------------------------- all of it


def matrix(table: pd.DataFrame, path: Path) -> list[Path]:
    """A line per method, a column per metric: the mean, on a colour for its rank.

    Dark is the best of the methods, controls not counted. Grey and in italics is what these images cannot tell from a
    random map.

    Args:
        table: The lines of one model and sampling from `summarize`.
        path: The files to write, without suffix.

    Returns:
        The files written.
    """
    table = table[table["mean"].notna()]
    methods = ordered(set(table["method"]))
    kinds = list(dict.fromkeys(sorted(map(group, methods), key=("ablation", "control").__contains__)))
    methods.sort(key=lambda name: kinds.index(group(name)))
    metrics = ordered(set(table["metric"]))
    lines = table.set_index(["method", "metric"])
    colours = colormaps["viridis_r"]
    with rc_context(FONT):
        figure = Figure(figsize=(1.3 + 0.35 * len(metrics), 1.1 + 0.19 * len(methods)), layout="constrained")
        axes = figure.subplots()
        for column, metric in enumerate(metrics):
            having = [method for method in methods if (method, metric) in lines.index]
            proper = [method for method in having if group(method) != "control"]
            sign = 1 if lines.loc[(having[0], metric), "better"] == "lower" else -1
            values = np.array([sign * lines.loc[(method, metric), "mean"] for method in proper])
            for method in having:
                line = lines.loc[(method, metric)]
                share = float((values < sign * line["mean"]).mean()) if len(values) else 0.0  # that are better
                row = methods.index(method)
                like_random = line["like_random"] is True and method != "random"
                face = "#eeeeee" if like_random else colours(1 - 0.9 * share)
                dark = sum(colour * weight for colour, weight in zip(to_rgb(face), LUMINANCE, strict=True)) < 0.5
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor="white", linewidth=0.8))
                look: Any = {"color": "white" if dark else "black", "fontstyle": "italic" if like_random else "normal"}
                axes.text(column + 0.5, row + 0.5, f"{line['mean']:z.2f}", ha="center", va="center", fontsize=7, **look)
        arrows = {
            metric: "↓" if "lower" in set(table.query("metric == @metric")["better"]) else "↑" for metric in metrics
        }
        names = [f"{label(metric)} {arrows[metric]}" for metric in metrics]
        axes.set_xticks(np.arange(len(metrics)) + 0.5, names, rotation=45, ha="left", fontsize=7)
        axes.set_yticks(np.arange(len(methods)) + 0.5, map(label, methods), fontsize=7)
        axes.set(xlim=(0, len(metrics)), ylim=(len(methods), 0))
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        edges = [at for at in range(1, len(methods)) if group(methods[at]) != group(methods[at - 1])]
        axes.hlines(edges, 0, len(metrics), color="black", linewidth=0.8)
        return save(figure, path)


# ---------------------------------------------------------------------- single images


def beside_the_paper(block: pd.DataFrame, compared: pd.DataFrame, path: Path) -> list[Path]:
    """A panel per metric: our means with their intervals, the published numbers, and what the controls have.

    Args:
        block: The lines of one model and sampling from `summarize`.
        compared: Their comparison, from `compare`.
        path: The files to write, without suffix.

    Returns:
        The files written; none if no published number is measured.
    """
    ours, theirs = block[block["mean"].notna()], compared.dropna(subset=["mean", "published"])
    if theirs.empty:
        return []
    metrics = ordered(set(theirs["metric"]))
    methods = ordered(set(theirs["method"]))[::-1]
    controls = [name for name in ordered(set(ours["method"])) if group(name) == "control"]
    lines: dict[str, Any] = {
        name: {"color": "#777777", "linestyle": look, "linewidth": 0.9}
        for name, look in zip(controls, STYLES[1:], strict=False)
    }
    better = dict(zip(ours["metric"], ours["better"], strict=True))
    with rc_context(FONT):
        figure = Figure(figsize=(1.0 + 1.25 * len(metrics), 0.75 + 0.17 * len(methods)), layout="constrained")
        for axes, metric in zip(figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0], metrics, strict=True):
            found = ours[ours["metric"] == metric].set_index("method")
            shown = found.reindex([name for name in methods if name in found.index])
            rows = [methods.index(name) for name in shown.index]
            reach = np.abs(shown[["low", "high"]].to_numpy().T - shown["mean"].to_numpy())
            axes.errorbar(shown["mean"], rows, xerr=reach, fmt="o", color=COLOURS[0], markersize=3, linewidth=1)
            said = theirs[theirs["metric"] == metric]
            at = [methods.index(name) for name in said["method"]]
            axes.plot(said["published"], at, "D", color=COLOURS[1], markersize=4, markerfacecolor="none")
            for name in filter(found.index.__contains__, lines):
                axes.axvline(found.loc[name, "mean"], **lines[name])
            axes.set_title(f"{label(metric)} {'↓' if better[metric] == 'lower' else '↑'}", fontsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(3))
            axes.tick_params(length=2, labelsize=7)
            axes.grid(axis="y", color="#eeeeee")
            axes.set_axisbelow(True)
        axes.set_yticks(range(len(methods)), map(label, methods))
        marks = [Line2D([], [], color=COLOURS[0], marker="o", markersize=3, label="ours, 95 % interval")]
        marks.append(Line2D([], [], color=COLOURS[1], marker="D", markersize=4, ls="", mfc="none", label="paper"))
        marks += [Line2D([], [], **look, label=f"control: {label(name)}") for name, look in lines.items()]
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=7)
        return save(figure, path)


def _tight() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.01, h_pad=0.01, wspace=0.02, hspace=0.02)


def layer_maps(photo: np.ndarray, maps: dict[str, np.ndarray], title: str, path: Path) -> list[Path]:
    """One photo with the maps of every layer: a row per method, a column per layer.

    Args:
        photo: The photo [H,W,3] in 0..1.
        maps: Heatmaps [L,H,W] in 0..1 by method.
        title: The title of the figure.
        path: The files to write, without suffix.

    Returns:
        The files written.
    """
    depth = max(len(heatmaps) for heatmaps in maps.values())
    with rc_context(FONT):
        figure = Figure(figsize=(0.62 * (depth + 1) + 0.4, 0.68 * len(maps) + 0.5), layout=_tight())
        grid = figure.subplots(len(maps), depth + 1, squeeze=False)
        for row, (name, heatmaps) in zip(grid, maps.items(), strict=True):
            overlay(row[0], photo)
            row[0].set_ylabel(label(name), fontsize=8)
            for axes, heatmap in zip(row[1:], heatmaps, strict=False):
                overlay(axes, photo, heatmap)
        for number, axes in enumerate(grid[0]):
            axes.set_title(f"layer {number}" if number else "photo", fontsize=7)
        figure.suptitle(title, fontsize=8)
        return save(figure, path)


def cases(rows: list[tuple[str, np.ndarray, dict[str, np.ndarray]]], path: Path) -> list[Path]:
    """Photos with the maps of several methods: a row per image.

    Args:
        rows: For each image its title, the photo [H,W,3] in 0..1, and heatmaps [H,W] in 0..1 by method.
        path: The files to write, without suffix.

    Returns:
        The files written.
    """
    names = list(rows[0][2])
    with rc_context(FONT):
        figure = Figure(figsize=(0.95 * (len(names) + 1) + 0.6, 1.0 * len(rows) + 0.3), layout=_tight())
        grid = figure.subplots(len(rows), len(names) + 1, squeeze=False)
        for line, (title, photo, heatmaps) in zip(grid, rows, strict=True):
            overlay(line[0], photo)
            line[0].set_ylabel(title, fontsize=6)
            for axes, name in zip(line[1:], names, strict=True):
                overlay(axes, photo, heatmaps[name])
        for axes, name in zip(grid[0], ["photo", *map(label, names)], strict=True):
            axes.set_title(name, fontsize=8)
        return save(figure, path)


def best_and_worst(cell: CellRows, metric: str = "tcc", count: int = 3) -> tuple[list[str], list[str]]:
    """The images with the best and the worst values of a metric, ties by name.

    Args:
        cell: The cell.
        metric: The metric. Defaults to "tcc".
        count: How many of each. Defaults to 3.

    Returns:
        Ids of the best images, the best first, and of the worst, the worst first.
    """
    values = cell.values(metric).dropna()
    table = pd.DataFrame({"value": values, "name": values.index}).sort_values(["value", "name"])
    low_is_good = cell.info["metrics"][metric] == "lower"
    order = list(table["name"]) if low_is_good else list(table["name"])[::-1]
    return order[:count], order[::-1][:count]
