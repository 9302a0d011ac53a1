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
    """A text without what signs an address and without the values of confidential environment variables."""
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\")]+", r"\1?...", text)
    text = re.sub(r"(https?://)[^\s/@'\"]+@", r"\1", text)
    for name, value in os.environ.items():
        if len(value) >= 4 and (name in _private or CONFIDENTIAL.search(name)):
            text = text.replace(value, f"${name}")
    return text


def keep_private(names: set[str]) -> None:
    """Environment variables whose values must not be shown from now on."""
    _private.update(name for name in names if not name.startswith("DAP_BENCH_"))


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless an option has one of the values it may have."""
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise UserError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value}.")


def require_int(name: str, value: object, least: int = 1, most: int = 2**32 - 1) -> None:
    """Raise unless an option is a whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(f"{name}={value} must be a whole number of at least {least} and at most {most}.")


def require_number(name: str, value: object, least: float = 0.0, most: float = inf) -> None:
    """Raise unless an option is a finite number within bounds."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or not least <= value <= most:  # type: ignore[operator]
        bounds = f"at least {least:g}" + (f" and at most {most:g}" if isfinite(most) else "")
        raise UserError(f"{name}={value} must be a number of {bounds}.")


def path(name: str, value: object) -> Path:
    """A place on disk, from what was written for an option."""
    try:
        if isinstance(value, str) and value and "\0" not in value:
            return Path(value).expanduser()
    except RuntimeError:  # ~somebody who does not exist
        pass
    raise UserError(f"{name}={value!r} is not a path.")
