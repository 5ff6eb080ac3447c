"""Curvature attribution: where the curvature of a model comes from."""

from curvlens.profiling.depth import propagation
from curvlens.profiling.forecast import Forecast
from curvlens.profiling.profiler import profile

__all__ = ["Forecast", "profile", "propagation"]
