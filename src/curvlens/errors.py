"""What goes wrong, said in the user's words: what was given, what was expected, the line that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class CurvlensError(Exception):
    """An input or a setting for which no right result exists."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class CurvlensWarning(UserWarning):
    """The result is right, but perhaps not what was meant."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


def listing(names: Iterable[str], limit: int = 6) -> str:
    """``'a', 'b' and 3 more``: names for a message, cut to a readable length."""
    names = list(names)
    shown = ", ".join(printable(repr(name)) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def a_kind(thing: object) -> str:
    """The type of something with its article.

    >>> a_kind([]), a_kind(3)
    ('a list', 'an int')
    """
    name = type(thing).__name__
    vowel = re.match(r"_*([aeio]|u(?!n[ei]|se))", name, re.IGNORECASE)
    return f"{'an' if vowel else 'a'} {name}"


# Letters and marks by Unicode that show nothing: fillers, variation selectors, the blank of Braille.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def printable(name: str) -> str:
    """A name of the user's, with what a terminal would obey or not show written out.

    Control characters, among them escapes and line breaks; what turns the direction of writing; what has no width. A
    name from a file or a model may hold any of them. All that shows names, in a terminal or a page, goes through here.

    >>> print(printable("h." + chr(27) + "[31mé" + chr(0x202E)))
    h.\\x1b[31mé\\u202e
    """
    if name.isascii() and name.isprintable():
        return name
    return "".join(c if c.isprintable() and not _UNSEEN.match(c) else ascii(c)[1:-1] for c in name)


def printable_lines(text: str) -> str:
    """A text with names in it, `printable` line by line."""
    return "\n".join(map(printable, text.split("\n")))


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
