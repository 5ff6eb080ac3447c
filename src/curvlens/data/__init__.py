"""Data for the reference model: an addition task and a text. Nothing is downloaded."""

from curvlens.data.addition import Addition
from curvlens.data.text import Characters

__all__ = ["Addition", "Characters"]
