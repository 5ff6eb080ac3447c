"""Values that a row can hold, and how they are written: JSON, floats exact to the bit.

A float is written by ``repr``, the shortest text that reads back as the same float. JSON has no infinities and no NaN:
they are ``{"$float": "inf"}``, ``"-inf"`` and ``"nan"``, and read back as floats. The sign and the payload of a NaN are
not kept in a row; tensors keep all their bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MARK = "$float"
DEEPEST = 50
"""Lists and mappings in each other. The JSON reader of Python ends at some hundreds."""
_NAMES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def plain(value: Any, *, finite: bool = False, where: str = "", depth: int = 0) -> Any:
    """A value of plain Python types, as it will be read back: tuples are lists. Anything else is a ValueError.

    >>> plain({"sizes": (1, 2.5), "name": "a"})
    {'sizes': [1, 2.5], 'name': 'a'}
    """
    if value is None or isinstance(value, (bool, str)):
        return _text(value, where) if isinstance(value, str) else value
    if isinstance(value, int):
        if abs(value) >= 1 << 64:
            raise ValueError(f"{where or 'it'} is a whole number of more than 64 bits")
        return int(value)
    if isinstance(value, float):
        if finite and not math.isfinite(value):
            raise ValueError(f"{where or 'it'} is {float(value)}, and needs a finite number")
        return float(value)
    if depth > DEEPEST:
        raise ValueError(f"lists or mappings are nested more than {DEEPEST} times")
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or name.startswith("$"):
                raise ValueError(f"{where}[{name!r:.40}] is no name; a name is a text that does not begin with '$'")
        return {
            _text(name, where): plain(each, finite=finite, where=f"{where}[{name!r}]", depth=depth + 1)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(v, finite=finite, where=f"{where}[{i}]", depth=depth + 1) for i, v in enumerate(value)]
    raise ValueError(f"{where or 'it'} is of type {type(value).__name__}; use numbers, texts, lists and mappings")


def encoded(value: Any) -> Any:
    """A plain value with infinities and NaN by name.

    >>> encoded([0.1, float("inf")])
    [0.1, {'$float': 'inf'}]
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {MARK: str(value)}
    if isinstance(value, dict):
        return {name: encoded(each) for name, each in value.items()}
    return [encoded(each) for each in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """What was encoded; a ValueError for a name of no float."""
    if isinstance(value, dict):
        if MARK not in value:
            return {name: decoded(each) for name, each in value.items()}
        name = value[MARK]
        if len(value) != 1 or not isinstance(name, str) or name not in _NAMES:
            raise ValueError(f"{value!r:.60} is no float")
        return _NAMES[name]
    return [decoded(each) for each in value] if isinstance(value, list) else value


def as_json(content: Any) -> str:
    """On one line, without spaces; equal texts for equal values."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where or 'it'} is a text that UTF-8 cannot hold") from None
    return str(value)
