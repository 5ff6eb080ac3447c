"""The Lanczos factorisation with full reorthogonalisation: A V = V T + (what the basis does not see).

Every entry of T is a computed ⟨v_i, A v_j⟩, not a recurrence. So T is the exact projection of A onto the basis after
restarts, after a breakdown and after a new direction was injected, and Ritz values are honest lower and upper bounds of
the ends of the spectrum. (`docs/math.md`, "Lanczos")
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.linalg.basis import Basis
from curvlens.linalg.probes import FRESH, Probes
from curvlens.linalg.products import Products


class Lanczos:
    """Grows a basis by one product a step."""

    def __init__(
        self,
        products: Products,
        basis: Basis,
        start: Tensor | None,
        probes: Probes,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.products, self.basis, self.probes, self._watch = products, basis, probes, watch
        self.T = torch.zeros(basis.capacity, basis.capacity, dtype=torch.float64)
        self.size = 0
        """Vectors that were multiplied; the next one waits behind them."""
        self.coupling = 0.0
        """How strongly the last product points out of the basis."""
        self.given_up: list[tuple[Tensor, Tensor]] = []
        """Directions that did not get their turn, and how far the product of each vector points along them."""
        self.norm = 0.0
        """The largest ‖A v‖ seen: a lower bound of the spectral norm."""
        self._fresh = 0
        self._waiting: Tensor
        eps = max(products.eps, float(torch.finfo(basis.dtype).eps))
        self._tiny = 10 * eps
        if start is None or not self._place(start.to(products.dtype), 0):
            self._place_fresh(0)

    @property
    def exhausted(self) -> bool:
        """Whether the basis spans the whole space, so that T has the spectrum of A."""
        return self.size == self.basis.n

    @property
    def broke_down(self) -> bool:
        """Whether the span of the basis is invariant, to rounding."""
        return self.coupling <= self._tiny * self.norm

    def step(self) -> None:
        """One product, one more row and column of T."""
        j = self.size
        v = self.basis[j]
        w = self.products(v)
        if self._watch is not None:
            self._watch(v, w)
        self.norm = max(self.norm, float(w.double().norm()))
        column = torch.zeros(j + 1, dtype=torch.float64)
        self.coupling = self._orthogonalise(w, column)
        self.T[: j + 1, j] = self.T[j, : j + 1] = column
        self.size = j + 1
        if self.exhausted:
            self.coupling = 0.0
        elif self.size < self.basis.capacity:
            if self.broke_down or not self._place(w, self.size):
                self._give_up(None)
                self._place_fresh(self.size)
        else:
            self._waiting = w

    def inject(self) -> None:
        """Give up the direction that would come next for a random one, orthogonal to all: it finds what is repeated."""
        self._give_up(None if self.broke_down else self.basis[self.size])
        self._place_fresh(self.size)

    def resume(self) -> None:
        """Take up the direction that was given up and that most is missing of."""
        waiting = self.basis[self.size].clone()
        most = max(range(len(self.given_up)), key=lambda i: float(self.given_up[i][1].norm()))
        direction, _ = self.given_up.pop(most)
        self._give_up(waiting)
        if not self._place(direction.to(self.products.dtype), self.size):
            self._place_fresh(self.size)  # the basis has it by now

    def _give_up(self, direction: Tensor | None, along: Tensor | None = None) -> None:
        """Remember the direction that was to come next, and which products point along it."""
        if along is None:
            along = torch.zeros(self.size, dtype=torch.float64)
            along[-1] = self.coupling
        if direction is not None:
            self.given_up.append((direction.clone(), along))
        self.coupling = 0.0

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, ascending; their vectors in the basis; estimates of their residuals."""
        theta, S = torch.linalg.eigh(self.T[: self.size, : self.size])
        squares = (self.coupling * S[-1]).square()
        for _, along in self.given_up:
            squares = squares + (along @ S[: len(along)]).square()
        return theta, S, squares.sqrt()

    def restart(self, theta: Tensor, S: Tensor, *, fresh: bool = False) -> None:
        """Keep some Ritz vectors, the columns of S, and the direction that comes next (or a ``fresh`` one)."""
        p = S.shape[1]
        waiting = self._waiting if self.size == self.basis.capacity else self.basis[self.size].clone()
        self.given_up = [(direction, along @ S[: len(along)]) for direction, along in self.given_up]
        if fresh:
            self._give_up(waiting / float(waiting.double().norm()), self.coupling * S[-1])
        self.basis.rotate(S)
        self.T.zero_()
        self.T[range(p), range(p)] = theta
        self.size = p
        if fresh or self.broke_down or not self._place(waiting, p):
            self._place_fresh(p)

    def _orthogonalise(self, w: Tensor, column: Tensor) -> float:
        """Take the basis out of w, in place, until nothing of it is left; the norm that remains."""
        before = float(w.double().norm())
        for _ in range(4):
            c = self.basis.dots(len(column), w)
            self.basis.subtract(c, w)
            column += c
            after = float(w.double().norm())
            if after > 0.5 * before:
                break
            before = after
        return after

    def _place(self, w: Tensor, j: int) -> bool:
        """Normalise a vector and orthogonalise it once more; whether something was left of it."""
        size = float(w.double().norm())
        if not size > 0:
            return False
        w = w / size
        if j:
            # What is left after dividing by a small number may point back into the basis.
            if self._orthogonalise(w, torch.zeros(j, dtype=torch.float64)) < 0.5:
                return False
            w = w / float(w.double().norm())
        self.basis.put(j, w)
        return True

    def _place_fresh(self, j: int) -> None:
        while not self._place(self._random(j), j):
            pass

    def _random(self, j: int) -> Tensor:
        """A random direction orthogonal to the basis, of length 1."""
        w = self.probes.direction(self._fresh, FRESH)
        self._fresh += 1
        if j:
            self._orthogonalise(w, torch.zeros(j, dtype=torch.float64))
        return w / float(w.double().norm())
