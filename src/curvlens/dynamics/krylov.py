"""An operator seen from some start vectors: its projection onto their block Krylov space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.linalg.vectors import slices
from curvlens.memory import available_bytes, readable

GONE = 1e4
"""A vector of which less than so many units in the last place is left beside the basis adds nothing to it."""


@dataclass(frozen=True)
class Krylov:
    """V with orthonormal rows, T = V A Vᵀ, and the start vectors in it."""

    V: Tensor
    """(k, n)."""
    T: Tensor
    """(k, k), float64, on the CPU."""
    starts: Tensor
    """(k, b): V s for every start vector s, float64, on the CPU. All of s is in the span of V."""
    exact: int
    """A polynomial of A up to this degree, times a start vector, is in the span of V."""
    products: int

    def gram(self, weights: Tensor) -> Tensor:
        """V diag(w) Vᵀ, float64, on the CPU."""
        k = len(self.V)
        found = torch.zeros(k, k, dtype=torch.float64, device=self.V.device)
        for part in slices(self.V.shape[1], k, self.V.device):
            rows = self.V[:, part].double()
            found += (rows * weights[part].double()) @ rows.T
        return found.cpu()

    def coordinates(self, v: Tensor) -> Tensor:
        """V v, float64, on the CPU."""
        return _times(self.V, v)


def krylov(
    product: Callable[[Tensor], Tensor], starts: Sequence[Tensor], degree: int, tick: Callable[[], None]
) -> Krylov:
    """The span of A^j s for all start vectors s and j up to ``degree``, by ``degree`` products for each of them.

    Every new vector is made orthogonal to all others twice. Start vectors that are 0 or depend on others add nothing.
    """
    first = starts[0]
    most = min(len(starts) * (degree + 1), len(first))
    needed, free = most * first.nbytes, available_bytes(first.device)
    if needed > 0.8 * free:
        raise CurvlensError(
            f"A forecast with {degree} products for each of {len(starts)} start vectors keeps {most} vectors, "
            f"{readable(needed)}; {readable(free)} are free. Give fewer: products={max(degree // 4, 1)}."
        )
    V = torch.zeros(most, len(first), dtype=first.dtype, device=first.device)
    T = torch.zeros(most, most, dtype=torch.float64, device="cpu")
    size = products = 0

    def add(v: Tensor, scale: float) -> bool:
        """Put what is left of v beside the basis into it."""
        nonlocal size
        if size == most:
            return False
        for _ in range(2):
            v = v - (_times(V[:size], v).to(v.device, v.dtype) @ V[:size])
        length = float(v.double().norm())
        if not length > GONE * torch.finfo(V.dtype).eps * scale:
            return False
        V[size] = v / length
        size += 1
        return True

    layer = []
    for start in starts:
        if add(start.clone(), float(start.double().norm())):
            layer.append(size - 1)
    exact = 0
    for _ in range(degree):
        following = []
        for j in layer:
            w = product(V[j])
            products += 1
            tick()
            row = _times(V[:size], w)
            T[j, :size] = row
            T[:size, j] = row
            if add(w, float(w.double().norm())):
                T[j, size - 1] = T[size - 1, j] = float(_times(V[size - 1 : size], w))
                following.append(size - 1)
        layer = following
        exact += 1
        if not layer:  # the span is invariant: everything is exact
            exact = 1 << 30
            break
    multiplied = size - len(layer)
    V, T = V[:multiplied], T[:multiplied, :multiplied]
    return Krylov(V, T, torch.stack([_times(V, s) for s in starts], 1), exact, products)


def _times(V: Tensor, v: Tensor) -> Tensor:
    """V v in float64, on the CPU."""
    total = torch.zeros(len(V), dtype=torch.float64, device=V.device)
    for part in slices(len(v), len(V) + 1, V.device):
        total += V[:, part].double() @ v[part].double()
    return total.cpu()
