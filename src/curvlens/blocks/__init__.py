"""Named blocks of the parameters."""

from curvlens.blocks.layout import Layout

__all__ = ["Layout"]
