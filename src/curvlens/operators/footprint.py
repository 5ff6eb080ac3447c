"""The memory that products with an operator take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from curvlens.operators.algebra import Restricted, Scaled, Sum
from curvlens.operators.base import Operator
from curvlens.operators.composition import Composed
from curvlens.operators.curvature import Curvature


@dataclass(frozen=True)
class Footprint:
    """Bytes, as far as they are known beforehand. The memory of the model's own layers is not included."""

    kept: int
    """Held from the first product on: graphs, and the copy of the model that detects changes."""
    work: int
    """Held during a product, including its result and excluding its argument."""
    spare: int = 0
    """The part of ``kept`` that a smaller budget for graphs would free. The graph of one piece is always needed."""


def footprint(operator: Operator) -> Footprint:
    """The memory for products with one vector. This builds the graphs, which the first product would build anyway."""
    vector = operator.shape[0] * operator.dtype.itemsize
    if isinstance(operator, Curvature):
        return _of_curvature(operator)
    if isinstance(operator, Scaled):
        inner = footprint(operator.inner)
        return replace(inner, work=max(inner.work, 2 * vector))
    if isinstance(operator, Sum):
        one, other = (footprint(term) for term, _ in operator.terms)
        work = max(one.work, vector + other.work, 3 * vector)
        return _together([term for term, _ in operator.terms], [one, other], work)
    if isinstance(operator, Composed):
        parts = [footprint(factor) for factor in operator.factors]
        return _together(operator.factors, parts, vector + max(part.work for part in parts))
    if isinstance(operator, Restricted):
        inner = footprint(operator.inner)
        return replace(inner, work=inner.work + operator.inner.shape[1] * operator.dtype.itemsize + vector)
    return Footprint(0, 2 * vector)


def _together(operators: Sequence[Operator], parts: Sequence[Footprint], work: int) -> Footprint:
    """The memory of several operators; shared graphs count once."""
    owners = {_owner(operator): part for operator, part in zip(operators, parts, strict=True)}
    return Footprint(sum(part.kept for part in owners.values()), work, sum(part.spare for part in owners.values()))


def _owner(operator: Operator) -> int:
    """The identity of what owns the graphs: operators of one problem share them."""
    while isinstance(operator, (Scaled, Restricted)):
        operator = operator.inner
    return id(getattr(operator, "problem", operator))


def _of_curvature(operator: Curvature) -> Footprint:
    problem = operator.problem
    cache = problem._evaluation.cache
    cache.prepare()
    whole = operator.rows.whole.size
    vector, exact = whole * operator.dtype.itemsize, whole * torch.float64.itemsize
    # One piece: its terms and the result. Several: the terms of two pieces when the float64 sum begins.
    work = 2 * vector if cache.n_pieces == 1 else 2 * vector + exact
    if operator.rows.size != whole:
        work += operator.columns.whole.size * operator.dtype.itemsize + operator.rows.size * operator.dtype.itemsize
    spare = max(cache.kept_bytes - cache.largest_bytes, 0)
    return Footprint(cache.kept_bytes + cache.point_bytes, work + cache.rebuilt_bytes, spare)
