"""The one exception that is the user's to put right."""


class UserError(Exception):
    """Something the user can put right: shown as one sentence, without a traceback, exit code 2."""
