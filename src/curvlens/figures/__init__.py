"""Pictures of results: a result in, one page that needs nothing else out."""

from curvlens.figures.icicle import MARK, icicle

__all__ = ["MARK", "icicle"]
