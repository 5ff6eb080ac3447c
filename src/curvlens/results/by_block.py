"""One estimate for each block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from curvlens.blocks import Block, By
from curvlens.errors import listing, printable
from curvlens.results.base import Result
from curvlens.results.estimate import Estimate
from curvlens.results.status import Status, worst

ADDS_UP = ("trace", "uᵀHu")
"""Quantities of which the blocks add up to the whole. Norms do not."""


class ByBlock(Result, Mapping[str, Estimate]):
    """One estimate for each block, by name: a mapping that prints as a table.

    Every name is present. If work ended before a block was measured, its estimate is not `Estimate.measured`, and its
    value is NaN. For traces, ``traces["h.0.attn"]`` is the sum over ``h.0.attn.q``, ``h.0.attn.k``, … if there is no
    block of that name, with the error from `curvlens.results.arithmetic`.
    """

    def __init__(
        self,
        blocks: Mapping[str, Estimate],
        what: str = "estimate",
        by: By = "block",
        note: str = "",
        status: Status | None = None,
    ) -> None:
        if not all(isinstance(block, Estimate) for block in blocks.values()):
            raise TypeError("every block has to be an Estimate")
        self._blocks = dict(blocks)
        self.what = what
        self.by = by
        """What each estimate is for: a block, layer, role, head or parameter."""
        self.note = note
        """Remarks on the whole: interrupted, what of a budget was spent, which blocks had less of it."""
        self._status = worst(block.status for block in blocks.values()) if status is None else Status(status)

    def __getitem__(self, name: str) -> Estimate:
        if name in self._blocks:
            return self._blocks[name]
        below = [block for known, block in self._blocks.items() if known.startswith(f"{name}.")]
        if below and self.what in ADDS_UP:
            return sum(below[1:], start=below[0])
        raise KeyError(f"The {self.what} by {self.by} has no {name!r}. {self._hint(str(name), bool(below))}")

    def __contains__(self, name: object) -> bool:
        return name in self._blocks

    def _hint(self, name: str, below: bool) -> str:
        """A hint for a missing name: another ``by=`` that may have it, or similar names."""
        other: By | None = None
        if Block(f"{name}.x", ()).layer == name:
            other = "layer" if self._may_have(name) else None
        elif any(known.endswith(f".{name}") for known in self):
            other = "role"
        elif name.rpartition(".")[0] in self and name.rpartition(".")[2].isdigit():
            other = "head"
        elif (layer := Block(name, ()).layer) is not None:
            role = Block(name, ()).role
            other = "block" if (role in self if self.by == "role" else self._may_have(layer)) else None
        asked = f"It may be in that with by={other!r}. " if other is not None and other != self.by else ""
        no_sum = "Norms of blocks do not add up to that of their union. " if below else ""
        return f"{no_sum}{asked}Names here: {listing(self)}."

    def _may_have(self, layer: str) -> bool:
        """Whether the measured operator may have a layer. Names of roles and parameters do not tell."""
        unsaid = self.by in ("role", "parameter")
        return unsaid or any(f"{known}.".startswith(f"{layer}.") for known in self)

    @property
    def status(self) -> Status:
        """How the work on all blocks ended: the worst status of a block, unless the whole has its own."""
        return self._status

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The blocks that were not measured."""
        return tuple(name for name, estimate in self.items() if not estimate.measured)

    def place(self, name: str) -> tuple[str | None, str, int | None]:
        """The layer of a name (None outside of layers), its role, and its head (None if it has none).

        >>> ByBlock({}, by="head").place("h.3.attn.q.1"), ByBlock({}).place("embed")
        (('h.3', 'attn.q', 1), (None, 'embed', None))
        """
        whole, _, last = name.rpartition(".")
        if self.by == "head" and last.isdigit() and Block(whole, ()).layer is not None:
            block = Block(whole, ())
            return block.layer, block.role, int(last)
        block = Block(name, ())
        return block.layer, block.role, None

    def _headline(self) -> str:
        missing = f", {len(self.unmeasured)} not measured" if self.unmeasured else ""
        return f"{self.what} by {self.by} ({len(self)}{missing})"

    def __repr__(self) -> str:
        names = [printable(name) for name in self]
        width = max(map(len, names), default=0)
        lines = [f"  {name:<{width}}  {estimate}" for name, estimate in zip(names, self.values(), strict=True)]
        note = [printable(f"note: {self.note}")] if self.note else []
        return "\n".join([printable(self._headline()), *lines, *note])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{escape(printable(name))}</td><td>{escape(str(estimate))}</td><td>{estimate.samples}</td>"
            f"<td>{escape(printable(estimate.note))}</td></tr>"
            for name, estimate in self.items()
        )
        head = f"<tr><th>{escape(self.by)}</th><th>{escape(self.what)}</th><th>samples</th><th></th></tr>"
        note = f"<p>{escape(printable(self.note))}</p>" if self.note else ""
        return f"<p>{escape(printable(self._headline()))}</p><table>{head}{cells}</table>{note}"

    def table(self) -> list[dict[str, Any]]:
        """A flat record for each block: name, value, stderr, low and high ends of the 95 % interval, samples,
        status, note.

        ``pandas.DataFrame(result.table())`` reads it. Values that were not measured are None.
        """
        records = []
        for name, estimate in self.items():
            numbers: tuple[Any, ...] = (None,) * 4
            if estimate.measured:
                numbers = (estimate.value.tolist(), estimate.stderr.tolist(), *estimate.interval())
            value, stderr, low, high = numbers
            about = {"samples": estimate.samples, "status": estimate.status.value, "note": estimate.note}
            records.append({self.by: name, "value": value, "stderr": stderr, "low": low, "high": high, **about})
        return records

    def to_dict(self) -> dict[str, Any]:
        """By name, plain numbers; None for those that were not measured."""
        unknown = {"value": None, "stderr": None}
        return {name: {**e.to_dict(), **({} if e.measured else unknown)} for name, e in self.items()}

    def _fields(self) -> dict[str, Any]:
        return {"blocks": self._blocks, "what": self.what, "by": self.by, "note": self.note, "status": self.status}
