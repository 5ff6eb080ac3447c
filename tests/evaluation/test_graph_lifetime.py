"""What is no longer used is gone at once: graphs and matrices are large, and Python looks for rings late."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.calculus import attention, feedforward, linear_mlp, norms

D = torch.float64


@pytest.fixture(autouse=True)
def no_search_for_rings() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


@pytest.mark.parametrize("use", [cl.hessian, cl.ggn, cl.functional, cl.empirical_fisher])
def test_the_graphs_of_a_problem(use: Callable[[cl.Problem], cl.Operator]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).double()
    problem = cl.Problem(model, [(X, draw(5, 3))], cl.losses.MSE())
    operator = use(problem)
    operator @ torch.ones(operator.shape[1], dtype=D)
    cl.eigs(operator, k=1)
    cache = problem._evaluation.cache
    gone: list[weakref.ref[Any]] = [weakref.ref(problem), weakref.ref(problem._evaluation), weakref.ref(cache)]
    gone += [weakref.ref(graph) for graph in cache.held() or []]
    del cache
    del problem, operator
    assert len(gone) == 4
    assert all(reference() is None for reference in gone)


def test_a_form_outlives_its_hessian_and_an_operator_its_problem() -> None:
    model, data, v = nn.Linear(4, 3).double(), [(X, draw(5, 3))], torch.ones(15, dtype=D)
    H, problem = attention.hessian(X, W, W, W, target=X, wrt="QKVX"), cl.Problem(model, data, cl.losses.MSE())
    block, product = H.total["Q", "X"], cl.hessian(problem) @ v
    form = attention.hessian(X, W, W, W, target=X, wrt="QKVX").total
    operator = cl.hessian(cl.Problem(model, data, cl.losses.MSE()))
    torch.testing.assert_close(form["Q", "X"], block, rtol=0, atol=0)
    torch.testing.assert_close(operator @ v, product, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda problem: pickle.loads(pickle.dumps(problem))])
def test_a_copy_of_a_problem_has_graphs_of_its_own(copied: Callable[[cl.Problem], cl.Problem]) -> None:
    problem = cl.Problem(nn.Linear(4, 3).double(), [(X, draw(5, 3))], cl.losses.MSE())
    product = cl.hessian(problem) @ torch.ones(15, dtype=D)
    other = copied(problem)
    gone = weakref.ref(problem)
    del problem
    assert gone() is None
    torch.testing.assert_close(cl.hessian(other) @ torch.ones(15, dtype=D), product, rtol=1e-14, atol=0)


def test_graphs_say_if_their_problem_is_gone() -> None:
    cache = cl.Problem(nn.Linear(4, 3).double(), [(X, draw(5, 3))], cl.losses.MSE())._evaluation.cache
    with pytest.raises(cl.CurvlensError, match="Keep a reference to the problem"):
        list(cache.pieces())


def test_a_linear_network_does_not_notice_later_changes() -> None:
    x, weights = X.clone(), [W.clone(), W.clone(), W.clone()]
    H = linear_mlp.hessian(x, weights, target=X.flip(0))
    before = linear_mlp.hessian(X, [W, W, W], target=X.flip(0)).total.dense()
    x.mul_(2), weights[1].mul_(3)
    torch.testing.assert_close(H.total.dense(), before, rtol=0, atol=0)
