"""Summaries -> LaTeX, in the structure of the paper's tables.

Best and second are decided before rounding, and equal values share their mark. A value that does not exist is a dash;
a cell that is not whole is marked with an asterisk, one that another version of dap_bench made with a dagger. The same
rows give the same bytes.
"""

from pathlib import Path

import pandas as pd

from dap_bench import __version__, files
from dap_bench.errors import UserError
from dap_bench.report.layouts import Layout, group, is_ours, label, ordered, tables

ARROWS = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
ESCAPES = str.maketrans(
    {c: rf"\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)
# the most columns that each size of print is for, and half of the room between them
SIZES = ((7, r"\normalsize", 6), (9, r"\small", 5), (11, r"\footnotesize", 4), (10**6, r"\scriptsize", 3))
# a mean and half its interval, one beside the other or, in wide tables, below it
HALF_BESIDE = r"{} {{\tiny$\pm${}}}"
HALF_BELOW = r"\begin{{tabular}}[c]{{@{{}}c@{{}}}}{}\\{{\tiny$\pm${}}}\end{{tabular}}"
# no wider than the text, but never enlarged: \width is what the table has by nature
FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def write_tables(
    summary: pd.DataFrame, folder: Path, ci: bool = False, controls: bool = False, booktabs: bool = False
) -> list[Path]:
    """Write the tables that conf/report describes, as far as there are rows for them; each may be \\input.

    A table of an earlier time that has no rows any more is removed.

    Args:
        summary: The table from `summarize`.
        folder: The folder to write to.
        ci: Add half of the 95 % interval to each mean. Defaults to False.
        controls: Add the controls, such as random maps. Defaults to False.
        booktabs: Use the rules of booktabs. Defaults to False.

    Returns:
        The files written.

    Raises:
        UserError: If a table would mix two data sources, or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, layout in tables().items():
        text = latex(summary, layout, ci, controls, booktabs)
        if text is None:
            (folder / f"{name}.tex").unlink(missing_ok=True)
        else:
            files.write_text(folder / f"{name}.tex", text)
            written.append(folder / f"{name}.tex")
    return written


def latex(
    summary: pd.DataFrame, layout: Layout, ci: bool = False, controls: bool = False, booktabs: bool = False
) -> str | None:
    """One table as LaTeX.

    Args:
        summary: The table from `summarize`.
        layout: What the table shows.
        ci: Add half of the 95 % interval to each mean. Defaults to False.
        controls: Add the controls, such as random maps. Defaults to False.
        booktabs: Use the rules of booktabs. Defaults to False.

    Returns:
        The text, or None where there are no rows for it.

    Raises:
        UserError: If the table would mix two data sources.
    """
    part = summary[
        summary["method"].isin(_methods(summary, layout, controls))
        & summary["sampler"].isin(layout.samplers)
        & summary["metric"].isin(layout.metrics)
    ]
    if not layout.open:
        part = part[part["model"].isin(layout.models)]
    if part.empty:
        return None
    one_source(part)
    models = ordered(set(part["model"]), layout.models)
    samplers = [name for name in layout.samplers if name in set(part["sampler"])]
    metrics = [name for name in layout.metrics if name in set(part["metric"])]
    polarity = part.drop_duplicates("metric").set_index("metric")["better"]
    heads = [rf"{escape(label(m))}\,{ARROWS[polarity[m]]}" for m in metrics]
    wide = 2 + len(heads) * len(samplers)
    half = (HALF_BESIDE if wide <= SIZES[1][0] else HALF_BELOW) if ci else "{}"
    high = 2 if half == HALF_BELOW else 1  # lines of a row
    size, room = next((size, room) for most, size, room in SIZES if wide <= most)
    middle, bottom = (r"\midrule", r"\bottomrule") if booktabs else (r"\hline",) * 2
    lines = [
        f"% needs \\usepackage{{multirow,graphicx{',booktabs' if booktabs else ''}}}",
        r"\begin{table}[t]",
        r"\centering",
        rf"{{{size}\setlength{{\tabcolsep}}{{{room}pt}}%",
        FITTED,
        *_head([label(sampler) for sampler in samplers], heads, booktabs),
    ]
    for model in models:
        lines.append(middle)
        block = part[part["model"] == model]
        methods = ordered(set(block["method"]), layout.methods)
        columns = [_column(block, sampler, metric, methods, half) for sampler in samplers for metric in metrics]
        for at, method in enumerate(methods):
            first = rf"\multirow{{{high * len(methods)}}}{{*}}{{{escape(label(model))}}}" if at == 0 else ""
            lines.append(" & ".join([first, escape(label(method)), *(column[at] for column in columns)]) + r" \\")
    numbered = [rf"\renewcommand{{\thetable}}{{{layout.number}}}\addtocounter{{table}}{{-1}}"] if layout.number else []
    caption = rf"\caption{{{layout.caption} {_notes(part, ci)}}}"
    lines += [bottom, r"\end{tabular}}}", *numbered, caption, r"\end{table}"]
    return "\n".join(lines) + "\n"


def _head(samplers: list[str], heads: list[str], booktabs: bool) -> list[str]:
    """The beginning of a table: the heads of its columns once for each sampling."""
    bar, wide = "" if booktabs else "|", len(heads)
    titles = [rf"\multicolumn{{{wide}}}{{c{bar if s != samplers[-1] else ''}}}{{{s}}}" for s in samplers]
    starts = range(3, 3 + wide * len(samplers), wide)
    below = [rf"\cmidrule(lr){{{at}-{at + wide - 1}}}" for at in starts]
    return [
        rf"\begin{{tabular}}{{c{bar}c{(bar + 'c' * wide) * len(samplers)}}}",
        r"\toprule" if booktabs else r"\hline",
        r"\multirow{2}{*}{Model} & \multirow{2}{*}{Method} & " + " & ".join(titles) + r" \\",
        "".join(below) if booktabs else rf"\cline{{3-{2 + wide * len(samplers)}}}",
        "& & " + " & ".join(heads * len(samplers)) + r" \\",
    ]


def _methods(summary: pd.DataFrame, layout: Layout, controls: bool) -> set[str]:
    """The methods that a table names; if it is open, those of one's own; and the controls, if asked for."""
    found = set(summary["method"])
    named = set(layout.methods) or {name for name in found if group(name) != "control"}
    placed = {name for each in tables().values() for name in each.methods}
    own = {name for name in found - placed if not is_ours(name)} if layout.open else set()
    return named | own | ({name for name in found if group(name) == "control"} if controls else set())


def one_source(part: pd.DataFrame) -> None:
    """Refuse to mix two data sources in one block of a table.

    Args:
        part: Lines from `summarize`.

    Raises:
        UserError: If a model and sampling has rows of two data sources.
    """
    sources = part.groupby(["model", "sampler"])["data"].unique()
    for key, names in sources.items():
        if len(names) > 1:
            raise UserError(
                f"{' '.join(map(str, key))} was run on {' and '.join(sorted(names))}: choose one with data=NAME."
            )


def _column(block: pd.DataFrame, sampler: str, metric: str, methods: list[str], form: str) -> list[str]:
    """The texts of a column; `form` takes a mean and half its interval."""
    found = block[(block["sampler"] == sampler) & (block["metric"] == metric)].set_index("method").reindex(methods)
    better = found["better"].dropna()
    partial = (found["missing"] > 0) | (found["failed"] > 0)
    beside = pd.Series([group(method) == "control" for method in methods], methods)
    marked = mark_best(found["mean"], better.iloc[0] if len(better) else "higher", ~partial & ~beside)
    texts = marked.where(~partial, marked + "*")
    texts = texts.where(found["like_random"] != True, texts + r"$^\circ$")  # noqa: E712  missing is neither
    texts = texts.where(~older(found), texts + r"$^\dagger$")
    halves = (found["high"] - found["low"]) / 2
    pairs = zip(texts, halves, strict=True)
    return [text if pd.isna(half) else form.format(text, number(half)) for text, half in pairs]


def older(table: pd.DataFrame) -> pd.Series:
    """Which lines rest on rows that another version of dap_bench made.

    Args:
        table: A table with the column `version`.

    Returns:
        True for such lines.
    """
    return table["version"].notna() & (table["version"] != __version__)


def mark_best(values: pd.Series, better: str, counts: pd.Series | None = None) -> pd.Series:
    """Values as text, the best in bold and the second underlined.

    Args:
        values: The values.
        better: higher or lower.
        counts: Which values count; None lets all count. Defaults to None.

    Returns:
        The texts.
    """
    ranked = values if counts is None else values.where(counts)
    order = ranked.rank(method="dense", ascending=better == "lower")
    text = values.map(number)
    return text.where(order != 1, r"\textbf{" + text + "}").where(order != 2, r"\underline{" + text + "}")


def _notes(part: pd.DataFrame, ci: bool) -> str:
    """What the numbers rest on, in a sentence or three."""
    counts = sorted(set(part["n"]))
    notes = [f"{counts[0]} images per cell." if len(counts) == 1 else f"{counts[0]} to {counts[-1]} images per cell."]
    undefined = part[part["nan"] > 0]
    if len(undefined):
        entries = "1 entry lacks" if len(undefined) == 1 else f"{len(undefined)} entries lack"
        notes.append(f"{entries} values of some images (at most {undefined['nan'].max()}).")
    if ((part["missing"] > 0) | (part["failed"] > 0)).any():
        notes.append("*: some images failed or are not computed yet.")
    known = part["resolution"].dropna()
    if len(known):
        least, most = f"{known.min():.3f}", f"{known.max():.3f}"
        span = least if least == most else f"{least} to {most}, depending on the entry"
        notes.append(f"The smallest detectable difference is {span}.")
    if (part["like_random"] == True).any():  # noqa: E712
        notes.append(r"$\circ$: not distinguishable from a random map.")
    versions = sorted(set(part.loc[older(part), "version"]))
    if versions:
        notes.append(rf"$\dagger$: rows of dap\_bench {escape(', '.join(versions))}, not {__version__}.")
    if ci:
        notes.append(r"$\pm$: half the 95\% bootstrap interval.")
    return " ".join(notes)


def number(value: float, form: str = ".3f") -> str:
    """A number in TeX, with a minus sign and not a hyphen.

    Args:
        value: The number.
        form: Its format. Defaults to ".3f".

    Returns:
        The text; a dash for NaN.
    """
    return "--" if pd.isna(value) else format(value, form).replace("-", "$-$").replace("+", "$+$")


def escape(text: str) -> str:
    """A text with what LaTeX would read as commands escaped.

    Args:
        text: The text.

    Returns:
        The text for LaTeX.
    """
    return text.translate(ESCAPES)
