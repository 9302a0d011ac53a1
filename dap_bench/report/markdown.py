"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[object], rows: Iterable[Sequence[object]], right: bool = False) -> str:
    """A table of texts and numbers.

    Args:
        header: The heads of the columns.
        rows: The rows.
        right: Align all but the first column to the right. Defaults to False.

    Returns:
        The table; its last line ends.
    """
    rule = ["---", *["---:" if right else "---"] * (len(header) - 1)]
    return "".join([line(header), f"|{'|'.join(rule)}|\n", *map(line, rows)])


def line(cells: Sequence[object]) -> str:
    """One line of a table, for tables that are printed line by line.

    Args:
        cells: The cells of the line.

    Returns:
        The line with its end.
    """
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |\n"
