"""The one error that is the user's to mend."""


class UserError(ValueError):
    """A mistake in what was asked for: its text says what, where, and what would be valid. No traceback is shown."""
