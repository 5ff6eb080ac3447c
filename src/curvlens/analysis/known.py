"""What an analysis knows so far: its records, as the schedule and the page ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from curvlens.analysis.estimates import cautious, difference, estimate, pooled, pooled_norm
from curvlens.results import Estimate
from curvlens.study import Record, Unit


class Known:
    """Records by kind, and what they say together. ``cost`` is what they took, in gradients."""

    def __init__(self, blocks: Mapping[str, int]) -> None:
        self.blocks = dict(blocks)
        self.cost = 0.0
        self._full = False
        self._skipped = set[str]()
        self._records: dict[str, list[Record]] = {}
        self._pace: dict[str, tuple[float, float]] = {}

    def add(self, record: Record, cost: float, expected: float) -> None:
        """Take in a record, with what it took of the budget, and the seconds that were expected of it."""
        self._records.setdefault(record.kind, []).append(record)
        self.cost += cost
        seconds, planned = self._pace.get(record.kind, (0.0, 0.0))
        self._pace[record.kind] = (seconds + record.seconds, planned + expected)
        self.__dict__.pop("_cells", None)

    def pace(self, kind: str) -> tuple[float, bool]:
        """Real over expected seconds of the units of a kind, or of all if there was none; whether there was one."""
        alike = kind in self._pace
        of = [self._pace[kind]] if alike else list(self._pace.values())
        planned = sum(each[1] for each in of)
        return (sum(each[0] for each in of) / planned if planned else 1.0), alike

    def skip(self, unit: Unit) -> None:
        """Take note of a unit that does not fit or failed: if it is one of many small ones, none of them fits."""
        self._full = self._full or unit.kind == "block"
        self._skipped.add(unit.kind)

    def left_out(self, kind: str) -> bool:
        """Whether a unit of a kind did not fit or failed."""
        return kind in self._skipped

    def of(self, kind: str, **config: Any) -> list[Record]:
        """The records of a kind whose configuration has these entries, in the order in which they came."""
        found = self._records.get(kind, [])
        return [r for r in found if all(r.config.get(name) == value for name, value in config.items())]

    def last(self, kind: str, **config: Any) -> Record | None:
        """The last of them: the finest."""
        found = self.of(kind, **config)
        return found[-1] if found else None

    # Cells: a number for each block

    @cached_property
    def _cells(self) -> dict[tuple[str, str], dict[str, Estimate]]:
        found: dict[tuple[str, str], dict[str, list[Estimate]]] = {}
        for record in self.of("ggn"):
            for quantity in ("trace", "norm"):
                for name, numbers in record.result[quantity].items():
                    found.setdefault(("G", quantity), {}).setdefault(name, []).append(estimate(numbers))
        for record in self._finest_blocks():
            for quantity, numbers in record.result.items():
                place = found.setdefault((record.config["operator"], quantity), {})
                place.setdefault(record.config["block"], []).append(cautious(estimate(numbers)))
        ways = {"trace": pooled, "norm": pooled_norm}
        cells = {key: {name: ways[key[1]](each) for name, each in of.items()} for key, of in found.items()}
        both = cells.get(("H", "trace"), {}).keys() & cells.get(("G", "trace"), {}).keys()
        cells["F", "trace"] = {
            name: difference(cells["H", "trace"][name], cells["G", "trace"][name])
            for name in self.blocks
            if name in both
        }
        return cells

    def _finest_blocks(self) -> list[Record]:
        """The rounds of each block with the most samples.

        Few samples of a matrix with one large eigenvalue may agree by chance, far from its trace. Pooled with a better
        round they would spoil it.
        """
        most: dict[tuple[str, str], int] = {}
        for record in self.of("block"):
            key = (record.config["operator"], record.config["block"])
            most[key] = max(most.get(key, 0), record.config["samples"])
        return [r for r in self.of("block") if r.config["samples"] == most[r.config["operator"], r.config["block"]]]

    def cells(self, letter: str, quantity: str) -> dict[str, Estimate]:
        """Estimates by block; blocks that were not measured are not there. F's trace is that of H without that of G."""
        return self._cells.get((letter, quantity), {})

    def error(self, letter: str, name: str, least: float) -> float:
        """The error of a trace relative to max(|cell|, ``least`` of the largest cell): half of the 95 % interval."""
        cells = self.cells(letter, "trace")
        if name not in cells:
            return math.inf
        largest = max(abs(float(each)) for each in cells.values())
        size = max(abs(float(cells[name])), least * largest)
        return float(cells[name].stderr) / size if size else 0.0

    def settled(self, letter: str, close: float, least: float) -> bool:
        """Whether 19 of 20 traces have a small error."""
        errors = [self.error(letter, name, least) for name in self.blocks]
        return sum(error < close / 2 for error in errors) >= 0.95 * len(errors)

    def rounds(self, name: str) -> int:
        """How often a block of H was measured."""
        return len(self.of("block", operator="H", block=name))

    def next_block(self, *, once: bool, close: float, least: float) -> str | None:
        """The block of H to measure next: one that was not, largest trace of G first; then the one that is nearest to
        a small error."""
        if self._full:
            return None
        done = self.cells("H", "trace")
        todo = [name for name in self.largest() if name not in done]
        if todo or once:
            return todo[0] if todo else None
        needs = {name: self._needed(name, close, least) for name in done}
        needs = {name: need for name, need in needs.items() if need > 0}
        return min(needs, key=needs.__getitem__) if needs else None

    def _needed(self, name: str, close: float, least: float) -> float:
        """Samples that the error of a block still takes."""
        cell = self.cells("H", "trace")[name]
        if cell.exact:
            return 0.0
        error = self.error("H", name, least)
        return 1.0 + cell.samples * ((error / close) ** 2 - 1) if error > close else 0.0

    def largest(self) -> list[str]:
        """All blocks, the largest trace of G (or, without it, the most parameters) first."""
        traces = self.cells("G", "trace")
        return sorted(self.blocks, key=lambda name: -float(traces[name]) if name in traces else -self.blocks[name])

    # Eigenvectors

    @property
    def pairs(self) -> Record | None:
        """The best search for eigenvalues of H."""
        return self.last("eigs", operator="H")

    @property
    def two_largest_key(self) -> str | None:
        """The key of the best search for eigenvalues of H, if it found two or more at each end."""
        found = self.pairs
        return found.key if found is not None and found.config["k"] > 1 and len(found.result["values"]) > 3 else None

    @property
    def vectors_key(self) -> str:
        """The key of the first search, whose vectors lines are drawn along: a finer one does not redo them."""
        return self.of("eigs", operator="H")[0].key

    def extremes(self) -> dict[str, int]:
        """The column of the top eigenvector, and of the bottom one if its eigenvalue is negative."""
        first = self.of("eigs", operator="H")
        if not first:
            return {}
        values = first[0].result["values"]
        found = {"top": len(values) - 1}
        return found | {"bottom": 0} if values[0] < 0 and len(values) > 1 else found

    def radius(self, vector: Iterable[Any]) -> float | None:
        """How far tokens are looked at along an eigenvector: the smaller radius of agreement of its line."""
        found = self.last("line", vector=list(vector))
        if found is None:
            return None
        radii = [found.result.get(name) for name in ("forward", "backward")]
        known = [float(r) for r in radii if isinstance(r, (int, float)) and math.isfinite(r) and r > 0]
        return min(known) if known else None
