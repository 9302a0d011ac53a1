"""What the README shows is what happens."""

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
README = ROOT.joinpath("README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder outside the project with the README's files, and its commands as they are written there."""
    folder = tmp_path_factory.mktemp("outside")
    section = README.split("## Your own method")[1].split("\n## ")[0]
    assert section.count("\n") <= 60
    for kind in ("python", "yaml"):
        for text in re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL):
            path = folder / re.match(r"# (\S+)\n", text)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    yaml = re.search(r"`my_conf/metric/(peak.yaml)`.*?`(peak: .*?)`", section, re.DOTALL)
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
    assert set(commands) == {
        f"-m dap_bench{name}" for name in ("", ".audit", ".tables", ".report", ".claim", ".settings")
    }
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

    run(commands["-m dap_bench.report"])
    page = (folder / "results" / "report" / "index.html").read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert {row["method"] for row in data["groups"][0]["rows"]} == set(cells)
    assert all(set(sample["methods"]) == set(cells) and sample["photo"] for sample in data["samples"])
    commands_said = {cell["command"] for cell in data["cells"]}
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
    run("python -m dap_bench --config-dir my_conf 'metric=[peak,afs]' sampler.n=4 keep_maps=true results_dir=peaks")
    (cell,) = store.cells(folder / "peaks")
    for row in cell.rows():
        scaled = [(value - min(row["map"])) / (max(row["map"]) - min(row["map"])) for value in row["map"]]
        assert row["peak"] == pytest.approx(1 / sum(scaled), rel=1e-5)


def test_the_library_example_runs():
    import torch

    from dap_bench import load_vit
    from dap_bench.data.shapes import draw

    (code,) = (block for block in blocks("python") if "load_metrics" in block)
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


def test_every_file_and_choice_the_readme_names_exists():
    from dap_bench.config import choices

    for group in ("model", "method", "sampler", "data", "metric", "experiment"):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{group}` |"))
        named = set(re.findall(r"`([a-z_]+)`", row.split("|", 2)[2]))
        assert named <= set(choices(group)), (group, named - set(choices(group)))
        assert group == "metric" or named == set(choices(group)), (group, set(choices(group)) - named)


def test_the_table_of_the_token_zoo_is_what_its_rows_say():
    from dap_bench.report.layouts import label

    means = summarize(ROOT / "results" / "zoo").set_index(["model", "method", "metric"])["mean"]
    models = ["vit_shapes", *(f"vit_shapes_{kind}" for kind in ("reg", "avg", "avg_reg", "dist"))]
    methods = sorted({method for _, method, _ in means.index})
    assert len(methods) == 9
    for method in methods:
        numbers = [f"{means[model, method, 'pointing']:.2f}" for model in models]
        assert f"| {label(method)} | {' | '.join(numbers)} |" in README
