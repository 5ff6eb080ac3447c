"""A named block: the parts of parameters that have one role."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from curvlens.blocks.cutting import intersection
from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError

_LAYER = re.compile(r"(?P<layer>(?:.*\.)?(?:h|enc|dec)\.\d+)\.(?P<role>.+)", re.DOTALL)


def layer_of(name: str) -> str | None:
    """The layer of a block's name, which may be a whole layer; None outside of the layers.

    >>> layer_of("h.3.attn.q"), layer_of("h.3"), layer_of("embed")
    ('h.3', 'h.3', None)
    """
    found = _LAYER.fullmatch(name) or _LAYER.fullmatch(f"{name}.whole")
    return found["layer"] if found else None


@dataclass(frozen=True)
class Block:
    """A name, such as ``h.3.attn.q``, and the parts of parameters that it stands for."""

    name: str
    parts: tuple[Part, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same tensors: ``unembed`` of a tied embedding."""
    heads: tuple[Block, ...] = field(default=(), repr=False)
    """The same numbers by head (or expert); empty if there are no heads."""
    heads_unknown: bool = field(default=False, repr=False)
    """Whether the block has heads but their number is not known, so that it cannot be divided."""
    heads_doubtful: bool = field(default=False, repr=False)
    """Whether the number of heads comes from a module outside of the attention, where it may mean something else."""

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(part.size for part in self.parts)

    @property
    def n_heads(self) -> int:
        """The number of heads (or experts), without the part that belongs to no head."""
        return sum(head.name.rpartition(".")[2].isdigit() for head in self.heads)

    @property
    def layer(self) -> str | None:
        """``h.3`` for ``h.3.attn.q``; None outside of the layers."""
        found = _LAYER.fullmatch(self.name)
        return found["layer"] if found else None

    @property
    def role(self) -> str:
        """``attn.q`` for ``h.3.attn.q``; the whole name outside of the layers."""
        found = _LAYER.fullmatch(self.name)
        return found["role"] if found else self.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that contain this block."""
        return tuple(dict.fromkeys(part.parameter for part in self.parts))

    def to_math(self, v: Tensor) -> Tensor:
        """Reorder a vector of this block, or a matrix of columns, from storage order to the row-vec order of X W.

        Each weight becomes inputs × outputs, row by row, in whatever order the module stores it (`nn.Linear` out × in,
        `Conv1D` in × out, fused and interleaved heads). Weight and bias stay in the order of the block.
        """
        return self._each(v, lambda part, x: part.to_math(x))

    def from_math(self, v: Tensor) -> Tensor:
        """The inverse of `to_math`: back to storage order."""
        return self._each(v, lambda part, x: part.from_math(x))

    def _each(self, v: Tensor, change: Callable[[Part, Tensor], Tensor]) -> Tensor:
        if v.shape[0] != self.size or v.ndim not in (1, 2):
            raise CurvlensError(
                f"Block {self.name!r} has {self.size} numbers. Expected a vector of shape ({self.size},) or a matrix "
                f"({self.size}, k), got shape {tuple(v.shape)}."
            )
        pieces = torch.split(v, [part.size for part in self.parts])
        return torch.cat([change(part, x) for part, x in zip(self.parts, pieces, strict=True)])

    def within(self, own: Iterable[Part]) -> Block | None:
        """The intersection of this block with some parts; None if it is empty."""
        own = tuple(own)
        parts = tuple(both for part in self.parts for both in intersection(part, own))
        if not parts:
            return None
        heads = (head.within(own) for head in self.heads)
        return replace(self, parts=parts, heads=tuple(head for head in heads if head is not None))
