"""Eigenvalues at the ends of a spectrum, by thick-restart Lanczos, with a check for hidden copies.

One random start contains one direction of every eigenspace, so a repeated eigenvalue appears only once. When the wanted
values have converged, a random direction orthogonal to the basis is injected, and the factorisation continues from it
(a *chain*). A hidden copy appears as a new value. The search ends only when a whole chain has found nothing new. Then
each vector is multiplied once more: the reported values and residuals are those of the returned vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlens.interrupts import must_be_whole
from curvlens.linalg.basis import Basis, BasisPlace
from curvlens.linalg.counted import CountedOperator, warn
from curvlens.linalg.lanczos import Lanczos
from curvlens.linalg.plan import Ends, Plan, plan_search, start_vector
from curvlens.linalg.vectors import distance
from curvlens.operators.base import Progress
from curvlens.results import Eigs, Status
from curvlens.surroundings import as_found

SHORTEST, CLEAR, PATIENCE = 8, 0.05, 40
"""When a chain has shown that nothing is hidden: after 8 steps, if its end is clear of the wanted values (its residual
is 1/20 of the distance); otherwise after as many steps as the search before it, and at least 40."""
ROOM = 2 * SHORTEST
"""Basis vectors reserved for a chain, if there are so many."""


@as_found
def eigs(
    operator: Any,
    k: int = 1,
    ends: Ends = "largest",
    *,
    tol: float | None = None,
    max_products: int | None = None,
    start: Tensor | np.ndarray | Eigs | None = None,
    seed: int = 0,
    memory: int | float | str | None = None,
    store: BasisPlace = "device",
    store_dtype: torch.dtype | None = None,
    check_copies: bool = True,
    progress: Progress | None = None,
) -> Eigs:
    """The k eigenvalues at an end of the spectrum (``"both"``: k at each), with vectors and residuals.

    ``ends`` is algebraic: ``"smallest"`` are the most negative ones; ``"magnitude"`` orders by |λ|. ``tol`` bounds
    the residuals ‖A x − λ x‖ relative to the spectral norm (1e-8 in float64, 1e-5 in float32); an isolated eigenvalue
    is far more accurate than that. ``start`` is a vector, or the `Eigs` of a nearby operator. ``memory`` bounds
    everything that the search needs beside the model: graphs kept for products, vectors, and the basis. ``store`` is
    where the basis is: ``"device"``, ``"cpu"`` or a folder for a file (``memory`` then bounds the basis alone); its
    dtype is ``store_dtype``. ``check_copies=False`` skips the search for hidden copies of repeated eigenvalues. That
    saves 8 products if the wanted values are clear of the rest, and otherwise as many as the search before it.

    After Ctrl-C, or ``max_products`` products, the result has what was found so far.

    >>> result = eigs(torch.diag(torch.tensor([3.0, 1.0, 3.0, -2.0], dtype=torch.float64)), k=2)
    >>> result.values.round(decimals=9)
    tensor([3., 3.], dtype=torch.float64)
    """
    products = CountedOperator(operator, symmetric=True, progress=progress, seed=seed)
    plan = plan_search(products, k, ends, tol, max_products, memory, store, store_dtype)
    basis = Basis(plan.capacity, products.n, dtype=plan.dtype, device=products.device, store=store)
    search = _Search(products, plan, basis, start_vector(start, products), seed, check_copies)
    try:
        status, note = search.run()
    except KeyboardInterrupt:
        if must_be_whole() or search.lanczos.size < 2 or not search.lanczos.valid:
            raise
        note = f"interrupted after {products.count} products"
        return search.result(Status.INTERRUPTED, note, explicit=False)
    return search.result(status, note, explicit=True)


class _Search:
    """The loop around the factorisation: grow the basis, test convergence, restart, inject a direction, end."""

    def __init__(
        self, products: CountedOperator, plan: Plan, basis: Basis, start: Tensor | None, seed: int, check_copies: bool
    ) -> None:
        self.products, self.plan, self.check_copies = products, plan, check_copies
        self.seed = seed
        self.lanczos = Lanczos(products, basis, start, products.probes(seed), tol=plan.tol)
        self.scale = 0.0
        self.chain: int | None = None
        """The index in the basis at which the chain of the last injected direction begins."""
        self.chain_start = 0
        self.mixed = False
        """Whether the chain has resumed a direction set aside before it. Then the two cannot be separated."""

    def run(self) -> tuple[Status, str]:
        """Grow the basis until the wanted values have converged. Return the status and a note."""
        plan, lanczos, products = self.plan, self.lanczos, self.products
        look = min(plan.count + 2, plan.capacity)
        while True:
            # Reserve one more product for each returned vector.
            if products.count >= max(plan.max_products - plan.count, 1):
                return Status.STOPPED_AT_BUDGET, f"stopped at max_products={plan.max_products}"
            lanczos.step()
            full = lanczos.size == plan.capacity
            if not (lanczos.exhausted or full or lanczos.size >= look):
                continue
            theta, S, residuals = lanczos.ritz()
            self.scale = max(self.scale, float(theta.abs().max()))
            if lanczos.exhausted:
                return Status.CONVERGED, "the basis spans the whole space"
            pick = plan.wanted(theta)
            there = len(theta) > plan.count and bool((residuals[pick] <= 0.5 * plan.tol * self.scale).all())
            if there and (not self.check_copies or self._nothing_hidden(theta[pick])):
                return Status.CONVERGED, ""
            # The missing part lies along directions that were set aside for a chain: resume them.
            ahead = (lanczos.outward @ S[:, pick]).abs()
            blocked = not there and bool(lanczos.given_up) and float(residuals[pick].max()) > 2 * float(ahead.max())
            begin_chain = there and self.check_copies and (self.chain is None or not self._same(theta[pick]))
            narrow = plan.capacity < products.n and plan.capacity - lanczos.size < ROOM
            if begin_chain and not (full or narrow):
                lanczos.inject()
            elif begin_chain:
                self._restart(S, theta, at_most=max(plan.capacity - ROOM, plan.count), fresh=True)
            elif full and self.chain is not None and not self.mixed and self._same(theta[pick]):
                self._restart_chain(self.chain)
            elif full:
                self._restart(S, theta)
                self.chain = None
            if blocked:
                lanczos.resume(S[:, pick] if not full else torch.eye(lanczos.size, dtype=torch.float64))
                self.mixed = True
            if begin_chain:
                self.mixed = False
                self.chain, self.chain_start, self.before = lanczos.size, products.count, theta[pick]
            look = lanczos.size + (4 if self.chain is not None else max(1, lanczos.size // 10))

    def _nothing_hidden(self, wanted: Tensor) -> bool:
        """Whether the chain has resolved its own end of the spectrum, and that end is not wanted."""
        if self.chain is None or not self._same(wanted):
            return False
        spent = self.products.count - self.chain_start
        # A chain as long as the search before it had the same chance, however slowly its end converges.
        if spent >= max(PATIENCE, self.chain_start):
            return True
        if spent < SHORTEST:
            return self.lanczos.broke_down and spent > 0
        theta, S = self._ritz_of_chain(self.chain)
        reach = (self.lanczos.outward[self.chain :] @ S).abs()
        if self.plan.ends == "magnitude":
            last = int(theta.abs().argmax())
            return bool(reach[last] <= CLEAR * (wanted.abs().min() - theta[last].abs()))
        k = self.plan.k
        low = self.plan.ends == "largest" or bool(reach[0] <= CLEAR * (theta[0] - wanted[:k].max()))
        high = self.plan.ends == "smallest" or bool(reach[-1] <= CLEAR * (wanted[-k:].min() - theta[-1]))
        return low and high

    def _same(self, wanted: Tensor) -> bool:
        """Whether the chain has found nothing new. Otherwise another chain is needed."""
        return bool(((wanted - self.before).abs() <= 2 * self.plan.tol * self.scale).all())

    def _ritz_of_chain(self, chain: int) -> tuple[Tensor, Tensor]:
        """Ritz values and vectors of the chain alone, without the vectors before it."""
        size = self.lanczos.size
        theta, S = torch.linalg.eigh(self.lanczos.T[chain:size, chain:size])
        return theta, S

    def _restart(self, S: Tensor, theta: Tensor, *, at_most: int | None = None, fresh: bool = False) -> None:
        """Keep the wanted vectors and some beyond them: the fewer are kept, the slower the next values converge."""
        plan = self.plan
        beyond = max((plan.capacity - plan.count) // 2, 1)
        keep = min(plan.count + beyond, plan.capacity - 3, self.lanczos.size if at_most is None else at_most)
        self.lanczos.restart(S[:, plan.wanted(theta, keep)], fresh=fresh)

    def _restart_chain(self, chain: int) -> None:
        """Keep the vectors before the chain, and the half of the chain that is nearest to the wanted values."""
        theta, R = self._ritz_of_chain(chain)
        room = self.plan.capacity - chain
        R = R[:, self.plan.wanted(theta, min(max(room // 2, 2), room - 1))]
        S = torch.zeros(self.lanczos.size, chain + R.shape[1], dtype=torch.float64)
        S[range(chain), range(chain)] = 1
        S[chain:, chain:] = R
        self.lanczos.restart(S, ritz=False)

    def result(self, status: Status, note: str, *, explicit: bool) -> Eigs:
        """Vectors, values and residuals, from one product with each vector if ``explicit``."""
        plan, products, lanczos = self.plan, self.products, self.lanczos
        theta, S, residuals = lanczos.ritz()
        pick = plan.wanted(theta)
        values, residuals, S = theta[pick], residuals[pick], S[:, pick]
        lanczos.forget_directions()
        X = lanczos.basis.combine(S, products.dtype)
        lanczos.basis.rows = lanczos.basis.rows[:0].clone()
        residuals = residuals.clamp(min=10 * products.eps * self.lanczos.norm)  # estimates do not include rounding
        if explicit:
            try:
                values, residuals = _polish(X, products)
            except KeyboardInterrupt:
                if must_be_whole():
                    raise
                status, note = Status.INTERRUPTED, f"interrupted after {products.count} products"
        order = values.argsort()
        values, residuals = values[order], residuals[order]
        vectors = (X.rows if len(order) == 1 else X.rows[order.to(X.rows.device)]).T
        scale = max(self.scale, float(values.abs().max()))
        converged = residuals <= plan.tol * scale
        missing = plan.count - len(values)
        if not bool(converged.all()) and status is Status.CONVERGED:
            status = Status.STALLED
            note = f"residuals stay above {float(residuals.max()) / scale:.0e} of the norm because products are rounded"
        if missing or not bool(converged.all()):
            warn(
                f"{missing + int((~converged).sum())} of {plan.count} eigenpairs did not converge to tol={plan.tol:g}: "
                f"{note}. `residuals` shows how far they are."
            )
        return Eigs(
            values=values,
            vectors=vectors,
            residuals=residuals,
            converged=converged,
            status=status,
            note=note,
            tol=plan.tol,
            norm=scale,
            products=products.count,
            memory=plan.memory,
            ends=plan.ends,
            shapes={name: list(shape) for name, shape in products.operator.columns.shapes.items()},
            blocks=products.operator.columns.blocks.to_dict(),
            maps=products.operator.columns.blocks.maps(),
            provenance=products.provenance(seed=self.seed, basis=plan.capacity, check_copies=self.check_copies),
        )


def _polish(X: Basis, products: CountedOperator) -> tuple[Tensor, Tensor]:
    """Orthonormalise X in place, multiply each vector, take the best combinations. Return values and residuals."""
    count = X.capacity
    one = torch.eye(count, dtype=torch.float64)
    for _ in range(2):
        gram = torch.stack([X.dots(count, X[i]) for i in range(count)])
        if float((gram - one).abs().max()) > torch.finfo(torch.float64).eps:
            scales, R = torch.linalg.eigh(gram)
            X.rotate(R / scales.clamp(min=1e-300).sqrt())
    W = Basis(count, X.n, dtype=X.dtype, device=X.device, store="device")
    for i in range(count):
        W.put(i, products(X[i]))
    M = torch.stack([X.dots(count, W[i]) for i in range(count)])
    values, R = torch.linalg.eigh((M + M.T) / 2)
    if count > 1:
        X.rotate(R)
        W.rotate(R)
    return values, torch.tensor([distance(W[i], float(v), X[i]) for i, v in enumerate(values)], dtype=torch.float64)
