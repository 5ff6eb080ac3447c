"""Pictures of results: a result in, a chart, a table for the terminal, or one page that needs nothing else out."""

from curvlens.report.plots import plot
from curvlens.report.profile_page import icicle

__all__ = ["icicle", "plot"]
