"""What tells a user's mistake from a bug: a UserError is one line on stderr (flags/usage.py), all else a traceback."""


class UserError(ValueError):
    """A flag, a file or a model that a run cannot take: one line that names flag, value and remedy."""
