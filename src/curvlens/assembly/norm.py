"""LayerNorm and RMSNorm as a primitive: y = γ∘n + β (`docs/explanation/math.md`, "Norms")."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.assembly.primitives import Block, Per, Primitive, Tangents, over_tokens
from curvlens.calculus import norms


class Norm(Primitive):
    """y = γ∘n(x) + β, slots (x, γ, β); γ and β are optional.

    λ·D²y is K of `curvlens.calculus.norms` on (x, x) and diag(λ) ∂n/∂x on (γ, x). All other blocks are zero.
    """

    tokenwise = True

    def __init__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        eps: float,
        kind: norms.Kind,
    ) -> None:
        self.x, self.scale, self.eps, self.kind = x, scale, eps, kind
        self._at = norms.normed(x, eps=eps, kind=kind)
        y = self._at.n if scale is None else self._at.n * scale
        self.value = y if shift is None else y + shift

    def _centred(self, t: Tensor) -> Tensor:
        """C t along the features, the last axis but one."""
        return norms.centred(t.mT, self.kind).mT

    def _plain(self, t: Tensor) -> Tensor:
        """(∂n/∂x) t = (C t − n ⟨n, t⟩/d)/s; if C has rank 1, C t (1 − ρ²)/s."""
        n, s, gap = (part[..., None] for part in self._at)
        d = n.shape[-2]
        if d == (2 if self.kind == "layer" else 1):
            return gap / s * self._centred(t)
        c = self._centred(t)
        return torch.addcmul(c, n, n.mT @ c, value=-1 / d).div_(s)

    def _scaled(self, t: Tensor) -> Tensor:
        return t if self.scale is None else self.scale[:, None] * t

    def push(self, slot: int, tangent: Tensor) -> Tensor:
        """γ∘(∂n/∂x) t, n∘t, t."""
        if slot == 0:
            return self._scaled(self._plain(tangent))
        if slot == 1:
            return self._at.n[..., None] * tangent
        return tangent.expand(*self.value.shape, tangent.shape[-1])

    def pull(self, slot: int, cotangent: Tensor, per: Per = None) -> Tensor:
        """(∂n/∂x)(γ∘c), Σ n∘c, Σ c."""
        if slot == 0:
            return self._plain(self._scaled(cotangent))
        if slot == 1 and per is None:
            return torch.einsum("btd,btdk->dk", self._at.n, cotangent)
        per_token = self._at.n[..., None] * cotangent if slot == 1 else cotangent
        return over_tokens(per_token, per)

    def bend(self, adjoint: Tensor, tangents: Tangents) -> list[Tensor | None]:
        """K t_x + (∂n/∂x)(λ∘t_γ) for x, Σ λ∘(∂n/∂x) t_x for γ, nothing for β."""
        along, scaled = tangents[0], tangents[1] if len(tangents) > 1 else None
        result: list[Tensor | None] = [None] * len(tangents)
        if along is not None:
            result[0] = self._bent(adjoint, along)
            if len(tangents) > 1:
                result[1] = (adjoint[..., None] * self._plain(along)).sum((0, 1))
        if scaled is not None:
            turned = self._plain(adjoint[..., None] * scaled)
            result[0] = turned if result[0] is None else result[0] + turned
        return result

    def _bent(self, adjoint: Tensor, t: Tensor) -> Tensor:
        """K t without building K: −(p ⟨n, t⟩ + n ⟨p, t⟩ + θ (C t − 3 n ⟨n, t⟩/d))/(d s²)."""
        n, s, gap = (part[..., None] for part in self._at)
        d, c = n.shape[-2], self._centred(t)
        p = self._centred(self._scaled(adjoint[..., None]))
        theta = (p * n).sum(-2, keepdim=True)
        if d == (2 if self.kind == "layer" else 1):
            return -3 * theta * gap / (d * s.square()) * c
        with_n, with_p = (n * c).sum(-2, keepdim=True), (p * c).sum(-2, keepdim=True)
        return -(p * with_n + n * with_p + theta * (c - (3 / d) * n * with_n)) / (d * s.square())

    def curvature(self, adjoint: Tensor) -> list[Block]:
        """K on (x, x), diag(λ) ∂n/∂x on (γ, x)."""
        bent = norms.contracted(self.x, adjoint, self.scale, eps=self.eps, kind=self.kind)
        blocks: list[Block] = [(0, 0, bent)]
        if self.scale is not None:
            plain = norms.jacobian(self.x, eps=self.eps, kind=self.kind)  # (B, T, d, d)
            blocks.append((1, 0, adjoint[..., None] * plain))
        return blocks
