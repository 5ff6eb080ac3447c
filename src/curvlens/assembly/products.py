"""Products with the Hessian and its parts, without a matrix: a tangent pass and a second adjoint pass.

Along v every state has a tangent ẋ. The second adjoint μ starts as Λ ẋ at the output and runs backward. At z = f(x, θ)

    μ_x += J_xᵀ μ_z + ∂⟨λ_z, J ẋ⟩/∂x ,

and the same for θ. The last term is the curvature of f; a part includes it only at its own primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from curvlens.assembly.circuit import ForwardPass, Ref, View
from curvlens.assembly.ledger import INPUT


@torch.no_grad()
def product(
    forward: ForwardPass,
    adjoints: Mapping[int, Tensor],
    direction: Mapping[str, Tensor],
    curvature: Callable[[Tensor], Tensor] | None,
    sources: Collection[int],
) -> dict[str, Tensor]:
    """H v, or a part of it, for v given by name, each (rows, columns, k); X is (B, *shape, k).

    ``curvature`` applies Λ, None leaves it out; ``sources`` are the indices of the nodes whose curvature is included.
    """
    circuit = forward.circuit
    tangents = _tangents(forward, direction)

    def tangent(ref: Ref) -> Tensor | None:
        if isinstance(ref, int):
            return tangents.get(ref)
        return circuit.shaped(ref, direction[ref.name]) if ref.name in direction else None

    result = {name: torch.zeros_like(v) for name, v in direction.items()}
    back: dict[int, Tensor] = {}

    def add(ref: Ref, pulled: Tensor) -> None:
        if isinstance(ref, int):
            back[ref] = back[ref] + pulled if ref in back else pulled
        elif ref.name in result:
            circuit.shaped(ref, result[ref.name]).add_(pulled)

    end = tangents.get(circuit.output)
    if curvature is not None and end is not None:
        back[circuit.output] = curvature(end)
    for position in reversed(range(len(forward.nodes))):
        node, primitive = forward.nodes[position], forward.at[position]
        if node.output == 0 and INPUT in direction:
            break
        along = [tangent(ref) for ref in node.inputs]
        if all(t is None for t in along):
            continue
        arrived = back.pop(node.output, None)
        if arrived is not None:
            for slot, ref in enumerate(node.inputs):
                if along[slot] is not None:
                    add(ref, primitive.pull(slot, arrived))
        if position in sources and node.output in adjoints:
            bent = primitive.bend(adjoints[node.output], along)
            for slot, ref in enumerate(node.inputs):
                curved = bent[slot]
                if curved is not None and along[slot] is not None:
                    add(ref, curved)
    if INPUT in direction and 0 in back:
        result[INPUT] = back[0]
    return result


def _tangents(forward: ForwardPass, direction: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The tangents of all states with a nonzero tangent."""
    found = {0: direction[INPUT]} if INPUT in direction else {}
    for node, primitive in zip(forward.nodes, forward.at, strict=True):
        if node.output == 0 and INPUT in direction:
            continue
        total: Tensor | None = None
        for slot, ref in enumerate(node.inputs):
            if isinstance(ref, View):
                moved = forward.circuit.shaped(ref, direction[ref.name]) if ref.name in direction else None
            else:
                moved = found.get(ref)
            if moved is not None:
                pushed = primitive.push(slot, moved)
                total = pushed if total is None else total + pushed
        if total is not None:
            found[node.output] = total
    return found
