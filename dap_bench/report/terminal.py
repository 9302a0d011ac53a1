"""Tables in a terminal."""

from collections.abc import Iterator, Sequence

import pandas as pd

from dap_bench.report.layouts import label, ordered

WIDTH = 120  # columns
ARROWS = {"higher": "↑", "lower": "↓"}


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """The lines of a table.

    Args:
        rows: The rows, the heads first.
        right: Align all but the first column to the right. Defaults to False.

    Returns:
        A line for each row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *[">" if right else "<"] * (len(widths) - 1)]
    forms = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


def means(summary: pd.DataFrame) -> str:
    """A block per data source, sampling and model: methods down and metrics across, in the paper's order.

    Each value is a mean with half its 95 % interval; metrics that do not fit beside the others come below.

    Args:
        summary: The table from `summarize`.

    Returns:
        The text.
    """
    blocks = []
    for sampler in ordered(set(summary["sampler"])):
        for model in ordered(set(summary["model"])):
            block = summary[(summary["sampler"] == sampler) & (summary["model"] == model)]
            for data, part in block.groupby("data"):
                title = f"{label(model)}, {label(sampler)} ({data}), mean ± half the 95 % interval"
                blocks.append("\n\n".join([title, *_pages(part)]))
    return "\n\n".join(blocks)


def _pages(part: pd.DataFrame) -> Iterator[str]:
    """The tables of a block, none wider than the terminal."""
    metrics, methods = ordered(set(part["metric"])), ordered(set(part["method"]))
    first = [["", *map(label, methods)]]
    for key in ("n", "failed", "missing"):
        counts = part.drop_duplicates("method").set_index("method")[key]
        if key == "n" or counts.any():
            first.append([key, *(str(counts[method]) for method in methods)])
    found = part.set_index(["metric", "method"])
    columns: list[list[str]] = []
    for metric in metrics:
        better = part.loc[part["metric"] == metric, "better"].iloc[0]
        lines = [found.loc[(metric, method)] if (metric, method) in found.index else None for method in methods]
        column = [f"{label(metric)} {ARROWS[better]}", *map(_value, lines)]
        if len(aligned(list(zip(*first, *columns, column, strict=True)), right=True)[1]) > WIDTH and columns:
            yield "\n".join(aligned(list(zip(*first, *columns, strict=True)), right=True))
            columns = []
        columns.append(column)
    yield "\n".join(aligned(list(zip(*first, *columns, strict=True)), right=True))


def _value(line: pd.Series | None) -> str:
    if line is None or pd.isna(line["mean"]):
        return "-"
    half = (line["high"] - line["low"]) / 2
    return f"{line['mean']:.3f}" + ("" if pd.isna(half) else f" ±{half:.3f}")
