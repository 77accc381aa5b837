"""Duel's own exceptions."""


class UserError(ValueError):
    """A user's mistake: the message says what is wrong, where, and what would be valid. No traceback is shown."""


class Disproved(Exception):
    """A row does not measure what it was asked to measure: the message says what shows it."""


class Diverged(Exception):
    """A training's loss is no number any more: the message says where, and what is kept."""
