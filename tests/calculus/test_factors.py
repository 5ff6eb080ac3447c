"""Matrices that are kept as factors: built where they are read, some at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvlens import CurvlensError, assembly
from curvlens.calculus import attention, feedforward, linear_mlp, norms, terms
from curvlens.calculus.rowwise import RowwiseHessian
from curvlens.calculus.term_norms import squared_norm
from curvlens.calculus.terms import Factored, Tokens, factored

AXES = (6, 5, 6, 5)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_factors_are_kept_where_they_are_smaller() -> None:
    assert isinstance(factored(draw(3, 8, 4), draw(3, 9, 4)), Factored)
    assert isinstance(factored(draw(3, 8, 5), draw(3, 9, 5)), Tensor)


def test_what_does_not_fit_is_refused() -> None:
    wide = draw(1, 1, 1).expand(1 << 20, 1 << 13, 1)
    with pytest.raises(CurvlensError, match=r"A matrix for every token has .* entries"):
        Factored(wide, wide).dense()


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])  # a token, two tokens, all at once
def test_chunks_are_the_product(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(terms, "CHUNK", chunk)
    factors = Factored(draw(5, 7, 2), draw(5, 4, 2))
    whole = factors.dense()
    assert factors.shape == whole.shape
    found = torch.cat([part.clone() for _, part in factors.chunks()])
    assert [some for some, _ in factors.chunks()][-1].stop == 5
    torch.testing.assert_close(found, whole, rtol=1e-14, atol=0)
    torch.testing.assert_close(factors.sizes(), whole.flatten(1).norm(dim=1), rtol=1e-12, atol=0)


def test_the_size_of_what_cancels_is_a_number() -> None:
    zero = Factored(torch.tensor([[[1.0, -1.0]] * 4]), torch.ones(1, 4, 2))
    assert zero.sizes().tolist() == [0.0]


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_the_norm_of_factors_is_that_of_their_matrices(
    monkeypatch: pytest.MonkeyPatch, repeated: bool, symmetric: bool, chunk: int
) -> None:
    monkeypatch.setattr(terms, "CHUNK", chunk)
    u, left = draw(8, 6), draw(8, 5, 2)
    if repeated:
        u = u[[0, 1, 0, 2, 1, 0, 3, 3]]  # equal vectors are added up
    factors = Factored(left, left if symmetric else draw(8, 5, 2))
    kept, built = (Tokens(u, u, given, "a", "c", "de", symmetric) for given in (factors, factors.dense()))
    assert squared_norm([kept], AXES) == pytest.approx(squared_norm([built], AXES), rel=1e-13)
    assert squared_norm([built], AXES) == pytest.approx(float(built.dense().square().sum()), rel=1e-12)
    torch.testing.assert_close(kept.dense(), built.dense(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(kept.T.diagonal(), built.T.diagonal(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_norms_of_few_keys_and_few_columns(monkeypatch: pytest.MonkeyPatch, heads: int, chunk: int) -> None:
    """Both the third derivative (as many columns as keys) and the curvature of the loss are kept as factors."""
    monkeypatch.setattr(terms, "CHUNK", chunk)
    d, length, samples = 12, 4, 3
    x = draw(samples, length, d)
    x[1, 2] = x[0, 2]
    wq, wk, wv = (draw(heads, d, d) / d**0.5 for _ in range(3))
    g, S = draw(samples, length, d), attention.Root(draw(samples, length, d, 2))
    H = attention.hessian(x, wq, wk, wv, grad=g, curvature=S, mask="causal")
    for form in (H.outer, H.functional, H.total):
        for first in form.names:
            for second in form.names:
                block = form[first, second]
                assert form.norm((first, second)) == pytest.approx(float(block.norm()), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(H.outer.dense() + H.functional.dense(), H.total.dense(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("small", [1e-24, 1.0])
@pytest.mark.parametrize("near", [1e-2, 5e-4, 1e-4])
@pytest.mark.parametrize("seed", [5, 6, 7])
def test_norms_of_what_nearly_cancels_in_float32(small: float, near: float, seed: int) -> None:
    """Two queries that cancel but for a part ``near``: the inner products of float32 are rounding, the block is not."""
    torch.manual_seed(seed)
    x, context, g = torch.randn(1, 16), torch.randn(4, 16), small * torch.randn(1, 16)
    x, g = torch.cat([x, -(x + near * torch.randn(1, 16))]), torch.cat([g, -g])
    wk, wv = torch.randn(16, 16), torch.randn(16, 16)

    def hessian(dtype: torch.dtype) -> attention.AttentionHessian:
        q, k, v, gradient, keys = (t.to(dtype) for t in (torch.zeros(16, 16), wk, wv, g, context))
        return attention.hessian(x.to(dtype), q, k, v, grad=gradient, curvature=0.0, context=keys)

    H, truth = hessian(torch.float32), hessian(torch.float64)
    assert H.norm("Q", "functional") == pytest.approx(float(truth.functional["Q"].norm()), rel=1e-3)


@pytest.mark.parametrize("size", [1e-100, 1e-60, 1.0, 1e60, 1e100])
def test_norms_where_squares_leave_float64(size: float) -> None:
    x, root = size * draw(2, 5, 8), draw(2, 5, 8, 2) / size
    wq, wk = (0.3 * draw(8, 8) / size for _ in range(2))
    H = attention.hessian(x, wq, wk, draw(8, 8), grad=draw(2, 5, 8) / size, curvature=attention.Root(root))
    for block in ("V", ("Q", "V"), ("K", "V")):
        dense = H.total[block]
        most = float(dense.abs().max())
        assert H.norm(block) == pytest.approx(most * float((dense / most).norm()), rel=1e-10)


def test_autocast_rounds_nothing() -> None:
    x, (wq, wk, wv) = draw(5, 12).float(), (draw(12, 12).float() / 12**0.5 for _ in range(3))
    y, v = draw(5, 12).float(), draw(3 * 144).float()

    def found() -> list[Tensor]:
        H = attention.hessian(x, wq, wk, wv, target=y)
        return [torch.tensor(H.norm("Q")), H.total.dense(), H.total["Q", "V"], H.matvec(v), H.diagonal(), H.total @ v]

    expected = found()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one, other in zip(found(), expected, strict=True):
            assert torch.equal(one, other)


def test_what_changes_later_is_not_ours() -> None:
    x, up, down, y, scale, shift = draw(4, 6), draw(6, 8), draw(8, 6), draw(4, 6), draw(6), draw(6)

    def found() -> list[RowwiseHessian]:
        return [
            feedforward.hessian(x, up, down, target=y),
            norms.hessian(x, scale, shift, target=y, wrt="scale shift X"),
        ]

    ours, expected = found(), [H.total.dense() for H in found()]
    for tensor in (x, up, down, y, scale, shift):
        tensor.mul_(3)
    for H, dense in zip(ours, expected, strict=True):
        assert torch.equal(H.total.dense(), dense)
        assert H.norm() == pytest.approx(float(dense.norm()), rel=1e-12)


def test_autocast_rounds_nothing_in_networks() -> None:
    x, y, v = draw(4, 8).float(), draw(4, 8).float(), draw(8 * 8 * 6).float()
    letters = ("q", "k", "v", "o", "up", "down")
    network = assembly.block({name: draw(8, 8).float() for name in letters}, heads=1, norm="none", activation="gelu")
    layers = [(draw(8, 8).float(), draw(8, 8).float(), draw(8, 8).float())] * 2

    def found() -> list[Tensor]:
        H = network.hessian(x, target=y)
        stacked = attention.stack(x, layers, target=y)
        mlp = linear_mlp.hessian(x, [draws for draws, _, _ in layers], y)
        return [H.total.dense(), H.matvec(v), H.total @ v, stacked.total.dense(), mlp.total.dense()]

    expected = found()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one, other in zip(found(), expected, strict=True):
            assert torch.equal(one, other)
