"""The committed rows of the real ViT-T: whole, described, and the same when they are computed again."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from dap_bench import config, runner
from dap_bench.data.images import decode
from dap_bench.metrics.base import Batch
from dap_bench.report.compare import compare, published, rank_agreement
from dap_bench.report.layouts import label, ordered, paper, paper_methods
from dap_bench.report.rows import load_rows
from dap_bench.report.summary import summarize

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "reference"
REFERENCE = FOLDER / "train"
METRICS = ("deletion", "insertion", "cs", "tcc", "afs", "lda")
CONTROLS = ("random", "centre")
PAGE, FRONT = ((folder / "README.md").read_text() for folder in (FOLDER, ROOT))
FRONT = FRONT.split("## Does it reproduce?")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def cells():
    return load_rows(REFERENCE)


@pytest.fixture(scope="module")
def summary():
    return summarize(REFERENCE)


@pytest.fixture(scope="module")
def compared(summary):
    found = compare(summary, published(), one_set=True).drop_duplicates(["model", "method", "sampler", "metric"])
    return found[found["table"].isin(["table1", "table3"])].dropna(subset=["mean", "published"])


def test_every_cell_of_the_experiment_is_there(cells):
    asked = {part for part, _ in config.sweep("experiment=reference")}
    assert {f"method={cell.names['method']}" for cell in cells} == asked
    assert {f"method={name}" for name in (*paper_methods(), *paper("table2").methods, *CONTROLS)} == asked


def test_cells_are_whole_small_and_say_how_they_were_made(cells):
    for cell in cells:
        assert len(cell.rows) == cell.info["n"] == 1000, cell.folder
        assert (cell.rows["status"] == "ok").all()
        assert "map" not in cell.rows  # no maps and no images
        assert cell.info["config"]["explain_precision"] == "fp64"
        assert cell.info["command"] == f"python -m dap_bench method={cell.names['method']} experiment=reference"
        assert (REFERENCE / "samples" / f"{cell.info['identity']['samples']}.csv").is_file()
        assert not cell.info["config"]["data"]["path"].startswith("/")
        assert not cell.mark
    assert sum(file.stat().st_size for file in REFERENCE.rglob("*") if file.is_file()) < 20 * 2**20


@pytest.mark.parametrize(
    ("folder", "split", "methods"),
    [
        ("validation", "validation", {"ar", "gradcam", "dap"}),
        ("localisation", "validation", {*paper_methods(), *CONTROLS}),
        ("readings", "train", {"attr_raw", "dap_smooth"}),
    ],
)
def test_the_other_rows_are_whole_and_say_how_they_were_made(folder, split, methods):
    found = load_rows(FOLDER / folder)
    assert {cell.names["method"] for cell in found} >= methods
    for cell in found:
        assert len(cell.rows) == cell.info["n"], cell.folder
        assert (cell.rows["status"] == "ok").all()
        assert cell.info["config"]["explain_precision"] == "fp64"
        assert cell.info["config"]["data"]["split"] == split
        assert cell.info["command"].startswith("python -m dap_bench ")
        assert "=/" not in cell.info["command"]


def test_ten_rows_computed_again(cells, assets, tmp_path_factory):
    """One row each of ten cells, from the images, by the cell's own config."""
    for at in range(10):
        cell = cells[at * 7 % len(cells)]
        found = _compute(cell, at * 71, assets, tmp_path_factory.getbasetemp() / "cache")
        stored = cell.rows.set_index("sample_id").loc[found.pop("sample_id")]
        for name, value in found.items():
            assert value == pytest.approx(stored[name], abs=1e-4, nan_ok=True), (cell.names, name)


def test_pages_are_what_the_rows_say(tmp_path):
    for command, page, out in (
        (["-m", "dap_bench.compare", "results=results/reference/train", "one_set=true"], "compare.md", tmp_path),
        (["scripts/protocol.py"], "PROTOCOL.md", tmp_path / "PROTOCOL.md"),
    ):
        subprocess.run([sys.executable, *command, f"out={out}"], cwd=ROOT, check=True, capture_output=True)
        assert (tmp_path / page).read_text() == (FOLDER / page).read_text(), f"make {page} again"


def test_the_tables_of_the_pages_are_what_the_rows_say(summary, compared):
    by_metric = rank_agreement(compared).set_index(["metric", "sampler"])
    for metric in METRICS:
        own = compared[compared["metric"] == metric]
        taus = [f"{by_metric.loc[(metric, sampler), 'tau']:.2f}" for sampler in ("balanced", "non_balanced")]
        agree = f"{own['verdict'].str.startswith('agrees').sum()} of {len(own)}"
        line = [label(metric), agree, f"{own['difference'].abs().mean():.3f}", f"{own['spread'].mean():.3f}", *taus]
        assert line in _tables(PAGE), line
        assert line[:4] in _tables(FRONT), line
    assert len(compared) == 98
    assert f"**{compared['verdict'].str.startswith('agrees').sum()} of the paper's 98 ViT-T" in " ".join(FRONT.split())
    ours = summary.set_index(["method", "metric"])
    theirs = compared.groupby(["method", "metric"])["published"].mean()
    for method in ordered(set(summary["method"])):
        line = [label(method)]
        for metric in METRICS:
            mean, low, high = ours.loc[(method, metric), ["mean", "low", "high"]]
            paper = f" ({theirs[method, metric]:.3f})" if (method, metric) in theirs else ""
            line.append("" if pd.isna(mean) else f"{mean:.3f} ± {(high - low) / 2:.3f}{paper}")
        assert line in _tables(PAGE), line


def test_localisation_is_what_the_rows_say():
    found = summarize(FOLDER / "localisation")
    ours, metrics = found.set_index(["method", "metric"]), ordered(set(found["metric"]))
    for method in ordered(set(found["method"])):
        lines = [ours.loc[(method, metric)] for metric in metrics]
        line = [label(method), *(f"{each['mean']:.3f} ± {(each['high'] - each['low']) / 2:.3f}" for each in lines)]
        assert line in _tables(PAGE), line


@pytest.mark.parametrize("text", [PAGE, FRONT], ids=["page", "README"])
def test_claims_are_what_the_rows_say(text, summary):
    """METHOD METRIC number [low, high], and claims with their verdicts."""
    ours = summary.set_index(["method", "metric"])
    names = {label(name): name for name in (*METRICS, *set(summary["method"]))}
    shown = re.findall(r"([\w-]+)\s+(Del|Ins|CS|TCC|AFS|LDA)\s+(-?\d\.\d+)\s+\[(-?\d\.\d+),\s+(-?\d\.\d+)\]", text)
    assert len(shown) >= 8
    for method, metric, *numerals in shown:
        line = ours.loc[(names[method], names[metric])]
        assert numerals == [f"{line[key]:.3f}" for key in ("mean", "low", "high")], (method, metric)


@pytest.mark.parametrize("text", [PAGE, FRONT], ids=["page", "README"])
def test_what_dap_beats_is_what_the_rows_say(text, summary):
    """Paired and corrected after Holm, of the metrics that a random map has."""
    against = summary.dropna(subset=["p"]).set_index(["method", "metric"])

    def verdict(method, metric):
        line = against.loc[(method, metric)]
        return "" if line["p"] >= 0.05 else "beats" if line["effect"] > 0 else "loses"

    assert {verdict("random", metric) for metric in METRICS[:5]} == {"beats"}
    assert [verdict("centre", metric) for metric in METRICS[:5]] == ["beats", "", "beats", "loses", "beats"]
    assert [verdict("ar", metric) for metric in METRICS[:2]] == ["", "loses"]  # Del is not better, and not worse
    assert [verdict("attr", metric) for metric in METRICS[:2]] == ["loses", "loses"]
    assert "It beats random maps in every metric, and the centre in Del, CS and AFS." in " ".join(text.split())


@pytest.mark.parametrize("text", [PAGE, FRONT], ids=["page", "README"])
def test_what_is_not_reproduced_is_what_the_rows_say(text, summary, compared):
    ours = summary.set_index(["method", "metric"])["mean"]
    theirs = compared.groupby(["method", "metric"])["published"].mean()
    (variant,) = (cell for cell in load_rows(FOLDER / "readings") if cell.names["method"] == "attr_raw")
    afs, cs = (variant.values(metric).mean() for metric in ("afs", "cs"))

    def both(method, metric, mean=None):
        return f"{ours[method, metric] if mean is None else mean:.3f}, paper {theirs[method, metric]:.3f}"

    assert (
        f"**Not reproduced:** Chefer (Del {both('chefer', 'deletion')}; AFS {both('chefer', 'afs')}), Table 1's LDA "
        f"(DAP {both('dap', 'lda')}; AR {both('ar', 'lda')}), and AttR's AFS ({both('attr', 'afs')}), which matches "
        f"without row normalisation ({afs:.3f}), but then CS does not ({both('attr', 'cs', cs)})."
    ) in " ".join(text.split())


def test_overall_figures_are_what_the_rows_say(cells, compared):
    mad = f"{compared['difference'].abs().mean():.3f}"
    assert f"difference, MAD: {mad};" in FRONT
    both = compared.set_index(["method", "metric", "sampler"])["published"].unstack()
    assert f"they differ by {(both['balanced'] - both['non_balanced']).abs().mean():.3f} on average" in " ".join(
        PAGE.split()
    )
    rows = cells[0].rows
    assert f"Top-1 accuracy is {(rows['predicted'] == rows['label']).mean():.1%}." in " ".join(PAGE.split())


@pytest.mark.parametrize("text", [PAGE, FRONT], ids=["page", "README"])
def test_there_is_no_number_that_rows_or_the_paper_do_not_have(text, summary, compared):
    """Every number with three decimals, wherever it stands."""
    tables = [summary, summarize(FOLDER / "localisation")]
    values = [table[key] for table in tables for key in ("mean", "low", "high")]
    values += [cell.rows[list(cell.info["metrics"])].mean() for cell in load_rows(FOLDER / "readings")]
    values += [(table["high"] - table["low"]) / 2 for table in tables]
    by_metric = compared.groupby("metric")
    values += [by_metric["difference"].agg(lambda found: found.abs().mean()), by_metric["spread"].mean()]
    values += [compared["difference"].abs().groupby(lambda _: 0).mean(), published()["published"]]
    values += [compared.groupby(["method", "metric"])["published"].mean()]
    both = compared.set_index(["method", "metric", "sampler"])["published"].unstack()
    values += [(both["balanced"] - both["non_balanced"]).abs().groupby(lambda _: 0).mean()]
    known = {f"{value:.3f}".lstrip("-") for each in values for value in each.dropna()}
    assert set(re.findall(r"\b\d\.\d{3}\b(?!\d)", text)) - known == set()


def _tables(text):
    """The lines of Markdown tables as lists of their cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def _compute(cell, at, assets, cache):
    cfg = OmegaConf.create(cell.info["config"])
    cfg.model.checkpoint = str(assets / "weights" / f"{cfg.model.tag}.safetensors")
    cfg.data.path = str(assets / "imagenet")
    cfg.cache_dir = str(cache)
    samples = runner.sample_set(cfg)
    assert samples.digest == cell.info["identity"]["samples"]
    vit = config.load_vit("vit_t", device="cpu", checkpoint=cfg.model.checkpoint)
    ((data, _),) = samples.read([at])
    image, double = torch.stack([vit.transform(decode(data))]), cfg.explain_precision == "fp64"
    explain = config.instantiate_method(cfg.method)
    batch = Batch.of(vit, explain, image, layers=True, double=double, ids=[samples.ids[at]])
    metrics = config.instantiate_metrics(cfg.metric)
    row = {"sample_id": samples.ids[at], "predicted": batch.predicted.item(), "confidence": batch.confidence.item()}
    return row | {name: metric(batch).item() for name, metric in metrics.items()}
