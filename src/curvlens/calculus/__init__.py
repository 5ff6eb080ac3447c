"""Pure mathematics: tensors in, tensors out. No module, no autograd."""

from curvlens.calculus import losses

__all__ = ["losses"]
