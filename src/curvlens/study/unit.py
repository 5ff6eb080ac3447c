"""A unit of work, identified by its configuration, and the record of its result."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.study.plain import as_json, plain
from curvlens.study.tensors import require_storable

FORMAT = 2
"""The format of new rows. Rows of format 1 have ten digits, and infinities as texts; they are kept unchanged."""
_KIND = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
Config = Mapping[str, Any]
"""Everything that a unit depends on: names with numbers, texts, truth values, or lists and mappings of them."""


@dataclass(frozen=True)
class Unit:
    """Work to do. Two units with the same kind, revision and configuration are the same unit."""

    kind: str
    """What is computed. It is the name of a file, so: small letters, digits, '.', '_' and '-'."""
    revision: int
    """Raise it when the same configuration gives other numbers than before."""
    config: Config

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not _KIND.fullmatch(self.kind) or self.kind == "table":
            raise CurvlensError(
                f"{self.kind!r:.60} is not a kind of unit. Use small letters, digits, '.', '_' and '-', as 'trace'. "
                "'table' is the name of another file."
            )
        if type(self.revision) is not int or not 0 <= self.revision < 1 << 63:
            raise CurvlensError(f"revision={self.revision!r:.40}, expected a whole number, 0 or more, as revision=1.")
        object.__setattr__(self, "config", _mapping("config", self.config, finite=True))

    @property
    def key(self) -> str:
        """The name of the unit: a digest of kind, revision and configuration. The order of entries does not matter."""
        return digest([self.kind, self.revision, ordered(self.config)], 16)


@dataclass(frozen=True)
class Record(Unit):
    """A unit that is done: its numbers and its tensors. Records are equal if their units and numbers are."""

    result: Mapping[str, Any]
    seconds: float = field(default=0.0, compare=False)
    """The time that it took."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Stored beside the rows. Those of a stored record are read from disk when first used."""
    format: int = field(default=FORMAT, compare=False)
    """The format of its row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "result", _mapping("result", self.result))
        if not isinstance(self.seconds, Real) or not math.isfinite(self.seconds):
            raise CurvlensError(f"seconds={self.seconds!r:.40}, expected a finite number, as seconds=1.5.")
        require_storable(self.tensors)


def digest(content: Any, letters: int) -> str:
    """The first letters of the SHA-256 of a plain value."""
    return hashlib.sha256(as_json(content).encode()).hexdigest()[:letters]


def ordered(value: Any) -> Any:
    """A plain value with all mappings sorted by name."""
    if isinstance(value, Mapping):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else value


def _mapping(name: str, value: Any, *, finite: bool = False) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise CurvlensError(f"{name} is of type {type(value).__name__}. Give a mapping, as {name}={{'width': 64}}.")
    try:
        found: dict[str, Any] = plain(value, finite=finite, where=name)
    except ValueError as error:
        raise CurvlensError(f"This {name} cannot be stored: {error}.") from error
    return found
