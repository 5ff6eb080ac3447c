"""A network as a list of primitives: states by number, parameters by name.

State 0 is the input X of the first layer. Every node computes one state from earlier states and from parameters. Nodes
are in an order in which they can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlens.assembly.primitives import Primitive


@dataclass(frozen=True)
class View:
    """A parameter, or a part of it, as a primitive uses it: some rows or columns, perhaps transposed.

    ``rows`` and ``columns`` are (first, last + 1); None means to the end.
    """

    name: str
    rows: tuple[int, int | None] = (0, None)
    columns: tuple[int, int | None] = (0, None)
    transposed: bool = False

    def of(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """The part along the axes ``axis`` and ``axis`` + 1 of a tensor; a view, which may be written into."""
        part = tensor[(slice(None),) * axis + (slice(*self.rows), slice(*self.columns))]
        return part.transpose(axis, axis + 1) if self.transposed else part


Ref = int | View
"""An input of a node: the number of a state, or a parameter."""


@dataclass(frozen=True)
class Node:
    """One primitive: its name in the network, its constructor, its inputs, and the state that it computes."""

    name: str
    make: Callable[..., Primitive]
    inputs: tuple[Ref, ...]
    output: int


@dataclass
class Circuit:
    """Nodes in order; ``parameters`` are the tensors by name, vectors as one row."""

    parameters: Mapping[str, Tensor]
    nodes: list[Node] = field(default_factory=list)
    vectors: frozenset[str] = frozenset()
    """Parameters that primitives take as vectors."""

    def add(self, name: str, make: Callable[..., Primitive], *inputs: Ref) -> int:
        """Append a node and return the number of its state."""
        output = self.output + 1
        self.nodes.append(Node(name, make, inputs, output))
        return output

    @property
    def output(self) -> int:
        """The last state."""
        return self.nodes[-1].output if self.nodes else 0

    def shaped(self, view: View, tensor: Tensor) -> Tensor:
        """A tensor in the shape of a parameter, with or without a last axis of directions, for use in a primitive."""
        part = view.of(tensor)
        return part[0] if view.name in self.vectors else part


@dataclass(frozen=True)
class ForwardPass:
    """A circuit at a point: all states, and every primitive at its inputs."""

    circuit: Circuit
    nodes: list[Node]
    states: dict[int, Tensor]
    at: list[Primitive]

    @property
    def output(self) -> Tensor:
        """The output of the network."""
        return self.states[self.circuit.output]

    def size(self, state: int) -> int:
        """The number of entries of a state in one sample."""
        return self.states[state][0].numel()

    def adjoints(self, gradient: Tensor) -> dict[int, Tensor]:
        """λ = ∂ℓ/∂(state) of all states, from λ of the output."""
        found = {self.circuit.output: gradient[..., None]}
        for node, primitive in zip(reversed(self.nodes), reversed(self.at), strict=True):
            if node.output not in found:
                continue
            for slot, ref in enumerate(node.inputs):
                if isinstance(ref, int):
                    pulled = primitive.pull(slot, found[node.output])
                    found[ref] = found[ref] + pulled if ref in found else pulled
        return {state: adjoint[..., 0] for state, adjoint in found.items()}


@torch.no_grad()
def forward_pass(circuit: Circuit, given: Tensor, front: Node | None = None) -> ForwardPass:
    """Compute all states from X, or from ``front``, a node with only parameters as inputs: a lookup of tokens."""
    nodes = circuit.nodes if front is None else [front, *circuit.nodes]
    states = {} if front is not None else {0: given}
    at = []
    for node in nodes:
        inputs = [
            states[ref] if isinstance(ref, int) else circuit.shaped(ref, circuit.parameters[ref.name])
            for ref in node.inputs
        ]
        primitive = node.make(*inputs)
        at.append(primitive)
        states[node.output] = primitive.value
    return ForwardPass(circuit, nodes, states, at)
