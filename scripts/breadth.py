"""All methods x all metrics on one page: python scripts/breadth.py

results/breadth/README.md and a matrix per model, from rows alone. Per metric: the best control, the methods that are
better than every control (paired, corrected after Holm), and whether the metric tells controls from methods at all.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import yaml

from dap_bench import files, summarize
from dap_bench.command import command
from dap_bench.config import CONF, DESCRIPTIONS
from dap_bench.report import figures
from dap_bench.report.layouts import group, label, ordered
from dap_bench.report.markdown import table as markdown
from dap_bench.report.rows import CellRows, load_rows
from dap_bench.report.summary import holm, paired

RESULTS = Path("results/breadth")
TOLD = "oracle"  # it knows where the object is: no control
LEAST = 0.001  # a smaller mean gain is none
INTRODUCTION = """# All methods x all metrics

Means with 95 % bootstrap intervals; `python scripts/breadth.py` makes this page from the rows. In the pictures dark is
the best of the methods (controls are not ranked), and grey italics are indistinguishable from a random map of patches.
A cell is empty where a metric was left out or is undefined (LDA needs maps of layers, which controls and methods on
pixels do not have).

A method is better than a control if its mean is better by at least 0.001 and a Wilcoxon test on the same images agrees
(p < 0.05, corrected after Holm within the metric). A control finer than the method is left out: removing scattered
pixels changes an image in another way than removing patches, whatever the map says, so maps of patches are not compared
with noise per pixel.

Some numbers follow from definitions. Controls know neither model nor class: they have CS 0, a quarter in Grid pointing,
Randomisation 1 and hardly any Max-sens. LDA (prior) compares DAP with its own prior. Maps with signs (input x gradient,
IG, AttnLRP) are scaled to 0..1 like all others; zero then lies near the middle, and AFS, Gini and Entropy mean little.

The bundled models were measured on 24 images, which tell only large differences. There the patterned object has most of
the edges, so that Edges finds it as well as most methods do.
"""


@command()
def main(results: Annotated[Path, "folder of folders of rows, which the page is written to"] = RESULTS) -> None:
    for folder in parts(results):
        table = summarize(folder)
        for model in set(table["model"]):
            figures.matrix(table[table["model"] == model], results / f"matrix-{model}")
    files.write_text(results / "README.md", page(results))
    print(f"wrote {results}/README.md")


def parts(results: Path) -> list[Path]:
    """The folders of rows."""
    return sorted(each for each in results.iterdir() if each.is_dir())


def page(results: Path) -> str:
    """The page in Markdown."""
    written = [INTRODUCTION]
    for folder in parts(results):
        table, cells = summarize(folder), load_rows(folder, columns=["grid"])
        for model in ordered(set(table["model"])):
            block = table[table["model"] == model]
            written.append(f"## {label(model)}, {int(block['n'].max())} images\n\n![ranks](matrix-{model}.png)\n")
            written.append(against_controls([cell for cell in cells if cell.names["model"] == model], block))
            written.append(values(block))
        written.append(made_by(cells))
    return "\n".join(written)


def values(block: pd.DataFrame) -> str:
    """Methods in lines, metrics in columns, each with its interval."""
    metrics = ordered(set(block.loc[block["mean"].notna(), "metric"]))
    known = block[block["mean"].notna()].set_index(["method", "metric"])
    texts = {at: f"{line['mean']:z.3f} [{line['low']:z.3f}, {line['high']:z.3f}]" for at, line in known.iterrows()}
    methods = ordered(set(block["method"]))
    rows = [[label(method), *(texts.get((method, metric), "") for metric in metrics)] for method in methods]
    return markdown(["", *map(label, metrics)], rows)


def against_controls(cells: list[CellRows], block: pd.DataFrame) -> str:
    """Per metric: which methods are better than every control no finer than they, and which metrics cannot tell."""
    controls = [cell for cell in cells if group(cell.names["method"]) == "control" and cell.names["method"] != TOLD]
    methods = [cell for cell in cells if group(cell.names["method"]) not in ("control", "ablation")]
    means = block.set_index(["method", "metric"])["mean"]
    rows, blind, untested = [], [], []
    for metric in ordered({metric for cell in methods for metric in cell.info["metrics"]}):
        gained = {
            (cell.names["method"], control.names["method"]): gain
            for cell in methods
            for control in controls
            if len(gain := gains(cell, control, metric)) > 1 and resolved(control) <= resolved(cell)
        }
        if not gained:
            untested.append(label(metric))
            continue
        corrected = dict(zip(gained, holm([paired(gain)["p"] for gain in gained.values()]), strict=True))
        wins = {key for key, gain in gained.items() if corrected[key] < 0.05 and gain.mean() >= LEAST}
        named = ordered({method for method, _ in gained})
        better = [name for name in named if all(key in wins for key in gained if key[0] == name)]
        others = [name for name in named if name not in better]
        sign = 1 if block.loc[block["metric"] == metric, "better"].iloc[0] == "higher" else -1
        best = sorted(ordered({control for _, control in gained}), key=lambda name: -sign * means[name, metric])
        of_all = next((name for name in best if all((method, name) in gained for method in named)), best[0])
        strongest = [f"{label(name)} {means[name, metric]:z.3f}" for name in dict.fromkeys((best[0], of_all))]
        rows.append([label(metric), ", ".join(strongest), some(better, named), some(others, named)])
        if 2 * len(better) < len(named):
            blind.append(f"{label(metric)} ({len(better) or 'none'} of {len(named)})")
    told = f"**Metrics by which fewer than half of the methods beat every control: {', '.join(blind)}.**\n\n"
    none = f"Controls have no {' and no '.join(untested)}.\n\n"
    heads = ["metric", "best control", "better than every control", "not better than some control"]
    return (told if blind else "") + (none if untested else "") + markdown(heads, rows)


def resolved(cell: CellRows) -> int:
    """How many values a cell's maps have."""
    height, width = cell.rows["grid"].dropna().iloc[0].split("x")
    return int(height) * int(width)


def gains(cell: CellRows, control: CellRows, metric: str) -> pd.Series:
    """How much better a method is than a control on each image; empty where one of them was not measured."""
    if not {cell.info["metrics"].get(metric), control.info["metrics"].get(metric)} <= {"higher", "lower"}:
        return pd.Series(dtype=float)
    pairs = pd.concat([cell.values(metric), control.values(metric)], axis=1, join="inner").dropna()
    gain = pairs.iloc[:, 0] - pairs.iloc[:, 1]
    return gain if cell.info["metrics"][metric] == "higher" else -gain


def some(names: list[str], of: list[str]) -> str:
    return "none" if not names else "all" if len(names) == len(of) else ", ".join(map(label, names))


def made_by(cells: list[CellRows]) -> str:
    """The commands that computed some cells, and where their options differ from the defaults."""
    said = [(name, changed("metric", name, cell)) for cell in cells for name in cell.info["metrics"]]
    said += [(cell.names["method"], changed("method", cell.names["method"], cell)) for cell in cells]
    others = dict.fromkeys(f"{label(name)} with {', '.join(options)}" for name, options in said if options)
    text = f"Options other than the defaults: {'; '.join(others)}.\n\n" if others else ""
    return f"{text}Computed by\n\n```sh\n" + "\n".join(whole(cell.info["command"] for cell in cells)) + "\n```\n"


def changed(kind: str, name: str, cell: CellRows) -> list[str]:
    """The options of a method or metric that its YAML has otherwise."""
    file = CONF / kind / f"{name}.yaml"
    default: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    config = cell.info["config"].get(kind, {})
    default, used = (default.get(name, {}), config.get(name, {})) if kind == "metric" else (default, config)
    own = default.keys() - set(DESCRIPTIONS)
    single = {key: value for key, value in used.items() if key in own and not isinstance(value, dict)}
    return [f"{key}={value}" for key, value in single.items() if value != default[key]]


def whole(commands: Iterable[str]) -> list[str]:
    """Commands of cells as commands of experiments: for all models, and for all methods if nothing else was asked."""
    models = [re.sub(r"^(python -m dap_bench) model=\w+( .*experiment=)", r"\1\2", each) for each in commands]
    swept = r"^(python -m dap_bench) method=\w+( experiment=\w+)$"
    return sorted({re.sub(swept, r"\1\2", each.replace("=null'", "'")) for each in models})


if __name__ == "__main__":
    main()
