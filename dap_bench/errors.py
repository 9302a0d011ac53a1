"""Errors that are answered in one sentence, checks that raise them, and what must not be said in them."""

import os
import re
from math import inf, isfinite
from pathlib import Path

CONFIDENTIAL = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_private: set[str] = set()  # other environment variables whose values are nobody's business


class UserError(Exception):
    """Something the user can correct: shown as one sentence, without a traceback, exit code 2."""

    def __init__(self, text: str) -> None:
        super().__init__(redacted(text))


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop, and its batch is finished."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number  # as shells have it


def redacted(text: str) -> str:
    """A text without what signs an address and without the values of confidential environment variables.

    Args:
        text: The text.

    Returns:
        The text, with `$NAME` in place of such a value.
    """
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\")]+", r"\1?...", text)
    text = re.sub(r"(https?://)[^\s/@'\"]+@", r"\1", text)
    for name, value in os.environ.items():
        if len(value) >= 4 and (name in _private or CONFIDENTIAL.search(name)):
            text = text.replace(value, f"${name}")
    return text


def keep_private(names: set[str]) -> None:
    """Hide the values of environment variables in messages from now on.

    Args:
        names: The names of the variables.
    """
    _private.update(name for name in names if not name.startswith("DAP_BENCH_"))


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless an option has one of the values it may have.

    Args:
        name: The option's name.
        value: Its value.
        allowed: The values it may have.

    Raises:
        UserError: If it has another value.
    """
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise UserError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value}.")


def require_int(name: str, value: object, least: int = 1, most: int = 2**32 - 1) -> None:
    """Raise unless an option is a whole number within bounds.

    Args:
        name: The option's name.
        value: Its value.
        least: The lower bound. Defaults to 1.
        most: The upper bound. Defaults to 4294967295.

    Raises:
        UserError: If the value is no whole number, or out of bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        large = isinstance(value, int) and value > most
        bound = f" and at most {most}" if large or most < 2**32 - 1 else ""
        raise UserError(f"{name}={value} must be an integer of at least {least}{bound}.")


def require_number(name: str, value: object, least: float = 0.0, most: float = inf) -> None:
    """Raise unless an option is a finite number within bounds.

    Args:
        name: The option's name.
        value: Its value.
        least: The lower bound. Defaults to 0.0.
        most: The upper bound. Defaults to inf.

    Raises:
        UserError: If the value is no finite number, or out of bounds.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or not least <= value <= most:  # type: ignore[operator]
        bounds = f"at least {least:g}" + (f" and at most {most:g}" if isfinite(most) else "")
        raise UserError(f"{name}={value} must be a number of {bounds}.")


def path(name: str, value: object) -> Path:
    """A place on disk, from what was written for an option.

    Args:
        name: The option's name.
        value: What was written for it; `~` is the home folder.

    Returns:
        The path.

    Raises:
        UserError: If it is not a path.
    """
    try:
        if isinstance(value, str) and value and "\0" not in value:
            return Path(value).expanduser()
    except RuntimeError:  # ~somebody who does not exist
        pass
    raise UserError(f"{name}={value!r} is not a path.")
