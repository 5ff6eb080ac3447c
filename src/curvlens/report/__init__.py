"""Pictures of results: charts, tables for the terminal, and self-contained HTML pages."""

from curvlens.report.plots import plot
from curvlens.report.profile_page import icicle

__all__ = ["icicle", "plot"]
