"""When graphs are kept and when they are rebuilt.

Building the graph of a piece costs a little more than one gradient, a product another one and a half to two and a half.
So graphs are kept while they fit the memory budget; the others are rebuilt for each call of `Engine.apply`, where all
vectors of the call share them. A piece that alone exceeds the budget is halved. Whatever is decided, the numbers are
the same: sums over pieces are in float64 and divided once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError
from curvlens.operators.graph import Graph, Parts, alive
from curvlens.operators.meter import Meter, OverBudgetError
from curvlens.pieces import Piece
from curvlens.point import Point
from curvlens.problem import Problem
from curvlens.totals import Total

Product = Callable[[Graph, Sequence[str], Parts, bool], Parts]
"""(graph, names of the rows, vector, whether the graph is needed again) → the rows of the product."""

Job = Callable[[Graph, int, bool], Parts]
"""(graph, which, whether the graph is needed again) → the rows of a term."""

Progress = Callable[[int, int | None], None]
"""(products done, of how many; None while the number of pieces is unknown)."""


@dataclass
class _Entry:
    """A piece of the plan: where it lies in the data, and its graph if that is kept."""

    index: int
    start: int
    stop: int | None
    graph: Graph | None
    bytes: int

    def lies_in(self, piece: Piece) -> bool:
        """Whether this is a part of the piece."""
        if self.index != piece.index:
            return False
        return self.stop is None or piece.stop is None or piece.start <= self.start < piece.stop


class Engine:
    """Applies second-order products to vectors, over all the data of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = weakref.ref(problem)  # which keeps this: a ring would hold the graphs until Python finds it
        self._plan: list[_Entry] | None = None
        self._point: Point | None = None

    @property
    def problem(self) -> Problem:
        """Whose it is; operators hold it."""
        return alive(self._problem)

    @property
    def kept_bytes(self) -> int:
        """What the kept graphs hold."""
        return sum(entry.bytes for entry in self._plan or [] if entry.graph is not None)

    @property
    def largest_bytes(self) -> int:
        """What the largest graph of one piece holds."""
        return max((entry.bytes for entry in self._plan or []), default=0)

    @property
    def rebuilt_bytes(self) -> int:
        """What the largest of the graphs holds that are rebuilt for every call."""
        return max((entry.bytes for entry in self._plan or [] if entry.graph is None), default=0)

    @property
    def point_bytes(self) -> int:
        """What the copy of the model holds that graphs are compared with."""
        return 0 if self._point is None else self._point.bytes

    @property
    def n_pieces(self) -> int:
        """Into how many pieces the data is cut; 0 if that is not known yet."""
        return len(self._plan or [])

    @property
    def rebuilds(self) -> bool:
        """Whether some graphs are rebuilt for every call."""
        return self._plan is not None and any(entry.graph is None for entry in self._plan)

    def release(self) -> None:
        """Drop all kept graphs; the next product builds them anew."""
        self._plan = None

    def apply(
        self,
        product: Product,
        rows: Layout,
        columns: Layout,
        vectors: Tensor,
        progress: Progress | None = None,
    ) -> Tensor:
        """The product with every column of ``vectors``, (columns.size, k) → (rows.size, k)."""
        k = vectors.shape[1]
        if not k:
            return vectors.new_zeros(rows.size, 0)
        applied = list(self.each(product, rows, columns, list(vectors.T.contiguous()), progress))
        return torch.stack(applied, dim=1) if k != 1 else applied[0][:, None]

    def each(
        self,
        product: Product,
        rows: Layout,
        columns: Layout,
        vectors: Sequence[Tensor],
        progress: Progress | None = None,
    ) -> Iterator[Tensor]:
        """The product with one flat vector after the other: besides the results one vector is held, no matrix."""
        parts = [columns.unflatten(v) for v in vectors]

        def job(graph: Graph, j: int, retain: bool) -> Parts:
            return product(graph, rows.names, parts[j], retain)

        for total, count in self.sums(len(parts), job, rows, columns, progress):
            yield total.over(count)
            del total  # before the next one is computed

    def sums(
        self, k: int, job: Job, rows: Layout, columns: Layout, progress: Progress | None = None
    ) -> Iterator[tuple[Total, float]]:
        """``job(graph, j, retain)`` summed over all graphs, for one j < k after the other, and the count to divide by.

        One at a time where all graphs are kept, so that only one sum is held; together where graphs are rebuilt.
        """
        done = 0
        with self.problem.isolated():
            held = self._held()
            for group in [range(k)] if held is None else [range(j, j + 1) for j in range(k)]:
                totals, count = [Total(rows, self.problem.dtype, self.problem.device) for _ in group], 0.0
                for graph, kept in self.graphs((*rows.names, *columns.names)) if held is None else held:
                    for total, j in zip(totals, group, strict=True):
                        total.add(job(graph, j, kept or j + 1 < k))
                        done += 1
                        if progress is not None:
                            progress(done, len(self._plan) * k if self._plan is not None else None)
                    count += graph.count
                    del graph  # before the next one is built
                count = self.problem.checked_count(count)
                while totals:
                    yield totals.pop(0), count

    def graphs(self, names: Sequence[str]) -> Iterator[tuple[Graph, bool]]:
        """All graphs in the order of the data, and whether each is kept; rebuilt ones know the named parameters."""
        with self.problem.isolated():
            held = self._held()
            if held is not None:
                yield from held
            elif self._plan is None:
                yield from self._first_pass()
            else:
                ordered = [name for name in self.problem.layout.names if name in names]
                yield from self._later_pass(self._plan, ordered)

    def point(self) -> Point:
        """Where the model is now, in the copy that the graphs are compared with."""
        self._held()
        assert self._point is not None
        return self._point

    def _held(self) -> list[tuple[Graph, bool]] | None:
        """All graphs, if all are kept and belong to the model and the data as they are now."""
        if self._point is None or not self.problem.is_at(self._point):
            self._plan, self._point = None, self.problem.point()
        if self._plan is None or self.rebuilds:
            return None
        self.problem.data.check_unchanged()
        return [(entry.graph, True) for entry in self._plan if entry.graph is not None]

    def _first_pass(self) -> Iterator[tuple[Graph, bool]]:
        """Build every graph, keep what fits, cut what does not, and write down what was decided."""
        plan: list[_Entry] = []
        everything = self.problem.layout.names
        unused, keeping = set(everything), True
        for piece in self.problem.pieces():
            todo = [piece]
            while todo:
                piece = todo.pop(0)
                held = sum(entry.bytes for entry in plan if entry.graph is not None)
                meter = Meter(self.problem, self.problem.memory - held)
                try:
                    graph = self._build(piece, meter)
                except OverBudgetError:
                    keeping = False
                    if held:  # room for one transient graph, as large as the largest kept
                        next(entry for entry in reversed(plan) if entry.graph is not None).graph = None
                        todo.insert(0, piece)
                        continue
                    if self._can_halve(piece):
                        todo[:0] = piece.split(((piece.size or 0) + 1) // 2)
                        continue
                    meter = Meter(self.problem, None)
                    graph = self._build(piece, meter)
                self.problem.check_attention(piece, graph.total)
                plan.append(_Entry(piece.index, piece.start, piece.stop, graph if keeping else None, meter.bytes))
                unused &= graph.unused
                yield graph, keeping
                del graph
        self.problem.say_unused(unused)
        self._plan = plan

    def _later_pass(self, plan: list[_Entry], names: Sequence[str]) -> Iterator[tuple[Graph, bool]]:
        """Kept graphs as they are, the others rebuilt for just the parameters this product needs."""
        for entry, piece in self._cut(plan):
            if entry.graph is not None:
                yield entry.graph, True
            else:
                yield Graph(self.problem, piece, names), False

    def _cut(self, plan: list[_Entry]) -> Iterator[tuple[_Entry, Piece]]:
        """The data in the pieces of the plan."""
        entries = deque(plan)
        for piece in self.problem.pieces():
            while entries and entries[0].lies_in(piece):
                entry = entries.popleft()
                yield entry, piece if entry.stop is None else piece.part(entry.start, entry.stop)
        assert not entries  # the data is checked to be the same as in the first pass

    def prepare(self) -> None:
        """Build the graphs, if that was not done yet."""
        with self.problem.isolated():
            self._held()
            if self._plan is None:
                for _ in self._first_pass():
                    pass

    def pieces(self) -> Iterator[Piece]:
        """The data, cut so that the graph of each piece fits the memory budget."""
        with self.problem.isolated():
            self.prepare()
            assert self._plan is not None
            for _, piece in self._cut(self._plan):
                yield piece

    def _can_halve(self, piece: Piece) -> bool:
        """Whether a piece has more than one sample, and cutting it leaves the loss alone."""
        if (piece.size or 1) < 2 or self.problem.loss_function.couples_batch:
            return False
        try:
            self.problem.check_split(piece)
        except (CurvlensError, RuntimeError, ValueError, IndexError, TypeError):
            return False  # a model that does not take half a batch
        return True

    def _build(self, piece: Piece, meter: Meter) -> Graph:
        graph = meter.watch(lambda: Graph(self.problem, piece, self.problem.layout.names))
        for x in graph.tensors():
            meter.count(x)
        return graph


def engine_of(problem: Problem) -> Engine:
    """The engine of a problem: one for all its operators, so that they share graphs."""
    if problem._engine is None:
        problem._engine = Engine(problem)
    engine = problem._engine
    assert isinstance(engine, Engine)
    return engine
