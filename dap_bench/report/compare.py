"""Our numbers beside the published ones."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from dap_bench.errors import UserError
from dap_bench.report.layouts import label
from dap_bench.report.markdown import table
from dap_bench.report.tables import escape, number, older, one_source

# in an installed wheel the published numbers are inside the package, in a source tree among the results
INSTALLED = Path(__file__).parents[1] / "paper"
PAPER = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "results" / "paper"
KEY = ["model", "method", "sampler", "metric"]
ROUNDING = 0.0005  # of the published numbers
IMAGES = 800  # that they are means of


def published(folder: str | Path = PAPER) -> pd.DataFrame:
    """The paper's tables.

    Args:
        folder: The folder with a CSV per table. Defaults to `PAPER`, the numbers that come with the package.

    Returns:
        One line per table, model, method, sampler and metric, with the number in `published`.

    Raises:
        UserError: If the folder holds no CSV.
    """
    files = sorted(Path(folder).glob("*.csv"))
    if not files:
        raise UserError(f"{folder} holds no published numbers; it should have table1.csv and the others.")
    tables = [
        pd.read_csv(file)
        .melt(["model", "method", "sampler"], var_name="metric", value_name="published")
        .assign(table=file.stem)
        for file in files
    ]
    return pd.concat(tables, ignore_index=True)


def compare(summary: pd.DataFrame, paper: pd.DataFrame, one_set: bool = False) -> pd.DataFrame:
    """Every published number with ours, the difference and a verdict.

        agrees:  |ours - paper| <= h sqrt(1 + n / 800) + 0.0005        h: half of our 95 % interval, n: our images

    The paper's images are another random draw, of 800, so the difference of two means varies by sqrt(1 + n/800) times
    what ours does; 0.0005 is the rounding of print. An asterisk marks a verdict on a cell that is not whole, a dagger
    one on rows of another version.

    Args:
        summary: The table from `summarize`.
        paper: The table from `published`.
        one_set: Put our rows, of one set of images, beside both of the paper's draws. Defaults to False.

    Returns:
        The lines of `paper`, with our `mean`, its interval (`low`, `high`), `n`, `difference`, `verdict` and the
        `command` that computes the cell. `spread` is what the means of two draws of 800 of our images differ by in 95
        of 100 cases: h sqrt(2n / 800).

    Raises:
        UserError: If a model was run on two data sources, or `one_set` is asked for rows of several samplings.
    """
    ours = summary[summary["model"].isin(set(paper["model"]))]
    one_source(ours)
    if one_set:
        if ours["sampler"].nunique() != 1:
            raise UserError(f"one_set=true needs rows of one sampling, there are {sorted(set(ours['sampler']))}.")
        ours = pd.concat([ours.assign(sampler=sampler) for sampler in sorted(set(paper["sampler"]))])
    columns = ["mean", "low", "high", "n", "missing", "failed", "version", "command"]
    found = paper.merge(ours[[*KEY, *columns]], how="left", on=KEY)
    found["difference"] = found["mean"] - found["published"]
    half = (found["high"] - found["low"]) / 2
    found["spread"] = half * np.sqrt(2 * found["n"] / IMAGES)
    allowed = half * np.sqrt(1 + found["n"] / IMAGES) + ROUNDING
    verdict = (found["difference"].abs() <= allowed).map({True: "agrees", False: "differs"})
    verdict = verdict.where(allowed.notna(), "too few images")
    found["verdict"] = verdict.where(found["mean"].notna(), "not measured").where(
        found["published"].notna(), "no number"
    )
    partial = (found["missing"] > 0) | (found["failed"] > 0)
    found["verdict"] += np.where(found["mean"].notna() & partial, "*", "")
    found["verdict"] += np.where(found["mean"].notna() & older(found), "†", "")
    found["command"] = _commands(found, ours)
    return found


def missing_cell_command(line: pd.Series) -> str:
    """What computes a cell of the paper.

    Args:
        line: A line with `model`, `method` and `sampler`.

    Returns:
        The command.
    """
    return f"python -m dap_bench model={line['model']} method={line['method']} sampler={line['sampler']}"


def _commands(found: pd.DataFrame, ours: pd.DataFrame) -> list[str]:
    """For each line what computes its cell, as the model's other cells were computed where there are some."""
    like = ours[ours["command"] != ""].groupby("model")["command"].first().to_dict()
    having = set(zip(ours["model"], ours["method"], ours["sampler"], strict=True))
    commands = []
    for _, line in found.iterrows():
        key = (line["model"], line["method"], line["sampler"])
        if pd.notna(line["command"]) and line["command"]:
            commands.append(line["command"])
            continue
        text = missing_cell_command(line)
        if line["model"] in like:
            kept = [
                part
                for part in shlex.split(like[line["model"]])
                if re.split(r"[./=]", part.lstrip("+~"))[0] not in ("method", "sampler", "name")
            ]
            text = shlex.join([*kept, f"method={line['method']}", f"sampler={line['sampler']}"])
        if key in having:  # it has rows, of other metrics
            text += "  # with metric=paper"
        commands.append(text)
    return commands


def rank_agreement(compared: pd.DataFrame) -> pd.DataFrame:
    """How well our numbers and the published ones agree, per model, sampling and metric.

    Args:
        compared: The table from `compare`.

    Returns:
        For each of them with at least 3 methods: Kendall's `tau` between our order of the methods and theirs, how many
        numbers `agree`, the mean `difference`, the mean absolute one (`mad`), the mean `spread` between two draws, and
        the number of `methods`.
    """
    both = compared.drop_duplicates(KEY).dropna(subset=["mean", "published"])
    lines = []
    for key, group in both.groupby(["model", "sampler", "metric"]):
        if len(group) > 2 and group["published"].nunique() > 1:
            line = dict(zip(["model", "sampler", "metric"], key, strict=True), methods=len(group))
            line["tau"] = kendalltau(group["mean"], group["published"]).statistic
            line["agree"] = int(group["verdict"].str.startswith("agrees").sum())
            line |= {"difference": group["difference"].mean(), "mad": group["difference"].abs().mean()}
            lines.append(line | {"spread": group["spread"].mean()})
    columns = ["model", "sampler", "metric", "tau", "agree", "difference", "mad", "spread", "methods"]
    return pd.DataFrame(lines, columns=columns)


def count_verdicts(compared: pd.DataFrame) -> str:
    """How many published numbers agree, differ and are not measured, in words.

    Args:
        compared: The table from `compare`.

    Returns:
        A sentence.
    """
    counts = compared.drop_duplicates(KEY)["verdict"].str.rstrip("*†").value_counts()
    words = {"agrees": "agree", "differs": "differ", "not measured": "are not measured"}
    return "Of the published numbers " + ", ".join(f"{counts.get(key, 0)} {word}" for key, word in words.items()) + "."


def markdown(compared: pd.DataFrame) -> str:
    """The comparison as a page in Markdown.

    Args:
        compared: The table from `compare`.

    Returns:
        The page: every number, the agreement per metric, and the commands that compute what is missing.
    """
    header = ["table", "model", "sampling", "method", "metric"]
    header += ["paper", "ours", "95 % interval", "images", "difference", "verdict"]
    rows = []
    for _, line in compared[compared["mean"].notna()].iterrows():
        names = [line["table"], *(label(line[name]) for name in ("model", "sampler", "method", "metric"))]
        numbers = [_number(line["published"]), _number(line["mean"])]
        numbers += [f"{_number(line['low'])} to {_number(line['high'])}", f"{line['n']:.0f}"]
        rows.append([*names, *numbers, _number(line["difference"], "+.3f"), line["verdict"]])
    parts = ["# Comparison with the paper\n", f"{count_verdicts(compared)}\n", table(header, rows)]
    taus = rank_agreement(compared)
    if len(taus):
        header = ["model", "sampling", "metric", "agree", "mean difference", "MAD", "spread", "Kendall's tau"]
        rows = []
        for _, line in taus.iterrows():
            names = [label(line[name]) for name in ("model", "sampler", "metric")]
            numbers = [f"{line['agree']} of {line['methods']}", _number(line["difference"], "+.3f")]
            rows.append([*names, *numbers, *map(_number, (line["mad"], line["spread"])), _number(line["tau"], ".2f")])
        parts += [
            "## Metric by metric\n",
            "Kendall's tau says whether the methods come in the same order; MAD is the mean absolute difference, "
            "and the spread what two draws of 800 images differ by in 95 of 100 cases.\n",
            table(header, rows),
        ]
    commands = missing_commands(compared)
    if commands:
        parts += ["## Not measured yet\n", "These commands fill what is missing:\n"]
        parts.append("\n".join(["```sh", *commands, "```\n"]))
    return "\n".join(parts)


def latex(compared: pd.DataFrame) -> str:
    """The comparison as LaTeX: every number that is measured as a long table, the order of the methods as another.

    Needs longtable and booktabs.

    Args:
        compared: The table from `compare`.

    Returns:
        The text, with the commands that compute what is missing as comments.
    """
    printed = compared.drop_duplicates(KEY).dropna(subset=["published"])
    rows = []
    for _, line in printed.dropna(subset=["mean"]).iterrows():
        names = [escape(label(line[name])) for name in ("model", "sampler", "method", "metric")]
        ours = rf"{number(line['mean'])} {{\tiny [{number(line['low'])}, {number(line['high'])}]}}"
        verdict = line["verdict"].replace("†", r"$^\dagger$")
        rows.append([*names, number(line["published"]), ours, number(line["difference"], "+.3f"), verdict])
    head = ["Model", "Sampling", "Method", "Metric", "Paper", "Ours", "Difference", "Verdict"]
    lines = [r"% needs \usepackage{longtable,booktabs}", r"\begingroup\scriptsize\setlength{\tabcolsep}{2.5pt}"]
    lines += _long("llllrrrl", head, rows)
    left = int(printed["mean"].isna().sum())
    if left:
        lines.append(rf"\noindent {left} of {len(printed)} published numbers are not measured.")
    taus = rank_agreement(compared)
    if len(taus):
        rows = []
        for _, line in taus.iterrows():
            names = [escape(label(line[name])) for name in ("model", "sampler", "metric")]
            rows.append([*names, number(line["tau"], ".2f"), str(line["methods"])])
        lines += _long("lllrr", ["Model", "Sampling", "Metric", r"Kendall's $\tau$", "Methods"], rows)
    lines += [r"\endgroup", *(f"% {text}" for text in missing_commands(compared))]
    return "\n".join(lines) + "\n"


def _long(shape: str, head: list[str], rows: list[list[str]]) -> list[str]:
    first, *rest = [" & ".join(row) + r" \\" for row in (head, *rows)]
    begin = [rf"\begin{{longtable}}{{{shape}}}", r"\toprule", first, r"\midrule", r"\endhead"]
    return [*begin, *rest, r"\bottomrule", r"\end{longtable}"]


def missing_commands(compared: pd.DataFrame) -> list[str]:
    """The commands that compute the cells that are not measured.

    Args:
        compared: The table from `compare`.

    Returns:
        The commands, each once.
    """
    return sorted(set(compared.loc[compared["verdict"] == "not measured", "command"]))


def _number(value: float, form: str = ".3f") -> str:
    return "-" if pd.isna(value) else format(value, form)
