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
from dap_bench.config import CONF
from dap_bench.report import figures
from dap_bench.report.layouts import group, label, ordered
from dap_bench.report.markdown import table as markdown
from dap_bench.report.rows import CellRows, load_rows
from dap_bench.report.summary import holm, paired

RESULTS = Path("results/breadth")
TOLD = "oracle"  # it knows where the object is: no control
INTRODUCTION = """# All methods x all metrics

Means with 95 % bootstrap intervals. In the pictures dark is the best of the methods (controls are not ranked), and grey
italics are indistinguishable from a random map. A cell is empty where a metric was left out or is undefined (LDA needs
maps of layers, which controls and methods on pixels do not have). A method is better than a control if a Wilcoxon test
on the same images says so (p < 0.05, corrected after Holm within the metric). `python scripts/breadth.py` makes this
page from the rows.
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
        table, cells = summarize(folder), load_rows(folder)
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
    """Per metric: which methods are better than every control, image by image; and which metrics cannot tell."""
    controls = [cell for cell in cells if group(cell.names["method"]) == "control" and cell.names["method"] != TOLD]
    methods = [cell for cell in cells if group(cell.names["method"]) not in ("control", "ablation")]
    means = block.set_index(["method", "metric"])["mean"]
    rows, blind = [], []
    for metric in ordered({metric for cell in methods for metric in cell.info["metrics"]}):
        tests = {
            (cell.names["method"], control.names["method"]): paired(gain)
            for cell in methods
            for control in controls
            if len(gain := gains(cell, control, metric)) > 1
        }
        if not tests:
            continue
        corrected = dict(zip(tests, holm([test["p"] for test in tests.values()]), strict=True))
        wins = {key for key, test in tests.items() if corrected[key] < 0.05 and test["effect"] > 0}
        named = ordered({method for method, _ in tests})
        better = [name for name in named if all(key in wins for key in tests if key[0] == name)]
        sign = 1 if block.loc[block["metric"] == metric, "better"].iloc[0] == "higher" else -1
        best = max(ordered({control for _, control in tests}), key=lambda name: sign * means[name, metric])
        others = [name for name in named if name not in better]
        strongest = f"{label(best)} {means[best, metric]:z.3f}"
        rows.append([label(metric), strongest, some(better, named), some(others, named)])
        if 2 * len(better) < len(named):
            blind.append(f"{label(metric)} ({len(better) or 'none'} of {len(named)})")
    told = f"**Metrics by which fewer than half of the methods beat every control: {', '.join(blind)}.**\n\n"
    heads = ["metric", "best control", "better than every control", "not better than some control"]
    return (told if blind else "") + markdown(heads, rows)


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
    methods = {label(cell.names["method"]): changed("method", cell.names["method"], cell) for cell in cells}
    metrics = {label(name): changed("metric", name, cell) for cell in cells for name in cell.info["metrics"]}
    others = [f"{name} with {', '.join(options)}" for name, options in {**metrics, **methods}.items() if options]
    text = f"Options other than the defaults: {'; '.join(others)}.\n\n" if others else ""
    return f"{text}Computed by\n\n```sh\n" + "\n".join(whole(cell.info["command"] for cell in cells)) + "\n```\n"


def changed(kind: str, name: str, cell: CellRows) -> list[str]:
    """The options of a method or metric that its YAML has otherwise."""
    file = CONF / kind / f"{name}.yaml"
    default: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    config = cell.info["config"].get(kind, {})
    default, used = (default.get(name, {}), config.get(name, {})) if kind == "metric" else (default, config)
    single = {key: value for key, value in used.items() if key in default and not isinstance(value, dict)}
    return [f"{key}={value}" for key, value in single.items() if value != default[key]]


def whole(commands: Iterable[str]) -> list[str]:
    """Commands of cells as commands of experiments, where nothing else was asked for."""
    swept = r"python -m dap_bench(?: (?:model|method)=\w+)+ (experiment=\w+)"
    return sorted({re.sub(f"^{swept}$", r"python -m dap_bench \1", each) for each in commands})


if __name__ == "__main__":
    main()
