"""Duel's own exceptions."""


class UserError(ValueError):
    """A user's mistake: the message says what is wrong, where, and what would be valid. No traceback is shown."""


class Disproved(Exception):
    """A row does not measure what it was asked to measure: the message says what shows it."""


class Diverged(Exception):
    """A training's loss is no number any more: the message says where, and what is kept."""


def kind_of(error: str) -> str:
    """Return the kind of an error, "out of memory" or "code".

    Frameworks have many classes for running out of memory, so the text decides, with the name of the class.
    """
    exhausted = (
        *("out of memory", "resource_exhausted", "alloc_failed", "n't allocate memory", "not allocate memory"),
        *("unable to allocate", "bad_alloc", "memoryerror"),  # numpy, C++, Python
    )
    text = error.lower()
    # What a TPU has for one kernel: a smaller batch need not help.
    return "out of memory" if any(words in text for words in exhausted) and "memory space vmem" not in text else "code"
