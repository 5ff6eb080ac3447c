"""The first-order graph of one piece of data, from which every second-order product is one or two backward passes.

With the outputs f(θ) and the loss gradient λ = ∂ℓ/∂f, the gradient is g(θ, λ) = J(θ)ᵀ λ. It is built once, with λ as
a tensor of its own in the graph. Then, for a direction v (`docs/explanation/math.md`, "Products"),

- J v = ∂⟨g, v⟩/∂λ,
- F v = ∂⟨g, v⟩/∂θ with λ held fixed: the functional part,
- H v = ∂⟨g, v⟩/∂θ with λ = ∂ℓ/∂f(θ): the Hessian,
- G v = Jᵀ Λ J v with the output Hessian Λ of the loss.

All four are reverse-over-reverse. λ is tied to f by a `LossBoundary` that is open for H (its backward is Λ in closed
form) and closed for F, so one graph serves all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlens import batches
from curvlens._evaluation.checks import CANNOT_TWICE, graph_nodes
from curvlens._evaluation.pieces import Piece
from curvlens.errors import CurvlensError
from curvlens.losses import FromModel
from curvlens.precision import in_dtype
from curvlens.surroundings import Result

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation

Parts = dict[str, Tensor]
"""A vector by parameter name; a name that is missing means zeros."""


def alive(reference: weakref.ref[Evaluation]) -> Evaluation:
    """The evaluation that graphs belong to. It lives as long as a problem or one of its operators."""
    evaluation = reference()
    if evaluation is None:
        raise CurvlensError(
            "The Problem of these graphs was deleted. Keep a reference to the problem, or to one of its operators."
        )
    return evaluation


class LossBoundary:
    """Separates the loss from the outputs: it holds λ = ∂ℓ/∂f and applies Λ = ∂²ℓ/∂f²."""

    def __init__(self, evaluation: Evaluation, piece: Piece, outputs: Any) -> None:
        self.loss = evaluation.loss_function
        self._model = evaluation.model
        self.piece = piece
        self.open = True
        self._floating = [x.is_floating_point() for x in batches.tensors(outputs)]
        self.outputs = batches.map_tensors(Tensor.detach, outputs)
        leaves = [
            x.requires_grad_() if is_float else x for x, is_float in zip(self._leaves(), self._floating, strict=True)
        ]
        with torch.enable_grad():
            total, self.count = evaluation.sum_and_count(batches.replace_tensors(outputs, leaves), piece)
        self.total = float(total.detach())
        wanted = [x for x in leaves if x.requires_grad]
        evaluation.require_dependence(total.requires_grad)
        self.gradient = torch.autograd.grad(total, wanted, materialize_grads=True, allow_unused=True)

    def _leaves(self) -> list[Tensor]:
        return [x.detach() for x in batches.tensors(self.outputs)]

    def tree(self, floating: Iterable[Tensor]) -> Any:
        """A tree like the outputs, from its floating-point tensors."""
        new = iter(floating)
        leaves = batches.tensors(self.outputs)
        return batches.replace_tensors(
            self.outputs, [next(new) if f else x for x, f in zip(leaves, self._floating, strict=True)]
        )

    def flat(self, tree: Any) -> list[Tensor]:
        """The floating-point tensors of a tree like the outputs."""
        return [x for x, f in zip(batches.tensors(tree), self._floating, strict=True) if f]

    @torch.no_grad()
    def curvature(self, t: Sequence[Tensor]) -> list[Tensor]:
        """Λ t."""
        return in_dtype(
            self._model, lambda: self.flat(self.loss.curvature(self.outputs, self.piece.batch, self.tree(t)))
        )

    @torch.no_grad()
    def sqrt_curvature(self, z: Sequence[Tensor]) -> list[Tensor]:
        """Λ^½ z."""
        return in_dtype(
            self._model, lambda: self.flat(self.loss.sqrt_curvature(self.outputs, self.piece.batch, self.tree(z)))
        )


class _LossGradient(torch.autograd.Function):
    """f ↦ λ. The backward applies Λ if the boundary is open, and is zero if it is closed."""

    @staticmethod
    def forward(ctx: Any, boundary: LossBoundary, values: Sequence[Tensor], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.boundary = boundary
        return tuple(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *t: Tensor) -> tuple[Tensor | None, ...]:
        boundary: LossBoundary = ctx.boundary
        if not boundary.open:
            return (None, None, *(None for _ in t))
        return (None, None, *boundary.curvature(t))


class Graph:
    """The gradient of one piece, as a graph in the named parameters."""

    def __init__(self, evaluation: Evaluation, piece: Piece, names: Iterable[str]) -> None:
        self._evaluation = weakref.ref(evaluation)
        self.leaves = evaluation.leaves(names)
        self.kept = False
        """Whether the graph is kept for the next sum."""
        self.memo: dict[Any, Any] = {}
        """Values that an operator reuses in its next product; freed with the graph."""
        with torch.enable_grad():
            self._inside(lambda: self._build(evaluation, piece))

    def _inside(self, action: Callable[[], Result]) -> Result:
        """Run forward or backward passes with the leaves instead of the model's parameters."""
        return alive(self._evaluation).at(self.leaves, action, twice=True)

    def _build(self, evaluation: Evaluation, piece: Piece) -> None:
        outputs = evaluation.loss_function.outputs(evaluation.model, piece.batch)
        inputs = list(self.leaves.values())
        self.boundary: LossBoundary | None = None
        if isinstance(evaluation.loss_function, FromModel):
            total, self.count = evaluation.sum_and_count(outputs, piece)
            evaluation.require_dependence(total.requires_grad)
            self.total = float(total.detach())
            gradient = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
        else:
            self.boundary = LossBoundary(evaluation, piece, outputs)
            self.count, self.total = self.boundary.count, self.boundary.total
            self.outputs = self.boundary.flat(outputs)
            values = [x.detach() for x in self.boundary.gradient]
            self.cotangent = _LossGradient.apply(self.boundary, values, *self.outputs)  # type: ignore[no-untyped-call]
            pairs = [(f, w) for f, w in zip(self.outputs, self.cotangent, strict=True) if f.requires_grad]
            evaluation.require_dependence(any(f.requires_grad for f in self.outputs))
            gradient = torch.autograd.grad(
                [f for f, _ in pairs], inputs, [w for _, w in pairs], create_graph=True, allow_unused=True
            )
        self.gradient = dict(zip(self.leaves, gradient, strict=True))
        if once_differentiable(g for g in gradient if g is not None):
            raise CurvlensError(CANNOT_TWICE.format("a function is marked once_differentiable"))

    @property
    def unused(self) -> set[str]:
        """Parameters this piece of the loss does not depend on."""
        return {name for name, g in self.gradient.items() if g is None}

    def _pull(self, wrt: Sequence[Tensor], v: Parts, *, retain: bool) -> Sequence[Tensor]:
        """∂⟨g, v⟩/∂wrt."""
        pairs = [(g, v[name].to(g.dtype)) for name in v if (g := self.gradient[name]) is not None and g.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in wrt]
        return self._inside(
            lambda: torch.autograd.grad(
                [g for g, _ in pairs],
                wrt,
                [x for _, x in pairs],
                retain_graph=retain,
                allow_unused=True,
                materialize_grads=True,
            )
        )

    def second(self, rows: Sequence[str], v: Parts, *, functional: bool, retain: bool) -> Parts:
        """The rows of H v, or of F v with ``functional``."""
        if self.boundary is not None:
            self.boundary.open = not functional
        return dict(zip(rows, self._pull([self.leaves[name] for name in rows], v, retain=retain), strict=True))

    def push(self, v: Parts) -> list[Tensor]:
        """J v, one tensor for each floating-point output."""
        assert self.boundary is not None
        return list(self._pull(self.cotangent, v, retain=True))

    def pull(self, rows: Sequence[str], u: Sequence[Tensor], *, retain: bool) -> Parts:
        """The rows of Jᵀ u."""
        pairs = [(f, x) for f, x in zip(self.outputs, u, strict=True) if f.requires_grad]
        parts = self._inside(
            lambda: torch.autograd.grad(
                [f for f, _ in pairs],
                [self.leaves[name] for name in rows],
                [x.to(f.dtype) for f, x in pairs],
                retain_graph=retain,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        return dict(zip(rows, parts, strict=True))

    def tensors(self) -> list[Tensor]:
        """The tensors that the graph holds besides saved tensors."""
        held = [g for g in self.gradient.values() if g is not None]
        return held if self.boundary is None else [*held, *self.outputs, *self.boundary.gradient]


def once_differentiable(gradient: Iterable[Tensor], until: Iterable[Any] = ()) -> bool:
    """Whether the graph contains a function marked ``once_differentiable`` before the nodes of ``until``.

    torch attaches an error node to such functions, but on a branch that ``torch.autograd.grad(..., inputs)`` never
    visits. Second derivatives through them would be zero without an error.
    """
    return any(node.name() == "torch::autograd::Error" for node in graph_nodes(gradient, until))
