"""Self- and cross-attention: every block of the Hessian in closed form."""

from curvlens.calculus.attention.functions import forward, hessian, hessian_single
from curvlens.calculus.attention.hessian import AttentionHessian
from curvlens.calculus.attention.kernel import RankBound
from curvlens.calculus.attention.stack import StackHessian, stack
from curvlens.calculus.curvature import Root

__all__ = ["AttentionHessian", "RankBound", "Root", "StackHessian", "forward", "hessian", "hessian_single", "stack"]
