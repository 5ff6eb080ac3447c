"""Data for the reference model: a task and a text, both made on the spot."""

from curvlens.data.addition import Addition
from curvlens.data.text import Characters

__all__ = ["Addition", "Characters"]
