"""`curvlens.analyze`: the curvature of a model within a budget, stored unit by unit, on one page."""

from curvlens.analysis.compare import Comparison, compare
from curvlens.analysis.plan import Plan
from curvlens.analysis.result import Analysis, load_analysis
from curvlens.analysis.run import Now, analyze

__all__ = ["Analysis", "Comparison", "Now", "Plan", "analyze", "compare", "load_analysis"]
