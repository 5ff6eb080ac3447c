"""A named block: the parts of parameters that play one role."""

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


@dataclass(frozen=True)
class Block:
    """A name, such as ``h.3.attn.q``, and what it stands for."""

    name: str
    parts: tuple[Part, ...]
    aliases: tuple[str, ...] = ()
    """Other names of the same tensors: ``unembed`` of a tied embedding."""
    heads: tuple[Block, ...] = field(default=(), repr=False)
    """The same numbers head by head (or expert by expert), where there are heads."""
    heads_unknown: bool = field(default=False, repr=False)
    """Whether it has heads of which nobody told how many: then it cannot be divided."""
    heads_doubtful: bool = field(default=False, repr=False)
    """Whether the number of heads is told by a module far off, which may speak of something else."""

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return sum(part.size for part in self.parts)

    @property
    def n_heads(self) -> int:
        """How many heads (or experts) it has; what belongs to none of them does not count."""
        return sum(head.name.rpartition(".")[2].isdigit() for head in self.heads)

    @property
    def layer(self) -> str | None:
        """``h.3`` of ``h.3.attn.q``; None outside of the layers."""
        found = _LAYER.fullmatch(self.name)
        return found["layer"] if found else None

    @property
    def role(self) -> str:
        """``attn.q`` of ``h.3.attn.q``; the name itself outside of the layers."""
        found = _LAYER.fullmatch(self.name)
        return found["role"] if found else self.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters it lies in."""
        return tuple(dict.fromkeys(part.parameter for part in self.parts))

    def to_math(self, v: Tensor) -> Tensor:
        """A vector of this block, or columns of them, from storage order to the row-vec order of X W.

        Every weight becomes inputs × outputs, row by row, however the module stores it (`nn.Linear` out × in,
        `Conv1D` in × out, fused and interleaved heads); weight and bias follow each other as in the block.
        """
        return self._each(v, lambda part, x: part.to_math(x))

    def from_math(self, v: Tensor) -> Tensor:
        """Back to storage order."""
        return self._each(v, lambda part, x: part.from_math(x))

    def _each(self, v: Tensor, change: Callable[[Part, Tensor], Tensor]) -> Tensor:
        if v.shape[0] != self.size or v.ndim not in (1, 2):
            raise CurvlensError(
                f"Block {self.name!r} has {self.size} numbers, expected a vector of them or a ({self.size}, k) matrix, "
                f"got shape {tuple(v.shape)}."
            )
        pieces = torch.split(v, [part.size for part in self.parts])
        return torch.cat([change(part, x) for part, x in zip(self.parts, pieces, strict=True)])

    def within(self, own: Iterable[Part]) -> Block | None:
        """What of this block lies in some parts."""
        own = tuple(own)
        parts = tuple(both for part in self.parts for both in intersection(part, own))
        if not parts:
            return None
        heads = (head.within(own) for head in self.heads)
        return replace(self, parts=parts, heads=tuple(head for head in heads if head is not None))
