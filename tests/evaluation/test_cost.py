"""What is held in memory and how much is computed, counted rather than timed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import curvlens as cl
from curvlens._evaluation.graph import Graph
from curvlens.models import GPT, GPTConfig
from small import direction, gpt, tokens_and_labels


def most_alive(act: Callable[[], Any], size: int) -> int:
    """How many allocations of at least ``size`` bytes, made by ``act``, are alive at once.

    From the profiler's record of the allocator: watching tensors from Python would keep autograd from adding in place.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    assert profiler.profiler is not None
    events = [
        e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]" and abs(e.nbytes()) >= size
    ]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += 1 if event.nbytes() > 0 else -1
        most = max(most, live)
    return most


def language_model(kind: str, vocab: int, tokens: int) -> cl.Problem:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(vocab, 2), nn.Linear(2, vocab, bias=False))
    if kind == "GPT":
        model = GPT(GPTConfig(vocab=vocab, context=tokens, n_head=1, d_model=4, tied=True))
    batch = (torch.randint(vocab, (1, tokens)), torch.randint(vocab, (1, tokens)))
    return cl.Problem(model, batch, cl.losses.CrossEntropy())


@pytest.mark.parametrize("vocab", [5_000, pytest.param(50_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["linear", "GPT"])
@pytest.mark.parametrize("make", [cl.ggn, cl.hessian, cl.functional])
def test_logit_sized_tensors(make: Callable[[cl.Problem], cl.Operator], kind: str, vocab: int) -> None:
    """Beyond what forward and backward left in the kept graph, a product holds at most two tensors of logit size."""
    tokens = 400
    problem = language_model(kind, vocab, tokens)
    operator, v = make(problem), torch.randn(problem.layout.size)
    operator @ v
    assert not problem._evaluation.cache.rebuilds
    assert most_alive(lambda: operator @ v, 4 * vocab * tokens) <= 2


@pytest.mark.parametrize("make", [cl.hessian, cl.ggn])
def test_one_rebuilt_graph_at_a_time(
    make: Callable[[cl.Problem], cl.Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room to keep anything, a graph is gone before the next one is built."""
    alive, most = 0, 0

    class Counted(Graph):
        def __init__(self, *arguments: Any) -> None:
            nonlocal alive, most
            super().__init__(*arguments)
            alive += 1
            most = max(most, alive)
            weakref.finalize(self, gone)

    def gone() -> None:
        nonlocal alive
        alive -= 1

    monkeypatch.setattr("curvlens._evaluation.cache.Graph", Counted)
    problem = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), memory=0)
    operator, v = make(problem), direction(242)
    for _ in range(2):
        operator @ v
        operator.quadratic(v)
    assert most == 1
    assert alive == 0


def test_the_counter_counts() -> None:
    def act() -> None:
        a = torch.zeros(1000)
        b = a + 1
        a.add_(b)
        del b
        c = a * 2
        assert c.view(10, 100).shape == (10, 100)

    assert most_alive(act, 4000) == 2


def test_a_block_back_propagates_only_as_far_as_it_must() -> None:
    """The matrix products of H[b] @ v: few for the last layer, more the further down b lies, most for all of H."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Embedding(7, 4), *(nn.Linear(4, 4, bias=False) for _ in range(8)), nn.Linear(4, 7)
    )
    problem = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    H = cl.hessian(problem)
    H @ torch.ones(problem.layout.size)

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
            return func(*args, **(kwargs or {}))

    def cost(operator: cl.Operator) -> int:
        v = torch.ones(operator.shape[1])
        with Counter() as counter:
            operator @ v
        return int(counter.products)

    costs = [cost(H[f"{i}.weight"]) for i in range(1, 9)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] * 4 < costs[0]
    assert costs[0] < cost(H)


def test_released_graphs_are_freed() -> None:
    """A softmax saves its own output: a naive hook around it keeps the graph alive for ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Softmax(-1))
    x = torch.randn(500, 64)
    held = cl.Problem(model, (x, x), cl.losses.MSE())
    H, v = cl.hessian(held), torch.randn(held.layout.size)

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(5):
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1e-3)
        H @ v
    before = resident()
    for _ in range(40):
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1e-3)
        H @ v
    assert resident() - before < 20e6  # forty graphs of 2 MB would be more


def test_a_model_that_asserts_its_batch_size_is_not_cut() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) == 4
            return self.inner(x)  # type: ignore[no-any-return]

    x = torch.arange(8, dtype=torch.float64).view(4, 2)
    model = Strict()
    free, bound = (cl.Problem(model, (x, x[:, :1]), cl.losses.MSE(), memory=m) for m in (None, 0))
    assert torch.equal(cl.hessian(free).dense(), cl.hessian(bound).dense())
