"""The closed form of attention where numbers leave the range: sizes, masks, half precision, cancellation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_truth import Case
from curvlens.calculus import attention, moments
from curvlens.calculus.attention import products
from curvlens.calculus.terms import Tokens
from curvlens.errors import CurvlensError
from curvlens.operators import closed_form

D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def layer(seed: int = 0, length: int = 5, d: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return draw(length, d, seed=seed), *(draw(d, 2, seed=seed + i) for i in (1, 2, 3))  # type: ignore[return-value]


@pytest.mark.parametrize("curvature", [0.0, (0.0, 1.0)])
@pytest.mark.parametrize("heads", [None, 2])
def test_an_outer_part_that_is_zero_is_zero_in_products_too(curvature: Any, heads: int | None) -> None:
    case = Case(loss="ce", heads=heads, rank=2)
    positional, keywords = case.arguments()
    H = attention.hessian(*positional, **{**keywords, "curvature": curvature})
    v = torch.ones(H.total.size, dtype=D)
    assert not H.matvec(v, "outer").any()
    assert not closed_form(H, "outer").dense().any()
    torch.testing.assert_close(H.matvec(v, "functional"), H.functional.dense() @ v)
    torch.testing.assert_close(H.matvec(v), H.total.dense() @ v)


@pytest.mark.parametrize("d", [4, 12])  # many keys, few keys
@pytest.mark.parametrize("size", [1e4, 1e8, 1e30])
def test_a_key_that_nobody_sees_may_be_of_any_size(d: int, size: float) -> None:
    X, WQ, WK, WV = draw(8, d), *(draw(d, 3, seed=i) / d for i in (1, 2, 3))
    g, S = draw(8, 3, seed=4), torch.eye(3, dtype=D).repeat(8, 1, 1)
    g[-1], S[-1] = 0, 0
    real = torch.ones(8, 8, dtype=torch.bool).tril()
    real[:, -1] = False
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        small, large = X.clone(), X.clone()
        large[-1] *= size
        for mask in ("causal", real):
            if mask == "causal" and size > 1e8:
                continue  # the last token attends to itself, and its scores overflow
            options: dict[str, Any] = {"grad": g.to(dtype), "curvature": S.to(dtype), "mask": mask}
            weights = [w.to(dtype) for w in (WQ, WK, WV)]
            one, other = (attention.hessian(x.to(dtype), *weights, **options) for x in (small, large))
            for a, b in (("Q", "Q"), ("Q", "K"), ("K", "V"), ("V", "V")):
                error = (one.total[a, b] - other.total[a, b]).norm() / one.total[a, b].norm()
                assert error < near, (dtype, a, b)
                assert abs(one.norm((a, b)) / other.norm((a, b)) - 1) < near


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("sigma", [1e-5, 1e-4, 1e4])
def test_norms_in_float32_neither_underflow_nor_overflow(sigma: float, kind: Any) -> None:
    if kind == "softmax" and sigma > 1:
        sigma = 3.0
    X, WQ, WK, WV = layer(length=6, d=5)
    H = attention.hessian((sigma * X).float(), WQ.float(), WK.float(), WV.float(), draw(6, 2).float(), kind=kind)
    for form in (H.outer, H.functional):
        for pair in (("Q", "Q"), ("K", "K"), ("Q", "K"), ("Q", "V")):
            truth = float(form[pair].double().norm())
            assert abs(form.norm(pair) - truth) <= 1e-3 * truth, (form, pair)


@pytest.mark.parametrize("apart", [1e-6, 1e-8, 1e-10])
def test_norms_where_tokens_cancel(apart: float) -> None:
    C, X, g = draw(7, 4), draw(2, 4, seed=1), draw(2, 3, seed=2)
    X[1], g[1] = X[0] + apart * X[1], -g[0]
    WQ, WK, WV = (draw(4, 3, seed=i) for i in (3, 4, 5))
    H = attention.hessian(X, WQ, WK, WV, grad=g, curvature=0.0, context=C)
    for pair in (("Q", "Q"), ("Q", "V"), ("K", "V"), ("Q", "K")):
        truth = float(H.total[pair].norm())
        assert abs(H.norm(pair) - truth) <= 1e-6 * truth, pair


@pytest.mark.parametrize("sharpness", [20.0, 60.0])
def test_saturated_attention_on_a_word_that_occurs_twice(sharpness: float) -> None:
    """Two copies of the strongest key are one key with twice the weight: the same moments, also of what is left."""
    x, q = draw(6, 3), sharpness * draw(4, 3, seed=1)
    twice = torch.cat([x, x[:3]])
    a = (q @ twice.T).softmax(-1)
    merged = a[:, :6].clone()
    merged[:, :3] += a[:, 6:]
    u = draw(4, 3, seed=2)
    for one, other in zip(moments.contracted(a, twice, u), moments.contracted(merged, x, u), strict=True):
        for first, second in zip(one, other, strict=True):
            assert float((first - second).norm()) <= 1e-11 * float(second.norm()) + 1e-300


def test_a_part_that_is_zero_is_not_built_to_find_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokens, "rows", None)
    X, WQ, WK, WV = layer(length=2, d=12)
    H = attention.hessian(X, WQ, WK, WV, grad=torch.zeros(2, 2, dtype=D), curvature=1.0)
    assert H.norm("Q", "functional") == H.norm(("K", "V"), "functional") == 0


def test_half_precision_does_not_overflow_before_it_is_scaled() -> None:
    X, W = torch.full((8000, 3, 5), 3.0).half(), torch.full((5, 2), 0.1).half()
    H = attention.hessian(X, W, W, W, target=torch.zeros(8000, 3, 2).half())
    assert abs(float(H.outer["V"][0, 0]) - 9) < 0.1


def test_a_rest_that_is_rounding_beside_a_root() -> None:
    X, WQ, WK, WV = layer()
    root = draw(5, 2, 2, seed=9)
    noise = 1e-16 * draw(5, 2, 2, seed=10)
    attention.hessian(X, WQ, WK, WV, grad=draw(5, 2), curvature=(attention.Root(root), noise))
    attention.hessian(X, WQ, WK, WV, grad=draw(5, 2), curvature=(1.0, noise))


def test_many_columns_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    X, WQ, WK, WV = layer(length=3, d=6)
    H = attention.hessian(X, WQ, WK, WV, target=draw(3, 2), wrt="QKVX")
    v = draw(H.total.size, 11)
    whole = H.matvec(v)
    monkeypatch.setattr(products, "ALONG", 4 * H.layer.attention.numel())
    torch.testing.assert_close(H.matvec(v), whole, rtol=1e-14, atol=1e-15)
    assert H.matvec(v[:, :0]).shape == (H.total.size, 0)


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("size", [1e3, 1e8, 1e20])
def test_padding_that_sees_itself_moves_nobody(size: float, dtype: torch.dtype) -> None:
    """Under a causal mask the last token is seen by itself alone; it has no loss, but another sample's has."""
    x, g, S = draw(2, 6, 3), draw(2, 6, 3, seed=1), torch.eye(3, dtype=D).repeat(2, 6, 1, 1)
    g[0, -1], S[0, -1] = 0, 0
    weights = [draw(3, 3, seed=2) * 1e-3, draw(3, 3, seed=3) * 1e-3, draw(3, 3, seed=4)]

    def hessian(times: float, kind: torch.dtype) -> attention.AttentionHessian:
        y = x.clone()
        y[0, -1] *= times
        given = [w.to(kind) for w in (y, *weights)]
        return attention.hessian(*given, grad=g.to(kind), curvature=S.to(kind), mask="causal")

    truth, found = hessian(1.0, D).total.dense(), hessian(size, dtype)
    names, slices = found.total.names, found.total.slices
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for dense in (found.total.dense(), found.matvec(torch.eye(len(truth), dtype=dtype))):
        for a in names:
            for b in names:
                block = truth[slices[a], slices[b]]
                assert float((dense[slices[a], slices[b]].double() - block).norm()) <= tolerance * float(block.norm())
    assert found.norm("Q") == pytest.approx(float(truth[slices["Q"], slices["Q"]].norm()), rel=tolerance)


def test_copies_that_differ_in_the_sign_of_a_zero() -> None:
    """Two copies of each key, on one of which attention saturates: the moments are those of one."""
    keys, minus = (torch.tensor([[zero, 1.0], [zero, -1.0]], dtype=D) for zero in (0.0, -0.0))
    q, W, V = torch.tensor([[0.3, 1.0], [0.1, -1.0]], dtype=D), 8 * torch.eye(2, dtype=D), draw(2, 2)
    found = [
        attention.hessian(q, W, W, V, grad=draw(2, 2, seed=1), curvature=1.0, context=torch.cat([keys, copies]))
        for copies in (keys, minus)
    ]
    assert found[0].total["Q", "V"].any()
    torch.testing.assert_close(found[1].total.dense(), found[0].total.dense(), rtol=0, atol=0)


@pytest.mark.parametrize("length", [2, 6])
def test_linear_attention_with_a_masked_key_of_any_size(length: int) -> None:
    x, wq, wk, wv = layer(length=length)
    target = draw(length, 2, seed=6)
    context, real = draw(length + 1, 3, seed=5), torch.ones(length, length + 1, dtype=torch.bool)
    real[:, -1] = False
    dense = []
    for size in (1.0, 1e160):
        context[-1] = size
        H = attention.hessian(x, wq, wk, wv, target, kind="linear", mask=real, context=context)
        dense.append(H.total.dense())
    torch.testing.assert_close(dense[1], dense[0], rtol=0, atol=0)


def test_zero_curvature_and_weights_as_nn_linear_has_them() -> None:
    weights = [draw(4, 4, seed=i).T for i in range(3)]
    H = attention.hessian(draw(6, 4), *weights, grad=draw(6, 4, seed=3), curvature=0.0)
    assert not H.matvec(torch.ones(48, dtype=D), "outer").any()
    torch.testing.assert_close(H @ torch.ones(48, dtype=D), H.total.dense().sum(1))


@pytest.mark.parametrize("heads", [1, 16])
def test_the_origin_does_not_overflow_in_half_precision(heads: int) -> None:
    x = (16 + draw(300, 4)).half()
    wq, wk, wv = ((0.1 * draw(heads, 4, 4, seed=i)).half() for i in range(3))
    target = draw(300, 4, seed=4).half()
    truth = attention.hessian(*(t.double() for t in (x, wq, wk, wv, target))).total.dense()
    apart = attention.hessian(x, wq, wk, wv, target).total.dense().double() - truth
    assert float(apart.norm()) < 5e-3 * float(truth.norm())


@pytest.mark.parametrize(("length", "d"), [(6, 4), (3, 8)])  # many keys, few keys
@pytest.mark.parametrize("wrt", ["QKV", "QKVX", "QKVXC"])
def test_products_in_half_precision_with_a_masked_key_of_any_size(length: int, d: int, wrt: str) -> None:
    X, context, Y = (draw(length, d, seed=i).half() for i in range(3))
    weights = [(draw(d, d, seed=i) / d**0.5).half() for i in (3, 4, 5)]
    mask = torch.ones(length, length, dtype=torch.bool)
    mask[:, 0] = False
    context[0] = 6e4
    H, exact = (
        attention.hessian(x, q, k, v, target=y, context=c, mask=mask, wrt=wrt)
        for x, c, y, q, k, v in ([t.to(dtype) for t in (X, context, Y, *weights)] for dtype in (torch.float16, D))
    )
    direction = draw(H.total.size, seed=6).half()
    found, true = H.matvec(direction).double(), exact.matvec(direction.double())
    assert float((found - true).norm()) < 5e-3 * float(true.norm())


@pytest.mark.parametrize(
    ("dtype", "offset", "spread", "near"), [(D, 100.0, 1e-6, 1e-12), (torch.float32, 100.0, 0.01, 1e-5)]
)
def test_products_along_the_tokens_with_a_large_common_offset(
    dtype: torch.dtype, offset: float, spread: float, near: float
) -> None:
    """What keys have in common does not cancel: against the terms of the block, which are about a token of the row."""
    X = (offset + spread * draw(4, 6)).to(dtype)
    WQ, WK, WV = ((draw(6, 2, seed=i) / 6**0.5 / (offset if i == 1 else 1)).to(dtype) for i in (1, 2, 3))
    H = attention.hessian(X, WQ, WK, WV, grad=draw(4, 2, seed=4).to(dtype), curvature=0.5, wrt="QK")
    assert H._products._few_keys
    v = draw(H.total.size, seed=5).to(dtype)
    found, true = H.matvec(v), H.total.matvec(v)
    assert float((found - true).norm()) < near * float(true.norm())


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_norms_of_blocks_whose_squares_leave_float64(size: float) -> None:
    X, WQ, WK, WV = layer()
    grad = draw(5, 2, seed=9)
    one, other = (attention.hessian(X, WQ, WK, WV, grad=s * grad, curvature=0.0) for s in (1.0, size))
    for block in ("Q", ("Q", "V"), None):
        assert other.norm(block) == pytest.approx(size * one.norm(block), rel=1e-12)
    assert attention.hessian(X, WQ, WK, WV, grad=0 * grad, curvature=0.0).norm() == 0.0


def test_rank_bounds_of_linear_attention_and_with_padding() -> None:
    E = torch.eye(3, dtype=D)
    H = attention.hessian(E, E, E, draw(3, 3), target=draw(3, 3, seed=1), kind="linear")
    assert H.rank_bound().sharper >= int(torch.linalg.matrix_rank(H.t_outer().dense())) == 9
    X, real = draw(6, 3), torch.tensor([1, 1, 1, 1, 1, 0]).bool()
    X[5] *= 1e17
    weights = [draw(3, 3, seed=i) for i in (1, 2, 3)]
    S = torch.eye(3, dtype=D) * real[:, None, None]
    padded = attention.hessian(X, *weights, grad=draw(6, 3, seed=4) * real[:, None], curvature=S, mask=real[None])
    assert padded.rank_bound().sharper >= int(torch.linalg.matrix_rank(padded.t_outer().dense()))


def test_tokens_of_one_feature_as_a_transpose() -> None:
    X = draw(1, 4).T
    given = (draw(1, 3, seed=1), draw(1, 3, seed=2), draw(1, 2, seed=3))
    one, other = (attention.hessian(x, *given, target=draw(4, 2, seed=4)).norm("Q") for x in (X, X.clone()))
    assert one == pytest.approx(other, rel=1e-13)


@pytest.mark.parametrize("d", [3, 8])  # many keys, few keys
def test_padding_of_any_size_in_half_precision(d: int) -> None:
    """A token that mask and loss ignore may overflow whatever it likes."""
    X, g = draw(5, d), 1024 * draw(5, 2, seed=4)
    X[-1], g[-1] = 3e4 * X[-1].sign(), 0
    weights = [(w * draw(d, 2, seed=i)).half() for i, w in ((1, 0.01), (2, 0.1), (3, d**-0.5))]
    S = torch.zeros(5, 2, 2)
    H, exact = (
        attention.hessian(
            X.half().to(t), *(w.to(t) for w in weights), grad=g.half().to(t), curvature=S.to(t), mask="causal"
        )
        for t in (torch.float16, D)
    )
    true = exact.functional.dense()
    v = torch.ones(H.total.size, dtype=D)
    assert float((H.functional.dense().double() - true).norm()) < 5e-3 * float(true.norm())
    assert float((H.matvec(v.half()).double() - true @ v).norm()) < 5e-3 * float(true.norm()) * float(v.norm())


def test_outputs_that_overflow_are_told() -> None:
    X = torch.full((3, 2), 300.0).half()
    X[1] = -200
    small, large = 1e-3 * torch.eye(2).half(), 300 * torch.eye(2).half()
    with pytest.raises(CurvlensError, match="Outputs overflow"):
        attention.hessian(X, small, small, large, target=torch.zeros(3, 2).half())


@pytest.mark.parametrize("seed", [3, 192])
def test_norms_in_float32_where_nearly_equal_tokens_cancel(seed: int) -> None:
    X, context = draw(1, 4, seed=seed) + 0.01 * draw(8, 4, seed=seed + 1), draw(6, 4, seed=seed + 2)
    weights = [(draw(4, 3, seed=seed + i) / 2).float() for i in (3, 4, 5)]
    g = draw(8, 3, seed=seed + 6)
    g -= g.mean(0)
    H = attention.hessian(X.float(), *weights, grad=g.float(), curvature=0.0, context=context.float())
    for block in ("Q", "K"):
        assert H.norm(block) == pytest.approx(float(H.functional[block].double().norm()), rel=1e-5)


def test_a_large_token_without_weight_does_not_overflow() -> None:
    """It is hidden from all queries but one, which gives it no weight; times what values meet, it is beyond float16."""
    X, C, g = draw(3, 4), draw(6, 4, seed=1), draw(3, 3, seed=2)
    C[-1] = torch.tensor([3e4, 0, 0, 0])
    WQ, WK, WV = draw(4, 2, seed=3), draw(4, 2, seed=4), torch.zeros(4, 3, dtype=D)
    X[:, 0], WQ[0], WQ[1:], WK[0], WV[0], g[:, 0] = 1.0, 0.1, 0.01, -0.1, 1.0, 4.0
    seen = torch.ones(3, 6, dtype=torch.bool)
    seen[:-1, -1] = False
    tensors = {"X": X, "WQ": WQ, "WK": WK, "WV": WV, "grad": g, "context": C}
    half: dict[str, Any] = {name: t.half() for name, t in tensors.items()}
    double: dict[str, Any] = {name: t.double() for name, t in half.items()}
    H, true = (attention.hessian(**given, curvature=0.0, mask=seen, wrt="QK") for given in (half, double))
    assert float(g[0] @ WV[0]) * 3e4 > torch.finfo(torch.float16).max
    for block in ("Q", "K"):
        error = H.functional[block].double() - true.functional[block]
        assert float(error.norm()) < 1e-2 * float(true.functional[block].norm())


@pytest.mark.parametrize("second", ["V", "K"])
def test_blocks_of_half_precision_overflow_only_where_they_are_too_large(second: str) -> None:
    """Scales and weights are multiplied with what is small first."""
    X, WQ, WK, WV = draw(6, 3), draw(3, 2, seed=1), draw(3, 2, seed=2), 1e-3 * draw(3, 2, seed=3)
    given = [t.half() for t in (X, WQ, WK, WV, draw(6, 2, seed=4))]
    H, true = (
        attention.hessian(*t[:4], grad=t[4], curvature=3e4).outer["Q", second]
        for t in (given, [t.double() for t in given])
    )
    assert float((H.double() - true).norm()) < 1e-2 * float(true.norm())
    large = [t.half() for t in (30 * X, 1e-2 * WQ, 1e-3 * WK, 2e5 * WV, given[4])]
    low, exact = (
        attention.hessian(*t[:4], grad=t[4], curvature=1e-3).outer["Q", "V"]
        for t in (large, [t.double() for t in large])
    )
    assert float((low.double() - exact).norm()) < 1e-2 * float(exact.norm())


@pytest.mark.parametrize(
    ("dtype", "size", "length"), [("float64", 1e160, 3), ("float64", 1e-165, 3), ("float16", 12, 512)]
)
def test_outputs_of_linear_attention_where_squares_of_tokens_leave_the_dtype(
    dtype: str, size: float, length: int
) -> None:
    to: torch.dtype = getattr(torch, dtype)
    X, W = draw(length, 2), torch.eye(2, dtype=torch.float64)
    scales = (1 / size, 1 / size, 1 / size) if dtype == "float64" else (1e-3, 1e-1, 1e-3)
    wq, wk, wv = (scale * W for scale in scales)
    found = attention.forward((size * X).to(to), wq.to(to), wk.to(to), wv.to(to), kind="linear")
    scores = (size * X @ wq) @ (size * X @ wk).T / 2**0.5
    torch.testing.assert_close(
        found.double(),
        scores @ (size * X @ wv),
        rtol=1e-12 if to == torch.float64 else 2e-2,
        atol=1e-3 * (to != torch.float64),
    )


def test_scores_of_linear_attention_that_overflow_are_told() -> None:
    X, W = 1e160 * draw(2, 4), draw(4, 2, seed=1)
    with pytest.raises(CurvlensError, match="Scores overflow"):
        attention.forward(X, W, W, 1e-200 * W, kind="linear")


def test_what_the_values_take_away_is_gone_before_it_is_summed() -> None:
    """Tokens far from the origin, along a direction that W_V does not see."""
    X = draw(4, 2) + 1e6 * torch.ones(2, dtype=torch.float64)
    W, V = 1e-3 * torch.eye(2, dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    near = X - 1e6
    seen = torch.stack([near[:, 0] - near[:, 1]], 1)  # X W_V, without the offset
    A = attention.hessian(X, W, W, V, target=seen).layer.attention[0, 0]
    torch.testing.assert_close(attention.forward(X, W, W, V), A @ seen, rtol=0, atol=1e-13)


def test_linear_attention_of_more_tokens_than_an_attention_matrix_has_room_for() -> None:
    """A thousand times the same tokens: outputs and Jacobians are a thousand times as large, tokens as many."""
    X, Y, weights = draw(100, 3), draw(100, 2, seed=1), [draw(3, 2, seed=i) for i in (2, 3, 4)]
    one = attention.hessian(X, *weights, grad=Y, curvature=0.5, kind="linear")
    many = attention.hessian(X.repeat(1000, 1), *weights, grad=Y.repeat(1000, 1), curvature=0.5, kind="linear")
    torch.testing.assert_close(many.outer.dense(), 1e9 * one.outer.dense(), rtol=1e-10, atol=1e-3)
    torch.testing.assert_close(many.functional.dense(), 1e6 * one.functional.dense(), rtol=1e-10, atol=1e-6)
