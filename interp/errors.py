"""Errors that a user can put right: the command line tells them in one line, with no traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The message says what came, what was expected, and what to do."""


class UsageError(UserError):
    """Something that was asked for does not exist or does not fit; nothing was touched."""


def unknown(what: str, came: str, known: Iterable[str], *, of: str = "") -> str:
    """The message for a name that is none of the known ones, with the nearest that is."""
    known = list(known)
    near = difflib.get_close_matches(came, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    owner = f" of {of}" if of else ""
    return f"unknown {what} {came!r}{owner}: {hint}it is one of {', '.join(known) or '(none)'}"
