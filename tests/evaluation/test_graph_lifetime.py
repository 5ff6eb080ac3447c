"""Graphs that are no longer used are gone at once: they are large, and Python looks for rings late."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.calculus import attention

pytestmark = pytest.mark.usefixtures("no_search_for_rings")

D = torch.float64


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(0))


X, W = draw(5, 4), draw(4, 4)


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
