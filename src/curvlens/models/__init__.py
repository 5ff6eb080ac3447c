"""The reference Transformer."""

from curvlens.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
