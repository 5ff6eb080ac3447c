"""`curvlens.analyze`: the curvature of a model within a budget, stored unit by unit, on one page."""

from curvlens.analysis.plan import Plan
from curvlens.analysis.result import Analysis, load_analysis
from curvlens.analysis.run import Now, analyze

__all__ = ["Analysis", "Now", "Plan", "analyze", "load_analysis"]
