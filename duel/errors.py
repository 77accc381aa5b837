"""The errors that Duel raises itself."""


class UserError(ValueError):
    """A mistake in what was asked for: its text says what, where, and what would be valid. No traceback is shown."""


class Disproved(Exception):
    """What a row measures is not what it was asked to measure: the message says what shows it."""
