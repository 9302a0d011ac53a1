"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[object], rows: Iterable[Sequence[object]], right: bool = False) -> str:
    """A table of texts and numbers, whose last line ends; `right` puts all but the first column to the right."""
    rule = ["---", *["---:" if right else "---"] * (len(header) - 1)]
    return "".join([line(header), f"|{'|'.join(rule)}|\n", *map(line, rows)])


def line(cells: Sequence[object]) -> str:
    """One line of a table, for tables that are printed line by line."""
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |\n"
