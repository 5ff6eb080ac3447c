"""The user's own groups of blocks, and the rest of each block that they take from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from curvlens.blocks.block import Block
from curvlens.blocks.cutting import overlap
from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError, listing


def groups(patterns: Mapping[str, str | Iterable[str]], find: Callable[[Iterable[str]], Sequence[Part]]) -> list[Block]:
    """One block for each name with its patterns. The blocks must be disjoint."""
    own: list[Block] = []
    for name, wanted in patterns.items():
        if not isinstance(name, str) or not isinstance(wanted, Iterable):
            raise CurvlensError(
                f"blocks={{{name!r}: {wanted!r}}}: expected a text as the name of a block, and a name, a pattern or a "
                "list of them as its content, as in blocks={'attention': 'h.*.attn.*'}."
            )
        block = Block(name, tuple(find([wanted] if isinstance(wanted, str) else wanted)))
        for other in own:
            twice = [part.key for part in block.parts if _shared(part, other.parts)]
            if twice:
                raise CurvlensError(
                    f"The blocks {other.name!r} and {name!r} overlap: both contain {listing(twice)}. Give each "
                    "parameter to one block only."
                )
        own.append(block)
    return own


def left_of(block: Block, taken: Sequence[Part]) -> list[Block]:
    """The rest of a block without the taken parts. If a part is taken partially, the rest is one block per head.

    The rest is called ``….rest``. The name without ``.rest`` still means the whole block.
    """
    shared = {part.key: _shared(part, taken) for part in block.parts}
    if not any(shared.values()):
        return [block]
    left = tuple(part for part in block.parts if not shared[part.key])
    if all(shared[part.key] in (0, part.size) for part in block.parts):
        heads = tuple(rest for head in block.heads for rest in left_of(head, taken))
        return [replace(block, name=f"{block.name}.rest", parts=left, aliases=(), heads=heads)] if left else []
    if not block.heads:
        raise CurvlensError(
            f"A group takes a part of block {block.name!r}, which has no heads to divide it by. Take the whole block."
        )
    return [rest for head in block.heads for rest in left_of(head, taken)]


def _shared(part: Part, others: Iterable[Part]) -> int:
    """The number of entries of a part that lie in other, disjoint parts."""
    return sum(overlap(part, other) for other in others if other.parameter == part.parameter)
