"""The command line: bad input is one sentence and exit code 2, and never a traceback."""

import re
import sys

import pytest

from dap_bench import store
from dap_bench.__main__ import main


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, tmp_path_factory):
    def call(*arguments):
        cache = tmp_path_factory.getbasetemp() / "cache"
        monkeypatch.setattr(
            sys, "argv", ["dap_bench", *arguments, f"results_dir={tmp_path}/results", f"cache_dir={cache}"]
        )
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["method=nope"], "there is no method=nope; there are .*ar.*dap.*gradcam"),
        (["model=nope"], "there is no model=nope.*vit_b"),
        (["sampler=nope"], "there is no sampler=nope.*balanced"),
        (["metric=[cs,nope]"], "there is no metric=nope; there are .*afs, .*cs, deletion"),
        (["nonsense=1"], "there is no key nonsense; there are .*batch_size"),
        (["modle=vit_t"], "there is no key modle; did you mean model"),
        (["batchsize=3"], "there is no key batchsize; did you mean batch_size"),
        (["method=gradcam", "method.layr=3"], "there is no key method.layr; did you mean method.layer"),
        (["metric=[cs]", "metric.cs.unt=pixel"], "there is no key metric.cs.unt; did you mean metric.cs.unit"),
        *(([f"method={value}"], "method takes a name, one of agcam, ar") for value in ("nan", "1", "null", "true", "")),
        (["metric=7"], "metric takes a name, one of .*paper"),
        (["metric=[]"], "metric takes a name"),
        (["method=[ar,dap]"], "for several cells write -m method=ar,dap"),
        (["-m", "method=ar,", "dap"], "ends in a comma; write a sweep without spaces"),
        (["method=dap", "method.prior=legrad"], "the prior is a method, not 'legrad'; .*method/prior=legrad"),
        (["device=mps", "sampler.n=1"], "device=mps"),
        (["debug=maybe"], "debug must be one of True, False, not maybe"),
        (["data=parquet"], "Missing mandatory value: data.path"),
        (["data=parquet", "data.path=/does/not/exist"], "data.path=/does/not/exist holds no Parquet file"),
        (["data=imagefolder", "data.path=/does/not/exist"], "is not a folder"),
        (["device=cuda:77"], "device=cuda:77 was asked for"),
        (["model.checkpoint=/does/not/exist"], "cannot be read"),
        (["batch_size=0"], "batch_size=0 must be an integer of at least 1"),
        (["batch_size=abc"], "batch_size=abc must be an integer"),
        (["chunk_size=-4"], "chunk_size=-4 must be an integer"),
        (["sampler.n=2.5"], "sampler.n=2.5 must be an integer"),
        (["data.size=abc"], "data.size=abc must be an integer"),
        (["overwrite=maybe"], "overwrite must be one of True, False, failed, not maybe"),
        (["precision=fp8"], "precision must be one of fp32, tf32, bf16"),
        (["explain_precision=bf16"], "explain_precision must be one of fp32, fp64, not bf16"),
        (["metric.cs.unit=pixels"], "unit must be one of pixel, patch, not pixels"),
        (["model.depth=5"], "does not fit"),
        (["shard=2/1"], "must be i/n"),
        (["sampler.n=999999"], "more images than the source has"),
        (["sampler=balanced", "sampler.classes=13"], "use sampler.classes=12 or fewer"),
        (["name=../../escape", "sampler.n=2"], "cannot be part of a path"),
    ],
)
def test_bad_input(command, arguments, words):
    code, _, error = command(*arguments)
    assert code == 2, error
    assert error.startswith("dap_bench: ")
    assert re.search(words, error.replace("\n", " ")), error
    assert "Traceback" not in error


METHODS = """
import torch
def raises(vit, images, classes, layers=False):
    return images["nothing"]
class Column:
    better = "higher"
    def __call__(self, batch):
        return torch.zeros(len(batch.images), 1)
class Patches(Column):
    def __call__(self, batch):
        return batch.explanation.maps
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Configs of one's own, with what can be wrong in them."""
    (tmp_path / "own_code.py").write_text(METHODS)
    for name, text in {
        "method/broken": "_target_: [a\nx: 'y",
        "method/raises": "_target_: own_code.raises\n_partial_: true",
        "method/nothing": "power: 2",
        "method/builtin": "_target_: builtins.print\n_partial_: true",
        "method/nowhere": "_target_: own_code.nowhere\n_partial_: true",
        "metric/column": "column: {_target_: own_code.Column}",
        "metric/patches": "patches: {_target_: own_code.Patches}",
    }.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    return ["--config-dir", str(tmp_path / "conf"), "sampler.n=2", "metric=[afs]"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("method=broken", "a config is not YAML: .*broken.yaml.*line 2"),
        ("method=nothing", "names no function; its YAML needs _target_: MODULE.FUNCTION"),
        ("method=builtin", "_target_: builtins.print has no source that can be found"),
        ("method=nowhere", "own_code.nowhere"),
        ("metric=[column]", r"metric 'column' gave shape \[2, 1\], expected one number per image: \[2\]"),
        ("metric=[patches]", r"metric 'patches' gave shape \[2, 196\], expected one number per image: \[2\]"),
        ("method=raises", "IndexError: .*own_code.py, line 4.*; debug=true shows where"),
    ],
)
def test_mistakes_in_configs_and_methods_of_ones_own(command, folder, argument, words):
    code, _, error = command(*folder, argument)
    assert code == 2, error
    assert re.search(words, error.replace("\n", " ")), error
    assert "Traceback" not in error


def test_debug_raises_what_a_method_raises(command, folder):
    with pytest.raises(IndexError) as raised:
        command(*folder, "method=raises", "debug=true")
    assert raised.traceback[-1].path.name == "own_code.py"


def test_signed_addresses_and_tokens_are_not_repeated(monkeypatch):
    from dap_bench import UserError

    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    text = "https://cdn.example.org/file.parquet?X-Amz-Signature=0a1b&Expires=1 failed for hf_abcdefgh"
    assert str(UserError(text)) == "https://cdn.example.org/file.parquet?... failed for $HF_TOKEN"


def test_a_parquet_file_that_is_cut_or_of_another_kind(command, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "other.parquet").read_bytes()[:-9])
    for name, words in (("other", "has columns"), ("cut", "damaged or cut short")):
        code, _, error = command("data=parquet", f"data.path={tmp_path}/{name}.parquet")
        assert code == 2
        assert words in error
        assert "Traceback" not in error


def test_one_cell(command, tmp_path):
    code, out, error = command("sampler.n=4", "batch_size=2", "method=ar", "metric=[afs]", "name=mine")
    assert code == 0, error
    (cell,) = store.cells(tmp_path / "results")
    mean = sum(row["afs"] for row in cell.rows()) / 4
    assert out == f"vit_shapes mine non_balanced: 4 of 4 images, AFS {mean:.3f}\n  {cell.folder}\n"
    assert {row["method"] for row in cell.rows()} == {"mine"}
    assert re.search(rf"\rvit_shapes mine non_balanced \|█+\| 4/4 \[.*img/s, AFS {mean:.3f}\]", error)


def test_a_results_folder_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    for flags in ([], ["-m"]):
        arguments = [*flags, "results_dir=/dev/null/x", f"cache_dir={tmp_path}", "sampler.n=2", "method=ar"]
        monkeypatch.setattr(sys, "argv", ["dap_bench", *arguments])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert re.search(r"/dev/null/x.*cannot be", capsys.readouterr().err)


def test_a_sweep_goes_on_after_a_cell_that_cannot_run(command, tmp_path):
    code, _, error = command("-m", "method=gradcam", "method.layer=99,-1", "sampler.n=2", "metric=[afs]")
    assert code == 2
    told = [line for line in error.splitlines() if "layer=99" in line and not line.startswith("Error executing job")]
    assert len(told) == 1
    assert told[0].startswith("vit_shapes gradcam non_balanced: layer=99 is not a block")
    assert error.endswith("dap_bench: 1 cell could not be run (see above).\n")
    assert "Traceback" not in error
    done = [cell for cell in store.cells(tmp_path / "results") if len(cell.rows()) == 2]
    assert [cell.info["config"]["method"]["layer"] for cell in done] == [-1]


def test_a_sweep_over_methods_and_samplers(command, tmp_path):
    sweep = ["-m", "method=ar,dap", "sampler=balanced,non_balanced", "metric=[afs]", "data.size=60"]
    code, _, error = command(*sweep)
    assert code == 2  # 60 images hold 5 of each class, but not 800
    assert "sampler.n=800 asks for more images than the source has (60)" in error
    found = {(cell.info["method"], cell.info["sampler"], cell.info["n"]) for cell in store.cells(tmp_path / "results")}
    assert found == {("ar", "balanced", 48), ("dap", "balanced", 48)}


def test_help_shows_groups_and_commands(command):
    code, out, _ = command("--help")
    assert code in (0, None)
    for word in (
        "method: agcam, ar, attnlrp, attr",
        "vit_shapes",
        "python -m dap_bench model=vit_b method=dap",
        "sampler.per_class",
    ):
        assert word in out
    assert out.count("python -m dap_bench ") >= 5


@pytest.fixture
def no_hub(monkeypatch):
    from huggingface_hub import HfApi

    def fail(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(HfApi, "auth_check", fail)


def test_a_sweep_says_once_that_the_hub_is_out_of_reach(command, no_hub):
    code, _, error = command("-m", "model=vit_t,vit_s", "method=ar,dap")
    first, *others, _, end = error.splitlines()  # the last but one is Hydra's
    assert code == 2
    assert first.startswith("vit_t ar non_balanced: The Hugging Face Hub cannot be reached for ILSVRC/imagenet-1k")
    assert others == [
        f"{cell} non_balanced: not run; the Hugging Face Hub cannot be reached (see above)."
        for cell in ("vit_t dap", "vit_s ar", "vit_s dap")
    ]
    assert end == "dap_bench: 4 cells could not be run (see above)."


def test_the_hub_out_of_reach(command, no_hub):
    code, _, error = command("model=vit_b", "method=dap")
    assert code == 2
    assert "data=parquet data.path=FOLDER" in error
    assert "Traceback" not in error
