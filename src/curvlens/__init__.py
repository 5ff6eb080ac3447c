"""curvlens: the exact curvature instrument for Transformers."""

from importlib.metadata import version

from curvlens import assembly, calculus, figures, losses
from curvlens.doctor import doctor
from curvlens.errors import CurvlensError, CurvlensWarning
from curvlens.linalg import density, diagonal, eigs, frobenius, trace
from curvlens.operators import Operator, empirical_fisher, fisher, functional, ggn, hessian
from curvlens.precision import keep_dtype
from curvlens.problem import Problem
from curvlens.profiling import profile
from curvlens.results import Estimate, load
from curvlens.sdpa import second_order

__version__ = version("curvlens")

__all__ = [
    "CurvlensError",
    "CurvlensWarning",
    "Estimate",
    "Operator",
    "Problem",
    "__version__",
    "assembly",
    "calculus",
    "density",
    "diagonal",
    "doctor",
    "eigs",
    "empirical_fisher",
    "figures",
    "fisher",
    "frobenius",
    "functional",
    "ggn",
    "hessian",
    "keep_dtype",
    "load",
    "losses",
    "profile",
    "second_order",
    "trace",
]
