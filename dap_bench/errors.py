"""The one exception that is the user's to put right."""


class UserError(Exception):
    """Something the user can put right: shown as one sentence, without a traceback, exit code 2."""


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless an option has one of the values it may have."""
    if value not in allowed:
        raise UserError(f"{name} is one of {', '.join(map(str, allowed))}, not {value}.")


def whole(name: str, value: object, least: int = 1) -> None:
    """Raise unless an option is a whole number that is large enough."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value} must be a whole number of at least {least}.")
