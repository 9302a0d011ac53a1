"""Summaries -> LaTeX, in the structure of the paper's tables.

Best and second are decided before rounding, and equal values share their mark. A value that does not exist is a dash;
a cell that is not whole is marked with an asterisk, one that another version of dap_bench made with a dagger. The same
rows give the same bytes.
"""

from pathlib import Path

import pandas as pd

from dap_bench import __version__
from dap_bench.errors import UserError
from dap_bench.report.layouts import TABLES, Layout, label, ordered

ARROWS = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
ESCAPES = str.maketrans(
    {c: rf"\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)
PACKAGES = ("multirow", "graphicx")


def write_tables(summary: pd.DataFrame, folder: Path, ci: bool = False) -> list[Path]:
    """The paper's tables and one of localisation, as far as there are rows for them; each may be \\input.

    A table of an earlier time that has no rows any more is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, layout in {**TABLES, "localisation": localisation(summary)}.items():
        text = latex(summary, layout, ci)
        if text is None:
            (folder / f"{name}.tex").unlink(missing_ok=True)
        else:
            (folder / f"{name}.tex").write_text(text)
            written.append(folder / f"{name}.tex")
    return written


def localisation(summary: pd.DataFrame) -> Layout:
    """Where the heatmap lies, for every method that has rows: not in the paper."""
    from dap_bench.report.layouts import ABLATION, METHODS

    methods = tuple(ordered(set(summary["method"]), (*METHODS, *ABLATION)))
    return Layout("Does the heatmap lie on the object?", methods, ("pointing", "mass_inside"))


def latex(summary: pd.DataFrame, layout: Layout, ci: bool = False) -> str | None:
    """One table, or None where there is no row for it."""
    known = {name for each in TABLES.values() for name in each.methods} | {"dap_source"}
    mine = set(summary["method"]) - known if layout.open else set()
    part = summary[
        summary["method"].isin([*layout.methods, *mine])
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
    shape = "c|c" + ("|" + "c" * len(metrics)) * len(samplers)
    titles = [
        rf"\multicolumn{{{len(metrics)}}}{{{'c|' if s != samplers[-1] else 'c'}}}{{{label(s)}}}" for s in samplers
    ]
    heads = [rf"{escape(label(m))}\,{ARROWS[polarity[m]]}" for m in metrics] * len(samplers)
    lines = [
        f"% needs \\usepackage{{{','.join(PACKAGES)}}}",
        r"\begin{table}[t]",
        r"\centering",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{shape}}}",
        r"\hline",
        r"\multirow{2}{*}{Model} & \multirow{2}{*}{Method} & " + " & ".join(titles) + r" \\",
        rf"\cline{{3-{2 + len(heads)}}}",
        "& & " + " & ".join(heads) + r" \\",
        r"\hline",
    ]
    for model in models:
        block = part[part["model"] == model]
        methods = ordered(set(block["method"]), layout.methods)
        columns = [_column(block, sampler, metric, methods, ci) for sampler in samplers for metric in metrics]
        for at, method in enumerate(methods):
            first = rf"\multirow{{{len(methods)}}}{{*}}{{{escape(label(model))}}}" if at == 0 else ""
            lines.append(" & ".join([first, escape(label(method)), *(column[at] for column in columns)]) + r" \\")
        lines.append(r"\hline")
    lines += [r"\end{tabular}}", rf"\caption{{{layout.caption} {_notes(part, ci)}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def one_source(part: pd.DataFrame) -> None:
    """Rows of two data sources in one block of a table are named, not mixed."""
    sources = part.groupby(["model", "sampler"])["data"].unique()
    for key, names in sources.items():
        if len(names) > 1:
            raise UserError(
                f"{' '.join(map(str, key))} was run on {' and '.join(sorted(names))}: "
                "say which one the tables are about, data=NAME."
            )


def _column(block: pd.DataFrame, sampler: str, metric: str, methods: list[str], ci: bool) -> list[str]:
    found = block[(block["sampler"] == sampler) & (block["metric"] == metric)].set_index("method").reindex(methods)
    better = found["better"].dropna()
    marked = mark_best(found["mean"], better.iloc[0] if len(better) else "higher")
    partial = (found["missing"] > 0) | (found["failed"] > 0)
    texts = marked.where(~partial, marked + "*")
    texts = texts.where(~older(found), texts + r"$^\dagger$")
    if ci:
        half = ((found["high"] - found["low"]) / 2).map(
            lambda value: "" if pd.isna(value) else rf" {{\tiny$\pm${value:.3f}}}"
        )
        texts = texts + half
    return texts.tolist()


def older(table: pd.DataFrame) -> pd.Series:
    """Which lines rest on rows that another version of dap_bench made."""
    return table["version"].notna() & (table["version"] != __version__)


def mark_best(values: pd.Series, better: str) -> pd.Series:
    """Values as text, the best in bold and the second underlined."""
    order = values.rank(method="dense", ascending=better == "lower")
    text = values.map(lambda value: "-" if pd.isna(value) else f"{value:.3f}")
    return text.where(order != 1, r"\textbf{" + text + "}").where(order != 2, r"\underline{" + text + "}")


def _notes(part: pd.DataFrame, ci: bool) -> str:
    """What the numbers rest on, in a sentence or three."""
    counts = sorted(set(part["n"]))
    notes = [f"{counts[0]} images per cell." if len(counts) == 1 else f"{counts[0]} to {counts[-1]} images per cell."]
    undefined = part[part["nan"] > 0]
    if len(undefined):
        places = "1 place" if len(undefined) == 1 else f"{len(undefined)} places"
        notes.append(f"In {places} some images have no value (at most {undefined['nan'].max()}).")
    if ((part["missing"] > 0) | (part["failed"] > 0)).any():
        notes.append("*: some images failed or are not computed yet.")
    versions = sorted(set(part.loc[older(part), "version"]))
    if versions:
        notes.append(rf"$\dagger$: rows of dap\_bench {escape(', '.join(versions))}, not {__version__}.")
    if ci:
        notes.append(r"$\pm$: half the 95\% bootstrap interval.")
    return " ".join(notes)


def escape(text: str) -> str:
    return text.translate(ESCAPES)
