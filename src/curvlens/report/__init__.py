"""Pictures of results: a result in, a chart or one page that needs nothing else out."""

from curvlens.report.icicle import icicle
from curvlens.report.plots import plot

__all__ = ["icicle", "plot"]
