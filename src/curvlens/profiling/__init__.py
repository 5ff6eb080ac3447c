"""Curvature attribution: where the curvature of a model comes from."""

from curvlens.profiling.profile import profile

__all__ = ["profile"]
