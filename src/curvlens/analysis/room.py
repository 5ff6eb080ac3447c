"""The memory of each step of an analysis, before any is done."""

from __future__ import annotations

from curvlens.analysis.instrument import KEPT
from curvlens.analysis.schedule import Step
from curvlens.linalg.plan import FEW, ROOMY, SMALL
from curvlens.linalg.vectors import LONG
from curvlens.problem import Problem
from curvlens.profiling.forecast import prepared

IN_A_PRODUCT, RECORDED = 1.0, 2.0
"""What a product takes beside a kept graph, over this graph; and what recordings and tangents take."""
DOCTOR = 8
"""Vectors that the doctor holds while it compares derivatives with differences."""
SHARPER = 12
"""Eigenvectors that stay: 2 of the first search, 10 of the second."""


class Room:
    """Bytes beside the model: kept graphs, working vectors, and what a kind of unit holds on top."""

    def __init__(self, problem: Problem) -> None:
        cache = problem._evaluation.cache
        cache.prepare()  # builds the graphs, as the first product would
        self.problem = problem
        self.n = problem.layout.size
        self.vector = self.n * problem.dtype.itemsize
        self.graph = max(cache.largest_bytes, 1)
        self.kept = cache.kept_bytes + cache.point_bytes
        self._profiles: dict[int, int] = {}

    def of(self, step: Step) -> int:
        """The peak while a step is done."""
        config, kind = step.unit.config, step.unit.kind
        n: int = self.problem.blocks[config["block"]].size if config.get("block") else self.n
        vector = n * self.problem.dtype.itemsize
        found = SHARPER * self.vector if step.stage in ("sharp", "block ends", "spectra") else 0
        held = self.kept + found
        product = 3 * self.vector + int(IN_A_PRODUCT * self.graph)
        if kind in ("eigs", "ends", "stability", "adam"):
            k = int(config.get("k", 1)) * (2 if config.get("operator", "H") == "H" else 1)
            most = n if n <= SMALL else ROOMY if n <= LONG else max(FEW, k + FEW - 1, 3 * k)
            return held + product + (min(most, int(config["most"])) + k) * vector
        if kind == "density":
            return held + product + (int(config["steps"]) + 1) * vector
        if kind in ("block", "whole", "sharp-part"):
            samples = int(config["samples"])
            return held + product + min(samples * 2 * vector, KEPT) + (samples // 2) * vector
        if kind == "profile":
            return held - self.kept + self._profile(int(config["samples"]))
        if kind == "depth":
            return held + 3 * self.vector + int(RECORDED * self.graph)
        if kind == "doctor":
            return held + DOCTOR * self.vector + self.graph
        if kind == "noise":
            return held + 8 * 9 * self.n + self.graph
        return held + product + 2 * self.vector

    def _profile(self, samples: int) -> int:
        """What a profile announces itself, after one recorded pass."""
        if samples not in self._profiles:
            try:
                _, self._recordings, forecast = prepared(self.problem, samples, search=False, memory=None)
                found = forecast.memory
            except Exception:  # the profile will say why; a plan is no place for it
                found = self.kept + 7 * self.vector + int(RECORDED * self.graph)
            self._profiles[samples] = found
        return self._profiles[samples]
