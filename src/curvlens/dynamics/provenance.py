"""Where a result of this package comes from."""

from __future__ import annotations

from typing import Any

from curvlens.linalg.counted import CountedOperator
from curvlens.operators import hessian
from curvlens.problem import Problem


def provenance(problem: Problem, **more: Any) -> dict[str, Any]:
    """The problem and the versions, as results of operators have them."""
    return CountedOperator(hessian(problem), symmetric=True).provenance(**more)
