"""Commands that take key=value arguments, as everything else here does, and answer mistakes in a sentence."""

import sys
from collections.abc import Callable
from inspect import getmodule
from pathlib import Path

from dap_bench.config import add_folder
from dap_bench.errors import Interrupted, UserError, redacted

Others = Callable[[str], object]  # whether an argument is meant for something behind the command


def command(others: Others | None = None, **defaults: str) -> Callable[[Callable[..., int | None]], Callable[[], None]]:
    """Turn a function of these keys into one that takes them from the command line.

    Arguments that `others` is true for are handed on as a list of that name. What the function returns is the exit
    code; `--help` shows the text of its module.
    """

    def decorate(function: Callable[..., int | None]) -> Callable[[], None]:
        def run() -> None:
            def called() -> None:
                arguments = with_folders(sys.argv[1:])
                if {"-h", "--help"} & set(arguments):
                    print(getattr(getmodule(function), "__doc__", "") or "")
                    return
                left = [text for text in arguments if others is not None and others(text)]
                options = parse([text for text in arguments if text not in left], defaults)
                code = function(**options) if others is None else function(others=left, **options)
                if code:
                    sys.exit(code)

            program = Path(sys.argv[0])
            answer(program.parent.name if program.stem == "__main__" else program.stem, called)

        return run

    return decorate


def answer(name: str, call: Callable[[], None]) -> None:
    """Run a command: a mistake is one sentence and exit code 2, Ctrl-C one line and 130."""
    try:
        call()
    except (UserError, OSError) as error:
        print(f"{name}: {redacted(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"\n{name}: stopped; repeat the same command to go on.", file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, Interrupted) else 130)


def with_folders(arguments: list[str]) -> list[str]:
    """The arguments without `--config-dir FOLDER`, which says where configs of one's own are."""
    rest, left = [], iter(arguments)
    for argument in left:
        if argument == "--config-dir":
            add_folder(next(left, ""))
        else:
            rest.append(argument)
    return rest


def parse(arguments: list[str], defaults: dict[str, str]) -> dict[str, str]:
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in options:
            raise UserError(f"{argument} is not an option; use {', '.join(f'{name}=' for name in defaults)}.")
        options[key] = value
    return options
