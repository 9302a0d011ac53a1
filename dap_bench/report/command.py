"""Commands that take key=value arguments, as everything else here does, and answer mistakes in a sentence."""

import sys
from collections.abc import Callable

from dap_bench.config import add_folder
from dap_bench.errors import UserError


def command(**defaults: str) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Turn a function of these keys into one that takes them from the command line."""

    def decorate(function: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            try:
                function(**parse(_with_folders(sys.argv[1:]), defaults))
            except (UserError, OSError) as error:
                print(f"{function.__module__}: {error}".removeprefix("__main__: "), file=sys.stderr)
                sys.exit(2)

        return run

    return decorate


def _with_folders(arguments: list[str]) -> list[str]:
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
