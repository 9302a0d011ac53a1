"""The command line: options are key=value and come from a function's signature, mistakes are answered in a sentence.

    @command()
    def main(results: Results = "results/runs", ci: Annotated[bool, "intervals beside the means"] = False) -> None: ...

makes a command with the options `results=` and `ci=`. An option without a default must be given. Its type is str, bool,
int, float, Path or Literal, a tuple of one of these (written A,B), or one of these | None (None is written as nothing).
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from re import fullmatch
from textwrap import wrap
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dap_bench.config import add_folder
from dap_bench.errors import Interrupted, UserError, one_of, path, redacted, require_int, require_number

WIDTH = 100  # columns of the help
COMMANDS = (  # of dap-bench, each a module of that name with a `main`
    *("tables", "compare", "figures", "report", "status", "settings", "claim"),
    *("explain", "app", "audit", "export", "fetch"),
)
# options that several commands have
Results = Annotated[str, "folder with rows, or several: A,B"]
Data = Annotated[str, "only rows of this data source"]
Reference = Annotated[str, "method to test the others against"]
Published = Annotated[Path, "folder with the published numbers"]
Device = Annotated[str, "auto, cpu, cuda, cuda:N or mps"]
OneSet = Annotated[bool, "compare one set of images with both of the paper's samplings"]


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str
    kind: Any
    about: str
    default: Any

    def line(self) -> tuple[str, str]:
        """What --help says of it."""
        ends = "required" if self.default is Parameter.empty else _written(self.default)
        return f"{self.name}={_form(self.kind)}", f"{self.about} ({ends})".strip() if ends else self.about


def command(others: str = ".*") -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Turn a function into one that takes its options from the command line; what it returns is the exit code.

    Args:
        others: If the function has `*arguments`, a pattern of those that are no option of its own and are handed on.
            Defaults to ".*".

    Returns:
        The decorator.
    """

    def decorate(function: Callable[..., int | None]) -> Callable[..., None]:
        def run(arguments: Sequence[str] | None = None) -> None:
            def call() -> None:
                given = with_folders(sys.argv[1:] if arguments is None else arguments)
                if {"-h", "--help"} & set(given):
                    print(_help(function))
                elif code := _called(function, given, others):
                    sys.exit(code)

            answer(_program(), call)

        return run

    return decorate


def answer(name: str, call: Callable[[], None]) -> None:
    """Run a command: a mistake is one sentence and exit code 2, Ctrl-C one line and 130.

    Args:
        name: The command's name, for messages.
        call: What the command does.
    """
    try:
        call()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, OSError) as error:
        print(f"{name}: {redacted(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"\n{name}: stopped; repeat the same command to resume.", file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, Interrupted) else 130)


def with_folders(arguments: Sequence[str]) -> list[str]:
    """Take `--config-dir FOLDER`, which says where configs of one's own are, out of the arguments.

    Args:
        arguments: The arguments of a command.

    Returns:
        The other arguments.

    Raises:
        UserError: If there is no such folder.
    """
    rest, left = [], iter(arguments)
    for argument in left:
        flag, _, folder = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            add_folder(folder or next(left, ""))
        else:
            rest.append(argument)
    return rest


def grouped(arguments: Sequence[str], *groups: str) -> dict[str, dict[str, Any]]:
    """Sort options of the form GROUP.KEY=VALUE by group.

        method.relu=false model.checkpoint=FILE -> {"method": {"relu": False}, "model": {"checkpoint": "FILE"}}

    Args:
        arguments: The options.
        *groups: Names of the groups.

    Returns:
        The options of each group, empty where none were given.
    """
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    return {group: dict(found.get(group) or {}) for group in groups}


# ---------------------------------------------------------------------- from arguments to values


def _options(function: Callable[..., Any]) -> Iterator[Option]:
    """The options of a command, then what else it takes."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in sorted(signature(function).parameters.items(), key=lambda item: item[1].kind == _REST):
        kind, about = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name], "")
        yield Option(name, _REST if parameter.kind == _REST else kind, about, parameter.default)


_REST = Parameter.VAR_POSITIONAL


def _called(function: Callable[..., int | None], arguments: Sequence[str], others: str) -> int | None:
    """Call a function with what the arguments say."""
    options = {option.name: option for option in _options(function) if option.kind != _REST}
    takes_rest = any(option.kind == _REST for option in _options(function))
    values: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if equals and key in options:
            values[key] = _read(key, options[key].kind, text)
        elif takes_rest and fullmatch(others, argument):
            rest.append(argument)
        else:
            raise UserError(f"{argument} is not an option; use {', '.join(f'{name}=' for name in options)} or --help.")
    for option in options.values():
        if option.default is Parameter.empty and option.name not in values:
            raise UserError(f"{option.name}= is required: {option.about}.")
    return function(*rest, **values)


def _read(name: str, kind: Any, text: str) -> Any:
    """The value that is written for an option."""
    inner = [each for each in get_args(kind) if each not in (NoneType, ...)]
    if NoneType in get_args(kind):
        return _read(name, inner[0], text) if text else None
    if get_origin(kind) is tuple:
        return tuple(_read(name, inner[0], part) for part in text.split(","))
    if get_origin(kind) is Literal or kind is bool:
        one_of(name, text, tuple(inner) or ("true", "false"))
        return text == "true" if kind is bool else text
    if kind is Path:
        return path(name, text)
    if kind is int:
        number: Any = int(text) if text.isdecimal() else text
        require_int(name, number, least=0)
        return number
    if kind is float:
        try:
            number = float(text)
        except ValueError:
            number = text
        require_number(name, number)
        return number
    return text


# ---------------------------------------------------------------------- help


def _help(function: Callable[..., Any]) -> str:
    """The text of a command's module, and every option with its type and default."""
    lines = [option.line() if option.kind != _REST else ("...", option.about) for option in _options(function)]
    lines += [("--config-dir FOLDER", "your own configs"), ("--help", "this text")]
    about = (function.__globals__["__doc__"] or "").strip()
    return f"{about}\n\nOptions of {_program()}, with their defaults:\n{_columns(lines)}"


def _columns(lines: Sequence[tuple[str, str]]) -> str:
    room = 2 + min(24, max(len(first) for first, _ in lines))
    shown = []
    for first, text in lines:
        head, *rest = wrap(text, WIDTH - room - 2, break_long_words=False) or [""]
        shown += [f"  {first:<{room}}{head}".rstrip()] if len(first) < room else [f"  {first}", " " * (room + 2) + head]
        shown += [" " * (room + 2) + line for line in rest]
    return "\n".join(shown)


def _form(kind: Any) -> str:
    """How values of a type are written."""
    inner = [each for each in get_args(kind) if each not in (NoneType, ...)]
    if get_origin(kind) is Literal:
        return "|".join(inner)
    if get_origin(kind) is tuple:
        return f"{_form(inner[0])},..."
    if inner:
        return _form(inner[0])
    return {bool: "true|false", int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _written(value: Any) -> str:
    """A value as it would be written for an option."""
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _program() -> str:
    """What a command is called here: the end of `dap-bench tables`, of dap_bench.tables, or a script."""
    program = Path(sys.argv[0])
    return program.parent.name if program.stem == "__main__" else program.stem


# ---------------------------------------------------------------------- dap-bench


def main() -> None:
    """The console command: `dap-bench COMMAND ...`; without one it runs cells, as python -m dap_bench does."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where `python -m` finds a method of one's own
    if first in ("-h", "--help"):
        print(_overview())
    elif first in COMMANDS:
        sys.argv[:2] = [f"dap-bench {first}"]
        import_module(f"dap_bench.{first}.__main__" if first == "report" else f"dap_bench.{first}").main()
    elif fullmatch(r"[^-+~][^=]*", first) and first != "run":
        near = get_close_matches(first, ("run", *COMMANDS), 1)
        meant = f"did you mean {near[0]}?" if near else f"there are run, {', '.join(COMMANDS)}."
        print(f"dap-bench: {first} is not a command; {meant}", file=sys.stderr)
        sys.exit(2)
    else:
        from dap_bench.__main__ import main as run

        sys.argv[:2] = ["dap-bench", *([first] if first not in ("", "run") else [])]
        run()


def _overview() -> str:
    """The commands with the first sentence of each, read without importing them."""
    here = Path(__file__).parent
    files = {name: here / name / "__main__.py" if name == "report" else here / f"{name}.py" for name in COMMANDS}
    texts = {name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for name, file in files.items()}
    lines = [("run", "Run cells; `run` may be omitted: dap-bench model=vit_b method=dap")]
    lines += [(name, (text or "").splitlines()[0]) for name, text in texts.items()]
    return (
        "dap-bench: a benchmark for explainers of Vision Transformers\n\n"
        f"  dap-bench COMMAND key=value ...     or python -m dap_bench.COMMAND\n\n{_columns(lines)}\n\n"
        "`dap-bench COMMAND --help` lists the options of a command; `dap-bench run --help` is Hydra's help on models,\n"
        "methods, metrics and keys of a run; `dap-bench run --hydra-help` lists Hydra's own flags."
    )
