"""Named blocks of the parameters: the map of a model, and the naming rules of each architecture family."""

from curvlens.blocks.block import Block
from curvlens.blocks.family import Family, Rule
from curvlens.blocks.heads import Heads
from curvlens.blocks.layout import Layout, require_real
from curvlens.blocks.map import Blocks, By
from curvlens.blocks.naming import map_blocks
from curvlens.blocks.splits import Seen, watch

__all__ = ["Block", "Blocks", "By", "Family", "Heads", "Layout", "Rule", "Seen", "map_blocks", "require_real", "watch"]
