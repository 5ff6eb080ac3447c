"""Curvature attribution: the part of every module in the curvature of a model."""

from curvlens.profiling.depth import propagation
from curvlens.profiling.forecast import Forecast
from curvlens.profiling.profiler import profile

__all__ = ["Forecast", "profile", "propagation"]
