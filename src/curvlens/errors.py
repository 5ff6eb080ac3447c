"""What goes wrong, said in the user's words: what was given, what was expected, the line that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class CurvlensError(Exception):
    """An input or a setting for which no right result exists."""


class CurvlensWarning(UserWarning):
    """The result is right, but perhaps not what was meant."""


def listing(names: Iterable[str], limit: int = 6) -> str:
    """``'a', 'b' and 3 more``: names for a message, cut to a readable length."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def a_kind(thing: object) -> str:
    """The type of something with its article.

    >>> a_kind([]), a_kind(3)
    ('a list', 'an int')
    """
    name = type(thing).__name__
    vowel = re.match(r"_*([aeio]|u(?!n[ei]|se))", name, re.IGNORECASE)
    return f"{'an' if vowel else 'a'} {name}"


def printable(name: str) -> str:
    """A name of the user's, with control characters and the like written out.

    >>> print(printable("h." + chr(27) + "[31mé"))
    h.\\x1b[31mé
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def nearest(name: str, known: Iterable[str]) -> str:
    """A half sentence with the nearest known names in any case, or with the first ones if none is near."""
    known = list(known)
    lower: dict[str, list[str]] = {}
    for k in known:
        lower.setdefault(k.lower(), []).append(k)
    near = get_close_matches(name.lower(), lower, n=3, cutoff=0.6)
    near = near or [k for k in lower if name and name.lower() in k]
    close = [k for small in near for k in lower[small]][:3]
    return f"Did you mean {listing(close)}?" if close else f"Known names: {listing(known)}."
