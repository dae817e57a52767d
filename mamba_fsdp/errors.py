"""The one exception for what a user can mend: its message says what is wrong, where, and what to do."""


class UserError(Exception):
    """A user's mistake or a condition of their machine. Verbs print it as `error: ...` without a traceback and exit 2."""
