"""All methods x all metrics in one page: python scripts/breadth.py

results/breadth/README.md and a matrix per model, from rows alone. Per metric: the methods that are better than every
control (paired, corrected after Holm), and whether the metric tells the controls from the methods at all.
"""

from pathlib import Path
from typing import Annotated

import pandas as pd

from dap_bench import files, summarize
from dap_bench.command import command
from dap_bench.report import figures
from dap_bench.report.layouts import group, label, ordered
from dap_bench.report.markdown import table as markdown
from dap_bench.report.rows import CellRows, load_rows
from dap_bench.report.summary import holm, paired

RESULTS = Path("results/breadth")
TOLD = "oracle"  # it knows where the object is: no control


@command()
def main(results: Annotated[Path, "folder of folders of rows, which the page is written to"] = RESULTS) -> None:
    parts = [INTRODUCTION]
    for folder in sorted(each for each in results.iterdir() if each.is_dir()):
        table, cells = summarize(folder), load_rows(folder)
        for model in sorted(set(table["model"])):
            block = table[table["model"] == model]
            figures.matrix(block, results / f"matrix-{model}")
            count = int(block["n"].max())
            parts.append(f"## {model}, {count} images\n\n![ranks](matrix-{model}.png)\n")
            parts.append(values(block))
            parts.append(against_controls([cell for cell in cells if cell.names["model"] == model]))
        commands = sorted({cell.info["command"] for cell in cells})
        parts.append("Made by\n\n```bash\n" + "\n".join(commands) + "\n```\n")
    files.write_text(results / "README.md", "\n".join(parts))
    print(f"wrote {results}/README.md")


INTRODUCTION = """# All methods x all metrics

Means with 95 % bootstrap intervals. In the pictures dark is the best of the methods (controls are not ranked); grey
italics mark what does not differ from a random map. `python scripts/breadth.py` makes this page from the rows.
"""


def values(block: pd.DataFrame) -> str:
    """Methods in lines, metrics in columns, each with its interval."""
    metrics = ordered(set(block.loc[block["mean"].notna(), "metric"]))
    lines = block.set_index(["method", "metric"])
    rows = []
    for method in ordered(set(block["method"])):
        cells = []
        for metric in metrics:
            line = lines.loc[(method, metric)] if (method, metric) in lines.index else None
            known = line is not None and line["mean"] == line["mean"]
            cells.append(f"{line['mean']:.3f} [{line['low']:.3f}, {line['high']:.3f}]" if known else "")
        rows.append([label(method), *cells])
    return markdown(["", *map(label, metrics)], rows)


def against_controls(cells: list[CellRows]) -> str:
    """Per metric: which methods are better than every control, image by image; and which metrics cannot tell."""
    controls = [cell for cell in cells if group(cell.names["method"]) == "control" and cell.names["method"] != TOLD]
    methods = [cell for cell in cells if group(cell.names["method"]) not in ("control", "ablation")]
    rows = []
    blind: dict[str, list[str]] = {"none": [], "fewer than half": []}
    for metric in ordered({metric for cell in methods for metric in cell.info["metrics"]}):
        tests = {}
        for cell in methods:
            for control in controls:
                if metric in cell.info["metrics"] and metric in control.info["metrics"]:
                    pairs = pd.concat([cell.values(metric), control.values(metric)], axis=1, join="inner").dropna()
                    gain = pairs.iloc[:, 0] - pairs.iloc[:, 1]
                    gain = gain if cell.info["metrics"][metric] == "higher" else -gain
                    if len(gain) > 1:
                        tests[cell.names["method"], control.names["method"]] = paired(gain)
        if not tests:
            continue
        corrected = dict(zip(tests, holm([test["p"] for test in tests.values()]), strict=True))
        wins = {key for key, test in tests.items() if corrected[key] < 0.05 and test["effect"] > 0}
        named = ordered({method for method, _ in tests})
        better = [name for name in named if all(key in wins for key in tests if key[0] == name)]
        others = [name for name in named if name not in better]
        rows.append([label(metric), *(", ".join(map(label, some)) or "none" for some in (better, others))])
        if 2 * len(better) < len(named):
            blind["fewer than half" if better else "none"].append(label(metric))
    told = [f"by {', '.join(some)} {share} of the methods" for share, some in blind.items() if some]
    text = (
        f"Metrics that do not tell the controls from the methods: {'; '.join(told)} beat every control." if told else ""
    )
    return f"{text}\n\n" + markdown(["metric", "better than every control", "not better than some control"], rows)


if __name__ == "__main__":
    main()
