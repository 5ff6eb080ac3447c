"""The exception types, and helpers for messages: what was given, what was expected, how to fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class CurvlensError(Exception):
    """An input or a setting for which curvlens cannot give a correct result. The message names the fix."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NonFiniteLossError(CurvlensError):
    """The loss is NaN or infinite at this point. A search along a line takes it as "too far"."""


class CurvlensWarning(UserWarning):
    """The result is correct, but may not be what you want."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NotedWarning(CurvlensWarning):
    """A warning that is also in the ``note`` of the result. Code that shows the note can suppress it."""


def listing(names: Iterable[str], limit: int = 6) -> str:
    """Names for a message, at most ``limit`` of them: ``'a', 'b' and 3 more``."""
    names = list(names)
    shown = ", ".join(printable(repr(name)) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def a_kind(thing: object) -> str:
    """The type of an object, with its article.

    >>> a_kind([]), a_kind(3)
    ('a list', 'an int')
    """
    name = type(thing).__name__
    vowel = re.match(r"_*([aeio]|u(?!n[ei]|se))", name, re.IGNORECASE)
    return f"{'an' if vowel else 'a'} {name}"


# Invisible characters that Unicode counts as printable: fillers, variation selectors, the blank of Braille.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def printable(name: str) -> str:
    """A name with control characters and invisible characters escaped.

    Escaped are terminal sequences, line breaks, marks that change the direction of writing, and characters without
    width. A name from a file or a model may contain them, so call this wherever a name is shown.

    >>> print(printable("h." + chr(27) + "[31mé" + chr(0x202E)))
    h.\\x1b[31mé\\u202e
    """
    if name.isascii() and name.isprintable():
        return name
    return "".join(c if c.isprintable() and not _UNSEEN.match(c) else ascii(c)[1:-1] for c in name)


def printable_lines(text: str) -> str:
    """A text that contains names, made `printable` line by line."""
    return "\n".join(map(printable, text.split("\n")))


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence for a message: the known names nearest to ``name`` (ignoring case), or the first ones."""
    known = list(known)
    lower: dict[str, list[str]] = {}
    for k in known:
        lower.setdefault(k.lower(), []).append(k)
    near = get_close_matches(name.lower(), lower, n=3, cutoff=0.6)
    near = near or [k for k in lower if name and name.lower() in k]
    close = [k for small in near for k in lower[small]][:3]
    return f"Did you mean {listing(close)}?" if close else f"Known names: {listing(known)}."
