"""Attention and its derivatives, tile by tile. The matrix of all scores is never stored.

With S = c Q Kᵀ + bias, P = softmax(S), O = P V, and a gradient G at O (`docs/explanation/math.md`,
"Attention in linear memory"):

    pull      dP = G Vᵀ, D = rowsum(G∘O), dS = P∘(dP − D);   dV = Pᵀ G, dQ = c dS K, dK = c dSᵀ Q, dbias = dS
    push      Ṡ = c (Q̇ Kᵀ + Q K̇ᵀ) + bias̊, r = rowsum(P∘Ṡ), Ṗ = P∘(Ṡ − r);   Ȯ = Ṗ V + P V̇
    bend      dṖ = Ġ Vᵀ + G V̇ᵀ, Ḋ = rowsum(Ġ∘O + G∘Ȯ), dṠ = Ṗ∘(dP − D) + P∘(dṖ − Ḋ);
              dV̇ = Ṗᵀ G + Pᵀ Ġ, dQ̇ = c (dṠ K + dS K̇), dK̇ = c (dṠᵀ Q + dSᵀ Q̇), dbias̊ = dṠ

`bend` is the derivative of `pull` along a direction and, since second derivatives are symmetric, also its transpose.
A forward pass keeps only O and the logarithm ℓ of the row sums; P is recomputed from S and ℓ. Both use base 2, since
torch computes powers of 2 twice as fast as those of e. ℓ is kept as two numbers, the largest score m of a row and
log₂ Σ exp(S − m). If m is large, their sum would round the second away. Then m is subtracted first, to base e, since
m log₂ e may overflow.

Heads that share keys (grouped queries) are computed together. q is (B, H, g, L, d), k and v (B, H, M, ·); masks and
biases have five axes, each of full size or of size one. Half precision is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.sdpa.tiles import Sight, Spec, Tile, tiles

LOG2E = math.log2(math.e)
MODERATE = 128 / LOG2E
"""For scores up to this size the two parts of ℓ can be added without a loss of digits."""


class Inputs(NamedTuple):
    """The inputs of attention. A direction has the same form, without a mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    """True where a query may attend."""


class Kept(NamedTuple):
    """The results of a forward pass that the derivatives need."""

    o: Tensor
    """(B, H, g, L, e), in the dtype of the computation."""
    lse: Tensor
    """ℓ, (B, H, g, L, 2): the largest score, and log₂ Σ exp(score − largest). Both are 0 if a query sees no key."""


@dataclass
class Cell:
    """A tile of the queries that share one head of keys."""

    head: tuple[int, int]
    tile: Tile
    q: Tensor
    """c Q, (g·rows, d)."""
    k: Tensor
    """All keys that the tile sees."""
    v: Tensor
    p: Tensor
    """P, (g·rows, keys)."""
    bent: Tensor | None
    """tanh of the scores before their cap, if they have one."""


class Kernel:
    """Iterates over all tiles, with shared working memory."""

    def __init__(self, at: Inputs, spec: Spec) -> None:
        self.at, self.spec = at, spec
        self.batch, self.heads, self.groups, self.queries, _ = at.q.shape
        self.keys = at.k.shape[2]
        self.dtype = computed_in(at.q.dtype)
        self._room: dict[str, Tensor] = {}
        self._loaded: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._views: dict[int, tuple[tuple[int, int], Tensor]] = {}
        self._sight = Sight(spec, at.q.device)
        self.tiles = list(tiles(spec, self.queries, self.keys, self.groups))
        self._largest = max((self.groups * tile.height * tile.width for tile in self.tiles), default=0)

    def room(self, name: str, tile: Tile) -> Tensor:
        """A work matrix (g·rows, keys) in memory that all tiles share."""
        if name not in self._room:
            self._room[name] = torch.empty(self._largest, dtype=self.dtype, device=self.at.q.device)
        rows = self.groups * tile.height
        return self._room[name][: rows * tile.width].view(rows, tile.width)

    def of_head(self, name: str, x: Tensor, head: tuple[int, int]) -> Tensor:
        """Keys or values of a head in the dtype of the computation, converted once for each head."""
        if self._loaded.get(name, (None,))[0] != head:
            self._loaded[name] = (head, x[head].to(self.dtype).contiguous())
        return self._loaded[name][1]

    def rows(self, x: Tensor, head: tuple[int, int], tile: Tile) -> Tensor:
        """The rows of a tile: (B, H, g, L, ·) → (g·rows, ·)."""
        part = self.view(x, head)
        if self.groups == 1:
            return part[0, tile.rows].to(self.dtype)
        return part[:, tile.rows].reshape(self.groups * tile.height, part.shape[2]).to(self.dtype)

    def put(self, x: Tensor, cell: Cell, value: Tensor) -> None:
        """The inverse of `rows`: write the rows of a tile into x."""
        part = self.view(x, cell.head)
        part[:, cell.tile.rows] = value.view(self.groups, cell.tile.height, part.shape[2])

    def view(self, x: Tensor, head: tuple[int, int]) -> Tensor:
        """The slice of a tensor for a head, made once for each head."""
        known = self._views.get(id(x))
        if known is None or known[0] != head:
            known = self._views[id(x)] = (head, x[head])
        return known[1]

    def spread(self, x: Tensor, head: tuple[int, int], tile: Tile) -> Tensor:
        """The slice of a mask or a bias for a tile: (g or 1, rows or 1, keys or 1)."""
        part = x[head[0] if x.shape[0] > 1 else 0, head[1] if x.shape[1] > 1 else 0]
        part = part[:, tile.rows] if part.shape[1] > 1 else part
        return part[..., tile.keys] if part.shape[2] > 1 else part

    def apart(self, scores: Tensor, tile: Tile) -> Tensor:
        """(g·rows, keys) → (g, rows, keys)."""
        return scores.view(self.groups, tile.height, tile.width)

    def cells(self, lse: Tensor | None) -> Iterator[Cell]:
        """All tiles, with P if ℓ is given, else with S to base 2."""
        large = lse is not None and not moderate(lse[..., 0])
        if lse is not None and not large:
            lse = lse[..., :1] * LOG2E + lse[..., 1:]
        for b in range(self.batch):
            for h in range(self.heads):
                k, v = self.of_head("k", self.at.k, (b, h)), self.of_head("v", self.at.v, (b, h))
                for tile in self.tiles:
                    q = self.rows(self.at.q, (b, h), tile) * self.spec.scale
                    cell = Cell((b, h), tile, q, k[tile.keys], v[tile.keys], self.room("p", tile), None)
                    self.scores(cell, 1.0 if large else LOG2E)
                    if lse is not None:
                        known = self.rows(lse, (b, h), tile)
                        if large:
                            cell.p.sub_(known[:, :1]).mul_(LOG2E)
                        cell.p.sub_(known[:, -1:]).exp2_()
                    yield cell

    def scores(self, cell: Cell, unit: float) -> None:
        """Compute S times ``unit``, which is log₂ e for base 2."""
        torch.mm(cell.q * unit, cell.k.mT, out=cell.p)
        if self.spec.softcap is not None:
            cell.bent = self.room("bent", cell.tile)
            torch.div(cell.p, self.spec.softcap * unit, out=cell.bent).tanh_()
            torch.mul(cell.bent, self.spec.softcap * unit, out=cell.p)
        scores = self.apart(cell.p, cell.tile)
        if self.at.bias is not None:
            scores.add_(self.spread(self.at.bias, cell.head, cell.tile), alpha=unit)
        if self.at.mask is not None:
            scores.masked_fill_(~self.spread(self.at.mask, cell.head, cell.tile), -math.inf)
        self._sight.hide(scores, cell.tile)

    def capped(self, cell: Cell, x: Tensor) -> Tensor:
        """Multiply x by the slope of the soft cap at each score, in place."""
        if cell.bent is None:
            return x
        slope = self.room("slope", cell.tile)
        return x.mul_(torch.mul(cell.bent, cell.bent, out=slope).neg_().add_(1))

    def moved(self, cell: Cell, along: Inputs, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c Q̇, K̇, and Ṡ before and after the soft cap (one tensor if there is no cap), along a direction."""
        q = self.rows(along.q, cell.head, cell.tile) * self.spec.scale
        k = self.of_head(f"k{name}", along.k, cell.head)[cell.tile.keys]
        before = self.room(f"s{name}", cell.tile)
        torch.mm(q, cell.k.mT, out=before).addmm_(cell.q, k.mT)
        behind = before
        if cell.bent is not None:
            behind = self.capped(cell, self.room(f"capped{name}", cell.tile).copy_(before))
        if along.bias is not None:
            moved = self.apart(behind, cell.tile)
            moved += self.spread(along.bias, cell.head, cell.tile)
        return q, k, before, behind

    def turned(self, cell: Cell, s: Tensor) -> Tensor:
        """Ṗ = P∘Ṡ − r P, written over Ṡ."""
        s.mul_(cell.p)
        return s.addcmul_(cell.p, s.sum(1, keepdim=True), value=-1)

    def collect(self, into: Tensor, cell: Cell, x: Tensor) -> None:
        """Add a tile to the gradient of a bias, summed over the axes where the bias has size 1."""
        place = self.spread(into, cell.head, cell.tile)
        axes = [axis for axis in range(3) if place.shape[axis] == 1]
        tile = self.apart(x, cell.tile)
        place += tile.sum(axes, keepdim=True) if axes else tile

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros of a shape, in the dtype of the computation."""
        return torch.zeros(like.shape, dtype=self.dtype, device=like.device)

    def columns(self, like: Tensor) -> Tensor:
        """Zeros for keys or values, features first: adding products is a third faster than with features last."""
        return torch.zeros(*like.shape[:2], like.shape[3], like.shape[2], dtype=self.dtype, device=like.device)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums: float32 for half precision."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def moderate(top: Tensor) -> bool:
    """Whether all numbers are below `MODERATE` in size. False if one is NaN."""
    return not top.numel() or bool(top.abs().amax() < MODERATE)


def attend(at: Inputs, spec: Spec) -> Kept:
    """O and ℓ."""
    kernel = Kernel(at, spec)
    o = torch.zeros(*at.q.shape[:4], at.v.shape[-1], dtype=kernel.dtype, device=at.q.device)
    lse = torch.zeros(*at.q.shape[:4], 2, dtype=kernel.dtype, device=at.q.device)
    for cell in kernel.cells(None):
        top = _below_top(kernel, cell)
        total = cell.p.exp2_().sum(1, keepdim=True)
        total.masked_fill_(total == 0, 1.0)
        kernel.put(o, cell, (cell.p @ cell.v).div_(total))
        kernel.put(lse, cell, torch.cat([top, total.log2_()], 1))
    return Kept(o, lse)


def _below_top(kernel: Kernel, cell: Cell) -> Tensor:
    """Return the largest score of each row (0 if it sees no key), and replace S by S minus that, to base 2."""
    top = cell.p.amax(1, keepdim=True) / LOG2E
    if moderate(top):
        cell.p.sub_(top * LOG2E)
        return top
    kernel.scores(cell, 1.0)  # compute again to base e: to base 2 a bias near the end of the range overflows to −∞
    top = cell.p.amax(1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    cell.p.sub_(top).mul_(LOG2E)
    return top


def pull(
    at: Inputs, kept: Kept, g: Tensor, with_bias: bool, spec: Spec
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV, and dbias if there is a bias and ``with_bias``."""
    kernel = Kernel(at, spec)
    dq, dk, dv = kernel.zeros(at.q), kernel.columns(at.k), kernel.columns(at.v)
    db = kernel.zeros(at.bias) if with_bias and at.bias is not None else None
    for cell in kernel.cells(kept.lse):
        head, tile = cell.head, cell.tile
        own, o = kernel.rows(g, head, tile), kernel.rows(kept.o, head, tile)
        ds = torch.mm(own, cell.v.mT, out=kernel.room("ds", tile))
        ds.sub_((own * o).sum(1, keepdim=True)).mul_(cell.p)
        kernel.view(dv, head)[:, tile.keys].addmm_(own.mT, cell.p)
        if db is not None:
            kernel.collect(db, cell, ds)
        kernel.capped(cell, ds)
        kernel.put(dq, cell, torch.mm(ds, cell.k).mul_(spec.scale))
        kernel.view(dk, head)[:, tile.keys].addmm_(cell.q.mT, ds)
    return _like(at, dq, dk, dv, db)


def push(at: Inputs, kept: Kept, along: Inputs, spec: Spec) -> Tensor:
    """Ȯ."""
    kernel = Kernel(at, spec)
    out = kernel.zeros(kept.o)
    for cell in kernel.cells(kept.lse):
        _, _, _, s = kernel.moved(cell, along, "1")
        v = kernel.of_head("v1", along.v, cell.head)[cell.tile.keys]
        kernel.put(out, cell, torch.mm(kernel.turned(cell, s), cell.v).addmm_(cell.p, v))
    return out


class Bent(NamedTuple):
    """The derivative of `pull` along a direction, and Ȯ, which is computed on the way."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    o: Tensor


def bend(at: Inputs, kept: Kept, g: Tensor, along: Inputs, g_along: Tensor | None, with_bias: bool, spec: Spec) -> Bent:
    """dQ̇, dK̇, dV̇, dbias̊ and Ȯ; without Ġ it is the gradient of ⟨G, Ȯ⟩ by Q, K, V and the bias."""
    kernel = Kernel(at, spec)
    dq, dk, dv = kernel.zeros(at.q), kernel.columns(at.k), kernel.columns(at.v)
    db = kernel.zeros(at.bias) if with_bias and at.bias is not None else None
    out = kernel.zeros(kept.o)
    for cell in kernel.cells(kept.lse):
        head, tile, keys = cell.head, cell.tile, cell.tile.keys
        own, o = kernel.rows(g, head, tile), kernel.rows(kept.o, head, tile)
        q1, k1, before, s1 = kernel.moved(cell, along, "1")
        v1 = kernel.of_head("v1", along.v, head)[keys]
        p1 = kernel.turned(cell, s1)
        o1 = torch.mm(p1, cell.v).addmm_(cell.p, v1)
        kernel.put(out, cell, o1)
        kernel.view(dv, head)[:, keys].addmm_(own.mT, p1)
        d1 = (own * o1).sum(1, keepdim=True)
        ds1 = torch.mm(own, v1.mT, out=kernel.room("ds1", tile))
        if g_along is not None:
            g1 = kernel.rows(g_along, head, tile)
            d1 += (g1 * o).sum(1, keepdim=True)
            ds1.addmm_(g1, cell.v.mT)
            kernel.view(dv, head)[:, keys].addmm_(g1.mT, cell.p)
        ds = torch.mm(own, cell.v.mT, out=kernel.room("ds", tile)).sub_((own * o).sum(1, keepdim=True))
        ds1.sub_(d1).mul_(cell.p).addcmul_(p1, ds)
        ds.mul_(cell.p)
        if db is not None:
            kernel.collect(db, cell, ds1)
        if cell.bent is not None:
            ds1.addcmul_(before.mul_(cell.bent), ds, value=-2 / (spec.softcap or 1.0))
            kernel.capped(cell, ds)
            kernel.capped(cell, ds1)
        kernel.put(dq, cell, torch.mm(ds1, cell.k).addmm_(ds, k1).mul_(spec.scale))
        kernel.view(dk, head)[:, keys].addmm_(cell.q.mT, ds1).addmm_(q1.mT, ds)
    return Bent(*_like(at, dq, dk, dv, db), out)


def push_twice(at: Inputs, kept: Kept, one: Inputs, other: Inputs, spec: Spec) -> Tensor:
    """D²O along two directions: P̈ V + Ṗ₁ V̇₂ + Ṗ₂ V̇₁ with P̈ = P∘(Z − rowsum(P∘Z)), Z = (Ṡ₁ − r₁)∘(Ṡ₂ − r₂) + S̈."""
    kernel = Kernel(at, spec)
    out = kernel.zeros(kept.o)
    for cell in kernel.cells(kept.lse):
        head, tile, p = cell.head, cell.tile, cell.p
        q1, k1, before1, s1 = kernel.moved(cell, one, "1")
        q2, k2, before2, s2 = kernel.moved(cell, other, "2")
        mixed = torch.mm(q1, k2.mT, out=kernel.room("mixed", tile)).addmm_(q2, k1.mT)
        if cell.bent is not None:
            steep = -2 / (spec.softcap or 1.0)
            mixed = kernel.capped(cell, mixed.addcmul_(before1 * before2, cell.bent, value=steep))
        from_mean = s2 - (p * s2).sum(1, keepdim=True)
        p1, p2 = kernel.turned(cell, s1), kernel.turned(cell, s2)
        z = mixed.mul_(p).addcmul_(p1, from_mean)
        z.addcmul_(p, z.sum(1, keepdim=True), value=-1)
        v1, v2 = (kernel.of_head(f"v{i}", x.v, head)[tile.keys] for i, x in ((1, one), (2, other)))
        kernel.put(out, cell, torch.mm(z, cell.v).addmm_(p1, v2).addmm_(p2, v1))
    return out


def _like(
    at: Inputs, dq: Tensor, dk: Tensor, dv: Tensor, db: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients in the dtypes of their inputs."""
    given = None if db is None or at.bias is None else db.to(at.bias.dtype)
    return dq.to(at.q.dtype), _rows(dk).to(at.k.dtype), _rows(dv).to(at.v.dtype), given


def _rows(x: Tensor) -> Tensor:
    return x.mT.contiguous()
