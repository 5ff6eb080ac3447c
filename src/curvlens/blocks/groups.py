"""Groups of the user's own: what they take of the blocks, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from curvlens.blocks.block import Block
from curvlens.blocks.cutting import overlap
from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError, listing


def groups(patterns: Mapping[str, str | Iterable[str]], find: Callable[[Iterable[str]], Sequence[Part]]) -> list[Block]:
    """A block for each name and its patterns; no number may be in two of them."""
    own: list[Block] = []
    for name, wanted in patterns.items():
        if not isinstance(name, str) or not isinstance(wanted, Iterable):
            raise CurvlensError(
                f"blocks={{{name!r}: {wanted!r}}}: a block has a text as its name, and a name, a pattern or a list of "
                "them as what it is made of, as in blocks={'attention': 'h.*.attn.*'}."
            )
        block = Block(name, tuple(find([wanted] if isinstance(wanted, str) else wanted)))
        for other in own:
            twice = [part.key for part in block.parts if _shared(part, other.parts)]
            if twice:
                raise CurvlensError(
                    f"The blocks {other.name!r} and {name!r} overlap: both have {listing(twice)}. Every parameter "
                    "belongs to one block."
                )
        own.append(block)
    return own


def left_of(block: Block, taken: Sequence[Part]) -> list[Block]:
    """What of a block is not taken; head by head, if a part is taken in part.

    A block that lost something is called ``….rest``: its name goes on to mean all of it.
    """
    shared = {part.key: _shared(part, taken) for part in block.parts}
    if not any(shared.values()):
        return [block]
    left = tuple(part for part in block.parts if not shared[part.key])
    if all(shared[part.key] in (0, part.size) for part in block.parts):
        heads = tuple(rest for head in block.heads for rest in left_of(head, taken))
        return [replace(block, name=f"{block.name}.rest", parts=left, aliases=(), heads=heads)] if left else []
    if not block.heads:
        raise CurvlensError(f"Block {block.name!r} is taken in part, and it has no heads to be divided by.")
    return [rest for head in block.heads for rest in left_of(head, taken)]


def _shared(part: Part, others: Iterable[Part]) -> int:
    """How many numbers of a part lie in others, which are disjoint."""
    return sum(overlap(part, other) for other in others if other.parameter == part.parameter)
