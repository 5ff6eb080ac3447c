"""curvlens: the exact curvature instrument for Transformers."""

from importlib.metadata import version

from curvlens import calculus, losses
from curvlens.errors import CurvlensError, CurvlensWarning
from curvlens.operators import Operator, empirical_fisher, fisher, functional, ggn, hessian
from curvlens.precision import keep_dtype
from curvlens.problem import Problem
from curvlens.sdpa import second_order

__version__ = version("curvlens")

__all__ = [
    "CurvlensError",
    "CurvlensWarning",
    "Operator",
    "Problem",
    "__version__",
    "calculus",
    "empirical_fisher",
    "fisher",
    "functional",
    "ggn",
    "hessian",
    "keep_dtype",
    "losses",
    "second_order",
]
