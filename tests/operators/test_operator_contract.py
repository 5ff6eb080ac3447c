"""Every class of operator keeps the contract that `curvlens.testing` ships to users."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch

import curvlens as cl
import small
from curvlens.calculus import attention
from curvlens.linalg.compression import Compression
from curvlens.linalg.remembered import Remembered
from curvlens.operators import activation_hessian, as_operator, closed_form, module_part
from curvlens.testing import check_operator

Make = Callable[[cl.Problem], cl.Operator]


def weights(A: cl.Operator) -> cl.Operator:
    return cl.operators.diagonal(small.direction(A.shape[0], seed=5).abs() + 0.1)


def compressed(problem: cl.Problem) -> cl.Operator:
    G = cl.ggn(problem)
    return Compression(G, cl.eigs(G, 2).vectors)


def formula(problem: cl.Problem) -> cl.Operator:
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    WQ, WK, WV = (torch.randn(4, 4, generator=generator, dtype=torch.float64) / 2 for _ in range(3))
    return closed_form(attention.hessian(X, WQ, WK, WV, target=Y))


CASES: dict[str, Make] = {
    "Curvature": cl.hessian,
    "Curvature, functional": cl.functional,
    "Curvature, a block": lambda p: cl.hessian(p)["h.0.attn.q", "embed"],
    "GaussNewton": cl.ggn,
    "GaussNewton, Fisher": lambda p: cl.fisher(p, samples=2),
    "GaussNewton, a union": lambda p: cl.ggn(p)[["h.0.attn.q", "embed"]],
    "GaussNewton, empirical": cl.empirical_fisher,
    "ModulePart": lambda p: module_part(p, "h.0.attn"),
    "ModulePart, own": lambda p: module_part(p, "h.0.attn", own=True),
    "ActivationHessian": lambda p: activation_hessian(p, "h.0"),
    "ActivationHessian, functional": lambda p: activation_hessian(p, "h.0", of="functional"),
    "Scaled": lambda p: -2.0 * cl.hessian(p),
    "Sum": lambda p: cl.hessian(p) - 0.5 * cl.ggn(p),
    "Identity": lambda p: cl.hessian(p).identity(),
    "Wrapped": lambda p: as_operator(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64)),
    "Wrapped, scipy": lambda p: as_operator(cl.ggn(p).to_scipy()),
    "Restricted": lambda p: (cl.ggn(p) @ cl.hessian(p))["h.0.attn.q", "embed"],
    "ClosedForm": formula,
    "Diagonal": lambda p: weights(cl.ggn(p)),
    "LowRank": lambda p: cl.eigs(cl.hessian(p), 2, "both").operator(),
    "Composed": lambda p: cl.ggn(p) @ cl.hessian(p),
    "Composed, a congruence": lambda p: weights(cl.ggn(p)) @ cl.ggn(p) @ weights(cl.ggn(p)),
    "Compression": compressed,
    "Remembered": lambda p: Remembered(cl.ggn(p), 4),
    "Inverse": lambda p: cl.ggn(p).inverse(damping=1.0, rtol=1e-15),
}
"""By the name of the class."""
PARTS = {"_Block": "a part of ActivationHessian, which check_operator cuts out"}


@pytest.fixture(scope="module")
def problem() -> cl.Problem:
    return small.problem()


def kinds(of: type[cl.Operator]) -> Iterator[type[cl.Operator]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_there_is_a_case_of_every_class(problem: cl.Problem) -> None:
    for module in pkgutil.walk_packages(cl.__path__, "curvlens."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    ours = {kind.__name__ for kind in kinds(cl.Operator) if kind.__module__.startswith("curvlens.")}
    assert {name.partition(",")[0] for name in CASES} == ours - set(PARTS)


@pytest.mark.parametrize("name", CASES)
def test_the_contract(name: str, problem: cl.Problem) -> None:
    operator = CASES[name](problem)
    assert "," in name or type(operator).__name__ == name
    check_operator(operator)
    check_operator(operator.T, seed=1)
