"""Named blocks of the parameters: the grammar, the map, one file an architecture family."""

from curvlens.blocks.block import Block
from curvlens.blocks.family import Family, Rule
from curvlens.blocks.layout import Layout
from curvlens.blocks.map import Blocks, By
from curvlens.blocks.naming import map_blocks

__all__ = ["Block", "Blocks", "By", "Family", "Layout", "Rule", "map_blocks"]
