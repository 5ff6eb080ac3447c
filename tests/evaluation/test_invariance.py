"""The loss is Σ token losses / Σ valid tokens: nothing about batches changes a product beyond 1e-12."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvlens as cl
from small import direction, gpt, relative, tokens_and_labels

OPERATORS: dict[str, Callable[[cl.Problem], cl.Operator]] = {
    "hessian": cl.hessian,
    "ggn": cl.ggn,
    "functional": cl.functional,
    "fisher": lambda p: cl.fisher(p, samples=2, seed=5),
    "empirical_fisher": cl.empirical_fisher,
}
TOLERANCE = 1e-12


def products(data: Any, **options: Any) -> dict[str, torch.Tensor]:
    problem = cl.Problem(gpt(), data, cl.losses.CrossEntropy(), **options)
    v = direction(problem.layout.size)
    results = {name: make(problem) @ v for name, make in OPERATORS.items()}
    return {**results, "gradient": problem.gradient(), "loss": torch.tensor([problem.loss()])}


WHOLE = products(tokens_and_labels())


def assert_same(got: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> None:
    errors = {name: relative(got[name], WHOLE[name]) for name in WHOLE if name not in but}
    assert max(errors.values()) <= TOLERANCE, errors


@settings(max_examples=16)  # all there are
@given(cuts=st.sets(st.integers(1, 4)))
def test_splitting_into_batches(cuts: set[int]) -> None:
    """Ragged batches with different numbers of valid tokens."""
    tokens, labels = tokens_and_labels()
    edges = [0, *sorted(cuts), 5]
    assert_same(products([(tokens[a:b], labels[a:b]) for a, b in pairwise(edges)]))


@settings(max_examples=10)
@given(order=st.permutations(range(5)))
def test_reordering(order: list[int]) -> None:
    """The sampled Fisher draws by place, so it alone may differ."""
    tokens, labels = tokens_and_labels()
    assert_same(products([(tokens[order], labels[order])]), but=("fisher",))


@given(micro_batch=st.integers(1, 6))
def test_micro_batches(micro_batch: int) -> None:
    assert_same(products(tokens_and_labels(), micro_batch=micro_batch))


def test_padding_samples_and_batches_that_do_not_count() -> None:
    tokens, labels = tokens_and_labels()
    padding = (torch.zeros(2, 6, dtype=torch.long), torch.full((2, 6), -100))
    assert_same(products([(tokens, labels), padding]))
    assert_same(products([(torch.cat([tokens, padding[0]]), torch.cat([labels, padding[1]]))]))


def test_padding_to_other_lengths() -> None:
    """Causal attention does not see what comes later: sequences may be cut where no label counts any more."""
    tokens, labels = tokens_and_labels()
    assert_same(products([(tokens[:2, :2], labels[:2, :2]), (tokens[2:], labels[2:])]))


def graph_bytes() -> tuple[int, list[int]]:
    """What the graphs of the five sequences take, as a whole and one by one."""
    sizes = []
    for micro_batch in (5, 1):
        problem = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), micro_batch=micro_batch)
        v = direction(problem.layout.size)
        cl.hessian(problem) @ v
        plan = problem._evaluation.cache._plan
        assert plan is not None
        sizes.append([entry.bytes for entry in plan])
    return sizes[0][0], sizes[1]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99, 1.5])
@pytest.mark.parametrize("batches", [1, 3])
def test_kept_or_rebuilt_graphs(share: float, batches: int) -> None:
    """Budgets that keep all graphs, some, or none, and that force batches to be cut."""
    tokens, labels = tokens_and_labels()
    whole, _ = graph_bytes()
    data = [(t, y) for t, y in zip(tokens.tensor_split(batches), labels.tensor_split(batches), strict=True)]
    assert_same(products(data, memory=int(share * whole)))


def test_the_budget_is_kept() -> None:
    whole, single = graph_bytes()
    for share in (0.99, 1.01, 2.0):
        problem = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), memory=int(share * whole))
        v = direction(problem.layout.size)
        cl.hessian(problem) @ v
        cache = problem._evaluation.cache
        assert cache.kept_bytes <= share * whole
        assert cache.rebuilds == (share < 1)
    problem = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), memory=0)
    cl.hessian(problem) @ v
    cache = problem._evaluation.cache
    assert cache.kept_bytes == 0
    assert cache.rebuilds
    assert cache._plan is not None
    assert [(e.start, e.stop) for e in cache._plan] == [(i, i + 1) for i in range(5)]
    assert min(single) > 0


def test_the_size_of_a_graph_is_no_matter_of_chance() -> None:
    """Memory that is freed and given out again while a graph is built is not taken for something counted before."""
    found, junk = set(), []
    for i in range(12):
        junk.append(torch.zeros(137 * (i * i % 11 + 1)))
        junk = junk[-3:]
        found.add(graph_bytes()[0])
    assert len(found) == 1


def test_blocks_do_not_depend_on_the_graph_either() -> None:
    kept = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy())
    rebuilt = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), memory=0)
    rows, columns = "h.0.attn.q.weight", ["h.0.mlp.*", "unembed.weight"]
    for make in OPERATORS.values():
        block = make(kept)[rows, columns]
        v = direction(block.shape[1])
        other = make(rebuilt)
        other @ direction(other.shape[1])  # the plan is made: from now on only what the block needs is built
        assert relative(other[rows, columns] @ v, block @ v) <= TOLERANCE
        assert relative(block @ v, make(kept).dense()[kept.layout.slices[rows]] @ pad(kept, columns, v)) <= TOLERANCE


def pad(problem: cl.Problem, names: list[str], v: torch.Tensor) -> torch.Tensor:
    part = problem.layout.select(names)
    padded = torch.zeros(problem.layout.size, dtype=v.dtype)
    for name in part.names:
        padded[problem.layout.slices[name]] = v[part.slices[name]]
    return padded
