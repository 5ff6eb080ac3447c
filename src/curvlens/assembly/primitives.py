"""The primitives of a network: each has a value at a point and its first two derivatives in closed form.

A primitive z = f(x_1, …) has slots for its inputs: states (with a batch axis in front) and parameters (without).
Directions are one more axis at the end: a tangent or cotangent of a state is (B, *shape, k), of a parameter
(*shape, k). With J_i the Jacobian of slot i,

    push(i, t)     J_i t
    pull(i, c)     J_iᵀ c, for a parameter summed over all samples, or for each sample or token
    bend(λ, t)     the gradient with respect to every slot of ⟨λ, Σ_i J_i t_i⟩, for fixed t: D²f contracted with λ and t
    curvature(λ)   the blocks of λ·D²f themselves, for the pairs of slots where they are not zero
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from curvlens.assembly.contraction import contract
from curvlens.calculus import activations, softmax
from curvlens.calculus.vec import identity

Tangents = Sequence[Tensor | None]
"""A tangent for every slot; None means zero."""
Block = tuple[int, int, Tensor]
"""Two slots i, j and λ·∂²f/∂x_i∂x_j, (B, size of x_i, size of x_j); (B, T, ·, ·) if it is zero between tokens."""
Per = Literal["sample", "token"] | None
"""Whether the cotangent of a parameter is kept for each sample or token; None sums over all."""


class Primitive:
    """A primitive at a point. If it is jointly linear in its inputs, `bend` is zero."""

    value: Tensor
    curved = True
    tokenwise = False
    """Whether all states are (B, T, ·) and each output token depends only on the same token of the inputs."""

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """J_i t, (B, *shape, k)."""
        raise NotImplementedError

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """J_iᵀ c, (B, *shape, k). For a parameter (*shape, k), with B in front per sample, with B, T per token."""
        raise NotImplementedError

    def bend(self, adjoint: Tensor, tangents: Tangents) -> list[Tensor | None]:
        """∂⟨λ, Σ_i J_i t_i⟩/∂x_j for every slot j, with directions as in `pull`; None means zero."""
        return [None] * len(tangents)

    def curvature(self, adjoint: Tensor) -> list[Block]:
        """The blocks of λ·D²f; only one of (i, j) and (j, i)."""
        return []


class Bilinear(Primitive):
    """A product of two inputs in the notation of einsum: products with weights, scores, mixing, gates.

    ``Bilinear("bti,io->bto", x, W)`` is x W. The letter b is the sample; an input without b is a parameter.
    λ·∂²f/∂x∂y = λ δ, with a δ for every letter that x and y share.
    """

    def __init__(self, letters: str, first: Tensor, second: Tensor, scale: float = 1.0) -> None:
        inputs, self.out = letters.split("->")
        self.letters = inputs.split(",")
        self.inputs = (first, second)
        self.tokenwise = all(part.startswith("bt") for part in (*self.letters, self.out) if "b" in part)
        self.scale = scale
        self.value = self.scale * torch.einsum(letters, first, second)

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """The product of the tangent with the other input."""
        return self._with_other(slot, tangent, self.letters[slot], self.out)

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """The product of the cotangent with the other input: the letters of output and input are exchanged."""
        mine = self.letters[slot]
        into = mine if per is None or "b" in mine else f"{'b' if per == 'sample' else 'bt'}{mine}"
        return self._with_other(slot, cotangent, self.out, into)

    def _with_other(self, slot: int, t: Tensor, source: str, into: str) -> Tensor:
        other = self.inputs[1 - slot] if self.scale == 1 else self.scale * self.inputs[1 - slot]
        return contract(f"{source}y,{self.letters[1 - slot]}->{into}y", t, other)

    def bend(self, adjoint: Tensor, tangents: Tangents) -> list[Tensor | None]:
        """λ pulled back to each input through the tangent of the other."""
        result: list[Tensor | None] = [None, None]
        for slot in (0, 1):
            tangent = tangents[1 - slot]
            if tangent is not None:
                mine, others = self.letters[slot], self.letters[1 - slot]
                result[slot] = contract(f"{others}y,{self.out}->{mine}y", tangent, self.scale * adjoint)
        return result

    def curvature(self, adjoint: Tensor) -> list[Block]:
        """λ with a δ for every shared letter."""
        alone = "bt" if self.tokenwise and "b" in self.letters[1] else "b"
        first, second = (letters.removeprefix(alone) for letters in self.letters)
        shared = [letter for letter in first if letter in second]
        sizes = dict(zip(self.letters[0], self.inputs[0].shape, strict=True))
        rows = prod(sizes[letter] for letter in first)
        if len(shared) == 1:
            block = self._on_one_diagonal(adjoint, alone + first, second, shared[0])
            return [(0, 1, block.view(*block.shape[: len(alone)], rows, -1))]
        turned = second
        for letter in shared:
            turned = turned.replace(letter, letter.upper())
        deltas = [identity(sizes[letter], adjoint) for letter in shared]
        terms = ",".join([self.out, *(letter + letter.upper() for letter in shared)])
        block = torch.einsum(f"{terms}->{alone}{first}{turned}", self.scale * adjoint, *deltas)
        return [(0, 1, block.reshape(*block.shape[: len(alone)], rows, -1))]

    def _on_one_diagonal(self, adjoint: Tensor, first: str, second: str, shared: str) -> Tensor:
        """λ δ for one shared letter, on the letters of both; zero outside of a diagonal."""
        sizes = dict(zip("".join(self.letters), (*self.inputs[0].shape, *self.inputs[1].shape), strict=True))
        block = adjoint.new_zeros([sizes[letter] for letter in first + second])
        diagonal = block.diagonal(dim1=first.index(shared), dim2=len(first) + second.index(shared))
        left = (first + second).replace(shared, "")
        order = [self.out.index(letter) for letter in left + (shared if shared in self.out else "")]
        value = (self.scale * adjoint).permute(order)
        diagonal.copy_(value if shared in self.out else value[..., None])
        return block


class Softmax(Primitive):
    """a = softmax of every row where ``allowed``; λ·D²a = diag w − a wᵀ − w aᵀ, w = a∘(λ − ⟨a, λ⟩)."""

    def __init__(self, scores: Tensor, allowed: Tensor | None = None) -> None:
        self.value = softmax.softmax(scores, allowed)
        self._top = self.value.argmax(-1, keepdim=True)[..., None]

    def _from_mean(self, t: Tensor) -> Tensor:
        """t − ⟨a, t⟩, from t minus its value where a is largest, so that nothing cancels in nearly one-hot rows."""
        t = t - t.gather(-2, self._top.expand(*self._top.shape[:-1], t.shape[-1]))
        return t.sub_(self.value[..., None, :] @ t)

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """(diag a − a aᵀ) t."""
        return self._from_mean(tangent).mul_(self.value[..., None])

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """As `push`: the Jacobian is symmetric."""
        return self.push(slot, cotangent)

    def bend(self, adjoint: Tensor, tangents: Tangents) -> list[Tensor | None]:
        """w∘t̂ − a ⟨w, t̂⟩ with t̂ = t − ⟨a, t⟩."""
        (tangent,) = tangents
        if tangent is None:
            return [None]
        bent = softmax.gradient_rows(self.value, adjoint)[..., None] * self._from_mean(tangent)
        return [bent - self.value[..., None] * bent.sum(-2, keepdim=True)]

    def curvature(self, adjoint: Tensor) -> list[Block]:
        """diag w − a wᵀ − w aᵀ for every row, zero between two rows."""
        a = self.value.flatten(1, -2)
        w = softmax.gradient_rows(a, adjoint.flatten(1, -2))
        cross = a[..., :, None] * w[..., None, :]
        return [(0, 0, by_rows(w.diag_embed() - cross - cross.mT))]


class Activation(Primitive):
    """φ of every entry of (B, T, m); λ·D²φ = diag(λ∘φ'')."""

    tokenwise = True

    def __init__(self, z: Tensor, kind: str) -> None:
        self._phi = activations.activation(kind)
        self.z, self.value = z, self._phi.value(z)
        self._slope = self._phi.first(z)

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """φ'∘t."""
        return self._slope[..., None] * tangent

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """φ'∘c."""
        return self._slope[..., None] * cotangent

    def bend(self, adjoint: Tensor, tangents: Tangents) -> list[Tensor | None]:
        """λ∘φ''∘t."""
        (tangent,) = tangents
        return [None if tangent is None else (adjoint * self._phi.second(self.z))[..., None] * tangent]

    def curvature(self, adjoint: Tensor) -> list[Block]:
        """diag(λ∘φ'')."""
        return [(0, 0, (adjoint * self._phi.second(self.z)).diag_embed())]


def over_tokens(t: Tensor, per: Per) -> Tensor:
    """A cotangent (B, T, ·, k) of a shared parameter: summed over everything, or over each sample, or unchanged."""
    return t if per == "token" else t.sum(1) if per == "sample" else t.sum((0, 1))


def by_rows(blocks: Tensor) -> Tensor:
    """Blocks (B, R, n, m) of R rows as one matrix (B, R n, R m), zero between two rows."""
    samples, rows, n, m = blocks.shape
    return add_rows(blocks.new_zeros(samples, rows * n, rows * m), blocks)


def add_rows(whole: Tensor, blocks: Tensor) -> Tensor:
    """Add blocks (B, R, n, m) of R rows to a matrix (B, R n, R m), in place."""
    samples, rows, n, m = blocks.shape
    whole.view(samples, rows, n, rows, m).diagonal(dim1=1, dim2=3).add_(blocks.movedim(1, -1))
    return whole
