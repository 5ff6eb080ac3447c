"""Forecast of a profile's memory and time, made before the first probe and kept within a budget."""

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
"""Bytes that vectors may always take, if a quarter of the budget is at least as much."""
BUILDS = 6.0
"""The cost of a probe, in units of the time for building the recordings."""
SLICE = 1 << 16
"""How many entries of vectors are multiplied at a time, in float64."""
CUTS = 8
"""How many times smaller pieces of the data are tried."""


@dataclass(frozen=True)
class Forecast:
    """The expected memory and time of a profile. ``str`` is a line for people."""

    parameters: int
    probes: int
    group: int
    """The number of probes that go through the model together."""
    pieces: int
    """The number of pieces of the data."""
    memory: int
    """The peak in bytes, beyond what the process held before the profile."""
    seconds: float
    """The time for the probes. The time for eigenvalues is not known beforehand."""
    search: int
    """The part of ``memory`` for the search for the largest eigenvalue, in bytes; 0 without a search."""

    def __str__(self) -> str:
        cut = "" if self.pieces == 1 else f", data in {self.pieces} pieces"
        more = ", then the largest eigenvalue" if self.search else ""
        return (
            f"{self.probes} probes, {self.parameters:,} parameters, {self.group} probes at a time{cut}: about "
            f"{readable_time(self.seconds)}{more}; memory up to {readable(self.memory)}"
        )


@dataclass(frozen=True)
class ProfileBytes:
    """The memory of a profile in bytes, as measured in the first pass over the data."""

    vector: int
    kept: int
    """Kept graphs and recordings, and the copy of the parameters that detects changes."""
    graph: int
    """The largest graph that is rebuilt for each call; 0 if all are kept."""
    recording: int
    """The largest recording that is rebuilt for each call; 0 if all are kept."""
    forms: int
    """The memory of one probe and its product with H in the tangent pass."""
    outputs: int
    total: int
    """One sum over the pieces of the data; in float64 if there are several."""
    sliced: int
    """Slices of vectors in float64, for each probe: for inner products of z, of H z, and of both."""

    @classmethod
    def of(cls, problem: Problem, recordings: Recordings) -> ProfileBytes:
        """Measure after the first pass of the recordings."""
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
        """The peak during the probes, with ``group`` of them at a time."""
        z, Hz = group * self.vector, group * self.vector
        # kept graphs: products one by one; a rebuilt graph serves all products, and is freed before the results
        product = 2 * self.outputs + (self.graph + group * self.total if self.graph else Hz + self.total)
        forms = Hz + max(self.recording + group * self.forms, group * self.sliced)
        return self.kept + z + max(product, forms)

    def beside(self, needs: Needs) -> int:
        """The memory held beside a search: kept recordings, and outputs in use."""
        return max(self.kept - needs.product.kept, 0) + 2 * self.outputs

    def top(self, needs: Needs, search: int) -> int:
        """The peak of a search for eigenvalues with ``search`` bytes, and of the forms after it."""
        return max(self.beside(needs) + search, self.kept + 2 * self.vector + self.recording + self.forms)


def prepared(
    problem: Problem, samples: int, *, search: bool, memory: int | float | str | None
) -> tuple[Problem, Recordings, Forecast]:
    """The problem and its recordings, in pieces that fit the memory, and the forecast. Raise an error if none fit."""
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
    """The same problem with graphs of its own and this memory budget."""
    return problem._with(problem._evaluation.within(memory))


def _group(samples: int, problem: Problem) -> int:
    """The number of probes that go through the model together: more pairs give better norms."""
    # vectors, two for each probe, take half the memory of a kept graph, or `LITTLE`
    held = max(problem._evaluation.cache.kept_bytes // 2, min(problem.memory // 4, LITTLE))
    return min(samples, MOST_TOGETHER, max(FEWEST_TOGETHER, held // (2 * problem.layout.size * problem.dtype.itemsize)))


def _needs(problem: Problem) -> Needs:
    """The memory for the search for the two largest eigenvalues."""
    products = CountedOperator(hessian(problem), symmetric=True)
    return Needs.of(products, min(2, products.n), 1, products.dtype, "device")


def _too_little(problem: Problem, needed: int, limit: int, what: str, instead: str = "") -> CurvlensError:
    vector = readable(problem.layout.size * problem.dtype.itemsize)
    return CurvlensError(
        f"A profile of {problem.layout.size:,} parameters needs {readable(needed)} for {what} (a vector has {vector}), "
        f"{readable(limit)} are allowed. {instead}Raise memory=, give fewer or shorter sequences, or profile some "
        "parameters: Problem(..., params='h.0')."
    )
