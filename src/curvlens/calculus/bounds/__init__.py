"""Upper bounds on the spectral norm of the Hessian of a layer, and of a whole block: always valid, seldom attained.

‖H‖₂ is at most the norm of a small matrix that has a bound for each block (`docs/explanation/math.md`, "Bounds"). A
bound is a
worst case: it says what curvature cannot exceed, and is no estimate of the largest eigenvalue. `Bound.tightness`
compares it with the true norm; a closed form's ``norm()`` is another one, the Frobenius norm.
"""

from curvlens.calculus.bounds.bound import Bound
from curvlens.calculus.bounds.of_attention import SOFTMAX, SOFTMAX_SECOND, attention
from curvlens.calculus.bounds.of_block import block
from curvlens.calculus.bounds.of_feedforward import feedforward
from curvlens.calculus.bounds.of_norm import norm

__all__ = ["SOFTMAX", "SOFTMAX_SECOND", "Bound", "attention", "block", "feedforward", "norm"]
