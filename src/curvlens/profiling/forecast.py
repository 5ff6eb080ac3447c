"""What a profile will take, in memory and time: told before the first probe, and kept within a budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from curvlens._evaluation.recordings import Recordings
from curvlens.errors import CurvlensError
from curvlens.linalg.counted import CountedOperator
from curvlens.linalg.needs import Needs
from curvlens.linalg.plan import ROOMY, SMALL
from curvlens.memory import available_bytes, parse_bytes, readable
from curvlens.operators.hessian import hessian
from curvlens.operators.modules import recordings_of
from curvlens.problem import Problem
from curvlens.study.budget import readable_time

logger = logging.getLogger("curvlens")

FEWEST_TOGETHER, MOST_TOGETHER = 2, 64
"""Norms need pairs of probes, so no group has a single one. An interrupt loses the work of a group, so none is long."""
LITTLE = 1 << 27
"""Bytes that vectors may take in any case, if a quarter of the budget is as much."""
BUILDS = 6.0
"""What a probe costs, in the time that building the recordings takes."""
SLICE = 1 << 16
"""Entries of vectors that are multiplied at a time, in float64."""
CUTS = 8
"""How often smaller pieces of the data are tried."""


@dataclass(frozen=True)
class Forecast:
    """What a profile will take. ``str`` is a line for people."""

    parameters: int
    probes: int
    group: int
    """Probes that go through the model together."""
    pieces: int
    """Into how many the data is cut."""
    memory: int
    """Peak, in bytes, above what the process held when the profile was asked for."""
    seconds: float
    """For the probes. How long eigenvalues take is not known beforehand."""
    search: int
    """Bytes of it for the search for the largest eigenvalue; 0 if it is not sought."""

    def __str__(self) -> str:
        cut = "" if self.pieces == 1 else f", data in {self.pieces} pieces"
        more = ", then the largest eigenvalue" if self.search else ""
        return (
            f"{self.probes} probes, {self.parameters:,} parameters, {self.group} probes at a time{cut}: about "
            f"{readable_time(self.seconds)}{more}; memory up to {readable(self.memory)}"
        )


@dataclass(frozen=True)
class ProfileBytes:
    """What a profile holds, in bytes, as the first pass over the data found it."""

    vector: int
    kept: int
    """Kept graphs and recordings, and the copy of the parameters that they are compared with."""
    graph: int
    """The largest graph that is built anew for each call; 0 if all are kept."""
    recording: int
    """The same of recordings."""
    forms: int
    """What one probe and H times it need in the tangent pass."""
    outputs: int
    total: int
    """One sum over the pieces of the data: in float64 if there are several."""
    sliced: int
    """Slices of vectors in float64, for each probe: inner products of probes, H times them, and both together."""

    @classmethod
    def of(cls, problem: Problem, recordings: Recordings) -> ProfileBytes:
        """After their first pass."""
        cache = problem._evaluation.cache
        vector = problem.layout.size * problem.dtype.itemsize
        return cls(
            vector=vector,
            kept=cache.kept_bytes + recordings.kept_bytes + vector,
            graph=cache.largest_bytes if cache.rebuilds else 0,
            recording=0 if recordings.kept_bytes else recordings.largest_bytes,
            forms=recordings.forms_bytes,
            outputs=recordings.output_bytes,
            total=vector if cache.n_pieces < 2 else vector + 8 * problem.layout.size,
            sliced=5 * 8 * min(problem.layout.size, SLICE),
        )

    def probes(self, group: int) -> int:
        """The peak of the probes, so many at a time."""
        z, Hz = group * self.vector, group * self.vector
        # where graphs are kept products come one by one; one that is rebuilt serves all, and is gone before the results
        product = 2 * self.outputs + (self.graph + group * self.total if self.graph else Hz + self.total)
        forms = Hz + max(self.recording + group * self.forms, group * self.sliced)
        return self.kept + z + max(product, forms)

    def beside(self, needs: Needs) -> int:
        """What is held beside a search: the recordings that are kept, and outputs in work."""
        return max(self.kept - needs.product.kept, 0) + 2 * self.outputs

    def top(self, needs: Needs, search: int) -> int:
        """The peak of a search for eigenvalues that takes so many bytes, and of the forms that follow it."""
        return max(self.beside(needs) + search, self.kept + 2 * self.vector + self.recording + self.forms)


def prepared(
    problem: Problem, samples: int, *, search: bool, memory: int | float | str | None
) -> tuple[Problem, Recordings, Forecast]:
    """A problem and its recordings, in pieces that fit, and what a profile of them will take; or an error."""
    limit = available_bytes(problem.device) if memory is None else parse_bytes(memory)
    vector = problem.layout.size * problem.dtype.itemsize
    # the copy of the parameters, one gradient as a graph, and two probes with their products
    least = 6 * vector
    if least > limit:
        raise _too_little(problem, least, limit, "probes alone")
    inner = problem if memory is None else _with_memory(problem, min(problem.memory, (limit - least) // 2))
    for _ in range(CUTS):
        recordings = recordings_of(inner)
        recordings.known()
        sizes, pieces = ProfileBytes.of(inner, recordings), inner._evaluation.cache.n_pieces
        needs = _needs(inner) if search and not recordings.blocked else None
        probes = sizes.probes(FEWEST_TOGETHER)
        top = 0 if needs is None else sizes.top(needs, needs.total(needs.fewest))
        if max(probes, top) <= limit or not inner.memory:
            break
        inner = _with_memory(problem, min(inner.memory // 2, limit - min(limit, least)))
    if probes > limit:
        cut = "" if pieces < 2 else f", with the data in {pieces} pieces"
        raise _too_little(problem, probes, limit, f"probes{cut}")
    if top > limit:
        raise _too_little(problem, top, limit, "the largest eigenvalue", "Leave it out: top=False. ")
    group = _group(samples, inner)
    while group > FEWEST_TOGETHER and sizes.probes(group) > limit:
        group -= 1
    basis = 0
    if needs is not None:
        n = problem.layout.size
        most = needs.total(n if n <= SMALL else ROOMY)
        room = limit - sizes.beside(needs)
        basis = max(min(most, min(limit // 4, room) if memory is None else room), needs.total(needs.fewest))
    rebuilt = (bool(sizes.graph) + bool(sizes.recording)) * -(-samples // group)
    forecast = Forecast(
        parameters=problem.layout.size,
        probes=samples,
        group=group,
        pieces=max(pieces, 1),
        memory=max(sizes.probes(group), 0 if needs is None else sizes.top(needs, basis)),
        seconds=recordings.seconds * (BUILDS * samples + rebuilt),
        search=basis,
    )
    logger.info("profile: %s", forecast)
    return inner, recordings, forecast


def _with_memory(problem: Problem, memory: int) -> Problem:
    """The same problem, with graphs of its own that take so much."""
    return problem._with(problem._evaluation.within(memory))


def _group(samples: int, problem: Problem) -> int:
    """How many probes go through the model together: the more meet, the better for norms."""
    # vectors, two a probe, take half of what a kept graph does, or little
    held = max(problem._evaluation.cache.kept_bytes // 2, min(problem.memory // 4, LITTLE))
    return min(samples, MOST_TOGETHER, max(FEWEST_TOGETHER, held // (2 * problem.layout.size * problem.dtype.itemsize)))


def _needs(problem: Problem) -> Needs:
    """What the search for the two largest eigenvalues takes."""
    products = CountedOperator(hessian(problem), symmetric=True)
    return Needs.of(products, min(2, products.n), 1, products.dtype, "device")


def _too_little(problem: Problem, needed: int, limit: int, what: str, instead: str = "") -> CurvlensError:
    vector = readable(problem.layout.size * problem.dtype.itemsize)
    return CurvlensError(
        f"A profile of {problem.layout.size:,} parameters needs {readable(needed)} for {what} (a vector has {vector}), "
        f"{readable(limit)} are allowed. {instead}Raise memory=, give fewer or shorter sequences, or profile some "
        "parameters: Problem(..., params='h.0')."
    )
