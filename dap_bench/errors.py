"""The one exception that is the user's to put right, and checks that raise it."""

from pathlib import Path


class UserError(Exception):
    """Something the user can put right: shown as one sentence, without a traceback, exit code 2."""


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless an option has one of the values it may have."""
    if value not in allowed:
        raise UserError(f"{name} is one of {', '.join(map(str, allowed))}, not {value}.")


def whole(name: str, value: object, least: int = 1, most: int = 2**32 - 1) -> None:
    """Raise unless an option is a whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(f"{name}={value} must be a whole number of at least {least} and at most {most}.")


def path(name: str, value: object) -> Path:
    """A place on disk, from what was written for an option."""
    try:
        if isinstance(value, str) and value and "\0" not in value:
            return Path(value).expanduser()
    except RuntimeError:  # ~somebody who does not exist
        pass
    raise UserError(f"{name}={value!r} is not a path.")
