"""curvlens: the exact curvature instrument for Transformers.

Names are imported when they are first used: ``import curvlens`` and ``curvlens --help`` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlens import (
        assembly,
        calculus,
        data,
        dynamics,
        losses,
        models,
        operators,
        results,
        sdpa,
        study,
        testing,
    )
    from curvlens.analysis.compare import compare
    from curvlens.analysis.run import analyze
    from curvlens.blocks import Family, Rule
    from curvlens.checkup import doctor
    from curvlens.dynamics.attribute import attribute
    from curvlens.dynamics.stability import stability
    from curvlens.errors import CurvlensError, CurvlensWarning
    from curvlens.linalg.density import density
    from curvlens.linalg.eigs import eigs
    from curvlens.linalg.estimators import diagonal, frobenius, trace
    from curvlens.operators.activations import activation_hessian
    from curvlens.operators.base import Operator
    from curvlens.operators.fisher import empirical_fisher, fisher
    from curvlens.operators.functional import functional
    from curvlens.operators.ggn import ggn
    from curvlens.operators.hessian import hessian
    from curvlens.precision import keep_dtype
    from curvlens.problem import Problem
    from curvlens.profiling import profile, propagation
    from curvlens.results import Estimate, load
    from curvlens.sdpa import second_order

    __version__: str

_PACKAGES = {
    *("assembly", "calculus", "data", "dynamics", "losses", "models", "operators", "results", "sdpa", "study"),
    "testing",
}
_HOMES = {
    "analysis": ["analyze", "compare"],
    "blocks": ["Family", "Rule"],
    "checkup": ["doctor"],
    "dynamics": ["attribute", "stability"],
    "errors": ["CurvlensError", "CurvlensWarning"],
    "linalg": ["density", "diagonal", "eigs", "frobenius", "trace"],
    "operators": ["Operator", "activation_hessian", "empirical_fisher", "fisher", "functional", "ggn", "hessian"],
    "precision": ["keep_dtype"],
    "problem": ["Problem"],
    "profiling": ["profile", "propagation"],
    "results": ["Estimate", "load"],
    "sdpa": ["second_order"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CurvlensError",
    "CurvlensWarning",
    "Estimate",
    "Family",
    "Operator",
    "Problem",
    "Rule",
    "__version__",
    "activation_hessian",
    "analyze",
    "assembly",
    "attribute",
    "calculus",
    "compare",
    "data",
    "density",
    "diagonal",
    "doctor",
    "dynamics",
    "eigs",
    "empirical_fisher",
    "fisher",
    "frobenius",
    "functional",
    "ggn",
    "hessian",
    "keep_dtype",
    "load",
    "losses",
    "models",
    "operators",
    "profile",
    "propagation",
    "results",
    "sdpa",
    "second_order",
    "stability",
    "study",
    "testing",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"curvlens.{name}")
    if name in _HOME:
        value = getattr(import_module(f"curvlens.{_HOME[name]}"), name)
    elif name == "__version__":
        value = import_module("importlib.metadata").version("curvlens")
    else:
        raise AttributeError(f"module 'curvlens' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
