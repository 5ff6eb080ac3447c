"""Matrices of the theorems, moments under saturation, the papers' statements, closed spectra, growth rates."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from itertools import pairwise
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.autograd import functional as autograd

import curvlens as cl
from curvlens.calculus import (
    attention,
    exponents,
    linear_mlp,
    losses,
    moments,
    scalar_attention,
    softmax,
    theorems,
    vec,
)
from curvlens.operators import closed_form

D = torch.float64
NAMES = [("V", "V"), ("Q", "Q"), ("V", "Q"), ("Q", "K"), ("K", "K"), ("V", "K")]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def jacobian(function: Any, at: Tensor) -> Tensor:
    found: Tensor = autograd.jacobian(lambda x: function(x).reshape(-1), at)  # type: ignore[no-untyped-call]
    return found.reshape(found.shape[0], -1)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-300) + 1e-14


# Words


def test_vec_and_kronecker() -> None:
    A, X, B = draw(2, 3), draw(3, 4), draw(4, 5)
    close(vec.vec(A @ X @ B), vec.kron(A, B.T) @ vec.vec(X))
    close(vec.unvec(vec.vec(A), 2, 3), A)
    close(vec.kron(A, X, B), torch.kron(torch.kron(A, X), B))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (4, 1)])
def test_commutation(m: int, n: int) -> None:
    B = draw(n, m)
    K = vec.commutation(m, n, B)
    close(K @ vec.vec(B), vec.vec(B.T))
    close(K.T, vec.commutation(n, m, B))
    close(vec.swap(n, m, B), K)


def test_khatri_rao_of_a_grid_of_blocks() -> None:
    A, B = draw(4, 6), draw(2, 9)
    found = vec.khatri_rao(A, B, rows=2, columns=3)
    assert found.shape == (4, 18)
    close(found[2:, 6:12], torch.kron(A[2:, 2:4].contiguous(), B[1:, 3:6].contiguous()))
    with pytest.raises(cl.CurvlensError, match="cannot be cut into 3 × 1"):
        vec.khatri_rao(A, rows=3)


def test_derivatives_of_softmax() -> None:
    T = draw(3, 3)
    A = T.softmax(-1)
    close(softmax.jacobian(A), jacobian(lambda t: t.softmax(-1), T))

    def first(t: Tensor) -> Tensor:
        rows = t.softmax(-1)
        return torch.stack([torch.diag(a) - torch.outer(a, a) for a in rows])

    close(
        softmax.second_rows(A),
        torch.stack([jacobian(first, T)[:, 3 * i : 3 * i + 3].view(3, 3, 3, 3)[i] for i in range(3)]),
    )
    g = draw(3, 3, seed=1)
    w = softmax.gradient_rows(A, g)
    contracted = torch.einsum("ij,ijkl->ikl", g, softmax.second_rows(A))
    close(w.diag_embed() - A[..., None] * w[..., None, :] - w[..., None] * A[..., None, :], contracted)


def test_a_row_that_attends_to_nothing_is_zero() -> None:
    allowed = torch.tensor([[True, False], [False, False]])
    close(softmax.softmax(draw(2, 2), allowed), torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=D))


def test_both_forms_of_the_moment_matrices() -> None:
    A, X = draw(4, 4).softmax(-1), draw(4, 3, seed=1)
    close(moments.z1(A, X), moments.z1_by_definition(A, X))
    close(moments.z2(A, X), moments.z2_by_definition(A, X))


# Saturation, against extended precision


def precise(scores: Tensor, X: Tensor, u: Tensor) -> tuple[Any, ...]:
    """Moments of every row, and M3 contracted with u, with 120 decimals."""
    getcontext().prec = 120
    rows, d = X.shape
    x = [[Decimal(float(v)) for v in row] for row in X]
    means, seconds, thirds, firsts = [], [], [], []
    for i in range(scores.shape[0]):
        e = [Decimal(float(s)).exp() for s in scores[i]]
        a = [v / sum(e) for v in e]
        m = [sum(a[j] * x[j][p] for j in range(rows)) for p in range(d)]
        c = [[x[j][p] - m[p] for p in range(d)] for j in range(rows)]
        m2 = [[sum(a[j] * c[j][p] * c[j][q] for j in range(rows)) for q in range(d)] for p in range(d)]
        w = [Decimal(float(v)) for v in u[i]]
        s = [sum(w[p] * c[j][p] for p in range(d)) for j in range(rows)]
        m3 = [[sum(a[j] * s[j] * c[j][p] * c[j][q] for j in range(rows)) for q in range(d)] for p in range(d)]
        means.append([float(v) for v in m])
        seconds.append([[float(v) for v in row] for row in m2])
        thirds.append([[float(v) for v in row] for row in m3])
        firsts.append([float(sum(m2[p][q] * w[q] for q in range(d))) for p in range(d)])
    return tuple(torch.tensor(t, dtype=D) for t in (means, seconds, firsts, thirds))


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 25.0, 60.0])
def test_moments_of_saturated_attention(scale: float, offset: float) -> None:
    """Right where 1 − max A is 1e-18 and less; and with a common offset of the tokens, which must not cancel."""
    scores, u = draw(5, 6, seed=3), draw(5, 3, seed=4)
    scores[:, 2] += 1.0
    scores = scores * scale
    X = draw(6, 3, seed=5)
    if offset:
        X = (X * 2**20).round() / 2**20 + offset  # exact in float64 as a sum
    A = scores.softmax(-1)
    tail = float((A.sum(-1) - A.max(-1).values).min())
    truth = precise(scores, X, u)
    found = moments.contracted(A, X, u)
    for name, value, true in zip(found._fields, found, truth, strict=True):
        for row, (a, b) in enumerate(zip(value, true, strict=True)):
            assert float((a - b).norm()) <= 1e-12 * float(b.norm()), (name, row, tail)
    y = moments.deviations(A, X)
    s = (y * u[:, None]).sum(-1)
    by_keys = ((A[..., None] * y).mT @ y, ((A * s)[..., None] * y).mT @ y)
    for value, true in zip(by_keys, (truth[1], truth[3]), strict=True):
        for a, b in zip(value, true, strict=True):
            assert float((a - b).norm()) <= 1e-12 * float(b.norm()), tail
    plain = moments.moments(A, X)
    for a, b in ((plain.M2, truth[1]), (torch.einsum("ip,ipqr->iqr", u, plain.M3), truth[3])):
        for row, true_row in zip(a, b, strict=True):
            assert float((row - true_row).norm()) <= 1e-12 * float(true_row.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", [1.0, 1e-3, 1e-6])
def test_moments_of_rows_that_attend_within_a_cluster(width: float, dtype: torch.dtype) -> None:
    """Three clusters of tokens, a row for each; nothing of their distance may be left in the moments."""
    step = 2.0**-40 if dtype == torch.float64 else 2.0**-21
    X = draw(3, 3, seed=5).repeat_interleave(4, 0).round() + (width * draw(12, 3, seed=6) / step).round() * step
    assert torch.equal(X.to(dtype).double(), X)
    scores, u = draw(3, 12, seed=3), draw(3, 3, seed=4).float().double()
    scores -= 1000 * (torch.arange(12) // 4 != torch.arange(3)[:, None])
    truth = precise(scores, X, u)
    found = moments.contracted(scores.softmax(-1).to(dtype), X.to(dtype), u.to(dtype))
    for name, value, true in zip(found._fields, found, truth, strict=True):
        for a, b in zip(value.double(), true, strict=True):
            assert float((a - b).norm()) <= 30 * torch.finfo(dtype).eps * float(b.norm()), name


def test_moments_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    A, X, u = draw(3, 7, 5).softmax(-1), draw(3, 5, 2, seed=1), draw(3, 7, 2, seed=2)
    whole = moments.contracted(A, X, u)
    for numbers in (1, 20, 30, 150):
        monkeypatch.setattr(moments, "CHUNK", numbers)
        for piece, at_once in zip(moments.contracted(A, X, u), whole, strict=True):
            close(piece, at_once)


def test_the_hessian_of_saturated_attention_where_autodiff_is_lost() -> None:
    """1 − max A ≈ 1e-18: blocks of the closed form against extended precision, and autodiff's error beside."""
    X = draw(4, 2, seed=0)
    WQ = WK = 6.5 * torch.eye(2, dtype=D)
    WV, Y = draw(2, 2, seed=1), draw(4, 2, seed=2)
    scores = X @ WQ @ WK.T @ X.T / 2**0.5
    A = scores.softmax(-1)
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    g = 2 / 8 * (A @ X @ WV - Y)
    _, M2, _, G = precise(scores, X, g @ WV.T)
    tails = 1 - A.max(-1).values
    assert float(tails.min()) < 1e-15
    tau = 2**-0.5
    key = tau**2 * torch.einsum("iac,id,ie->adce", G, X @ WQ, X @ WQ).reshape(4, 4)
    assert float((H.functional["K"] - key).norm()) <= 1e-12 * float(key.norm())
    outer = tau**2 * 2 / 8 * torch.einsum("iab,bf,gf,igc,id,ie->adce", M2, WV, WV, M2, X @ WQ, X @ WQ).reshape(4, 4)
    assert float((H.outer["K"] - outer).norm()) <= 1e-12 * float(outer.norm())
    # row by row: the most saturated one, alone, is what autodiff has lost
    i = int(tails.argmin())
    one = attention.hessian(X[i : i + 1], WQ, WK, WV, grad=g[i : i + 1], curvature=0.0, context=X)
    row = tau**2 * torch.einsum("ac,d,e->adce", G[i], (X @ WQ)[i], (X @ WQ)[i]).reshape(4, 4)
    assert float((one.functional["K"] - row).norm()) <= 1e-12 * float(row.norm())

    def scalar(k: Tensor) -> Tensor:
        return (g[i] * ((X[i] @ WQ @ k.view(2, 2).T @ X.T / 2**0.5).softmax(-1) @ X @ WV)).sum()

    by_autodiff: Tensor = autograd.hessian(scalar, WK.reshape(-1))  # type: ignore[no-untyped-call]
    assert float((by_autodiff - row).norm()) > 1e-3 * float(row.norm())


# The theorems, literally


@pytest.mark.parametrize(("length", "d", "d_k"), [(4, 3, 2), (3, 2, 4), (1, 2, 1), (2, 1, 3)])
def test_theorems_equal_the_structured_forms(length: int, d: int, d_k: int) -> None:
    X, Y = draw(length, d), draw(length, d, seed=1)
    WQ, WK = draw(d, d_k, seed=2) / d**0.5, draw(d, d_k, seed=3) / d**0.5
    WV, WQK = draw(d, d, seed=4) / d**0.5, draw(d, d, seed=5) / d
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    outer, functional = theorems.theorem_3_1(X, WQ, WK, WV), theorems.theorem_3_2(X, WQ, WK, WV, Y)
    for name in NAMES:
        close(H.outer[name], outer[name])
        close(H.functional[name], functional[name])
    single = attention.hessian_single(X, WQK, WV, target=Y)
    close(single.total["QK"], theorems.lemma_4_1(X, WQK, WV, Y))
    linear = attention.hessian(X, WQ, WK, WV, target=Y, kind="linear")
    for form, blocks in zip((linear.outer, linear.functional), theorems.remark_4_1(X, WQ, WK, WV, Y), strict=True):
        for name in NAMES:
            close(form[name], blocks[name])
    t_outer, t_functional = theorems.remark_d_1(X, WQ, WK, WV, Y)
    close(H.t_outer().dense(), t_outer)
    close(H.t_functional().dense(), t_functional)
    assert H.rank_bound().lemma == theorems.lemma_d_2(d, d_k)
    A = (X @ WQ @ WK.T @ X.T / d_k**0.5).softmax(-1)
    for found, truth in zip(
        theorems.remark_3_1(X, WQ, WK), (moments.z1_by_definition(A, X), moments.z2_by_definition(A, X)), strict=True
    ):
        close(found, truth)


def test_jacobians_of_the_layer() -> None:
    X = draw(4, 3)
    weights = {"Q": draw(2, 3, 2, seed=1), "K": draw(2, 3, 2, seed=2), "V": draw(2, 3, 3, seed=3)}
    one = {name: w[0] for name, w in weights.items()}

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (X @ q @ k.T @ X.T / 2**0.5).softmax(-1) @ X @ v

    found = theorems.lemma_b_1(X, one["Q"], one["K"], one["V"])
    for name in "QKV":
        close(found[name], jacobian(lambda w, name=name: layer(*{**one, name: w}.values()), one[name]))
    for head, blocks in enumerate(theorems.remark_e_1(X, weights["Q"], weights["K"], weights["V"])):
        close(blocks["Q"], jacobian(lambda w, h=head: layer(w, weights["K"][h], weights["V"][h]), weights["Q"][head]))


def test_second_derivative_of_softmax_as_printed() -> None:
    T = draw(2, 2)
    close(theorems.remark_c_1(T.softmax(-1)), theorems.lemma_c_1(T.softmax(-1)))
    A = draw(3, 3, seed=1)
    second = jacobian(lambda t: jacobian_of_softmax(t), A)
    close(theorems.lemma_c_1(A.softmax(-1)), second)


def jacobian_of_softmax(t: Tensor) -> Tensor:
    blocks = [torch.diag(a) - torch.outer(a, a) for a in t.softmax(-1)]
    return torch.block_diag(*blocks)  # type: ignore[no-untyped-call,no-any-return]


def test_jacobians_of_products_as_printed() -> None:
    A, B = draw(3, 4), draw(2, 5, seed=1)
    close(theorems.equation_15(A, B.T), jacobian(lambda x: A @ x @ B.T, draw(4, 5)))
    close(theorems.equation_16(A, B), jacobian(lambda x: torch.kron(x, B), A))
    close(theorems.equation_17(A, B), jacobian(lambda y: torch.kron(A, y), B))
    close(theorems.equation_18(A), jacobian(lambda x: x.T, A))


# Closed spectra


@pytest.mark.parametrize("d_k", range(1, 9))
@pytest.mark.parametrize("how", ["plain", "bias", "causal", "sink and mask", "equal weights"])
def test_spectrum_of_scalar_attention(d_k: int, how: str) -> None:
    x, y = draw(2, 5, seed=d_k), draw(2, 5, seed=100 + d_k)
    w_q, w_k, w_v = draw(d_k, seed=7), draw(d_k, seed=8), 0.7
    if how == "equal weights":
        w_k = w_q.clone()
    bias = draw(5, 5, seed=9) if how == "bias" else None
    mask: Any = {
        "causal": "causal",
        "sink and mask": torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.7,
    }.get(how)
    if isinstance(mask, Tensor):
        mask[:, 0] = True
    sink = 2.0 if how == "sink and mask" else 0.0
    allowed = torch.ones(5, 5, dtype=torch.bool).tril() if mask == "causal" else mask

    def output(t: Tensor) -> Tensor:
        scores = t[:d_k] @ t[d_k:-1] / d_k**0.5 * x[:, :, None] * x[:, None, :]
        scores = scores if bias is None else scores + bias
        scores = scores + sink * (torch.arange(5) == 0)
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        found: Tensor = t[-1] * (scores.softmax(-1) @ x[:, :, None])[..., 0]
        return found

    theta = torch.cat([w_q, w_k, torch.tensor([w_v], dtype=D)])
    H: Tensor = autograd.hessian(lambda t: ((output(t) - y) ** 2).mean(), theta)  # type: ignore[no-untyped-call]
    J = jacobian(output, theta)
    G = 2 * J.T @ J / y.numel()
    found = scalar_attention.spectrum(x, w_q, w_k, w_v, y, bias=bias, mask=mask, sink=sink)
    size = float(H.norm())
    assert float((found.eigenvalues - torch.linalg.eigvalsh(H)).abs().max()) <= 1e-12 * max(size, 1)
    assert float((found.ggn_eigenvalues - torch.linalg.eigvalsh(G)).abs().max()) <= 1e-12 * max(size, 1)
    assert found.bulk.multiplicity == d_k - 1
    vectors = torch.cat([found.outlier_vectors, found.bulk_vectors], 1)
    mu = torch.full((d_k - 1,), found.mu, dtype=D)
    values = torch.cat([found.outliers, mu, -mu])
    close(H @ vectors, vectors * values, 1e-11)
    close(vectors.T @ vectors, torch.eye(2 * d_k + 1, dtype=D))
    close(G @ found.ggn_vectors, found.ggn_vectors * found.ggn_outliers, 1e-11)
    assert found.loss == pytest.approx(float(((output(theta) - y) ** 2).mean()))


def test_norms_of_query_and_key_change_the_condition_and_not_the_bulk() -> None:
    x, y, w = draw(3, 6), draw(3, 6, seed=1), draw(4, seed=2)
    w_k = draw(4, seed=3)
    w, w_k = w / w.norm(), w_k / w_k.norm()
    spectra = [scalar_attention.spectrum(x, s * w, w_k / s, 0.5, y) for s in (1.0, 4.0, 16.0)]
    assert len({round(s.bulk.value, 12) for s in spectra}) == 1
    assert len({round(s.loss, 12) for s in spectra}) == 1
    tops = [float(s.eigenvalues[-1]) for s in spectra]
    assert tops[0] < tops[1] < tops[2]
    assert spectra[0].condition < spectra[2].condition


# Linear networks


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_linear_mlp(depth: int) -> None:
    sizes = [3, 5, 4, 2, 3][: depth + 1]
    weights = [draw(b, a, seed=i) for i, (a, b) in enumerate(pairwise(sizes))]
    X, Y = draw(2, 6, 3), draw(2, 6, sizes[-1], seed=1)
    theta = torch.cat([w.reshape(-1) for w in weights])

    def output(t: Tensor) -> Tensor:
        x, start = X, 0
        for w in weights:
            x = x @ t[start : start + w.numel()].view(w.shape).T
            start += w.numel()
        return x

    truth: Tensor = autograd.hessian(lambda t: ((output(t) - Y) ** 2).mean(), theta)  # type: ignore[no-untyped-call]
    g = (2 * (output(theta) - Y) / Y.numel()).detach()
    functional: Tensor = autograd.hessian(lambda t: (g * output(t)).sum(), theta)  # type: ignore[no-untyped-call]
    H = linear_mlp.hessian(X, weights, Y)
    close(H.total.dense(), truth)
    close(H.functional.dense(), functional)
    assert H.total.norm() == pytest.approx(float(truth.norm()), rel=1e-12)
    v = draw(len(theta), 3)
    close(H.total @ v, truth @ v)
    for i in range(depth):
        assert H.functional.norm(f"W{i + 1}") == 0.0
    assert not depth > 1 or H.functional.norm(("W1", "W2")) > 0


# Growth


def slopes(residual: str, kind: str = "softmax") -> dict[tuple[str, str], float]:
    """Slopes of all blocks over σ ∈ [1e-3, 1e-2]."""
    length, d, d_k = 6, 4, 3
    base = draw(length, d, seed=1)
    WQ, WK, WV = (draw(d, n, seed=s) / d**0.5 for n, s in ((d_k, 2), (d_k, 3), (d, 4)))
    sigma = torch.logspace(-3, -2, 5, dtype=D)
    target = draw(length, d, seed=5)
    curves: dict[tuple[str, str], list[float]] = {}
    for s in sigma.tolist():
        H = attention.hessian(s * base, WQ, WK, WV, target=target * (s if residual == "scaling" else 1.0), kind=kind)  # type: ignore[arg-type]
        for part in ("outer", "functional"):
            for block in ("QQ", "KK", "QK", "VQ", "VK", "VV"):
                curves.setdefault((part, block), []).append(H.norm((block[0], block[1]), part))
    return {
        key: exponents.fit(sigma, torch.tensor(values, dtype=D)).slope if any(values) else math.nan
        for key, values in curves.items()
    }


@pytest.mark.parametrize("residual", ["constant", "scaling"])
@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_growth_rates(residual: Any, kind: Any) -> None:
    for (part, block), slope in slopes(residual, kind).items():
        predicted = exponents.predicted(part, block, kind=kind, residual=residual).data  # type: ignore[arg-type]
        if predicted is None:
            assert math.isnan(slope)
        else:
            assert abs(slope - predicted) < 0.01, (part, block, slope)


@pytest.mark.parametrize("letter", ["Q", "K", "V"])
@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_growth_in_the_weights(letter: str, kind: Any) -> None:
    """At attention that hardly moves (small tokens): the powers of the weights in every block."""
    X = 1e-4 * draw(5, 4)
    weights = {"Q": draw(4, 3, seed=1), "K": draw(4, 3, seed=2), "V": draw(4, 4, seed=3)}
    grad, curvature = draw(5, 4, seed=4), 1.0
    norms = []
    for scale in (1.0, 2.0):
        w = {n: t * (scale if n == letter else 1.0) for n, t in weights.items()}
        H = attention.hessian(X, w["Q"], w["K"], w["V"], grad=grad, curvature=curvature, kind=kind)
        norms.append(
            {
                (p, b): H.norm((b[0], b[1]), p)
                for p in ("outer", "functional")
                for b in ("QQ", "KK", "QK", "VQ", "VK", "VV")
            }
        )
    for part, block in norms[0]:
        growth = exponents.predicted(part, block, kind=kind)  # type: ignore[arg-type]
        if growth.data is not None:
            power = math.log2(norms[1][part, block] / norms[0][part, block])
            assert abs(power - growth.weights.get(letter, 0)) < 0.01, (part, block)


@pytest.mark.parametrize("depth", [1, 2])
def test_growth_with_depth(depth: int) -> None:
    X, Y = draw(4, 3), draw(4, 3, seed=1)
    layers = [tuple(draw(3, 3, seed=10 * i + j) for j in range(3)) for i in range(depth)]
    sigma = torch.logspace(-3, -2, 4, dtype=D)
    for layer in range(1, depth + 1):
        curves: dict[str, list[float]] = {"outer": [], "functional": []}
        for s in sigma.tolist():
            H = attention.stack(s * X, layers, target=Y, kind="linear")  # type: ignore[arg-type]
            for part, curve in curves.items():
                curve.append(getattr(H, part).norm(f"Q{layer}"))
        for part, curve in curves.items():
            predicted = exponents.predicted_depth(depth, layer, part)  # type: ignore[arg-type]
            if predicted is None:
                assert max(curve) <= 1e-14 * max(curves["outer"])
            else:
                assert abs(exponents.fit(sigma, torch.tensor(curve, dtype=D)).slope - predicted) < 0.01


def test_a_fit_finds_the_window_of_the_law() -> None:
    sigma = torch.logspace(-2, 1, 25, dtype=D)
    clean = 3 * sigma**5 / (1 + sigma**4)
    law = exponents.fit(sigma, clean)
    assert law.window[0] == pytest.approx(1e-2)
    assert law.window[1] < 0.5
    assert law.slope == pytest.approx(5, abs=0.02)
    assert exponents.fit(sigma, clean, window=(5.0, 10.0)).slope == pytest.approx(1, abs=0.05)
    assert law.prefactor == pytest.approx(3, rel=0.05)
    noise = 0.02 * draw(20, 25)
    repeated = exponents.fit(sigma, clean * noise.exp(), tolerance=0.2)
    assert repeated.interval[0] < 5.02
    assert repeated.interval[1] > 4.9
    assert "σ^" in str(law)
    assert law.to_dict()["points"] == law.points


def test_the_widest_window_is_found() -> None:
    steps = torch.tensor([0, 0, 0, 0.08, 0.08, 0.08], dtype=D)
    sigma = torch.exp(torch.arange(7, dtype=D))
    law = exponents.fit(sigma, torch.cat([torch.zeros(1, dtype=D), steps]).cumsum(0).exp(), tolerance=0.05)
    assert law.points == 7


def test_intervals_of_a_fit_hold() -> None:
    sigma = torch.logspace(-2, 0, 12, dtype=D)
    inside = 0
    for seed in range(200):
        law = exponents.fit(sigma, (2 * sigma**3) * (0.1 * draw(12, seed=seed)).exp(), window=(1e-2, 1.0))
        inside += int(law.interval[0] <= 3 <= law.interval[1])
    assert 0.90 <= inside / 200 <= 0.99


def test_a_fit_keeps_all_digits_of_a_list() -> None:
    sigma = [0.01, 0.03, 0.1, 0.3]
    law = exponents.fit(sigma, [s**3 for s in sigma], window=(0.01, 0.1))
    assert law.points == 3
    assert law.slope == pytest.approx(3, abs=1e-13)


def test_quantiles_of_student() -> None:
    for dof in (1, 2, 3, 4, 7, 30):
        for level in (0.5, 0.95, 0.999):
            truth = float(scipy.stats.t.ppf((1 + level) / 2, dof))
            assert exponents.student(level, dof) == pytest.approx(truth, rel=1e-9)


# Losses and operators


def test_cross_entropy_behind_an_unembedding() -> None:
    f, E = draw(2, 4, 3), draw(3, 7, seed=1)
    labels = torch.tensor([[1, 2, -100, 6], [0, -100, -100, 3]])
    g, s = losses.unembedded_cross_entropy(f, E, labels)
    same, root = losses.unembedded_cross_entropy_root(f, E, labels)
    close(same, g)
    close(root @ root.mT, s)
    for b in range(2):
        x = f[b].clone().requires_grad_()
        value = torch.nn.functional.cross_entropy(x @ E, labels[b])
        close(g[b], torch.autograd.grad(value, x)[0])
        whole: Tensor = autograd.hessian(lambda t, b=b: torch.nn.functional.cross_entropy(t @ E, labels[b]), f[b])  # type: ignore[no-untyped-call]
        for i in range(4):
            close(s[b, i], whole[i, :, i, :])


def test_all_of_linalg_runs_on_a_closed_form() -> None:
    X, Y = draw(6, 4), draw(6, 4, seed=1)
    WQ, WK, WV = (draw(4, n, seed=s) / 2 for n, s in ((3, 2), (3, 3), (4, 4)))
    H = attention.hessian(X, WQ, WK, WV, target=Y, mask="causal")
    operator = closed_form(H)
    dense = H.total.dense()
    values = torch.linalg.eigvalsh(dense)
    eigs = cl.eigs(operator, k=3, ends="both")
    torch.testing.assert_close(eigs.values, torch.cat([values[:3], values[-3:]]), atol=1e-9, rtol=0)
    torch.testing.assert_close(operator["Q", "V"].dense(), H.total["Q", "V"])
    torch.testing.assert_close(operator["V"].dense(), H.total["V"])
    assert float(cl.trace(operator, samples=operator.shape[0])) == pytest.approx(H.trace())
    traces = cl.trace(closed_form(H, "outer"), samples=40, by="block")
    assert set(traces) == {"Q", "K", "V"}
    assert float(cl.frobenius(closed_form(H.functional), samples=operator.shape[0])) == pytest.approx(
        H.norm(part="functional")
    )
    with pytest.raises(cl.CurvlensError, match="closed_form takes"):
        closed_form(dense)
