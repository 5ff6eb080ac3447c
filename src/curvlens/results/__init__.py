"""What comes out: frozen numbers with their errors and where they come from, saved as JSON and safetensors."""

from curvlens.results.base import Result, load
from curvlens.results.density import Density
from curvlens.results.eigs import Eigs
from curvlens.results.estimate import ByBlock, Estimate
from curvlens.results.profile import Portion, Profile, Row
from curvlens.results.propagation import Amount, Level, Propagation
from curvlens.results.solution import Solution

__all__ = [
    "Amount",
    "ByBlock",
    "Density",
    "Eigs",
    "Estimate",
    "Level",
    "Portion",
    "Profile",
    "Propagation",
    "Result",
    "Row",
    "Solution",
    "load",
]
