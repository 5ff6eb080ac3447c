"""Products of the Hessian with vectors: from the moments, or along the tokens if that costs less.

If the tokens are among the variables, all products go along the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from curvlens.calculus.attention.along_tokens import along_tokens
from curvlens.calculus.attention.blocks import Blocks
from curvlens.calculus.attention.by_moments import ByMoments
from curvlens.calculus.form import SplitPart, places, require_room_for
from curvlens.calculus.terms import Given, Term

ALONG = 1 << 24
"""Numbers in the attention matrices of the directions that are processed together: 128 MB in float64."""


class Products:
    """H v for every part, for vectors of the weights and tokens in the order of ``shapes``."""

    def __init__(self, blocks: Blocks, tokens: Sequence[str], shapes: Mapping[str, tuple[int, int]]) -> None:
        self._blocks, self._tokens, self._shapes = blocks, tokens, shapes
        self._prepared: dict[SplitPart, ByMoments] = {}

    def __call__(self, vectors: Tensor, part: SplitPart) -> Tensor:
        """The product with a vector (size,) or with the columns of a (size, k) matrix."""
        if not vectors.numel():
            return vectors.clone()
        if self._tokens or self._few_keys:
            of = self._blocks.layer
            # limits the number of directions at a time: each needs several copies of the attention matrix
            step = max(1, ALONG // (of.heads * of.samples * of.queries.shape[1] * of.keys.shape[1]))
            pieces = torch.split(vectors.reshape(len(vectors), -1), step, 1)
            return torch.cat([self._along_tokens(piece, part) for piece in pieces], 1).reshape(vectors.shape)
        if vectors.ndim == 1:
            return self._by_moments(vectors.contiguous(), part)
        return torch.stack([self._by_moments(column, part) for column in vectors.T.contiguous()], 1)

    def terms(self, first: str, second: str, part: SplitPart) -> list[Term]:
        """The terms of a block; the second name does not come before the first. With tokens, products build it."""
        if first in self._blocks.slots and second in self._blocks.slots:
            return self._blocks.terms(first, second, part)
        (height, width), like = self._shapes[second], self._blocks.layer.queries
        rows = self._shapes[first][0] * self._shapes[first][1]
        require_room_for(rows * height * width, like, f"The block ({first}, {second})")
        size = max(place.stop for place in self._slices.values())
        unit = torch.zeros(size, height * width, dtype=like.dtype, device=like.device)
        unit[self._slices[second]] = torch.eye(height * width, dtype=like.dtype, device=like.device)
        return [Given(self(unit, part)[self._slices[first]].view(*self._shapes[first], height, width))]

    @cached_property
    def _slices(self) -> dict[str, slice]:
        return places(self._shapes)

    @cached_property
    def _few_keys(self) -> bool:
        """Whether a product costs less along the tokens, N L_k (d_K + d_V), than from the moments, 2 N d²."""
        of = self._blocks.layer
        return of.keys.shape[1] * (of.WQ.shape[-1] + of.d_out) < of.keys.shape[2] ** 2

    @cached_property
    def _letters(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices of one head; they are equal for all heads."""
        return {slot.letter: slot.shape for slot in self._blocks.slots.values()}

    @cached_property
    def _begins(self) -> list[tuple[str, tuple[int, int], int]]:
        """The offsets of the matrices of one head in a vector, with their shapes."""
        return [(letter, self._letters[letter], place.start) for letter, place in places(self._letters).items()]

    def _by_moments(self, v: Tensor, part: SplitPart) -> Tensor:
        if part not in self._prepared:
            self._prepared[part] = ByMoments(self._blocks.state, part)
        product, heads = self._prepared[part], self._blocks.layer.heads
        if heads == 1:
            start = v.storage_offset()
            found = product({n: v.as_strided(shape, (shape[1], 1), start + i) for n, shape, i in self._begins})
            return torch.cat([found[letter].reshape(-1) for letter in self._letters])
        rows = v.view(heads, -1)
        found = product({n: rows[:, i : i + a * b].reshape(heads, a, b) for n, (a, b), i in self._begins})
        return torch.cat([found[letter].reshape(heads, -1) for letter in self._letters], 1).reshape(-1)

    def _along_tokens(self, columns: Tensor, part: SplitPart) -> Tensor:
        blocks = self._blocks
        of, loss = (blocks.layer, blocks.loss) if self._tokens else blocks.known
        given: dict[str, Tensor] = {}
        for letter in self._letters:
            names = [name for name, slot in blocks.slots.items() if slot.letter == letter]
            parts = [columns[self._slices[name]].T.reshape(-1, *self._shapes[name]) for name in names]
            given[letter] = torch.stack(parts, 1)
        for letter in self._tokens:
            source = of.queries if letter == "X" else of.keys
            given[letter] = columns[self._slices[letter]].T.reshape(-1, *source.shape)
        found = along_tokens(of, loss, given, part)
        out = torch.empty_like(columns)
        for name, slot in blocks.slots.items():
            out[self._slices[name]] = found[slot.letter][:, slot.head].flatten(1).T
        for letter in self._tokens:
            out[self._slices[letter]] = found[letter].flatten(1).T
        return out
