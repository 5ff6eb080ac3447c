"""What the closed form of attention takes, refuses, keeps and hands out."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.errors import CurvlensError

D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def layer(seed: int = 0, length: int = 5, d: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return draw(length, d, seed=seed), *(draw(d, 2, seed=seed + i) for i in (1, 2, 3))  # type: ignore[return-value]


def test_what_changes_after_construction_changes_nothing() -> None:
    X, WQ, WK, WV = layer()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    settings: tuple[dict[str, Any], ...] = (
        {"target": draw(5, 2, seed=7)},
        {"grad": draw(5, 2, seed=7), "curvature": 1.0},
    )
    for options in settings:
        given = [t.clone() for t in (X, WQ, WK, WV)]
        H = attention.hessian(*given, mask=mask.clone(), **options)
        allowed = mask.clone()
        changed = attention.hessian(*given, mask=allowed, **options)
        changed.norm("K")
        for tensor in given:
            tensor.mul_(2)
        allowed.logical_not_()
        v = torch.ones(H.total.size, dtype=D)
        torch.testing.assert_close(changed.total.dense(), H.total.dense(), rtol=0, atol=0)
        torch.testing.assert_close(changed.matvec(v), H.total.dense() @ v)


X, WQ, WK, WV = layer()
Y = draw(5, 2, seed=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1e-300}, "temperature=1e-300"),
        ({"curvature": float("nan"), "grad": Y, "target": None}, "curvature is nan"),
        ({"X": 1e200 * X}, "Scores overflow"),
        ({"context": X[0]}, "context has shape"),
        ({"wrt": "O"}, "there is no O"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    keywords = {"X": X, "WQ": WQ, "WK": WK, "WV": WV, "target": Y, **changes}
    with pytest.raises(CurvlensError, match=message):
        attention.hessian(**keywords).norm()


def test_one_matrix_has_no_key() -> None:
    with pytest.raises(CurvlensError, match="names no block"):
        attention.hessian_single(X, WQ @ WK.T, WV, Y, wrt="K")
    with pytest.raises(CurvlensError, match="complex"):
        attention.hessian(X, WQ, WK, WV, Y).matvec(torch.ones(18, dtype=torch.complex128))


def test_what_leaves_may_be_differentiated_through() -> None:
    """Inside, tensors are made in inference mode; none of them gets out."""
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    H = attention.hessian(x, w, w, w, target=torch.zeros(4, 3, dtype=torch.float64))
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    found = [H.total.dense(), H.total["Q", "V"], H.outer["V"], H.diagonal(), H.matvec(torch.ones(27)), H.moments.M2]
    for tensor in [*found, H.layer.output, H.gauge(), H.t_functional().dense()]:
        torch.autograd.grad((scale * tensor).sum(), scale)


def test_the_layer_of_a_hessian_keeps_its_dtype_under_autocast() -> None:
    X, WQ, WK, WV = (t.float() for t in layer())
    H = attention.hessian(X, WQ, WK, WV, grad=torch.zeros(5, 2), curvature=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {t.dtype for t in (H.layer.attention, H.layer.output, H.layer.q, H.layer.kappa)} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to("meta"), r"X is on meta, without numbers; expected a dense tensor"),
        (lambda x: x.to_sparse(), r"X is torch.sparse_coo, torch.float64; expected a dense tensor .*\.to_dense\(\)"),
        (
            lambda x: x.to(torch.float8_e4m3fn),
            r"X is torch.strided, torch.float8_e4m3fn; expected a dense tensor of 16",
        ),
    ],
)
def test_tensors_that_are_not_plain_numbers(change: Any, message: str) -> None:
    X, WQ, WK, WV = layer()
    with pytest.raises(CurvlensError, match=message):
        attention.hessian(change(X), WQ, WK, WV, grad=draw(5, 2), curvature=1.0)


@pytest.mark.parametrize("wrt", [["QK", "V"], ["Q", "KV"], ["QK"]])
def test_letters_are_given_one_by_one(wrt: Any) -> None:
    X, WQ, WK, WV = layer()
    with pytest.raises(CurvlensError, match="expected letters among Q, K, V"):
        attention.hessian(X, WQ, WK, WV, grad=draw(5, 2), curvature=1.0, wrt=wrt)
    with pytest.raises(CurvlensError, match="O needs V"):
        attention.hessian(X, WQ, WK, (WV, draw(2, 2)), grad=draw(5, 2), curvature=1.0, wrt="QO")


def test_what_users_read_of_a_layer_may_be_differentiated_through() -> None:
    X, WQ, WK, WV = layer()
    H = attention.hessian(X, WQ, WK, WV, grad=draw(5, 2), curvature=1.0)
    assert H.norm() > 0
    (H.layer.attention * torch.ones(5, 5, dtype=D, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


def test_a_layer_read_in_inference_mode_is_not_of_it() -> None:
    H = attention.hessian(*layer(), grad=draw(5, 2), curvature=1.0)
    with torch.inference_mode():
        assert H.layer.queries.isfinite().all()
        assert H.loss.gradient.isfinite().all()
    scale = torch.ones((), dtype=D, requires_grad=True)
    torch.autograd.grad((scale * H.layer.queries).sum() + (scale * H.loss.gradient).sum(), scale)


def test_what_a_stack_hands_out_is_a_copy() -> None:
    X, W = draw(3, 2), draw(2, 2, seed=1)
    H = attention.stack(X, [(W, W, W)] * 2, target=draw(3, 2, seed=2))
    before = H.total["Q1"].clone()
    H.total.dense().zero_()
    torch.testing.assert_close(H.total["Q1"], before, rtol=0, atol=0)


def test_an_attention_hessian_is_pickled() -> None:
    H = attention.hessian(*layer(), grad=draw(5, 2), curvature=1.0)
    matrix = H.total.dense()
    torch.testing.assert_close(pickle.loads(pickle.dumps(H)).total.dense(), matrix, rtol=0, atol=0)
    for form in (H.t_outer(), H.t_functional()):
        torch.testing.assert_close(pickle.loads(pickle.dumps(form)).dense(), form.dense(), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.eye(2, dtype=D).to_sparse(), torch.empty(5, 2, 2, dtype=D, device="meta")])
def test_curvatures_without_dense_numbers(bad: Tensor) -> None:
    bad = bad if bad.ndim == 3 else torch.stack([bad] * 5)
    for given in (bad, attention.Root(bad), (1.0, bad)):
        with pytest.raises(CurvlensError, match="dense tensor"):
            attention.hessian(*layer(), grad=draw(5, 2), curvature=given)
