"""The chain rule for bounds: tangents forward, gradients backward, and the contribution of every layer to the Hessian.

H = T_outᵀ (∇²ℓ) T_out + Σ_m T_mᵀ (λ_m · D²f_m) T_m over the layers m (`docs/explanation/math.md`, "Bounds"). A state
has a vector t of bounds on ‖∂state/∂·‖. After a layer it is ‖∂y/∂X‖ t, and ‖∂y/∂W‖ for the weights of the layer; for a
sum of states it is the sum. If layers act on every token separately and their Jacobians are known, the norm of the
product of the Jacobians, including skips, replaces the product of their norms where it is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.calculus.bounds.sizes import Local, S, matrix, spectral


@dataclass
class Path:
    """How a state depends on an earlier one: ∂state/∂earlier of each token, (L, d, d), and the weights between."""

    earlier: Tensor
    """t of the earlier state."""
    jacobian: Tensor
    own: Tensor

    def t(self) -> Float[Tensor, " n"]:
        """Bounds on ‖∂state/∂·‖."""
        return spectral(self.jacobian) * self.earlier + self.own


@dataclass
class Node(Generic[S]):
    """A state, and bounds on ‖∂state/∂·‖ for all names."""

    value: S
    t: Tensor
    path: Path | None = None
    gradient: S | None = None

    def receive(self, gradient: S) -> None:
        """Add a gradient. Gradients from all uses of a state add up."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class Tape(Generic[S]):
    """Records states forward, and the steps for the way back."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._steps: list[tuple[Node[S], Callable[[S], Tensor | None]]] = []

    def start(self, tokens: S) -> Node[S]:
        """The tokens X."""
        return self._node(tokens, self._unit("X"), None)

    def _unit(self, name: str) -> Tensor:
        return torch.tensor([float(other == name) for other in self.names], dtype=torch.float64)

    def _node(self, value: S, t: Tensor, path: Path | None) -> Node[S]:
        if path is not None:
            t = torch.minimum(t, path.t())
        elif isinstance(value, Tensor):
            eye = torch.eye(value.shape[1], dtype=value.dtype, device=value.device)
            path = Path(t, eye.expand(len(value), -1, -1), torch.zeros_like(t))
        return Node(value, t, path)

    def through(self, node: Node[S], local: Local[S], prefix: str = "") -> Node[S]:
        """The state after a layer whose weights are called prefix + name."""
        weights: dict[str, str] = {n: prefix + n for n in local.first if prefix + n in self.names and n != "X"}
        used = ["X", *weights]
        tangents = torch.stack([node.t, *(self._unit(name) for name in weights.values())])
        first = torch.tensor([local.first[name] for name in used], dtype=torch.float64)
        path = None
        if node.path is not None and local.tokens is not None:
            between = local.first["X"] * node.path.own + first[1:] @ tangents[1:]
            path = Path(node.path.earlier, node.path.jacobian @ local.tokens, between)
        out = self._node(local.output, first @ tangents, path)

        def back(gradient: S) -> Tensor:
            node.receive(local.back(gradient))
            return tangents.mT @ matrix(used, local.bend(gradient)) @ tangents

        self._steps.append((out, back))
        return out

    def plus(self, first: Node[S], second: Node[S]) -> Node[S]:
        """The sum of two states."""
        one, other, path = first.path, second.path, None
        if one is not None and other is not None and one.earlier is other.earlier:
            path = Path(one.earlier, one.jacobian + other.jacobian, one.own + other.own)
        out = self._node(first.value + second.value, first.t + second.t, path)

        def back(gradient: S) -> None:
            first.receive(gradient)
            second.receive(gradient)

        self._steps.append((out, back))
        return out

    def bent(self, out: Node[S], gradient: S) -> Float[Tensor, "n n"]:
        """Σ_m T_mᵀ C_m T_m."""
        out.receive(gradient)
        total = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)
        for node, back in reversed(self._steps):
            assert node.gradient is not None
            found = back(node.gradient)
            total = total if found is None else total + found
        return total
