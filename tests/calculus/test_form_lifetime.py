"""A closed form that is no longer used is gone at once; what it was made of may change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlens as cl
from curvlens.calculus import attention, feedforward, linear_mlp, norms

pytestmark = pytest.mark.usefixtures("no_search_for_rings")

D = torch.float64


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(0))


X, W = draw(5, 4), draw(4, 4)
BLOCK = dict.fromkeys("qkvo", W) | {"up": draw(4, 8), "down": draw(8, 4)}
FORMS: dict[str, Callable[[], Any]] = {
    "attention": lambda: attention.hessian(X, W, W, W, target=X),
    "attention by its tokens": lambda: attention.hessian(X, W, W, W, target=X, wrt="QKVX"),
    "stack": lambda: attention.StackHessian({"Q1": (2, 2)}, draw(4, 4), draw(4, 4)),
    "feed-forward": lambda: feedforward.hessian(X, draw(4, 8), draw(8, 4), target=X),
    "norm": lambda: norms.hessian(X, target=X),
    "linear network": lambda: linear_mlp.hessian(X, [W, W], target=X),
    "block": lambda: cl.assembly.block(BLOCK, heads=1, norm="none", activation="gelu").hessian(X, target=X),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_closed_form(name: str) -> None:
    H = FORMS[name]()
    form = H.total
    form.dense(), form.norm(), form.matvec(torch.ones(form.size, dtype=D))
    if name == "block":
        [part.dense() for part in H.parts.values()]
    if name.startswith("attention"):
        H.norm("Q"), H.t_outer().dense(), H.matvec(torch.ones(form.size, dtype=D))
    gone = [weakref.ref(H), weakref.ref(form)]
    del H, form
    assert [reference() for reference in gone] == [None, None]


def test_a_linear_network_does_not_notice_later_changes() -> None:
    x, weights = X.clone(), [W.clone(), W.clone(), W.clone()]
    H = linear_mlp.hessian(x, weights, target=X.flip(0))
    before = linear_mlp.hessian(X, [W, W, W], target=X.flip(0)).total.dense()
    x.mul_(2), weights[1].mul_(3)
    torch.testing.assert_close(H.total.dense(), before, rtol=0, atol=0)
