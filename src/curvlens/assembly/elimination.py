"""The dense Hessian by elimination of the states, from the last to the first (`docs/math.md`, "Assembly").

A quadratic form in all variables, states and parameters, starts as the sources: the curvature Λ of the loss at the
output, and λ·D²f of every primitive at its inputs. Going backwards, the state z = f(x, θ) with Jacobians J is replaced
by its inputs: for every other variable y and every two inputs a, b

    G[a, y] += J_aᵀ G[z, y],        G[a, b] += J_aᵀ G[z, z] J_b,

and z is forgotten. What is left in the end are parameters: the Hessian. A sample has its own states and shares the
parameters: blocks with a state are (B, ·, ·), blocks of two parameters are summed over the samples. Behind the last
attention tokens do not meet either: there a block of two states is (B, T, ·, ·), one for each token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.assembly.graph import Node, Trace, View
from curvlens.assembly.ledger import INPUT, Ledger
from curvlens.assembly.pairs import Pairs
from curvlens.assembly.primitives import Primitive, by_rows


class Use(NamedTuple):
    """One use of a parameter by a primitive, and where it lies in the panel of all uses met so far."""

    view: View
    start: int
    stop: int


class Elimination:
    """The quadratic form in what is not yet eliminated."""

    def __init__(self, trace: Trace, adjoints: dict[int, Tensor], ledger: Ledger) -> None:
        """Only what depends on the parameters of the ledger is followed."""
        self._trace, self._adjoints, self._ledger = trace, adjoints, ledger
        self._pairs = Pairs()
        self._panels: dict[int, list[tuple[int, Tensor]]] = {}
        """Blocks of a state with uses of parameters: parts of a panel (B, ·, width), each with its first column."""
        self._uses: list[Use] = []
        self._needed = {0} if INPUT in ledger.shapes else set()
        for node in trace.nodes:
            if any(self._wanted(ref) for ref in node.inputs):
                self._needed.add(node.output)

    def _wanted(self, ref: int | View) -> bool:
        return ref in self._needed if isinstance(ref, int) else ref.name in self._ledger.shapes

    @torch.no_grad()
    def run(self, curvature: Tensor | None, sources: Collection[int]) -> None:
        """Eliminate all states, with Λ (or None) and the functional sources of the nodes at these positions."""
        last = self._trace.graph.output
        if curvature is not None and last in self._needed:
            self._pairs.add(last, last, curvature)
        for position in reversed(range(len(self._trace.nodes))):
            node, primitive = self._trace.nodes[position], self._trace.at[position]
            if node.output in self._needed and not (node.output == 0 and INPUT in self._ledger.shapes):
                self._eliminate(node, primitive, position in sources)
        if INPUT in self._ledger.shapes:
            self._keep_input()

    def _eliminate(self, node: Node, primitive: Primitive, curved: bool) -> None:
        z = node.output
        own, others = self._pairs.pop(z)
        panel = self._panel(z)
        before = len(self._uses)
        slots: list[tuple[int, int | Use]] = []
        for slot, ref in enumerate(node.inputs):
            if self._wanted(ref):
                slots.append((slot, ref if isinstance(ref, int) else self._register(ref)))
        for slot, variable in slots:
            if panel is not None:
                self._pull_panel(primitive, slot, variable, panel, self._uses[:before])
            for y, block in others.items():
                self._add(variable, y, _pull(primitive, slot, block), same=False)
        if own is not None:
            for i, (slot, variable) in enumerate(slots):
                half = _pull(primitive, slot, own).mT
                for other, into in slots[i:]:
                    summed = isinstance(variable, Use) and isinstance(into, Use)
                    block = _pull(primitive, other, half, summed=summed)
                    self._add(into, variable, block, same=slot == other)
        if curved and z in self._adjoints:
            found = dict(slots)
            for first, second, block in primitive.curvature(self._adjoints[z]):
                if first in found and second in found:
                    self._add(found[first], found[second], block, same=first == second)

    def _register(self, view: View) -> Use:
        rows, columns = view.of(torch.empty(self._ledger.shapes[view.name], device="meta")).shape
        start = self._uses[-1].stop if self._uses else 0
        self._uses.append(Use(view, start, start + rows * columns))
        return self._uses[-1]

    def _panel(self, state: int) -> Tensor | None:
        """All blocks of a state with parameters, side by side: (B, ·, width)."""
        parts = self._panels.pop(state, None)
        if parts is None:
            return None
        width = self._uses[-1].stop
        if len(parts) == 1 and parts[0][1].shape[-1] == width:
            return parts[0][1]
        panel = parts[0][1].new_empty(*parts[0][1].shape[:2], width)
        filled = 0
        for start, part in sorted(parts, key=lambda item: item[0]):
            stop = start + part.shape[-1]
            panel[..., filled:start].zero_()
            fresh = max(start, min(filled, stop))
            panel[..., start:fresh] += part[..., : fresh - start]
            panel[..., fresh:stop] = part[..., fresh - start :]
            filled = max(filled, stop)
        panel[..., filled:].zero_()
        return panel

    def _pull_panel(self, primitive: Primitive, slot: int, ref: int | Use, panel: Tensor, uses: list[Use]) -> None:
        """The blocks of an input with all parameters behind its node."""
        if isinstance(ref, int):
            self._panels.setdefault(ref, []).append((0, _pull(primitive, slot, panel)))
            return
        rows = _pull(primitive, slot, panel, summed=True)
        for use in uses:
            self._ledger.add(ref.view, use.view, rows[:, use.start : use.stop])

    def _add(self, first: int | Use, second: int | Use, block: Tensor, *, same: bool) -> None:
        """Add a block to the form; of two different inputs, or of an input with itself if ``same``."""
        if isinstance(first, Use) and isinstance(second, Use):
            if same:
                self._ledger.add_own(first.view, block)
            else:
                self._ledger.add(first.view, second.view, block)
        elif isinstance(first, Use):
            self._add(second, first, block.mT, same=same)
        elif isinstance(second, Use):
            flat = block.flatten(1, 2) if block.ndim == 4 else block
            self._panels.setdefault(first, []).append((second.start, flat))
        else:
            both = first == second and not same
            self._pairs.add(first, second, block + block.mT if both else block)

    def _keep_input(self) -> None:
        """The blocks of X, which is as many variables as all samples have."""
        (own, _), panel = self._pairs.pop(0), self._panel(0)
        x = View(INPUT)
        if panel is not None:
            for use in self._uses:
                self._ledger.add(use.view, x, panel[..., use.start : use.stop].flatten(0, 1).T)
        if own is not None:
            own = by_rows(own) if own.ndim == 4 else own
            self._ledger.add_own(x, by_rows(own[None])[0])


def _pull(primitive: Primitive, slot: int, block: Tensor, *, summed: bool = False) -> Tensor:
    """Jᵀ of the rows of a block, (B, ·, k) or (B, T, ·, k) again; (·, k) for a parameter if it is ``summed``."""
    if block.ndim == 4 and primitive.tokenwise:
        pulled = primitive.pull(slot, block, None if summed else "token")
        return pulled.reshape(-1, block.shape[-1]) if summed else pulled.flatten(2, -2)
    block = by_rows(block) if block.ndim == 4 else block
    rows = block.view(len(block), *primitive.value.shape[1:], -1)
    pulled = primitive.pull(slot, rows, None if summed else "sample")
    return pulled.reshape(-1, block.shape[-1]) if summed else pulled.reshape(len(block), -1, block.shape[-1])
