"""What is held in memory, counted tensor by tensor rather than timed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import curvlens as cl
from curvlens.operators.engine import engine_of


class LiveTensors(TorchDispatchMode):
    """Counts storages of at least a given size that are alive at once, the largest count being kept."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.live, self.most = size, 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= self.size:
                if x.untyped_storage()._cdata not in given:  # a view, or an update in place
                    self.note(x.untyped_storage())
        return result

    def note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        self.seen.add(key)
        self.live += 1
        self.most = max(self.most, self.live)

        def gone() -> None:
            self.live -= 1
            self.seen.discard(key)

        weakref.finalize(storage, gone)


def language_model(vocab: int, tokens: int) -> cl.Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocab, 2), nn.Linear(2, vocab, bias=False))
    labels = torch.randint(vocab, (1, tokens))
    return cl.Problem(model, (torch.randint(vocab, (1, tokens)), labels), cl.losses.CrossEntropy())


@pytest.mark.parametrize("vocab", [5_000, pytest.param(50_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("make", [cl.ggn, cl.hessian, cl.functional])
def test_logit_sized_tensors(make: Callable[[cl.Problem], cl.Operator], vocab: int) -> None:
    """Beyond what forward and backward left in the kept graph, a product holds at most two tensors of logit size."""
    tokens = 400
    problem = language_model(vocab, tokens)
    operator, v = make(problem), torch.randn(problem.layout.size)
    operator @ v
    assert not engine_of(problem).rebuilds
    with LiveTensors(4 * vocab * tokens) as counter:
        product = operator @ v
    assert product.shape == v.shape
    assert counter.most <= 2


def test_the_counter_counts() -> None:
    with LiveTensors(4000) as counter:
        a = torch.zeros(1000)
        b = a + 1
        a.add_(b)
        del b
        c = a * 2
        d = c.view(10, 100)
    assert counter.most == 2
    assert d.shape == (10, 100)


def test_a_block_back_propagates_only_as_far_as_it_must() -> None:
    """The matrix products of H[b] @ v: few for the last layer, more the further down b lies, most for all of H."""
    from tests.small import tokens_and_labels

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), *(nn.Linear(4, 4, bias=False) for _ in range(8)), nn.Linear(4, 7))
    problem = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    H = cl.hessian(problem)
    H @ torch.ones(problem.layout.size)

    class Counter(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
            return func(*args, **(kwargs or {}))

    def cost(operator: cl.Operator) -> int:
        v = torch.ones(operator.shape[1])
        with Counter() as counter:
            operator @ v
        return counter.products

    costs = [cost(H[f"{i}.weight"]) for i in range(1, 9)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] * 4 < costs[0]
    assert costs[0] < cost(H)
