"""Commands that take key=value arguments, as everything else here does, and answer mistakes in a sentence."""

import sys
from collections.abc import Callable
from pathlib import Path

from dap_bench.errors import UserError


def command(**defaults: str) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Turn a function of these keys into one that takes them from the command line."""

    def decorate(function: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            sys.path.insert(0, str(Path.cwd()))  # where `python -m dap_bench` finds a method of one's own
            try:
                function(**parse(sys.argv[1:], defaults))
            except (UserError, OSError) as error:
                print(f"{function.__module__}: {error}".removeprefix("__main__: "), file=sys.stderr)
                sys.exit(2)

        return run

    return decorate


def parse(arguments: list[str], defaults: dict[str, str]) -> dict[str, str]:
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in options:
            raise UserError(f"{argument} is not an option; use {', '.join(f'{name}=' for name in defaults)}.")
        options[key] = value
    return options
