"""One measured point, and how it is written: a line with its configuration, its numbers, and sums to know them by."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from curvlens import files

FORMAT = 1
DIGITS = 10
"""Significant digits that are kept of a number."""
Config = Mapping[str, Any]
"""Names and plain numbers, texts and truth values: all that a point depends on."""


@dataclass(frozen=True)
class Record:
    """One measured point."""

    experiment: str
    revision: int
    config: Config
    result: Mapping[str, Any]
    seconds: float = field(default=0.0, compare=False)

    @property
    def key(self) -> str:
        """The same for the same experiment, revision and configuration."""
        return key(self.experiment, self.revision, self.config)

    def line(self, *, timed: bool) -> str:
        """As a line of a file; without the time it is the same for the same numbers."""
        result = rounded(self.result)
        content = {
            "key": self.key,
            "experiment": self.experiment,
            "revision": self.revision,
            "config": dict(sorted(self.config.items())),
            "result": result,
            "check": _check(self.key, result),
        }
        return _text(content | ({"seconds": round(self.seconds, 3)} if timed else {})) + "\n"


def key(experiment: str, revision: int, config: Config) -> str:
    """What a point is stored under."""
    return _digest([experiment, revision, dict(sorted(config.items()))], 16)


def _check(name: str, result: Any) -> str:
    """Another one for almost every other result: a number that was changed in a file is noticed."""
    return _digest([name, result], 6)


def _digest(content: Any, letters: int) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()[:letters]


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


HEAD = _text({"curvlens results": FORMAT}) + "\n"
"""The first line of every file."""


def rounded(value: Any) -> Any:
    """Numbers with `DIGITS` digits; what no number is, by its name, so that a file has it in writing.

    >>> rounded({"norm": [1 / 3, float("inf"), float("nan")]})
    {'norm': [0.3333333333, 'inf', 'nan']}
    """
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def parsed(line: bytes) -> Record:
    """The point of a line; a ValueError says what is wrong with it."""
    try:
        content = files.parse(line)
        content.setdefault("seconds", 0.0)  # a table has none
        record = Record(*(content[name] for name in ("experiment", "revision", "config", "result", "seconds")))
        if not isinstance(record.config, dict) or not isinstance(record.result, dict):
            raise ValueError("its configuration or result is no mapping")
        if type(record.experiment) is not str or type(record.revision) is not int:
            raise ValueError("its experiment is no text, or its revision no whole number")
        if type(record.seconds) not in (int, float):
            raise ValueError("its seconds are no number")
        if content["key"] != record.key:
            raise ValueError("its key does not belong to its configuration")
        if content["check"] != _check(record.key, record.result):
            raise ValueError("its numbers were changed")
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is no point of an experiment") from error
    return record


def table(records: Mapping[str, Record]) -> str:
    """All points by experiment and configuration, as lines without times: the same for the same numbers."""
    ordered = sorted(records.values(), key=lambda r: (r.experiment, r.revision, _text(dict(sorted(r.config.items())))))
    return HEAD + "".join(record.line(timed=False) for record in ordered)
