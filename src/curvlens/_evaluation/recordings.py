"""The data of an evaluation as recordings, one for each piece (`curvlens._evaluation.recording`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from curvlens._evaluation.meter import built
from curvlens._evaluation.pieces import Piece
from curvlens._evaluation.point import Point
from curvlens._evaluation.recording import Recording
from curvlens.errors import CurvlensError

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation


class Recordings:
    """The data as recordings. They are kept while they fit the memory budget, otherwise rebuilt for every pass."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.kinds: dict[str, str] = {}
        """By path: the class of the module, or the step of attention. Known after the first pass."""
        self.hidden: dict[str, str] = {}
        """Modules that ran where no cut is possible, and their callers. Known after the first pass."""
        self.blocked: dict[str, str] = {}
        """Paths that cannot be differentiated twice, with the reason."""
        self.adds_up = False
        """Whether G and all functional parts were checked to add up to H."""
        self.kept_bytes = self.largest_bytes = self.forms_bytes = self.output_bytes = 0
        """In bytes, after a pass: all kept recordings; the largest one; its `Recording.forms_bytes`; its outputs."""
        self.seconds = 0.0
        """The time that building them took."""
        self._kept: list[Recording] | None = None
        self._point: Point | None = None

    def __iter__(self) -> Iterator[Recording]:
        with self.evaluation.isolated():
            point = self.evaluation.cache.point()
            if self._point is not point:
                self._kept, self._point = None, point
            if self._kept is not None:
                self.evaluation.data.check_unchanged()
            for recording in self._built() if self._kept is None else self._kept:
                yield recording
                self.blocked.update(recording.blocked)
                del recording  # before the next one is built

    def _built(self) -> Iterator[Recording]:
        evaluation, kept, pieces = self.evaluation, list[Recording](), self._pieces()
        room = before = evaluation.memory - evaluation.cache.kept_bytes
        self.seconds = 0.0
        for piece in pieces:
            started = time.perf_counter()
            recording, size = built(evaluation, partial(Recording, evaluation, piece), None)
            self.seconds += time.perf_counter() - started
            self.largest_bytes = max(self.largest_bytes, size)
            self.forms_bytes = max(self.forms_bytes, recording.forms_bytes)
            self.output_bytes = max(self.output_bytes, sum(x.nbytes for x in recording.ends))
            self.kinds.update(recording.kinds)
            self.hidden.update(recording.hidden)
            room -= size
            if room >= 0:
                kept.append(recording)
            else:
                kept.clear()
            yield recording
            del recording
        self._kept = kept if room >= 0 else None
        self.kept_bytes = before - room if room >= 0 else 0

    def _pieces(self) -> Iterator[Piece]:
        cache = self.evaluation.cache
        try:
            cache.prepare()
        except CurvlensError:  # a model without a Hessian may still have parts that are known
            return self.evaluation.pieces()
        return cache.pieces()

    def known(self) -> dict[str, str]:
        """The kind of every path."""
        if not self.kinds:
            for _ in self:
                pass
        return self.kinds
