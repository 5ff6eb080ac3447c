"""Assembled Hessians against dense autodiff: the whole, the Gauss–Newton part, every primitive's part, and products."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assembly_truth import Case
from curvlens.assembly.contraction import contract
from curvlens.calculus.form import Form

TOL, FLOOR = 1e-10, 1e-13
GRID = [
    Case(layers, norm, heads, activation, loss, norm_kind=("layer", "rms")[i % 5 == 0], seed=i)
    for i, (layers, norm, heads, activation, loss) in enumerate(
        product((0, 3), ("pre", "post", "none"), (1, 4), ("gelu", "relu", "swiglu"), ("square", "cross-entropy"))
    )
]
SOME = [GRID[i] for i in (0, 9, 17, 30, 41, 65)]
ODD = [
    Case(mask=None, heads=2, activation="silu", norm_kind="rms", bias=False, d=6, seed=100),
    Case(mask="bool", heads=2, activation="gelu_tanh", norm="post", samples=3, length=4, seed=101),
    Case(layers=2, mask="bool", heads=2, loss="cross-entropy", eps=0.1, length=4, seed=102),
    Case(samples=1, length=2, d=2, inner=3, seed=103),  # two features: a norm has one direction
]


def name_of(case: Case) -> str:
    return f"{case.layers or 'block'}-{case.norm}-{case.heads}-{case.activation}-{case.loss}-{case.norm_kind}"


def block_norms(matrix: Tensor, form: Form) -> Tensor:
    """The Frobenius norm of the block of every two parameters."""
    belongs = torch.zeros(len(form.names), form.size, dtype=matrix.dtype)
    for row, part in zip(belongs, form.slices.values(), strict=True):
        row[part] = 1
    return (belongs @ matrix.square() @ belongs.T).sqrt()


def check(got: Form, truth: Tensor, what: str = "") -> float:
    """‖Δ_ab‖ ≤ TOL ‖truth_ab‖ + FLOOR ‖truth‖ for every two parameters; the largest quotient of the two sides."""
    assert got.dense().shape == truth.shape
    assert truth.norm() > 0 or what.endswith("activation"), f"{what}: the truth is zero, nothing is tested"
    error, size = block_norms(got.dense() - truth, got), block_norms(truth, got)
    allowed = TOL * size + FLOOR * truth.norm()
    for a, b in (error > allowed).nonzero().tolist():
        where = f"({got.names[a]}, {got.names[b]})"
        raise AssertionError(f"{what} {where}: ‖Δ‖ {error[a, b]:.2e}, ‖truth‖ {size[a, b]:.2e}")
    return float((error / allowed.clamp(min=1e-300)).max())


def check_case(case: Case) -> None:
    H = case.hessian([*case.weights, "X"])
    total = case.total()
    assert H.names == (*case.weights, "X")
    assert H.total.norm() > 0
    check(H.total, total, "total")
    check(H.ggn, case.ggn(), "ggn")
    truths = case.parts()
    assert set(truths) == set(H.parts)
    size = H.ggn.dense().abs()
    summed = H.ggn.dense().clone()
    for name, truth in truths.items():
        check(H.parts[name], truth, name)
        summed += H.parts[name].dense()
        size = size + H.parts[name].dense().abs()
    assert float((summed - H.total.dense()).norm()) <= 1e-12 * float(size.norm())
    assert float((summed - H.ggn.dense() - H.functional.dense()).norm()) <= 1e-12 * float(size.norm())
    assert torch.equal(H.total.dense(), H.total.dense().T)


@pytest.mark.parametrize("case", [*SOME, *ODD], ids=name_of)
def test_every_part_is_that_of_autodiff(case: Case) -> None:
    check_case(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in GRID if case not in SOME], ids=name_of)
def test_every_part_is_that_of_autodiff_on_the_grid(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("case", [*SOME[:4], *ODD], ids=name_of)
def test_products_are_those_of_the_matrices(case: Case) -> None:
    H = case.hessian([*case.weights, "X"])
    v = torch.randn(H.size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    forms = {"total": H.total, "ggn": H.ggn, "functional": H.functional, **H.parts}
    for name, form in forms.items():
        truth = form.dense() @ v
        for got, right in ((H.matvec(v, name), truth), (H.matvec(v[:, 0], name), truth[:, 0]), (form @ v, truth)):
            assert got.shape == right.shape
            assert float((got - right).norm()) <= 1e-12 * float(right.norm()), name


@pytest.mark.parametrize("case", SOME[::3], ids=name_of)
def test_differences_of_the_gradient_agree(case: Case) -> None:
    H = case.hessian([*case.weights, "X"])
    for name, part in H.total.slices.items():
        v = torch.zeros(H.size, dtype=torch.float64)
        v[part] = torch.randn(part.stop - part.start, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        truth = case.by_differences(v)
        assert float((H.matvec(v) - truth).norm()) <= 1e-7 * float(truth.norm()) + 1e-9, name


def test_some_parameters_are_a_part_of_all() -> None:
    case = Case(layers=2, heads=2, seed=3)
    everything = case.hessian([*case.weights, "X"]).total
    for names in (["h.1.q"], ["h.0.norm1.scale", "h.1.down_bias"], ["h.0.k", "unembedding"], ["X"]):
        some = case.hessian(names)
        assert some.names == tuple(names)
        for a, b in product(names, names):
            assert torch.allclose(some.total[a, b], everything[a, b], rtol=1e-12, atol=1e-15)
        v = torch.randn(some.size, dtype=torch.float64)
        assert torch.allclose(some.matvec(v), some.total.dense() @ v, rtol=1e-10, atol=1e-13)
    assert case.hessian("unembedding h.0.k").names == ("h.0.k", "unembedding")
    assert case.hessian().names == tuple(case.weights)


@pytest.mark.parametrize("case", SOME[1:3], ids=name_of)
def test_the_gauss_newton_part_is_not_negative(case: Case) -> None:
    values = torch.linalg.eigvalsh(case.hessian().ggn.dense())
    assert values[0] > -1e-13 * values[-1]


@pytest.mark.parametrize("directions", [1, 40])
@pytest.mark.parametrize(
    "letters",
    [
        "btoy,io->btiy",
        "btoy,bti->ioy",
        "btoy,bti->bioy",
        "btoy,bti->btioy",
        "bhtsy,bhse->bhtey",
        "bhtsy,bhte->bhsey",
        "bhtey,bhse->bhtsy",
        "bhtey,bhts->bhsey",
        "ioy,bti->btoy",
        "btiy,bti->btiy",
    ],
)
def test_contractions_are_those_of_einsum(letters: str, directions: int) -> None:
    sizes = {**dict(zip("bhtseio", range(2, 9), strict=True)), "y": directions}
    many, small = (
        torch.randn(*(sizes[c] for c in part), dtype=torch.float64) for part in letters.split("->")[0].split(",")
    )
    truth = torch.einsum(letters, many, small)
    turned = many.movedim(0, -1).contiguous().movedim(-1, 0)  # the same numbers, in another order in memory
    for given in (many, turned):
        got = contract(letters, given, small)
        assert got.shape == truth.shape
        assert torch.allclose(got, truth, rtol=1e-12, atol=1e-13)


def test_no_derivative_is_automatic() -> None:
    import curvlens.assembly

    for file in Path(curvlens.assembly.__file__).parent.glob("*.py"):
        code = file.read_text(encoding="utf-8")
        assert not re.search(r"autograd|torch\.func\b|functorch|\.backward\(|requires_grad|enable_grad|jvp|vjp", code)
