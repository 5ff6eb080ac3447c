"""What a calculation may cost: time, or work in units of one gradient.

A gradient is a forward and a backward pass over all the data. By the matrix products alone (`docs/math.md`, "Costs"),
with graphs kept, a product with the Hessian or its functional part is 2 of it, one with a Gauss–Newton matrix 4/3, a
backward pass 2/3. These numbers are fixed, so that the same budget gives the same result on every machine; building
the graphs, about one gradient, is not counted.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Literal

from curvlens.errors import CurvlensError
from curvlens.operators import Operator
from curvlens.operators.algebra import Restricted, Scaled, Sum
from curvlens.operators.composition import Composed
from curvlens.operators.curvature import Curvature, GaussNewton

BACKWARD = 2 / 3
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"(\d+\.?\d*(?:e\d+)?)\s*(s|m|h|gradients?)(?:ec(?:ond)?s?|in(?:ute)?s?|ours?|rs?)?")


@dataclass(frozen=True)
class Limit:
    """So many seconds, or so many gradients."""

    amount: float
    unit: Literal["seconds", "gradients"]
    text: str

    def __str__(self) -> str:
        return self.text


def limit(budget: str | float | None) -> Limit | None:
    """``"2m"``, ``"90s"``, ``"1h"``, a number of seconds, or ``"200 gradients"``.

    >>> limit("2m").amount, limit("200 gradients").unit
    (120.0, 'gradients')
    """
    if budget is None:
        return None
    if isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 < budget < float("inf"):
        return Limit(float(budget), "seconds", f"{budget:g}s")
    text = budget.strip() if isinstance(budget, str) else ""
    match = _PATTERN.fullmatch(text)
    if match is None or not float(match[1]) > 0:
        raise CurvlensError(
            f"budget={budget!r}, expected a time, as '90s', '2m' or '1h', or a cost, as '200 gradients'."
        )
    if match[2].startswith("gradient"):
        return Limit(float(match[1]), "gradients", text)
    return Limit(float(match[1]) * _SECONDS[match[2]], "seconds", text)


def gradients(operator: Operator) -> float:
    """What one product costs, in gradients; of a sum, what its terms cost."""
    if isinstance(operator, GaussNewton):
        return 4 / 3
    if isinstance(operator, Curvature):
        return 2.0
    if isinstance(operator, (Scaled, Restricted)):
        return gradients(operator.inner)
    if isinstance(operator, Composed):
        return sum(map(gradients, operator.factors))
    return sum(gradients(term) for term, _ in operator.terms) if isinstance(operator, Sum) else 0.0


class Spending:
    """What was spent of a limit, and how many steps of equal cost are left."""

    def __init__(self, bound: Limit | None, cost: float) -> None:
        if bound is not None and bound.unit == "gradients" and not cost:
            raise CurvlensError(
                f"budget={bound.text!r} counts gradients, and the operator belongs to no problem that has one. Give a "
                "time, as budget='2m'."
            )
        self.limit, self.cost, self.steps = bound, cost, 0
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """In the unit of the limit; seconds, if there is none."""
        if self.limit is not None and self.limit.unit == "gradients":
            return self.steps * self.cost
        return time.monotonic() - self._start

    def left(self) -> float:
        """Steps that still fit; as many as one likes without a limit, and two before the first was timed."""
        if self.limit is None:
            return float("inf")
        step = self.cost if self.limit.unit == "gradients" else self.spent / self.steps if self.steps else 0.0
        return max((self.limit.amount - self.spent) / step, 0.0) + 1e-9 if step else 2.0

    def __str__(self) -> str:
        """``198 of 200 gradients``."""
        if self.limit is None:
            return ""
        if self.limit.unit == "gradients":
            return f"{self.spent:.4g} of {self.limit.amount:g} gradients"
        return f"{self.spent:.3g}s of {self.limit}"


def readable_time(seconds: float) -> str:
    """A time for people.

    >>> readable_time(8.2), readable_time(130), readable_time(9000)
    ('8 s', '2.2 min', '2.5 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} s"
