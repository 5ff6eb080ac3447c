"""Attention with two derivatives, in linear memory."""

from curvlens.sdpa.attention import scaled_dot_product_attention
from curvlens.sdpa.huggingface import register
from curvlens.sdpa.mode import second_order

__all__ = ["register", "scaled_dot_product_attention", "second_order"]
