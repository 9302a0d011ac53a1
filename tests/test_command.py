"""Options as key=value, from the signature of a function; and the console command."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest

from dap_bench import command as commands
from dap_bench.command import COMMANDS, command

seen = {}


@command(others=r"model\.\w+=.*")
def example(
    *others: Annotated[str, "model.KEY=VALUE"],
    out: Annotated[Path, "the folder to write to"],
    ci: Annotated[bool, "intervals"] = False,
    n: Annotated[int, "how many"] = 8,
    rate: float = 0.5,
    vary: Annotated[Literal["each", "all"], "which"] = "each",
    only: tuple[Literal["a", "b"], ...] = (),
    page: Annotated[Path | None, "a file"] = None,
    data: str = "",
) -> int:
    seen.update(locals())
    return n if n > 8 else 0


HELP = f"""{__doc__}

Options of test, with their defaults:
  out=PATH             the folder to write to (required)
  ci=true|false        intervals (false)
  n=N                  how many (8)
  rate=X               (0.5)
  vary=each|all        which (each)
  only=a|b,...
  page=PATH            a file
  data=TEXT
  ...                  model.KEY=VALUE
  --config-dir FOLDER  your own configs
  --help               this text
"""


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["test.py"])


def test_values_have_the_types_of_the_signature():
    example(["out=a", "ci=true", "n=3", "rate=2", "vary=all", "only=b,a", "page=~/p", "data=x=y", "model.a=b"])
    assert seen == {
        "others": ("model.a=b",),
        "out": Path("a"),
        "ci": True,
        "n": 3,
        "rate": 2.0,
        "vary": "all",
        "only": ("b", "a"),
        "page": Path.home() / "p",
        "data": "x=y",
    }
    example(["out=a", "out=b", "page="])
    assert (seen["out"], seen["page"], seen["ci"], seen["others"]) == (Path("b"), None, False, ())


def test_what_the_function_returns_is_the_exit_code():
    with pytest.raises(SystemExit) as stop:
        example(["out=a", "n=9"])
    assert stop.value.code == 9


def test_help_has_every_option_with_its_type_and_default(capsys):
    example(["--help"])
    assert capsys.readouterr().out == HELP


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("n=1", "out= is required: the folder to write to."),
        ("ci=yes", "ci must be one of true, false, not yes."),
        ("ci=True", "ci must be one of true, false, not True."),
        ("n=many", "n=many must be an integer of at least 0."),
        ("n=-1", "n=-1 must be an integer of at least 0."),
        ("n=4294967296", "n=4294967296 must be an integer of at least 0 and at most 4294967295."),
        ("rate=fast", "rate=fast must be a number of at least 0."),
        ("vary=some", "vary must be one of each, all, not some."),
        ("only=a,c", "only must be one of a, b, not c."),
        ("out=", "out='' is not a path."),
        *(
            (text, f"{text} is not an option; use out=, ci=, n=, rate=, vary=, only=, page=, data= or --help.")
            for text in ("--ci", "ci", "cl=true", "method.a=b")
        ),
        ("--config-dir=nowhere", "--config-dir nowhere is not a folder."),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(capsys, argument, sentence):
    with pytest.raises(SystemExit, match="2"):
        example([argument])
    assert capsys.readouterr().err == f"test: {sentence}\n"


# ---------------------------------------------------------------------- dap-bench


def console(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/dap-bench", *arguments])
    try:
        commands.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_the_help_lists_every_command_and_says_where_hydras_is(monkeypatch, capsys):
    code, out, _ = console(monkeypatch, capsys, "--help")
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "][1:]
    assert (code, listed) == (0, ["run", *COMMANDS])
    assert "  tables    Write the paper's tables in LaTeX, and a summary of all cells.\n" in out
    assert "`dap-bench run --help` is Hydra's help" in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(monkeypatch, capsys, name):
    code, out, _ = console(monkeypatch, capsys, name, "--help")
    assert code == 0
    assert f"\nOptions of dap-bench {name}, with their defaults:\n" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tabels"], "dap-bench: tabels is not a command; did you mean tables?\n"),
        (["my-table"], "dap-bench: my-table is not a command; did you mean tables?\n"),
        (["xyz"], f"dap-bench: xyz is not a command; there are run, {', '.join(COMMANDS)}.\n"),
        (["tables", "ci=1"], "dap-bench tables: ci must be one of true, false, not 1.\n"),
        (["export"], "dap-bench export: out= is required: the folder to write to.\n"),
        (
            ["run", "batch_size=0"],
            "dap_bench: batch_size=0 must be an integer of at least 1.\n",
        ),
        (["batch_size=0"], "dap_bench: batch_size=0 must be an integer of at least 1.\n"),
    ],
)
def test_mistakes_in_the_console(monkeypatch, capsys, arguments, error):
    assert console(monkeypatch, capsys, *arguments) == (2, "", error)


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; sys.argv = ['dap-bench', 'tables', '--help']\n"
        "from dap_bench.command import main; main(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
