"""The values that a row can hold, and their text: JSON, floats exact to the bit.

A float is written by ``repr``, the shortest text that gives the same float when read. JSON has no infinities and no
NaN: they are written as ``{"$float": "inf"}``, ``"-inf"`` and ``"nan"``. A row does not keep the sign and the payload
of a NaN; tensors keep all their bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MARK = "$float"
DEEPEST = 50
"""The deepest nesting of lists and mappings. Python's JSON reader fails at some hundreds."""
_NAMES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def plain(value: Any, *, finite: bool = False, where: str = "", depth: int = 0) -> Any:
    """A value as plain Python types, as it will be read back: tuples become lists. Raise ValueError for other types.

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
                raise ValueError(f"{where}[{name!r:.40}] is not a name; a name is a text that does not begin with '$'")
        return {
            _text(name, where): plain(each, finite=finite, where=f"{where}[{name!r}]", depth=depth + 1)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(v, finite=finite, where=f"{where}[{i}]", depth=depth + 1) for i, v in enumerate(value)]
    raise ValueError(f"{where or 'it'} is of type {type(value).__name__}; use numbers, texts, lists and mappings")


def encoded(value: Any) -> Any:
    """A plain value with infinities and NaN as mappings.

    >>> encoded([0.1, float("inf")])
    [0.1, {'$float': 'inf'}]
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {MARK: str(value)}
    if isinstance(value, dict):
        return {name: encoded(each) for name, each in value.items()}
    return [encoded(each) for each in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """The inverse of `encoded`. Raise ValueError for an unknown float."""
    if isinstance(value, dict):
        if MARK not in value:
            return {name: decoded(each) for name, each in value.items()}
        name = value[MARK]
        if len(value) != 1 or not isinstance(name, str) or name not in _NAMES:
            raise ValueError(f"{value!r:.60} is not a float")
        return _NAMES[name]
    return [decoded(each) for each in value] if isinstance(value, list) else value


def as_json(content: Any) -> str:
    """JSON on one line, without spaces. Equal values have equal texts."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where or 'it'} is a text that UTF-8 cannot hold") from None
    return str(value)
