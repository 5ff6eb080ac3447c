"""Whole networks from closed forms: primitives with two derivatives, and the exact Hessian of their composition.

No derivative is taken by automatic differentiation.
"""

from curvlens.assembly.network import Network
from curvlens.assembly.plain import block, stack
from curvlens.assembly.readers import read
from curvlens.assembly.result import NetworkHessian

__all__ = ["Network", "NetworkHessian", "block", "read", "stack"]
