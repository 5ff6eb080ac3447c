"""Algebra, blocks and conversions: one list of operators, the same checks for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.operators import as_operator
from mlp import X, Y, net
from small import direction, problem, relative

PROBLEM = problem()
H, G, F = cl.hessian(PROBLEM), cl.ggn(PROBLEM), cl.functional(PROBLEM)
HD, GD, FD = H.dense(), G.dense(), F.dense()
NAMES = PROBLEM.layout.names
A, B = "h.0.attn.q.weight", "h.0.mlp.up.weight"
SA, SB = PROBLEM.layout.slices[A], PROBLEM.layout.slices[B]


class Foreign:
    """Somebody else's operator: a shape, a product with one vector, a transpose."""

    shape = (len(HD), len(HD))

    @property
    def T(self) -> Foreign:  # noqa: N802
        return self

    def __matmul__(self, v: Tensor) -> Tensor:
        return 2 * v


IDENTITY = torch.eye(len(HD), dtype=torch.float64)
ARRAY: Any = IDENTITY.numpy()
CASES: dict[str, tuple[Callable[[], cl.Operator], Tensor]] = {
    "hessian": (lambda: H, HD),
    "ggn": (lambda: G, GD),
    "functional": (lambda: F, FD),
    "sum": (lambda: G + F, HD),
    "difference": (lambda: H - G, FD),
    "damped": (lambda: H + 0.1 * H.identity(), HD + 0.1 * IDENTITY),
    "block of the identity": (
        lambda: (G - G.identity())[A, [A, B]],
        torch.cat([(GD - IDENTITY)[SA, c] for c in (SA, SB)], 1),
    ),
    "multiple": (lambda: -0.5 * H / 2, -0.25 * HD),
    "numbers of numpy and torch": (lambda: np.float64(2) * H * torch.tensor(0.5), HD),
    "with a tensor": (lambda: H + IDENTITY, HD + IDENTITY),
    "from a tensor": (lambda: ARRAY - H, IDENTITY - HD),
    "with scipy's": (lambda: H + sla.aslinearoperator(FD.numpy()), HD + FD),
    "with a stranger's": (lambda: H + Foreign(), HD + 2 * IDENTITY),
    "block": (lambda: H[A, B], HD[SA, SB]),
    "diagonal block": (lambda: H[B], HD[SB, SB]),
    "block of a sum": (lambda: (H + 2 * IDENTITY)[A], (HD + 2 * IDENTITY)[SA, SA]),
    "block of a stranger's": (lambda: (H - Foreign())[A, B], HD[SA, SB]),
    "union": (lambda: H[[B, A]], torch.cat([torch.cat([HD[r, c] for c in (SA, SB)], 1) for r in (SA, SB)])),
    "block of a block": (lambda: H[[A, B]][B, A], HD[SB, SA]),
    "transpose": (lambda: H[A, B].T, HD[SA, SB].T),
    "transpose of a sum": (lambda: (H - 2 * G)[A, B].T, (HD - 2 * GD)[SA, SB].T),
    "wrapped array": (lambda: as_operator(FD[:5].numpy()), FD[:5]),
}


@pytest.mark.parametrize(("create", "dense"), CASES.values(), ids=CASES.keys())
def test_operator(create: Callable[[], cl.Operator], dense: Tensor) -> None:
    operator = create()
    assert operator.shape == tuple(dense.shape)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12 * float(dense.norm())}
    matrix = torch.stack([direction(operator.shape[1], seed) for seed in range(3)], dim=1)
    torch.testing.assert_close(operator.dense(), dense, **close)
    torch.testing.assert_close(operator @ matrix, dense @ matrix, **close)
    torch.testing.assert_close(operator @ matrix[:, 0], dense @ matrix[:, 0], **close)
    by_name = operator @ operator.columns.unflatten(matrix[:, 0].contiguous())
    assert list(by_name) == list(operator.rows.names)
    torch.testing.assert_close(torch.cat([x.reshape(-1) for x in by_name.values()]), dense @ matrix[:, 0], **close)
    in_scipy = operator.to_scipy()
    np.testing.assert_allclose(in_scipy @ matrix.numpy(), (dense @ matrix).numpy(), **close)
    np.testing.assert_allclose(in_scipy @ matrix[:, 0].numpy(), (dense @ matrix[:, 0]).numpy(), **close)
    if operator.symmetric:
        torch.testing.assert_close(dense, dense.T, **close)
    if operator.psd:
        assert torch.linalg.eigvalsh(dense).min() >= -1e-12 * dense.norm()
    if operator.rows == operator.columns:
        v = matrix[:, 1]
        assert operator.quadratic(v) == pytest.approx(float(v @ dense @ v), rel=1e-10)
        by_name = operator.columns.unflatten(v.contiguous())
        assert operator.quadratic(by_name) == pytest.approx(operator.quadratic(v), rel=1e-13)
    left = direction(operator.shape[0], 9)
    torch.testing.assert_close(operator.T @ left, dense.T @ left, **close)
    assert str(operator.shape[0]) in repr(operator)


def test_tags() -> None:
    assert H.symmetric
    assert not H.psd
    assert G.psd
    assert not (-1 * G).psd
    assert (G + G).psd
    assert not G[A, B].symmetric
    assert G[A].psd
    assert not cl.ggn(cl.Problem(PROBLEM.model, PROBLEM.data.source, lambda o, b: (o.pow(4).sum(), 1))).psd


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: x.numpy()])
def test_tags_stay_true_when_the_source_changes(kind: Callable[[Tensor], Any]) -> None:
    z, S = torch.ones(3, dtype=torch.float64), torch.eye(len(HD), dtype=torch.float64)
    D, W = cl.operators.diagonal(kind(z)), H + kind(S)
    z.neg_()
    S[0, 1] = 5
    assert D.psd
    assert D.quadratic(torch.ones(3)) == 3
    assert W.symmetric
    assert torch.equal(W.dense(), HD + IDENTITY)


def test_an_operator_of_scipy_on_the_left() -> None:
    v, S = direction(len(HD)), sla.aslinearoperator(GD.numpy())
    with pytest.raises(cl.CurvlensError, match=r"write cl\.operators\.as_operator\(S\) @ H"):
        S @ H
    assert relative((as_operator(S) @ H) @ v, GD @ (HD @ v)) < 1e-12


def test_a_sum_has_the_wider_dtype_of_its_terms() -> None:
    single, double = as_operator(torch.eye(3)), as_operator(2 * torch.eye(3, dtype=torch.float64))
    for found in (single + double, double + single):
        assert found.dtype == torch.float64
        assert torch.equal(found.dense(), 3 * torch.eye(3, dtype=torch.float64))


def test_the_inverse_times_no_vector() -> None:
    assert (G.inverse(damping=0.1) @ torch.zeros(len(HD), 0)).shape == (len(HD), 0)


def test_eigenvalues_by_scipy() -> None:
    values = sla.eigsh(H.to_scipy(), k=3, return_eigenvectors=False)
    exact = torch.linalg.eigvalsh(HD)
    largest = exact[exact.abs().argsort(descending=True)[:3]].sort().values
    np.testing.assert_allclose(np.sort(values), largest.numpy(), rtol=1e-8)


def test_sampled_fisher_tends_to_the_ggn() -> None:
    few, many = (relative(cl.fisher(PROBLEM, samples=n, seed=1).dense(), GD) for n in (4, 100))
    assert many < 0.25
    assert many < few / 3  # 1/√25 of it, with room for chance
    first, again, other = (cl.fisher(PROBLEM, seed=s) @ direction(len(HD)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_empirical_fisher_is_the_second_moment_of_token_gradients() -> None:
    tokens, labels = PROBLEM.data.first()
    total = torch.zeros_like(HD)
    for i, j in (labels != -100).nonzero().tolist():
        alone = torch.full_like(labels, -100)
        alone[i, j] = labels[i, j]
        g = cl.Problem(PROBLEM.model, (tokens, alone), cl.losses.CrossEntropy()).gradient()
        total += torch.outer(g, g)
    assert relative(cl.empirical_fisher(PROBLEM).dense(), total / PROBLEM.n_tokens) < 1e-12


def test_fisher_matrices_of_images() -> None:
    """Classes on axis 1: the same matrices as with the classes last."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(2, 3, 1).double()
    x, y = direction(80).view(2, 2, 4, 5), torch.randint(3, (2, 4, 5))

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            return torch.movedim(self.conv(x), 1, -1)

    first = cl.Problem(conv, (x, y), cl.losses.CrossEntropy(class_dim=1))
    last = cl.Problem(Last(), (x, y), cl.losses.CrossEntropy())
    for make in (cl.ggn, cl.empirical_fisher, cl.fisher):
        assert relative(make(first).dense(), make(last).dense()) < 1e-12


def test_row_vectors_and_python_sums() -> None:
    v, w = direction(len(HD)), torch.stack([direction(len(HD), s) for s in range(2)])
    assert relative(v @ H, HD @ v) < 1e-12
    assert relative(w @ H, w @ HD) < 1e-12
    assert relative(direction(SA.stop - SA.start) @ H[A, B], HD[SB, SA] @ direction(SA.stop - SA.start)) < 1e-12
    row = v.numpy() @ H
    assert isinstance(row, np.ndarray)
    assert relative(torch.from_numpy(row), HD @ v) < 1e-12
    assert relative(sum([G, F]) @ v, HD @ v) < 1e-12  # type: ignore[operator]
    arrays = {name: part.numpy() for name, part in PROBLEM.layout.unflatten(v).items()}
    assert relative(torch.cat([x.reshape(-1) for x in (H @ arrays).values()]), HD @ v) < 1e-12


def test_no_vector_at_all() -> None:
    assert (H @ torch.ones(len(HD), 0)).shape == (len(HD), 0)


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int | None]] = []
    H.apply(torch.stack([direction(len(HD), s) for s in range(4)], 1), progress=lambda *c: calls.append(c))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_loss_without_split_point() -> None:
    tokens, labels = PROBLEM.data.first()

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    whole = cl.Problem(PROBLEM.model, (tokens, labels), loss)
    assert relative(cl.hessian(whole).dense(), HD) < 1e-12
    for make in (cl.ggn, cl.functional, cl.fisher, cl.empirical_fisher):
        with pytest.raises(cl.CurvlensError, match="maps the model to a number"):
            make(whole)


def test_outputs_may_be_a_tree() -> None:
    """Two outputs, one of them with a loss that is linear: no curvature of its own, but a functional part."""
    tokens, _ = PROBLEM.data.first()

    class Two:
        def outputs(self, model: torch.nn.Module, batch: Tensor) -> dict[str, Tensor]:
            logits = model(batch)
            return {"a": logits[..., :3], "b": logits[..., 3:].tanh()}

        def sum_and_count(self, outputs: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, int]:
            return outputs["a"].pow(4).sum() + outputs["b"].sum(), batch.numel()

    tree = cl.Problem(PROBLEM.model, tokens, Two())
    flat = cl.Problem(
        PROBLEM.model, tokens, lambda model, b: Two().sum_and_count(Two().outputs(model, b), b)[0] / b.numel()
    )
    assert isinstance(flat.loss_function, cl.losses.FromModel)
    v = direction(len(HD))
    assert relative(cl.hessian(tree) @ v, cl.hessian(flat) @ v) < 1e-12
    assert relative(cl.ggn(tree) @ v + cl.functional(tree) @ v, cl.hessian(tree) @ v) < 1e-12


def test_fisher_matrices_of_outputs_with_one_axis() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.squeeze(-1)

    flat, full = (cl.Problem(m, (X, y), cl.losses.MSE()) for m, y in ((Flat(), Y.squeeze(-1)), (net(), Y)))
    for make in (cl.fisher, cl.empirical_fisher):
        assert relative(make(flat).dense(), make(full).dense()) < 1e-13


def test_arrays_of_every_layout() -> None:
    H, v = cl.hessian(problem()), direction(242)
    truth = (H @ v).numpy()
    for array in (v.numpy()[::-1].copy()[::-1], v.numpy().astype(">f8"), v.numpy().astype("longdouble")):
        assert abs(H @ array - truth).max() < 1e-12


# Operators of other libraries in their own precision

SYMMETRIC = (torch.add(HD, HD.T) / 2).float()
UNSYMMETRIC = SYMMETRIC + 0.1 * SYMMETRIC.norm() / len(HD) * torch.ones(len(HD), len(HD)).triu(1)


class Made:
    """Products with a float32 matrix, made in float32, of an operator that says ``dtype``, or nothing."""

    def __init__(self, matrix: Tensor, dtype: Any, *, as_float64: bool = False) -> None:
        self.matrix, self.as_float64, self.shape = matrix, as_float64, tuple(matrix.shape)
        self.given: set[torch.dtype] = set()
        if dtype is not None:
            self.dtype = dtype

    def __matmul__(self, v: Tensor) -> Tensor:
        self.given.add(v.dtype)
        w = self.matrix @ v.float()
        return w.double() if self.as_float64 else w


@pytest.mark.parametrize(
    "dtype", [torch.float32, np.float32, np.dtype("float32"), "float32", "torch.float32", "<f4"], ids=str
)
def test_a_foreign_dtype_is_taken(dtype: Any) -> None:
    foreign = Made(SYMMETRIC, dtype)
    with pytest.warns(cl.CurvlensWarning, match="in float32"):
        found = cl.eigs(foreign, 2, tol=1e-4)
    assert foreign.given == {torch.float32}
    assert found.provenance["dtype"] == "float32"
    torch.testing.assert_close(found.values.double(), torch.linalg.eigvalsh(SYMMETRIC.double())[-2:], rtol=1e-5, atol=0)
    with pytest.raises(cl.CurvlensError, match="is not symmetric"):
        cl.eigs(Made(UNSYMMETRIC, dtype), 1)


def test_scipy_in_float32() -> None:
    operator = sla.LinearOperator(SYMMETRIC.shape, matvec=lambda v: SYMMETRIC.numpy() @ v, dtype=np.float32)
    with pytest.warns(cl.CurvlensWarning, match="in float32"):
        found = cl.eigs(operator, 1, tol=1e-4)
    assert float(found) == pytest.approx(float(torch.linalg.eigvalsh(SYMMETRIC.double())[-1]), rel=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("as_float64", [False, True])
def test_float32_behind_float64_is_said(dtype: Any, as_float64: bool) -> None:
    with pytest.raises(cl.CurvlensError, match=r"symmetric to float32 only.*its products are float32 numbers"):
        cl.eigs(Made(SYMMETRIC, dtype, as_float64=as_float64), 1)
    with pytest.raises(cl.CurvlensError, match="is not symmetric"):
        cl.eigs(Made(UNSYMMETRIC, dtype, as_float64=as_float64), 1)
    # A float64 matrix that is unsymmetric by as little is not said to be rounded.
    with pytest.raises(cl.CurvlensError, match=r"symmetric to float32 only.*as if its products"):
        cl.eigs(HD + 1e-6 * HD.norm() / len(HD) * torch.ones_like(HD).triu(1), 1)


def test_a_sum_is_as_precise_as_its_terms() -> None:
    damped = 2 * (H + Made(SYMMETRIC, "float32"))
    assert damped.dtype == torch.float64
    assert damped.precision == damped[A].precision == torch.float32
    with pytest.warns(cl.CurvlensWarning, match="in float32"):
        found = cl.eigs(damped, 1, tol=1e-4)
    assert float(found) == pytest.approx(4 * float(torch.linalg.eigvalsh(HD)[-1]), rel=1e-5)


def test_low_precision_is_said_once_a_process() -> None:
    with pytest.warns(cl.CurvlensWarning, match="in float32"):
        cl.trace(SYMMETRIC)
    cl.trace(SYMMETRIC)  # a second warning would be an error here
    with pytest.warns(cl.CurvlensWarning, match="in bfloat16"):
        cl.trace(SYMMETRIC.bfloat16())
