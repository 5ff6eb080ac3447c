"""The Lanczos factorisation with full reorthogonalisation: A V = V T + (the part outside of the basis).

Every entry of T is a computed ⟨v_i, A v_j⟩, not a recurrence. So T is the exact projection of A onto the basis, also
after restarts, breakdowns and injected directions, and Ritz values are true bounds: the largest is never above the top
of the spectrum, the smallest never below its bottom. (`docs/explanation/math.md`, "Lanczos")
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.linalg.basis import Basis
from curvlens.linalg.counted import CountedOperator
from curvlens.linalg.probes import Probes


class Lanczos:
    """Grows a basis by one product in each step."""

    def __init__(
        self,
        products: CountedOperator,
        basis: Basis,
        start: Tensor | None,
        probes: Probes,
        watch: Callable[[Tensor, Tensor], None] | None = None,
        tol: float = 0.0,
    ) -> None:
        self.products, self.basis, self.probes, self._watch = products, basis, probes, watch
        self.T = torch.zeros(basis.capacity, basis.capacity, dtype=torch.float64)
        self.size = 0
        """The number of vectors that were multiplied; the next vector follows them in the basis."""
        self.outward = torch.zeros(0, dtype=torch.float64)
        """The component of each vector's product along the next vector."""
        self.given_up: list[tuple[Tensor, Tensor]] = []
        """Directions that were set aside, each with the components of the vectors' products along it."""
        self.norm = 0.0
        """The largest ‖A v‖ seen: a lower bound of the spectral norm."""
        self.valid = True
        """False while vectors and T are being changed together."""
        self._fresh = 0
        self._waiting: Tensor | None = None
        """The next vector, if the basis has no row for it."""
        self._clean = False
        """Whether the next vector is orthogonal to the basis."""
        eps = max(products.eps, float(torch.finfo(basis.dtype).eps))
        self._tiny = 10 * eps
        self._orthogonal = float(torch.finfo(products.dtype).eps)
        if basis.quick:
            # float32 coefficients leave a rounding error of their own. Errors that residuals below ``tol`` cannot show
            # are not worth another pass: they are measured, and T includes them.
            self._orthogonal = max(8 * self._orthogonal, 1e-3 * tol)
        if start is None or not self._place(start.to(products.dtype), 0):
            self._place_fresh(0)

    @property
    def exhausted(self) -> bool:
        """Whether the basis spans the whole space, so that T has the spectrum of A."""
        return self.size == self.basis.n

    @property
    def coupling(self) -> float:
        """The size of the products' components along the next vector."""
        return float(self.outward.norm())

    @property
    def broke_down(self) -> bool:
        """Whether the span of the basis is invariant up to rounding."""
        return self.coupling <= self._tiny * self.norm

    def step(self) -> None:
        """One product, one more row and column of T."""
        j = self.size
        v = self.basis[j]
        w = self.products(v)
        if self._watch is not None:
            self._watch(v, w)
        # ⟨v_i, A v_j⟩ = ⟨v_j, A v_i⟩ is known up to rounding, so the first pass over long vectors needs one row only.
        column, size, rest, clean = self._orthogonalise(w, j + 1, self.outward if self.basis.quick else None)
        self.norm = max(self.norm, size)
        self.valid = False
        self.T[: j + 1, j] = self.T[j, : j + 1] = column
        self.size = j + 1
        self.outward = torch.zeros(j + 1, dtype=torch.float64)
        self.outward[j] = 0.0 if self.exhausted else rest
        if self.size == self.basis.capacity:
            self._waiting, self._clean = w.div_(rest) if rest else w, clean
        elif not self.broke_down and clean:
            self.basis.put(self.size, w, rest)
        else:
            self.outward.zero_()
            self._place_fresh(self.size)
        self.valid = True

    def inject(self) -> None:
        """Set the next direction aside for a random one orthogonal to the basis, which finds repeated eigenvalues."""
        self._give_up(self._next())
        self._place_fresh(self.size)

    def resume(self, S: Tensor) -> None:
        """Resume the direction that was set aside and that the vectors V S miss most."""
        missing = [float((along @ S[: len(along)]).norm()) for _, along in self.given_up]
        direction, along = self._clear(*self.given_up.pop(missing.index(max(missing))))
        self._give_up(self._next())
        if direction is not None and self._place(direction, self.size):
            self.outward[: len(along)] = along
        else:  # the basis contains it by now
            self._place_fresh(self.size)

    def _clear(self, direction: Tensor, along: Tensor) -> tuple[Tensor | None, Tensor]:
        """Orthogonalise a direction to the basis, in place, and normalise it; None if nothing is left."""
        _, _, left, _ = self._orthogonalise(direction, self.size)
        return (direction.div_(left), along * left) if left > self._tiny else (None, along)

    def _next(self) -> Tensor:
        """A copy of the next direction, in the working dtype."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            return waiting
        return self.basis[self.size].to(self.products.dtype, copy=True)

    def _give_up(self, direction: Tensor) -> None:
        """Set the next direction aside, with the components of the products along it."""
        if not self.broke_down:
            self.given_up.append((direction, self.outward))
        self.outward = torch.zeros(self.size, dtype=torch.float64)

    def forget_directions(self) -> None:
        """Free what only further steps need: the next vector, and the directions set aside."""
        self._waiting = None
        self.given_up.clear()

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values in ascending order, their vectors in the basis, and estimates of their residuals."""
        theta, S = torch.linalg.eigh(self.T[: self.size, : self.size])
        squares = (self.outward @ S).square()
        for _, along in self.given_up:
            squares = squares + (along @ S[: len(along)]).square()
        return theta, S, squares.sqrt()

    def restart(self, S: Tensor, *, fresh: bool = False, ritz: bool = True) -> None:
        """Replace the basis by V S, for orthonormal columns S, and keep the next direction (or take a ``fresh`` one).

        Products of Ritz vectors (``ritz``) have no component along the dropped vectors. Products of others may have
        one, along directions set aside; these directions then stay unchanged, so that residuals include it.
        """
        # The vector without a row is orthogonal to all vectors and so to their combinations, apart from rounding.
        p, ready = S.shape[1], self._waiting is not None and self._clean and self.basis.quick
        waiting = self._next()
        if ritz:
            # T contains the components of the dropped vectors along a direction set aside; only the rest is missing.
            cleared = [self._clear(direction, along) for direction, along in self.given_up]
            self.given_up = [(direction, along) for direction, along in cleared if direction is not None]
        self.valid = False
        self.basis.rotate(S)
        kept = S.T @ self.T[: self.size, : self.size] @ S
        self.T.zero_()
        self.T[:p, :p] = (kept + kept.T) / 2
        self.given_up = [(direction, along @ S[: len(along)]) for direction, along in self.given_up]
        self.outward = self.outward @ S
        self.size = p
        if self.broke_down:
            self.outward.zero_()
            fresh = True
        elif fresh:
            self._give_up(waiting)
        if not fresh and ready:
            self.basis.put(p, waiting)
        elif fresh or not self._place(waiting, p):
            self._place_fresh(p)
        self.valid = True

    def _orthogonalise(self, w: Tensor, count: int, known: Tensor | None = None) -> tuple[Tensor, float, float, bool]:
        """Orthogonalise w to the basis, in place: coefficients, ‖w‖ before and after, and whether nothing is left.

        ``known`` are the coefficients of the first vectors, up to rounding; the remainder is measured in any case. A
        pass that subtracts also measures what remains, so a second pass is made only if cancellation requires it.
        """
        column = torch.zeros(count, dtype=torch.float64)
        if known is None:
            c, before = self.basis.sweep(w, count)
        else:
            c = torch.cat([known, torch.tensor([self.basis.along(len(known), w)], dtype=torch.float64)])
            before = float("nan")
        after, rest, rounds = before, float(c.norm()), 0
        while not rest <= self._orthogonal * after and rounds < 5:
            c = c.to(self.products.dtype).double()  # rounded as in the subtraction
            column += c
            c, after = self.basis.sweep(w, count, subtract=c)
            rest, rounds = float(c.norm()), rounds + 1
        column += c
        if known is not None:
            before = math.hypot(after, float(column.norm()))
        return column, before, after, after > 0 and rest <= 0.5 * after

    def _place(self, w: Tensor, j: int) -> bool:
        """Orthogonalise a vector in place, normalise and store it. Return whether anything was left of it."""
        _, before, after, clean = self._orthogonalise(w, j)
        if not clean or after <= self._tiny * before:
            return False
        self.basis.put(j, w, after)
        return True

    def _place_fresh(self, j: int) -> None:
        """Store a random direction orthogonal to the basis."""
        placed = False
        while not placed:
            placed = self._place(self.probes.fresh(self._fresh), j)
            self._fresh += 1
