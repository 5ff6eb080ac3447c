"""The reference Transformer, on one screen."""

from curvlens.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
