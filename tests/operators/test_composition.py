"""Products, diagonals, inverses and low-rank parts of operators, against dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

import curvlens as cl
import small
from curvlens.testing import check_operator


@pytest.fixture(scope="module")
def problem() -> cl.Problem:
    return small.problem()


@pytest.fixture(scope="module", name="H")
def hessian(problem: cl.Problem) -> cl.Operator:
    return cl.hessian(problem)


@pytest.fixture(scope="module")
def dense(H: cl.Operator) -> Tensor:
    return H.dense()


def positive(n: int) -> Tensor:
    return small.direction(n, seed=5).abs() + 0.1


def close(found: Tensor, wanted: Tensor, tol: float = 1e-12) -> None:
    assert float((found - wanted).norm()) <= tol * float(wanted.norm())


def test_products(problem: cl.Problem, H: cl.Operator, dense: Tensor) -> None:
    G = cl.ggn(problem)
    product = H @ G
    close(product.dense(), dense @ G.dense())
    close(product.T.dense(), G.dense() @ dense)
    assert not product.symmetric
    assert not product.psd
    assert product.T.T is product
    close((H @ G @ H).dense(), dense @ G.dense() @ dense)
    assert (H @ G @ H).psd
    assert (G @ H @ G).symmetric
    assert not (G @ H @ G).psd
    assert (H @ H).psd
    v = small.direction(len(dense), seed=1)
    close(product @ v, dense @ (G @ v))
    named = product @ problem.layout.unflatten(v)
    close(problem.layout.flatten(named), product @ v)


def test_a_rectangular_block_and_its_transpose(H: cl.Operator, dense: Tensor) -> None:
    A = H["h.0.attn.q", "h.0.mlp.up"]
    gram = A.T @ A
    assert gram.symmetric
    assert gram.psd
    assert (A @ A.T).psd
    close(gram.dense(), A.dense().T @ A.dense())
    assert (A.T @ H["h.0.attn.q"] @ A).symmetric
    assert not (A.T @ H["h.0.attn.q"] @ A).psd
    assert gram.rows == H["h.0.mlp.up"].rows
    with pytest.raises(cl.CurvlensError, match="columns"):
        A @ A


@pytest.mark.parametrize("given", ["tensor", "array", "dict", "estimate", "reversed dict"])
def test_congruence_with_a_diagonal(given: str, problem: cl.Problem, H: cl.Operator, dense: Tensor) -> None:
    d = positive(len(dense))
    parts = problem.layout.unflatten(d)
    values: dict[str, Callable[[], Any]] = {
        "tensor": lambda: d,
        "array": d.numpy,
        "dict": lambda: parts,
        "reversed dict": lambda: dict(reversed(parts.items())),
        "estimate": lambda: cl.Estimate(d, torch.zeros_like(d), 1),
    }
    D = cl.operators.diagonal(values[given]())
    scaled = D @ H @ D
    truth = d[:, None] * dense * d
    close(scaled.dense(), truth)
    assert scaled.symmetric
    assert not scaled.psd
    assert (D @ cl.ggn(problem) @ D).psd
    assert scaled.rows == problem.layout
    close(cl.eigs(scaled, 2, "both").values, torch.linalg.eigvalsh(truth)[[0, 1, -2, -1]], 1e-8)
    close((H + D).dense(), dense + d.diag())
    close((D - H).dense(), d.diag() - dense)
    block = scaled["h.0.attn.q"]
    assert block.symmetric
    close(block.dense(), H.rows.extract(block.rows, H.rows.extract(block.rows, truth).T))
    assert not (D @ H).symmetric
    close((D @ H).T.dense(), (d[:, None] * dense).T)


def test_blocks_of_a_congruence_differentiate_only_the_block(H: cl.Operator, dense: Tensor) -> None:
    D = cl.operators.diagonal(positive(len(dense)))
    block: Any = (D @ H @ D)["h.0.attn.q", "h.0.mlp.up"]
    assert [f.shape for f in block.factors] == [(20, 20), block.shape, (block.shape[1],) * 2]


def test_by_block_and_budget(H: cl.Operator, dense: Tensor) -> None:
    d = positive(len(dense))
    scaled = cl.operators.diagonal(d) @ H @ cl.operators.diagonal(d)
    traces = cl.trace(scaled, by="block")
    truth = {name: float(b.dense().trace()) for name, b in scaled.blocks().items()}
    for name, trace in traces.items():
        assert float(trace) == pytest.approx(truth[name], abs=5 * float(trace.stderr) + 1e-12)
    assert "gradients spent" in cl.trace(scaled, by="block", budget="100 gradients").note


@pytest.mark.parametrize("psd", [True, pytest.param(False, marks=pytest.mark.full)])
def test_inverse(psd: bool, problem: cl.Problem, H: cl.Operator, dense: Tensor) -> None:
    A, M = (cl.ggn(problem), cl.ggn(problem).dense()) if psd else (H, dense)
    damping = 0.5 if psd else 3.0
    inverse = A.inverse(damping, rtol=1e-12)
    truth = torch.linalg.inv(M + damping * torch.eye(len(M), dtype=torch.float64))
    close(inverse.dense(), truth, 1e-8)
    assert inverse.symmetric
    assert inverse.psd == psd
    close(inverse["h.0.attn.q"].dense(), H.rows.extract(inverse["h.0.attn.q"].rows, truth)[:, _columns(H)], 1e-8)
    check_operator(A.inverse(damping, rtol=1e-14))
    influence = H["h.0.attn.q"].inverse(damping)
    assert influence.shape == H["h.0.attn.q"].shape


def _columns(H: cl.Operator) -> Tensor:
    everything = torch.arange(H.shape[0], dtype=torch.float64)
    return H.rows.extract(H["h.0.attn.q"].rows, everything).long()


def test_an_inverse_that_is_none() -> None:
    singular = cl.operators.as_operator(torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)))
    with pytest.raises(cl.CurvlensError, match="more damping"):
        singular.inverse() @ torch.ones(2, dtype=torch.float64)
    with pytest.raises(cl.CurvlensError, match="no option 'budget'"):
        singular.inverse(budget=3)
    with pytest.raises(cl.CurvlensError, match="no inverse"):
        cl.operators.as_operator(torch.ones(2, 3)).inverse()


def test_the_part_of_some_eigenpairs(H: cl.Operator, dense: Tensor, problem: cl.Problem) -> None:
    found = cl.eigs(H, 3, tol=1e-12)
    top = found.operator()
    values, vectors = torch.linalg.eigh(dense)
    close(top.dense(), (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].T, 1e-8)
    assert top.rows == problem.layout
    rest = H - top
    assert float(cl.eigs(rest, 1)) == pytest.approx(float(values[-4]), rel=1e-6)
    close(top["h.0.attn.q"].dense(), H.rows.extract(H["h.0.attn.q"].rows, top.dense())[:, _columns(H)])
    assert list(top.rows.blocks) == list(problem.blocks)
    block = cl.eigs(H["h.0.attn.q"], 1).operator()
    close((H["h.0.attn.q"] - block) @ torch.ones(20, dtype=torch.float64), _deflated(H["h.0.attn.q"]), 1e-6)


def _deflated(A: cl.Operator) -> Tensor:
    values, vectors = torch.linalg.eigh(A.dense())
    values[-1] = 0
    return torch.mv(vectors, values * (vectors.T @ torch.ones(len(values), dtype=torch.float64)))


def test_with_the_operators_of_others(H: cl.Operator, dense: Tensor) -> None:
    n = len(dense)
    d = positive(n)
    matrix = scipy.sparse.diags(d.numpy())
    for other in (matrix, sla.aslinearoperator(matrix), cl.operators.as_operator(d.diag())):
        close((H @ other).dense(), dense * d)
    assert (H @ cl.operators.as_operator(torch.eye(n))).columns == H.columns


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (torch.ones(2, 2), r"\.reshape\(-1\)"),
        (torch.tensor([1.0, torch.nan]), "1 of 2 numbers"),
        (torch.ones(2, dtype=torch.complex64), "complex"),
    ],
)
def test_what_is_no_diagonal(values: Tensor, match: str) -> None:
    with pytest.raises(cl.CurvlensError, match=match):
        cl.operators.diagonal(values)


def test_other_parameters_do_not_meet(H: cl.Operator) -> None:
    with pytest.raises(cl.CurvlensError, match="different parameters"):
        H["h.0.attn.q"] @ H["h.0.attn.k"]


# The contract


@pytest.mark.parametrize("of", [cl.hessian, cl.ggn, cl.functional, cl.fisher, cl.empirical_fisher])
def test_our_operators_keep_the_contract(of: Any, problem: cl.Problem) -> None:
    A = of(problem)
    D = cl.operators.diagonal(positive(A.shape[0]))
    for operator in (A, A["h.0.attn.q"], A["h.0.attn.q", "embed"], 2 * A, A - 0.5 * A.identity(), D @ A @ D, A @ A, D):
        check_operator(operator)


def test_in_single_precision() -> None:
    H = cl.hessian(cl.Problem(small.gpt().float(), small.tokens_and_labels(), cl.losses.CrossEntropy()))
    D = cl.operators.diagonal(positive(H.shape[0]))  # float64
    scaled = D @ H @ D
    assert scaled.dtype == scaled.precision == torch.float32
    check_operator(scaled)


def bad(change: Callable[[Any], Callable[..., Any]]) -> Any:
    """An operator of a matrix with one mistake."""
    A = cl.operators.as_operator(torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64))
    apply = A._apply
    A._apply = change(apply)  # type: ignore[method-assign]
    return A


MISTAKES: dict[str, tuple[Callable[[Any], Callable[..., Any]], str]] = {
    "affine": (lambda f: lambda v, p: f(v, p) + 1, "not linear"),
    "quadratic": (lambda f: lambda v, p: f(v, p) * v.abs().sum(), "not linear"),
    "random": (lambda f: lambda v, p: f(v, p) + torch.rand(1), "different results for the same vector"),
    "writes": (lambda f: lambda v, p: f(v.mul_(2), p), "writes into its argument"),
    "nan": (lambda f: lambda v, p: f(v, p) * torch.nan, "NaN"),
    "dtype": (lambda f: lambda v, p: f(v, p).float(), "has dtype torch.float64, but returns torch.float32"),
    "columns": (lambda f: lambda v, p: f(v, p) * v.shape[1], "matrix of columns"),
    "asymmetric": (lambda f: lambda v, p: v.flip(0) * torch.tensor([[1.0], [2.0]]), "transpose|symmetric"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_contract_finds_mistakes(name: str) -> None:
    change, text = MISTAKES[name]
    with pytest.raises(AssertionError, match=text):
        check_operator(bad(change))


def test_the_contract_finds_wrong_tags() -> None:
    A = cl.operators.as_operator(torch.diag(torch.tensor([1.0, -2.0], dtype=torch.float64)))
    check_operator(A)
    A.psd = True
    with pytest.raises(AssertionError, match="says psd"):
        check_operator(A, seed=1)
