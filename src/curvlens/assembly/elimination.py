"""The dense Hessian by elimination of the states, from the last to the first (`docs/explanation/math.md`, "Assembly").

A quadratic form in all variables, states and parameters, starts as the sources: the curvature Λ of the loss at the
output, and λ·D²f of every primitive at its inputs. Going backwards, the state z = f(x, θ) with Jacobians J is replaced
by its inputs: for every other variable y and every two inputs a, b

    G[a, y] += J_aᵀ G[z, y],        G[a, b] += J_aᵀ G[z, z] J_b,

and z is dropped. In the end only parameters are left: the Hessian. Every sample has its own states, and all share the
parameters: blocks with a state are (B, ·, ·), blocks of two parameters are summed over the samples. After the last
attention, tokens do not interact: there a block of two states is (B, T, ·, ·), one for each token.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from curvlens.assembly.circuit import ForwardPass, Node, View
from curvlens.assembly.ledger import INPUT, Ledger, Use
from curvlens.assembly.pairs import Pairs
from curvlens.assembly.primitives import Primitive, by_rows


class Elimination:
    """The quadratic form in the variables that are not yet eliminated."""

    def __init__(self, forward: ForwardPass, adjoints: dict[int, Tensor], ledger: Ledger) -> None:
        """Only states that depend on the parameters of the ledger are followed."""
        self._forward, self._adjoints, self._ledger = forward, adjoints, ledger
        self._pairs = Pairs()
        self._panels: dict[int, list[tuple[int, Tensor]]] = {}
        """Blocks of a state with uses of parameters, (B, ·, ·), each with its first column among all uses."""
        self._needed = {0} if INPUT in ledger.shapes else set()
        for node in forward.nodes:
            if any(self._wanted(ref) for ref in node.inputs):
                self._needed.add(node.output)

    def _wanted(self, ref: int | View) -> bool:
        return ref in self._needed if isinstance(ref, int) else ref.name in self._ledger.shapes

    @torch.no_grad()
    def run(self, curvature: Tensor | None, sources: Collection[int]) -> None:
        """Eliminate all states, with Λ (or None) and the functional sources of the nodes at these positions."""
        last = self._forward.circuit.output
        if curvature is not None and last in self._needed:
            self._pairs.add(last, last, curvature)
        for position in reversed(range(len(self._forward.nodes))):
            node, primitive = self._forward.nodes[position], self._forward.at[position]
            if node.output in self._needed and not (node.output == 0 and INPUT in self._ledger.shapes):
                self._eliminate(node, primitive, position in sources)
        if INPUT in self._ledger.shapes:
            self._keep_input()

    def _eliminate(self, node: Node, primitive: Primitive, curved: bool) -> None:
        z = node.output
        own, others = self._pairs.pop(z)
        panel = self._panel(z)
        wanted = {slot: ref for slot, ref in enumerate(node.inputs) if self._wanted(ref)}
        views = [ref for ref in wanted.values() if isinstance(ref, View)]
        opened = iter(self._ledger.open(views, alone=panel is None))
        slots = [(slot, next(opened) if isinstance(ref, View) else ref) for slot, ref in wanted.items()]
        for slot, variable in slots:
            if panel is not None:
                self._pull_panel(primitive, slot, variable, panel)
            for y, block in others.items():
                self._add(variable, y, _pull(primitive, slot, block), same=False)
        if own is not None:
            # parameters first: a block of a state with a parameter has the columns of the parameter, as panels do
            ordered = sorted(slots, key=lambda item: isinstance(item[1], int))
            for i, (slot, variable) in enumerate(ordered):
                half = _pull(primitive, slot, own).mT
                for other, into in ordered[i:]:
                    summed = isinstance(variable, Use) and isinstance(into, Use)
                    block = _pull(primitive, other, half, summed=summed)
                    self._add(into, variable, block, same=slot == other)
        if curved and z in self._adjoints:
            found = dict(slots)
            for first, second, block in primitive.curvature(self._adjoints[z]):
                if first in found and second in found:
                    self._add(found[first], found[second], block, same=first == second)

    def _panel(self, state: int) -> Tensor | None:
        """All blocks of a state with parameters, concatenated: (B, ·, width of all uses so far)."""
        parts = self._panels.pop(state, None)
        if parts is None:
            return None
        first, width = self._ledger.start, self._ledger.width - self._ledger.start
        found: dict[tuple[int, int], Tensor] = {}
        for absolute, part in parts:
            columns = (absolute - first, absolute - first + part.shape[-1])
            found[columns] = found[columns] + part if columns in found else part
        if (0, width) in found and len(found) == 1:
            return found[0, width]
        panel = parts[0][1].new_empty(*parts[0][1].shape[:2], width)
        filled = 0
        for (start, stop), part in sorted(found.items(), key=lambda item: item[0]):
            panel[..., filled:start].zero_()
            fresh = max(start, min(filled, stop))
            panel[..., start:fresh] += part[..., : fresh - start]
            panel[..., fresh:stop] = part[..., fresh - start :]
            filled = max(filled, stop)
        panel[..., filled:].zero_()
        return panel

    def _pull_panel(self, primitive: Primitive, slot: int, variable: int | Use, panel: Tensor) -> None:
        """The blocks of an input with all parameters used after its node."""
        if isinstance(variable, Use):
            self._ledger.set_row(variable, _pull(primitive, slot, panel, summed=True))
        else:
            start = self._ledger.width - panel.shape[-1]
            self._panels.setdefault(variable, []).append((start, _pull(primitive, slot, panel)))

    def _add(self, first: int | Use, second: int | Use, block: Tensor, *, same: bool) -> None:
        """Add a block to the form: of two different inputs, or with ``same`` of an input with itself."""
        if isinstance(first, Use) and isinstance(second, Use):
            self._ledger.add(first, second, block)
        elif isinstance(first, Use):
            self._add(second, first, block.mT, same=same)
        elif isinstance(second, Use):
            flat = block.flatten(1, 2) if block.ndim == 4 else block
            self._panels.setdefault(first, []).append((second.start, flat))
        else:
            both = first == second and not same
            self._pairs.add(first, second, block + block.mT if both else block)

    def _keep_input(self) -> None:
        """Keep the blocks of X. All samples of X are variables."""
        (own, _), panel = self._pairs.pop(0), self._panel(0)
        (x,) = self._ledger.open([View(INPUT)], alone=panel is None)
        if panel is not None:
            self._ledger.set_row(x, panel.flatten(0, 1))
        if own is not None:
            own = by_rows(own) if own.ndim == 4 else own
            self._ledger.add(x, x, by_rows(own[None])[0])


def _pull(primitive: Primitive, slot: int, block: Tensor, *, summed: bool = False) -> Tensor:
    """Jᵀ times the rows of a block: again (B, ·, k) or (B, T, ·, k); for a parameter (·, k) if ``summed``."""
    if block.ndim == 4 and primitive.tokenwise:
        pulled = primitive.pull(slot, block, None if summed else "token")
        return pulled.reshape(-1, block.shape[-1]) if summed else pulled.flatten(2, -2)
    block = by_rows(block) if block.ndim == 4 else block
    rows = block.view(len(block), *primitive.value.shape[1:], -1)
    pulled = primitive.pull(slot, rows, None if summed else "sample")
    return pulled.reshape(-1, block.shape[-1]) if summed else pulled.reshape(len(block), -1, block.shape[-1])
