"""What the README and the pages it leads to show is what happens."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dap_bench import store, summarize

ROOT = Path(__file__).parents[1]
README, OPTIONS, METHODS, METRICS, MODELS = (
    ROOT.joinpath(folder, "README.md").read_text()
    for folder in ("", "conf", "conf/method", "conf/metric", "conf/model")
)
ORACLE = re.compile(r"^\| `.*\b(captum|grad-cam|lxt|Quantus) \d")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(page for folder in ("conf", "results", "scripts") for page in ROOT.joinpath(folder).rglob("*.md"))


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder outside the project with the files of the pages, and the README's commands as they are written there."""
    folder = tmp_path_factory.mktemp("outside")
    section = README.split("## Your own method")[1].split("\n## ")[0]
    assert section.count("\n") <= 60
    for text in (*blocks(section, "python")[:1], *blocks(section, "yaml"), *blocks(METRICS, "python")):
        path = folder / re.match(r"# (\S+)\n", text)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yaml = re.search(r"`my_conf/metric/(peak.yaml)`.*?`(peak: .*?)`", METRICS, re.DOTALL)
    (folder / "my_conf" / "metric").mkdir()
    (folder / "my_conf" / "metric" / yaml[1]).write_text(yaml[2])
    environment = {**os.environ, "DAP_BENCH_CACHE": str(tmp_path_factory.getbasetemp() / "cache")}

    def run(command):
        python, *arguments = shlex.split(command, comments=True)
        assert python == "python"
        done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    commands = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()
    return folder, run, {re.search(r"-m dap_bench(\.\w+)?", text)[0]: text for text in commands}


def test_your_own_method_from_a_folder_outside_the_project(outside):
    folder, run, commands = outside
    assert set(commands) == {f"-m dap_bench{name}" for name in ("", ".audit", ".tables", ".report", ".claim")}
    run(commands["-m dap_bench"])
    cells = {cell.info["method"]: cell for cell in store.cells(folder / "results" / "runs")}
    assert set(cells) == {"norms", "dap", "random"}
    rows = cells["norms"].rows()
    assert len(rows) == 24
    assert all(row["status"] == "ok" and row["cs"] == 0.0 for row in rows)  # it does not look at the class

    assert "table1.tex" in run(commands["-m dap_bench.tables"])
    table = (folder / "results" / "tables" / "table1.tex").read_text()
    assert " & Norms & " in table
    assert " & Random & " in table
    summary = pd.read_csv(folder / "results" / "summary.csv").set_index(["method", "metric"])
    assert summary.loc[("norms", "deletion"), "n"] == 24
    assert np.isnan(summary.loc[("norms", "cs"), "p"])  # it is the reference
    assert summary.loc[("dap", "deletion"), "p"] <= 1

    run(commands["-m dap_bench.report"] + " pictures=3")
    page = (folder / "results" / "report" / "index.html").read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    (group,) = data["groups"]
    assert {row["method"] for row in group["rows"]} == set(cells)
    drawn = [sample for sample in group["samples"] if sample["maps"]]
    assert len(drawn) == 3
    assert all(set(sample["maps"]) == set(cells) and sample["photo"] for sample in drawn)
    commands_said = {cell["command"] for cell in group["cells"]}
    assert "python -m dap_bench --config-dir my_conf method=norms sampler.n=24" in commands_said
    assert "holds in 1 of 1" in run(commands["-m dap_bench.claim"])


@pytest.mark.slow
def test_iterating_on_a_method_costs_what_is_new_and_blocks_no_table(outside):
    """Another number of images, an edited method, a metric more: the tables show the newest."""
    folder, run, commands = outside
    base = "python -m dap_bench --config-dir my_conf method=norms results_dir=trial 'metric=[afs]'"
    run(f"{base} sampler.n=2")
    run(f"{base} sampler.n=4")
    method = folder / "my_method.py"
    text = method.read_text()
    method.write_text(text.replace("** power", "** (2 * power)"))
    run(f"{base} sampler.n=4")
    said = run("python -m dap_bench.tables results=trial tables=trial/t summary=trial/s.csv settings=all")
    assert said.count("older: ") >= 2
    assert "another my_method" in said
    assert "sampler.n 2, now 4" in said
    assert pd.read_csv(folder / "trial" / "s.csv")["n"].tolist() == [4]
    method.write_text(text)
    run("python -m dap_bench.settings results=trial remove=true")
    assert len(store.cells(folder / "trial")) == 1


@pytest.mark.slow
def test_the_audit_of_your_own_method(outside):
    folder, run, commands = outside
    assert "norms" in run(commands["-m dap_bench.audit"])


def test_your_own_metric(outside):
    folder, run, _ = outside
    (command,) = blocks(METRICS, "sh")
    run(f"{command.strip()} keep_maps=true results_dir=peaks")
    (cell,) = store.cells(folder / "peaks")
    for row in cell.rows():
        scaled = [(value - min(row["map"])) / (max(row["map"]) - min(row["map"])) for value in row["map"]]
        assert row["peak"] == pytest.approx(1 / sum(scaled), rel=1e-5)


def test_the_library_example_runs():
    import torch

    from dap_bench import load_vit
    from dap_bench.data.shapes import draw

    (code,) = (block for block in blocks(README, "python") if "load_metrics" in block)
    vit = load_vit("vit_shapes", device="cpu")
    names = {"images": torch.stack([vit.transform(draw(1)[0])]), "classes": torch.tensor([1])}
    exec(code, names)
    assert names["out"].maps.shape == (1, 196)
    assert set(names["values"]) == {"deletion", "insertion", "cs", "tcc", "afs", "lda", "lda_prior"}


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_are_make_targets(target):
    assert f"make {target}" in README
    listed = subprocess.run(["make", "help"], cwd=Path(__file__).parents[1], capture_output=True, text=True).stdout
    assert any(line.split()[0] == target for line in listed.splitlines())


def test_every_choice_that_the_options_name_exists():
    from dap_bench.config import choices

    for group in ("model", "method", "sampler", "data", "metric", "experiment"):
        row = next(line for line in OPTIONS.splitlines() if line.startswith(f"| `{group}` |"))
        named = set(re.findall(r"`([a-z_]+)`", row.split("|", 2)[2]))
        assert named <= set(choices(group)), (group, named - set(choices(group)))
        assert group == "metric" or named == set(choices(group)), (group, set(choices(group)) - named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)", found.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_methods_and_metrics_are_counted():
    from dap_bench.report.layouts import group

    methods = {file.stem for file in (ROOT / "conf" / "method").glob("*.yaml")}
    proper = [name for name in methods if group(name) in ("attention", "gradient", "black box")]
    metrics = re.findall(r"^\| `(\w+)` \| .* \| (?:higher|lower) \|", METRICS, re.MULTILINE)
    assert f"{len(proper)} methods, {len(metrics)} metrics" in README
    left_out = re.search(r"exclude=\[(.*?)\]", (ROOT / "conf" / "experiment" / "demo.yaml").read_text())[1].split(",")
    assert f"runs {len(methods - set(left_out))} methods on the bundled model" in README
    equal = {
        line.split("|")[1].strip() for page in (METHODS, METRICS) for line in page.splitlines() if ORACLE.search(line)
    }
    assert len(equal) == 10
    assert "ten methods and metrics equal captum, grad-cam, lxt, zennit or Quantus" in README


def test_the_readme_is_short_and_shows_pictures():
    assert len(README.split()) <= 1200
    assert re.findall(r"!\[.+?\]\((.+?)\)", README)


def test_the_table_of_the_token_zoo_is_what_its_rows_say():
    from dap_bench.report.layouts import label

    means = summarize(ROOT / "results" / "zoo").set_index(["model", "method", "metric"])["mean"]
    models = ["vit_shapes", *(f"vit_shapes_{kind}" for kind in ("reg", "avg", "avg_reg", "dist"))]
    methods = sorted({method for _, method, _ in means.index})
    assert len(methods) == 9
    for method in methods:
        numbers = [f"{means[model, method, 'pointing']:.2f}" for model in models]
        assert f"| {label(method)} | {' | '.join(numbers)} |" in MODELS


def test_figures_of_speed_and_memory_are_those_of_the_benchmark():
    from dap_bench.report.layouts import label

    page = (ROOT / "scripts" / "README.md").read_text()
    text, whole = " ".join(page.split()), (ROOT / "results" / "benchmark.md").read_text()
    parts = {file.stem: file.read_text() for file in (ROOT / "results" / "benchmark").glob("*.md")}
    assert all(part in whole for part in parts.values())
    found = re.search(
        r"\*\*(\S+)\*\* times.*by turn (\S+) to (\S+)\. With `compile=true` (\S+)\.\n", parts["limit"], re.S
    )
    ratio, low, high, compiled = found.groups()
    assert f"take **{ratio}** times as long" in text
    assert f"({low} to {high} over five turns)" in text
    assert f"`compile=true` takes {compiled} times as long" in text
    peers = dict(re.findall(r"\| ([\w -]+)(?:, Del only)? \| [\d.]+ \| ([\d.]+) x", parts["peers"]))
    for peer in ("torch-cam", "Quantus", "plain loop"):
        assert re.search(rf"{peer}[^,;]* {peers[peer]}\b", text), peer
    cells = re.findall(r"\| (\w+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|", parts["cells"])
    names, measured, floors = zip(*cells, strict=True)
    assert f"| | {' | '.join(map(label, names))} |" in page
    assert f"| measured | {' | '.join(f'{float(each):.2f}' for each in measured)} |" in page
    assert f"| by FLOPs | {' | '.join(f'{float(each):.2f}' for each in floors)} |" in page
    bf16 = {
        key: float(change) for key, change in re.findall(r"\| bf16 \| (\w+) \| \S+ \| ([\d.]+) \|", parts["precision"])
    }
    words = "bf16 changes Del by at most {deletion:.4f}, Ins by {insertion:.3f} and TCC by {tcc:.3f} per image"
    assert words.format(**bf16) in " ".join((ROOT / "conf" / "README.md").read_text().split())
    for line in re.findall(r"^\| vit_.*", parts["memory"], re.MULTILINE):
        model = line.split("|")[1].strip()
        assert line.replace(model, label(model)) in page
    memory = [
        int(line.split("|")[2].replace(",", "")) for line in re.findall(r"^\| [\d,]+ \|.*", parts["long_run"], re.M)
    ]
    assert f"between {min(memory):,} and {max(memory):,} MiB" in text
