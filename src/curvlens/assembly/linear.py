"""Primitives that are jointly linear in their inputs: they pass derivatives on and have no curvature."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.assembly.primitives import Per, Primitive, over_tokens


class Linear(Primitive):
    """Jointly linear: λ·D²f = 0."""

    curved = False


class Add(Linear):
    """x + y, two states: a residual sum."""

    tokenwise = True

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.value = first + second

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """t."""
        return tangent

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """c."""
        return cotangent


class Shift(Linear):
    """x + b with one bias for all tokens."""

    tokenwise = True

    def __init__(self, x: Tensor, bias: Tensor) -> None:
        self.value = x + bias

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """t, the same at every token for the bias."""
        return tangent if slot == 0 else tangent.expand(*self.value.shape, tangent.shape[-1])

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """c, summed over the tokens for the bias."""
        if slot == 0:
            return cotangent
        return over_tokens(cotangent, per)


class Split(Linear):
    """(B, T, d) as (B, heads, T, d/heads)."""

    def __init__(self, x: Tensor, heads: int) -> None:
        self._heads = heads
        self.value = _split(x[..., None], heads)[..., 0]

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """t, in the order of the heads."""
        return _split(tangent, self._heads)

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """c, in the order of the tokens."""
        return _merge(cotangent)


class Merge(Linear):
    """(B, heads, T, e) as (B, T, heads·e)."""

    def __init__(self, x: Tensor) -> None:
        self._heads = x.shape[1]
        self.value = _merge(x[..., None])[..., 0]

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """t, in the order of the tokens."""
        return _merge(tangent)

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """c, in the order of the heads."""
        return _split(cotangent, self._heads)


def _split(t: Tensor, heads: int) -> Tensor:
    samples, length, width, directions = t.shape
    return t.reshape(samples, length, heads, width // heads, directions).transpose(1, 2)


def _merge(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(2, 3)


class Keep(Linear):
    """The scores where they are allowed, zero elsewhere: the mask of linear attention."""

    def __init__(self, scores: Tensor, allowed: Tensor) -> None:
        self._allowed = allowed
        self.value = scores * allowed

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """t where it is allowed."""
        return tangent * self._allowed[..., None]

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """c where it is allowed."""
        return cotangent * self._allowed[..., None]


class Lookup(Linear):
    """The rows of a table at the tokens (B, T), plus the first T rows of a table of positions."""

    def __init__(self, table: Tensor, positions: Tensor | None = None, *, tokens: Tensor) -> None:
        self._tokens, self._sizes = tokens, [len(table), 0 if positions is None else len(positions)]
        self.value = table[tokens]
        if positions is not None:
            self.value = self.value + positions[: tokens.shape[1]]

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """The same rows of the tangent."""
        if slot == 0:
            return tangent[self._tokens]
        return tangent[: self._tokens.shape[1]].expand(len(self._tokens), -1, -1, -1)

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """For every row, the sum of c over the tokens that use it."""
        samples, length, *rest = cotangent.shape
        if slot == 1:
            out = cotangent.new_zeros(samples, self._sizes[1], *rest)
            out[:, :length] = cotangent
            return out.sum(0) if per is None else out
        if per is None:
            out = cotangent.new_zeros(self._sizes[0], *rest)
            return out.index_add_(0, self._tokens.flatten(), cotangent.flatten(0, 1))
        first = torch.arange(samples, device=cotangent.device)[:, None] * self._sizes[0]
        out = cotangent.new_zeros(samples * self._sizes[0], *rest)
        out.index_add_(0, (self._tokens + first).flatten(), cotangent.flatten(0, 1))
        return out.view(samples, self._sizes[0], *rest)
