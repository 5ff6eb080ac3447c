"""Attention that can be differentiated twice."""

from curvlens.sdpa.mode import second_order
from curvlens.sdpa.reference import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention", "second_order"]
