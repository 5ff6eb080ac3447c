"""Upper bounds on the spectral norm of the Hessian of a layer or a whole block: always valid, rarely attained.

‖H‖₂ is at most the norm of a small matrix of bounds on its blocks (`docs/explanation/math.md`, "Bounds"). A bound is a
worst case: curvature cannot exceed it. It is no estimate of the largest eigenvalue. `Bound.tightness` compares it with
the true spectral norm. The ``norm()`` of a closed form is the Frobenius norm.
"""

from curvlens.calculus.bounds.bound import Bound
from curvlens.calculus.bounds.of_attention import SOFTMAX, SOFTMAX_SECOND, attention
from curvlens.calculus.bounds.of_block import block
from curvlens.calculus.bounds.of_feedforward import feedforward
from curvlens.calculus.bounds.of_norm import norm

__all__ = ["SOFTMAX", "SOFTMAX_SECOND", "Bound", "attention", "block", "feedforward", "norm"]
