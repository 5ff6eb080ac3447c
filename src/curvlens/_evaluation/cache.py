"""Keeps graphs or rebuilds them: one cache for products and for the profiler's recordings.

Building the graph of a piece costs a little more than one gradient. A product costs another 1.5 to 2.5. So graphs are
kept while they fit the memory budget. The others are rebuilt for each sum, and all vectors of the sum share them. A
piece that exceeds the budget alone is halved. The numbers are the same in every case: sums over pieces are in float64
and divided once.

Recordings (`curvlens._evaluation.recording`) use the same pieces. They are kept while something refers to them and all
of them fit into the budget that the graphs leave.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from curvlens._evaluation import setting
from curvlens._evaluation.graph import Graph, alive
from curvlens._evaluation.meter import OverBudgetError, built
from curvlens._evaluation.pieces import Piece
from curvlens._evaluation.point import Point
from curvlens._evaluation.recordings import Recordings

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation


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


class Cache:
    """The graphs of an evaluation, piece by piece."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = weakref.ref(evaluation)  # a cycle would keep the graphs until the garbage collector runs
        self._plan: list[_Entry] | None = None
        self._point: Point | None = None
        self._recordings: weakref.ref[Recordings] | None = None

    @property
    def evaluation(self) -> Evaluation:
        """The owning evaluation."""
        return alive(self._evaluation)

    @property
    def kept_bytes(self) -> int:
        """The size of the kept graphs in bytes."""
        return sum(entry.bytes for entry in self._plan or [] if entry.graph is not None)

    @property
    def largest_bytes(self) -> int:
        """The size of the largest graph of one piece, in bytes."""
        return max((entry.bytes for entry in self._plan or []), default=0)

    @property
    def rebuilt_bytes(self) -> int:
        """The size of the largest graph that is rebuilt for every sum, in bytes."""
        return max((entry.bytes for entry in self._plan or [] if entry.graph is None), default=0)

    @property
    def point_bytes(self) -> int:
        """The size of the copy of the model that graphs are compared with, in bytes."""
        return 0 if self._point is None else self._point.bytes

    @property
    def n_pieces(self) -> int:
        """The number of pieces of the data; 0 if it is not known yet."""
        return len(self._plan or [])

    @property
    def rebuilds(self) -> bool:
        """Whether some graphs are rebuilt for every sum."""
        return self._plan is not None and any(entry.graph is None for entry in self._plan)

    def release(self) -> None:
        """Drop all kept graphs; the next product builds them anew."""
        self._plan = None

    def held(self) -> list[Graph] | None:
        """All graphs, if all are kept and neither the model nor the data has changed since. Otherwise None."""
        if self._point is None or not self.evaluation.is_at(self._point):
            self._plan, self._point = None, self.evaluation.point()
        if self._plan is None or self.rebuilds:
            return None
        self.evaluation.data.check_unchanged()
        return [entry.graph for entry in self._plan if entry.graph is not None]

    def point(self) -> Point:
        """The present state of the model, as the copy that graphs are compared with."""
        self.held()
        assert self._point is not None
        return self._point

    def graphs(self, names: Sequence[str]) -> Iterator[Graph]:
        """All graphs in the order of the data. Rebuilt graphs have only the named parameters as leaves."""
        with self.evaluation.isolated():
            held = self.held()
            if held is not None:
                yield from held
            elif self._plan is None:
                yield from self._first_pass()
            else:
                ordered = [name for name in self.evaluation.layout.names if name in names]
                yield from self._later_pass(self._plan, ordered)

    def some(self, names: Sequence[str], only: Container[int]) -> Generator[Graph]:
        """The graphs of some pieces, by their places in the order of the data; none is kept."""
        with self.evaluation.isolated():
            for place, piece in enumerate(self.evaluation.pieces()):
                if place in only:
                    yield Graph(self.evaluation, piece, names)

    def recordings(self) -> Recordings:
        """The data as recordings. While something refers to them, the same object is returned."""
        found = None if self._recordings is None else self._recordings()
        if found is None:
            found = Recordings(self.evaluation)
            self._recordings = weakref.ref(found)
        return found

    def prepare(self) -> None:
        """Build the graphs, if that was not done yet."""
        with self.evaluation.isolated():
            self.held()
            if self._plan is None:
                for _ in self._first_pass():
                    pass

    def pieces(self) -> Iterator[Piece]:
        """The data, cut so that the graph of each piece fits the memory budget."""
        with self.evaluation.isolated():
            self.prepare()
            assert self._plan is not None
            for _, piece in self._cut(self._plan):
                yield piece

    def total_pieces(self) -> int | None:
        """The number of pieces of the data; None until the first pass is complete."""
        return None if self._plan is None else len(self._plan)

    def _first_pass(self) -> Iterator[Graph]:
        """Build every graph, keep those that fit, halve pieces that do not, and store the plan."""
        evaluation, plan = self.evaluation, list[_Entry]()
        unused, keeping = set(evaluation.layout.names), True
        for piece in evaluation.pieces():
            todo = [piece]
            while todo:
                piece = todo.pop(0)
                held = sum(entry.bytes for entry in plan if entry.graph is not None)
                build = partial(Graph, evaluation, piece, evaluation.layout.names)
                try:
                    graph, size = built(evaluation, build, evaluation.memory - held)
                except OverBudgetError:
                    keeping = False
                    if held:  # room for one transient graph, as large as the largest kept
                        next(entry for entry in reversed(plan) if entry.graph is not None).graph = None
                        todo.insert(0, piece)
                        continue
                    if self._can_halve(piece):
                        todo[:0] = piece.split(((piece.size or 0) + 1) // 2)
                        continue
                    graph, size = built(evaluation, build, None)
                setting.check_attention(evaluation, piece, graph.total)
                graph.kept = keeping
                plan.append(_Entry(*piece.place, graph if keeping else None, size))
                unused &= graph.unused
                yield graph
                del graph
        evaluation.say_unused(unused)
        self._plan = plan

    def _later_pass(self, plan: list[_Entry], names: Sequence[str]) -> Iterator[Graph]:
        """Kept graphs as they are. The others are rebuilt with only the parameters that this sum needs."""
        for entry, piece in self._cut(plan):
            yield Graph(self.evaluation, piece, names) if entry.graph is None else entry.graph

    def _cut(self, plan: list[_Entry]) -> Iterator[tuple[_Entry, Piece]]:
        """The data in the pieces of the plan."""
        entries = deque(plan)
        for piece in self.evaluation.pieces():
            while entries and entries[0].lies_in(piece):
                entry = entries.popleft()
                yield entry, piece if entry.stop is None else piece.part(entry.start, entry.stop)
        assert not entries  # `Data` checks that every pass gives the same batches

    def _can_halve(self, piece: Piece) -> bool:
        """Whether a piece has more than one sample, and cutting it does not change the loss."""
        if (piece.size or 1) < 2 or self.evaluation.loss_function.couples_batch:
            return False
        try:
            setting.check_cut(self.evaluation, piece)
        except Exception:
            return False  # the model does not accept half a batch
        return True
