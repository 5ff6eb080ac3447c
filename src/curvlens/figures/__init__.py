"""Pictures of results: a result in, one page that needs nothing else out."""

from curvlens.figures.icicle import icicle

__all__ = ["icicle"]
