"""What the README shows is what happens."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dap_bench import store, summarize

SCRIPTS = Path(__file__).parents[1] / "scripts"
README = Path(__file__).parents[1].joinpath("README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_your_own_method_from_a_folder_outside_the_project(tmp_path, tmp_path_factory):
    section = README.split("## Your own method")[1].split("\n## ")[0]
    code, yaml, command = (
        re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "yaml", "sh")
    )
    assert code.count("\n") + yaml.count("\n") < 25
    for text in (code, yaml):
        path = tmp_path / re.match(r"# (\S+)\n", text)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "DAP_BENCH_CACHE": str(tmp_path_factory.getbasetemp() / "cache")}
    arguments = command.strip().removeprefix("python ").split()
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = {cell.info["method"]: cell for cell in store.cells(tmp_path / "results" / "runs")}
    assert set(cells) == {"norms", "dap"}
    rows = cells["norms"].rows()
    assert len(rows) == 24
    assert all(row["status"] == "ok" and row["cs"] == 0.0 for row in rows)  # it does not look at the class
    table = summarize(tmp_path / "results" / "runs").set_index(["method", "metric"])
    assert table.loc[("norms", "deletion"), "n"] == 24
    assert table.loc[("norms", "cs"), "mean"] == 0.0
    no_layers = [("norms", "lda"), ("norms", "lda_prior")]  # it has no layer maps, so no LDA
    assert table["mean"].drop(no_layers).notna().all()

    def script(name):
        command = [sys.executable, str(SCRIPTS / name), "--config-dir", "my_conf"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "table1.tex" in script("tables.py")
    assert " & norms & " in (tmp_path / "results" / "tables" / "table1.tex").read_text()
    assert "cases-best-vit_shapes-non_balanced.png" in script("figures.py")
    script("report.py")
    page = (tmp_path / "results" / "report" / "index.html").read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert [row["method"] for row in data["groups"][0]["rows"]] == ["dap", "norms"]
    assert all(set(sample["methods"]) == {"dap", "norms"} and sample["photo"] for sample in data["samples"])
    commands = {cell["command"] for cell in data["cells"]}
    assert commands == {
        f"python -m dap_bench --config-dir my_conf method={method} sampler.n=24" for method in ("dap", "norms")
    }
    again = [sys.executable, *max(commands).split()[1:]]
    done = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, "n=24, failed=0" in done.stdout) == (0, True)  # it is the same cell, and is there already


def test_your_own_metric(tmp_path, tmp_path_factory):
    (code,) = (block for block in blocks("python") if "class Peak" in block)
    yaml = re.search(r"`my_conf/metric/(peak.yaml)`.*?`(peak: .*?)`", README, re.DOTALL)
    (tmp_path / "my_metric.py").write_text(code)
    (tmp_path / "my_conf" / "metric").mkdir(parents=True)
    (tmp_path / "my_conf" / "metric" / yaml[1]).write_text(yaml[2])
    cache = f"cache_dir={tmp_path_factory.getbasetemp() / 'cache'}"
    arguments = ["--config-dir", "my_conf", "metric=[peak,afs]", "sampler.n=4", "keep_maps=true", cache]
    done = subprocess.run([sys.executable, "-m", "dap_bench", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (cell,) = store.cells(tmp_path / "results" / "runs")
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

    means = summarize(SCRIPTS.parent / "results" / "zoo").set_index(["model", "method", "metric"])["mean"]
    models = ["vit_shapes", *(f"vit_shapes_{kind}" for kind in ("reg", "avg", "avg_reg", "dist"))]
    methods = sorted({method for _, method, _ in means.index})
    assert len(methods) == 9
    for method in methods:
        numbers = [f"{means[model, method, 'pointing']:.2f}" for model in models]
        assert f"| {label(method)} | {' | '.join(numbers)} |" in README
