"""The published numbers, and ours beside them."""

from pathlib import Path

import pandas as pd
import pytest

from dap_bench import UserError, __version__
from dap_bench.report.compare import compare, latex, markdown, published, rank_agreement

PAPER = Path(__file__).parents[2] / "results" / "paper"


def number(table, model, method, sampler, metric):
    lines = published(PAPER).set_index(["table", "model", "method", "sampler", "metric"])["published"]
    return lines[table, model, method, sampler, metric]


@pytest.mark.parametrize(
    ("table", "rows", "metrics"), [("table1", 40, 6), ("table2", 8, 4), ("table3", 40, 5), ("tableA1", 6, 5)]
)
def test_every_number_is_there(table, rows, metrics):
    part = published(PAPER).query("table == @table")
    assert len(part) == rows * metrics
    missing = part[part["published"].isna()]
    assert set(missing["method"]) <= {"chefer"}  # has no LDA
    assert len(missing) == (8 if table == "table1" else 0)


def test_spot_values():
    assert number("table1", "vit_t", "ar", "balanced", "deletion") == 0.187
    assert number("table1", "vit_l", "dap", "non_balanced", "lda") == 0.100
    assert number("table1", "vit_s", "gmar", "non_balanced", "tcc") == 0.137
    assert number("table2", "vit_b", "dap_target", "balanced", "afs") == 0.201
    assert number("table2", "vit_l", "dap_uniform", "balanced", "lda_prior") == -0.163
    assert number("table3", "vit_b", "agcam", "non_balanced", "tcc") == 0.696
    assert number("table3", "vit_l", "cdam", "balanced", "afs") == 0.855
    assert number("tableA1", "vit_l", "gradcam", "balanced", "insertion") == 0.795


def test_a_number_in_two_tables_is_the_same():
    """Table 2's LDA is another metric than Table 1's: for DAP on ViT-B they say 0.865 and 0.103."""
    values = published(PAPER).groupby(["model", "method", "sampler", "metric"])["published"].nunique()
    assert values.max() == 1
    assert number("table1", "vit_b", "dap", "balanced", "lda") == 0.103
    assert number("table2", "vit_b", "dap", "balanced", "lda_prior") == 0.865


@pytest.fixture
def compared():
    def line(method, mean, low, high):
        return {
            "data": "parquet",
            "sampler": "balanced",
            "model": "vit_t",
            "method": method,
            "metric": "deletion",
            "mean": mean,
            "low": low,
            "high": high,
            "n": 800,
            "missing": 0,
            "failed": 0,
            "version": __version__,
            "command": f"python -m dap_bench experiment=reference method={method} sampler=balanced sampler.classes=200",
        }

    # published: AR 0.187, AttR 0.112, GMAR 0.185
    ours = [line("ar", 0.200, 0.190, 0.210), line("attr", 0.130, 0.125, 0.135), line("gmar", 0.190, 0.18, 0.20)]
    return compare(pd.DataFrame(ours), published(PAPER))


def test_verdicts_by_hand(compared):
    """AR differs by 0.013 and may by 1.414 * 0.010 + 0.0005; AttR by 0.018 and may by 1.414 * 0.005 + 0.0005."""
    lines = compared.query("table == 'table1' and model == 'vit_t' and sampler == 'balanced' and metric == 'deletion'")
    found = lines.set_index("method")
    assert found["verdict"].to_dict() == {
        "ar": "agrees",
        "attr": "differs",
        "chefer": "not measured",
        "gmar": "agrees",
        "dap": "not measured",
    }
    assert found.loc["ar", "difference"] == pytest.approx(0.013)


def test_a_cell_that_is_not_whole_is_marked():
    line = {"model": "vit_t", "method": "ar", "sampler": "balanced", "metric": "deletion", "data": "parquet"}
    ours = {**line, "mean": 0.187, "low": 0.18, "high": 0.19, "n": 400, "missing": 400, "failed": 0}
    ours |= {"version": "0.0.9", "command": ""}
    found = compare(pd.DataFrame([ours]), published(PAPER))
    assert set(found["verdict"]) == {"agrees*†", "not measured", "no number"}
    assert "1 agree, 0 differ" in markdown(found)
    found = compare(pd.DataFrame([{**ours, "missing": 0, "failed": 7, "version": __version__}]), published(PAPER))
    assert set(found["verdict"]) == {"agrees*", "not measured", "no number"}


def test_a_verdict_takes_the_number_of_images_into_account():
    """200 of ours, 800 of theirs: a half-width of 0.010 allows 0.010 * sqrt(1 + 1/4) = 0.0112, and rounding."""
    line = {"model": "vit_t", "method": "ar", "sampler": "balanced", "metric": "deletion", "data": "parquet"}
    ours = {**line, "n": 200, "missing": 0, "failed": 0, "version": __version__, "command": ""}
    means = {0.187 + 0.0116: "agrees", 0.187 + 0.0118: "differs"}
    for mean, verdict in means.items():
        table = pd.DataFrame([{**ours, "mean": mean, "low": mean - 0.01, "high": mean + 0.01}])
        assert verdict in set(compare(table, published(PAPER))["verdict"])
    alone = pd.DataFrame([{**ours, "n": 1, "mean": 0.187, "low": float("nan"), "high": float("nan")}])
    assert "too few images" in set(compare(alone, published(PAPER))["verdict"])


def test_rank_agreement_by_hand(compared):
    """Ours: AttR < GMAR < AR, theirs: AttR < GMAR < AR; ours are larger by 0.018, 0.005 and 0.013."""
    (line,) = rank_agreement(compared).to_dict("records")
    assert (line["tau"], line["methods"], line["metric"], line["agree"]) == (1.0, 3, "deletion", 2)
    assert line["difference"] == pytest.approx(0.012)
    assert line["mad"] == pytest.approx(0.012)
    assert line["spread"] == pytest.approx(2**0.5 * (0.010 + 0.005 + 0.010) / 3)
    assert "| ViT-T | Balanced | Del | 2 of 3 | +0.012 | 0.012 | 0.012 | 1.00 |" in markdown(compared)


def test_one_set_stands_beside_both_draws():
    """AR's Del is 0.187 and 0.185 in print; ours, of 1,000 images, may differ by 0.010 sqrt(1 + 1000/800) + 0.0005."""
    line = {"model": "vit_t", "method": "ar", "sampler": "non_balanced", "metric": "deletion", "data": "parquet"}
    ours = {**line, "n": 1000, "missing": 0, "failed": 0, "version": __version__, "command": ""}
    table = pd.DataFrame([{**ours, "mean": 0.1705, "low": 0.1605, "high": 0.1805}])
    alone, both = (compare(table, published(PAPER), one_set).dropna(subset=["mean"]) for one_set in (False, True))
    assert set(alone["sampler"]) == {"non_balanced"}
    found = both.query("table == 'table1'").set_index("sampler")
    assert found["verdict"].to_dict() == {"balanced": "differs", "non_balanced": "agrees"}
    assert found["spread"].tolist() == pytest.approx([0.010 * (2 * 1000 / 800) ** 0.5] * 2)
    with pytest.raises(UserError, match="needs rows of one sampling"):
        compare(pd.concat([table, table.assign(sampler="balanced")]), published(PAPER), True)


def test_what_is_missing_has_its_command(compared):
    text = markdown(compared)
    assert "python -m dap_bench model=vit_l method=legrad sampler=non_balanced" in text
    # the cells of a model are computed as those that are there were; rows of other metrics are in the way
    assert "\npython -m dap_bench experiment=reference method=legrad sampler=non_balanced\n" in text
    assert "experiment=reference method=ar sampler=balanced  # with metric=paper" in text
    assert (
        "| table1 | ViT-T | Balanced | AttR | Del | 0.112 | 0.130 | 0.125 to 0.135 | 800 | +0.018 | differs |" in text
    )
    assert "2 agree, 1 differ" in text


def test_latex_has_what_is_measured_and_counts_the_rest(compared):
    text = latex(compared)
    assert r"ViT-T & Balanced & AR & Del & 0.187 & 0.200 {\tiny [0.190, 0.210]} & $+$0.013 & agrees \\" in text
    assert text.count(r" \\") == 2 + 3 + 1  # two heads, three numbers, one metric
    assert "not measured \\" not in text
    # Table 1 without Chefer's LDA, four methods of Table 3, Table 2, where DAP has its LDA only; the rest is repeated
    count = (40 * 6 - 8) + 32 * 5 + 6 * 4 + 2
    assert rf"\noindent {count - 3} of {count} published numbers are not measured." in text
    assert "% python -m dap_bench model=vit_l method=legrad sampler=non_balanced" in text
    assert r"ViT-T & Balanced & Del & 1.00 & 3 \\" in text
