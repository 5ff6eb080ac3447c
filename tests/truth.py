"""Two truths about H, G and F that share no code with curvlens: dense autodiff, and finite differences.

Second derivatives are reverse-over-reverse only: forward-mode ones through ``layer_norm`` are wrong in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import functional as autograd
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Rows = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""(model, batch) → the outputs that count, (rows, classes), and their targets."""

AUTODIFF = (1e-9, 1e-13)
"""Tolerance and floor of a group against dense autodiff."""
DIFFERENCES = (1e-5, 1e-9)
"""Tolerance and floor of a group against finite differences."""


@contextmanager
def plainly() -> Iterator[None]:
    """Attention as written in the papers, and float64 all through: the name ``float32`` means float64 in here."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield


class Truth:
    """The full-batch loss of a model over batches, written plainly, and its derivatives."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], rows: Rows, *, square: bool) -> None:
        self.square = square
        self._batches = batches
        self._call = _Rows(model, rows)
        parameters = dict(model.named_parameters())
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self.theta = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        assert self.theta.dtype == torch.float64
        ends = torch.tensor([0, *(p.numel() for p in parameters.values())]).cumsum(0).tolist()
        self.slices = {name: slice(*ab) for name, ab in zip(parameters, pairwise(ends), strict=True)}
        with torch.no_grad(), plainly():
            self.targets = torch.cat([rows(model, batch)[1] for batch in batches])

    # The loss

    def outputs(self, theta: Tensor) -> Tensor:
        """f(θ): the rows of all batches, one under the other."""
        parts = {f"model.{n}": theta[s].view(self._shapes[n]) for n, s in self.slices.items()}
        with plainly():
            f = torch.cat([functional_call(self._call, parts, (batch,)) for batch in self._batches])
        assert f.dtype == torch.float64
        return f

    def loss_at(self, outputs: Tensor) -> Tensor:
        """ℓ(f), the mean over all that counts."""
        if self.square:
            return F.mse_loss(outputs, self.targets)
        return F.cross_entropy(outputs, self.targets)

    def loss(self, theta: Tensor) -> Tensor:
        """ℓ(f(θ))."""
        return self.loss_at(self.outputs(theta))

    def gradient(self, theta: Tensor) -> Tensor:
        """∂ℓ/∂θ."""
        return _gradient(self.loss, theta)

    def loss_gradient(self, outputs: Tensor) -> Tensor:
        """λ = ∂ℓ/∂f."""
        return _gradient(self.loss_at, outputs)

    def pull(self, theta: Tensor, cotangent: Tensor) -> Tensor:
        """J(θ)ᵀ u, one reverse pass."""
        return _gradient(lambda x: (cotangent * self.outputs(x)).sum(), theta)

    # Dense autodiff

    @cached_property
    def hessian(self) -> Tensor:
        """H, reverse over reverse."""
        return _hessian(self.loss, self.theta)

    @cached_property
    def jacobian(self) -> Tensor:
        """J = ∂f/∂θ, by reverse mode."""
        whole: Tensor = autograd.jacobian(self.outputs, self.theta, vectorize=True)  # type: ignore[no-untyped-call]
        return whole.flatten(0, -2)

    @cached_property
    def output_hessian(self) -> Tensor:
        """Λ = ∂²ℓ/∂f²."""
        f = self.outputs(self.theta).detach()
        return _hessian(self.loss_at, f).reshape(f.numel(), f.numel())

    @cached_property
    def ggn(self) -> Tensor:
        """G = Jᵀ Λ J."""
        return self.jacobian.T @ self.output_hessian @ self.jacobian

    @cached_property
    def functional(self) -> Tensor:
        """F = H − G: here a difference, which curvlens never takes."""
        return self.hessian - self.ggn

    @cached_property
    def functional_directly(self) -> Tensor:
        """F as the Hessian of ⟨λ, f(θ)⟩ with λ held fixed."""
        cotangent = self.loss_gradient(self.outputs(self.theta).detach())
        return _hessian(lambda x: (cotangent * self.outputs(x)).sum(), self.theta)

    def dense(self, operator: str) -> Tensor:
        """The matrix of an operator: "hessian", "ggn" or "functional"."""
        matrix: Tensor = getattr(self, operator)
        return matrix

    # Finite differences

    def steps(self, v: Tensor) -> list[Tensor]:
        """The points at which `by_differences` looks at the model."""
        return [self.theta + c * STEP * _unit(v) for h in LADDER for c in (h, -h)]

    def by_differences(self, operator: str, v: Tensor) -> Tensor:
        """The product of "hessian", "ggn" or "functional" with v."""
        if operator == "hessian":
            return _derivative(self.gradient, self.theta, v)
        f = self.outputs(self.theta).detach()
        if operator == "functional":
            cotangent = self.loss_gradient(f)
            return _derivative(lambda x: self.pull(x, cotangent), self.theta, v)
        assert operator == "ggn"
        tangent = _derivative(lambda x: self.outputs(x).detach(), self.theta, v)
        return self.pull(self.theta, _derivative(self.loss_gradient, f, tangent))


class _Rows(nn.Module):
    """The forward pass of a batch as a module, so that ``functional_call`` can exchange the parameters."""

    def __init__(self, model: nn.Module, rows: Rows) -> None:
        super().__init__()
        self.model = model
        self._rows = rows

    def forward(self, batch: Any) -> Tensor:
        return self._rows(self.model, batch)[0]


def _gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient


def _hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    result: Tensor = autograd.hessian(function, at, vectorize=True)  # type: ignore[no-untyped-call]
    return result


STEP = 2e-3
"""The length of the shortest step; with three lengths the error is of sixth order in it."""
LADDER = (1, 2, 4)


def _unit(v: Tensor) -> Tensor:
    unit: Tensor = v / v.norm()
    return unit


def _derivative(function: Callable[[Tensor], Tensor], at: Tensor, v: Tensor) -> Tensor:
    """The directional derivative by central differences of three step lengths, extrapolated to zero (Richardson)."""
    unit = _unit(v)
    table = [(function(at + h * STEP * unit) - function(at - h * STEP * unit)) / (2 * h * STEP) for h in LADDER]
    for order in range(1, len(table)):
        table = [fine + (fine - coarse) / (4**order - 1) for fine, coarse in pairwise(table)]
    derivative: Tensor = table[0] * v.norm()
    return derivative


# ReLU: a finite difference is a derivative only as long as no unit switches


class _Signs(TorchFunctionMode):
    """Notes which units of every ReLU are on."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_):
            self.patterns.append(args[0].detach() > 0)
        return func(*args, **(kwargs or {}))


def relu_patterns(truth: Truth, theta: Tensor) -> list[Tensor]:
    """Which units are on, for every ReLU the model passes, in order."""
    signs = _Signs()
    with torch.no_grad(), signs:
        truth.outputs(theta)
    return signs.patterns


# The comparison


def check_groups(got: Tensor, truth: Tensor, slices: Mapping[str, slice], tol: float, floor: float) -> float:
    """‖Δ_b‖ ≤ tol·‖truth_b‖ + floor·‖truth‖ for every parameter group b; the largest quotient of the two sides.

    Vectors, or matrices with the parameters as rows. Raises with every group that fails.
    """
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    assert got.dtype == truth.dtype == torch.float64
    assert bool(truth.isfinite().all()), "the truth is not finite"
    total = float(truth.norm())
    assert total > 0, "the truth is zero: nothing is tested"
    failures, worst = [], 0.0
    for name, part in slices.items():
        size, error = float(truth[part].norm()), float((got[part] - truth[part]).norm())
        allowed = tol * size + floor * total
        worst = max(worst, error / allowed) if error == error else float("nan")
        if not error <= allowed:
            relative = error / size if size else float("inf")
            failures.append(f"  {name}: ‖Δ‖ {error:.3e}, ‖truth‖ {size:.3e}, relative {relative:.3e}")
    if failures:
        raise AssertionError(
            f"{len(failures)} of {len(slices)} groups differ (tol {tol:g}, floor {floor:g}·{total:.3e}):\n"
            + "\n".join(failures)
        )
    return worst
