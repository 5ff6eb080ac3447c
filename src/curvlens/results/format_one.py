"""Results saved in format 1, where texts said how a computation ended.

No other module reads such texts. Newer files have a `Status`.
"""

from __future__ import annotations

import math
from typing import Any

from curvlens.results.status import Status

STATUSES = {
    "stagnated": Status.STALLED,
    "negative curvature": Status.NEGATIVE_CURVATURE,
    "max_products": Status.STOPPED_AT_BUDGET,
}
"""Status texts of a solution in format 1 that differ from the present ones."""
BEGINNINGS = {
    "converged": Status.CONVERGED,
    "the basis spans": Status.CONVERGED,
    "stopped at max_products": Status.STOPPED_AT_BUDGET,
    "budget": Status.STOPPED_AT_BUDGET,
    "interrupted": Status.INTERRUPTED,
    "rtol=": Status.ACCURACY_NOT_REACHED,
    "residuals do not fall": Status.STALLED,
    "the residual no longer falls": Status.STALLED,
    "rounding": Status.STALLED,
    "the system is inconsistent": Status.INCONSISTENT,
    "A + damping is singular to rounding, and no": Status.INCONSISTENT,
    "A + damping is singular to rounding, and x": Status.STALLED,
    "a direction has no positive curvature": Status.NEGATIVE_CURVATURE,
    "not twice differentiable": Status.HAS_GAPS,
    "not measured": Status.NOT_MEASURED,
}
"""Beginnings of the texts."""


def upgraded(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result, converted to the present format."""
    known = {"Eigs": _eigs, "Solution": _solution, "Estimate": _estimate, "ByBlock": _by_block}
    known |= {"Density": _density, "Profile": _profile}
    return known[kind](dict(fields)) if kind in known else fields


def _said(text: Any) -> Status | None:
    """The status that a text describes; None if it describes none. The first known part of the text decides."""
    for part in str(text).split("; "):
        for beginning, status in BEGINNINGS.items():
            if part.startswith(beginning):
                return status
    return None


def _noted(fields: dict[str, Any]) -> dict[str, Any]:
    """Rename ``why`` to ``note``, and leave it empty if the computation succeeded."""
    if "why" in fields:
        why = fields.pop("why")
        fields["note"] = "" if why == "converged" else why
    return fields


def _eigs(fields: dict[str, Any]) -> dict[str, Any]:
    status = _said(fields["why"])
    if status is None:
        raise ValueError(f"why is {fields['why']!r}, which does not say how it ended")
    return {**_noted(fields), "status": status}


def _solution(fields: dict[str, Any]) -> dict[str, Any]:
    converged = fields.pop("converged")
    said: Any = fields.get("status", _said(fields["why"]))
    status = Status.CONVERGED if converged else STATUSES.get(said, said or Status.STALLED)
    return {**_noted(fields), "status": status}


def _estimate(fields: dict[str, Any]) -> dict[str, Any]:
    status = _said(fields.get("note", ""))
    exact = math.isinf(fields.get("dof", math.inf))
    return {**fields, "status": status or (Status.EXACT if exact else Status.SAMPLED)}


def _by_block(fields: dict[str, Any]) -> dict[str, Any]:
    note = str(fields.get("note", ""))
    if "interrupted" in note:
        return {**fields, "status": Status.INTERRUPTED}
    return {**fields, "status": Status.STOPPED_AT_BUDGET} if "Not measured" in note else fields


def _density(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "status": Status.SAMPLED if fields["probes"] else Status.EXACT}


def _profile(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "status": _said(fields.get("note", "")) or Status.SAMPLED}
