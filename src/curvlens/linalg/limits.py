"""Budgets: time, or work in units of one gradient.

A gradient is a forward and a backward pass over all the data. Counting matrix products alone
(`docs/explanation/math.md`, "Costs"), and with graphs kept, a product with the Hessian or its functional part costs 2
gradients, one with a Gauss–Newton matrix 4/3, a backward pass 2/3. These numbers are fixed, so the same budget gives
the same result on every machine. Building the graphs, about one gradient, is not counted.
"""

from __future__ import annotations

import time

from curvlens.errors import CurvlensError
from curvlens.operators import Operator
from curvlens.operators.algebra import Restricted, Scaled, Sum
from curvlens.operators.composition import Composed
from curvlens.operators.curvature import Curvature, GaussNewton
from curvlens.study.budget import Budget

BACKWARD = 2 / 3


def gradients(operator: Operator) -> float:
    """The cost of one product in gradients; for a sum, the cost of its terms."""
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
    """The spent part of a budget, and the number of steps of equal cost that are left."""

    def __init__(self, budget: Budget | None, cost: float) -> None:
        if budget is not None and budget.gradients is not None and not cost:
            raise CurvlensError(
                f"budget={str(budget)!r} counts gradients, but the operator belongs to no Problem. Give a time: "
                "budget='2m'."
            )
        self.budget, self.cost, self.steps = budget, cost, 0
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """The amount spent, in the unit of the budget; in seconds if there is none."""
        if self.budget is not None and self.budget.gradients is not None:
            return self.steps * self.cost
        return time.monotonic() - self._start

    def left(self) -> float:
        """The number of steps that still fit: infinite without a budget, 2 until the first step is timed."""
        if self.budget is None:
            return float("inf")
        if self.budget.gradients is not None:
            amount, step = self.budget.gradients, self.cost
        else:
            amount, step = self.budget.seconds or 0.0, self.spent / self.steps if self.steps else 0.0
        return max((amount - self.spent) / step, 0.0) + 1e-9 if step else 2.0

    def __str__(self) -> str:
        """``198 of 200 gradients``."""
        if self.budget is None:
            return ""
        if self.budget.gradients is not None:
            return f"{self.spent:.4g} of {self.budget.gradients:g} gradients"
        return f"{self.spent:.3g}s of {self.budget}"
