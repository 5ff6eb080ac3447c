"""Products with vectors: a term for every graph, summed over all the data of a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from curvlens._evaluation.evaluation import Evaluation
from curvlens._evaluation.graph import Graph, Parts
from curvlens._evaluation.sums import summed
from curvlens._evaluation.totals import Total
from curvlens.blocks import Layout
from curvlens.operators.base import Progress

GraphProduct = Callable[[Graph, Sequence[str], Parts, bool], Parts]
"""(graph, names of the rows, vector, whether the graph is needed again) → the rows of the product."""

GraphTerm = Callable[[Graph, int, bool], Parts]
"""(graph, index of the vector, whether the graph is needed again) → the rows of a term."""


def apply(
    evaluation: Evaluation,
    product: GraphProduct,
    rows: Layout,
    columns: Layout,
    vectors: Tensor,
    progress: Progress | None,
) -> Tensor:
    """The product with every column of ``vectors``, (columns.size, k) → (rows.size, k)."""
    k = vectors.shape[1]
    if not k:
        return vectors.new_zeros(rows.size, 0)
    applied = list(each(evaluation, product, rows, columns, list(vectors.T.contiguous()), progress))
    return torch.stack(applied, dim=1) if k != 1 else applied[0][:, None]


def each(
    evaluation: Evaluation,
    product: GraphProduct,
    rows: Layout,
    columns: Layout,
    vectors: Sequence[Tensor],
    progress: Progress | None = None,
) -> Iterator[Tensor]:
    """The products with flat vectors, one after the other, without a matrix of them."""
    parts = [columns.unflatten(v) for v in vectors]

    def term(graph: Graph, j: int, retain: bool) -> Parts:
        return product(graph, rows.names, parts[j], retain)

    for total, count in sums(evaluation, len(parts), term, rows, columns, progress):
        yield total.over(count)
        del total  # before the next one is computed


def sums(
    evaluation: Evaluation, k: int, term: GraphTerm, rows: Layout, columns: Layout, progress: Progress | None = None
) -> Iterator[tuple[Total, float]]:
    """For each j < k the sum of ``term(graph, j, retain)`` over all graphs, and the count to divide by.

    If all graphs are kept, one j at a time, so that only one sum is held. If graphs are rebuilt, all j together.
    """
    done, cache, names = 0, evaluation.cache, (*rows.names, *columns.names)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            pieces = cache.total_pieces()
            progress(done, None if pieces is None else pieces * k)

    with evaluation.isolated():
        held = cache.held()
        for group in [range(k)] if held is None else [range(j, j + 1) for j in range(k)]:
            totals = [Total(rows, evaluation.dtype, evaluation.device) for _ in group]

            def added(graph: Graph, i: int, first: int = group.start) -> Parts:
                return term(graph, first + i, graph.kept or first + i + 1 < k)

            count = summed(evaluation, cache.graphs(names) if held is None else held, added, totals, tick)
            while totals:
                yield totals.pop(0), count
