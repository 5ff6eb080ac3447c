"""What a gradient and the products take on this machine: the seconds that a schedule will take."""

from __future__ import annotations

from dataclasses import dataclass

from curvlens.analysis.schedule import LIKE, OVERHEAD, PARTS, SETTING_UP, Step, share
from curvlens.study import Record

BETWEEN = 1.2
"""A pass between other work over the same pass repeated, which is what was timed: on three small models 1.0 to 1.4."""


@dataclass(frozen=True)
class Clock:
    """Measured seconds. A schedule has fixed costs, so that it is the same on every machine; its time is found here."""

    gradient: float
    products: dict[str, float]
    """Of a product with H, and with G where the loss has one."""
    overhead: float
    """The part of a gradient that does not shrink with the samples."""
    setup: float
    """Of a problem on a part of the data, beyond what its passes take: most of it for a small model."""
    took: float
    """Of the measurement itself."""

    @classmethod
    def of(cls, record: Record, samples: int) -> Clock:
        """From the unit that measured them."""
        gradient = max(float(record.result["gradient"]), 1e-6)
        products = {letter: float(record.result[letter]) for letter in ("H", "G") if letter in record.result}
        one, overhead = record.result.get("sample"), OVERHEAD
        if one is not None and samples > 1:
            overhead = min(max((float(one) / gradient - 1 / samples) / (1 - 1 / samples), 0.0), 1.0)
        passes = SETTING_UP * gradient * share(1 / samples, overhead)
        return cls(gradient, products, overhead, max(record.result.get("part", 0.0) - passes, 0.0), record.seconds)

    def seconds(self, step: Step) -> float:
        """What a step is expected to take."""
        if step.unit.kind == "clock":
            return self.took
        each = self.products.get(step.like, self.gradient * LIKE[step.like]) / LIKE[step.like]
        passes = step.cost * each * share(step.part, self.overhead) / share(step.part, OVERHEAD)
        return BETWEEN * (passes + self.setup * (step.unit.kind in PARTS))
