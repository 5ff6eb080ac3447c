"""The memory for a search for eigenvalues, and the largest basis that fits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from curvlens.errors import CurvlensError
from curvlens.linalg.basis import BasisPlace, budget
from curvlens.linalg.counted import CountedOperator
from curvlens.memory import available_bytes, give_back, parse_bytes, readable
from curvlens.operators.footprint import Footprint, footprint

logger = logging.getLogger("curvlens")

COMFORT = 4
"""Basis vectors beside the wanted ones with which restarts cost few products."""
FEWEST = 3
"""Basis vectors beside the wanted ones without which a search makes no progress."""


@dataclass(frozen=True)
class Needs:
    """The bytes that a search needs, as a function of the number of basis vectors."""

    n: int
    count: int
    """The number of eigenvectors returned."""
    sides: int
    """The number of ends of the spectrum."""
    stored: int
    """Bytes of a basis vector."""
    vector: int
    """Bytes of a working vector."""
    product: Footprint
    apart: bool
    """Whether the basis and the working vectors are stored in different places."""
    device: torch.device

    @classmethod
    def of(cls, products: CountedOperator, count: int, sides: int, dtype: torch.dtype, store: BasisPlace) -> Needs:
        """The needs of a search with these products. This builds their graphs, which are needed in any case."""
        n, device = products.n, products.device
        apart = store != "device" and not (store == "cpu" and device.type == "cpu")
        vector = n * products.dtype.itemsize
        product = footprint(products.operator)
        if dtype != products.dtype or products.dtype != products.operator.dtype or apart:
            product = replace(product, work=product.work + vector)  # a copy of the argument
        return cls(n, count, sides, n * dtype.itemsize, vector, product, apart, device)

    @property
    def fewest(self) -> int:
        """The smallest basis with which a search works."""
        return min(self.n, self.count + FEWEST + self.sides - 1)

    def beside(self) -> int:
        """The bytes beside basis and kept graphs: for a product, and for the direction set aside for a chain.

        At the end they are for the returned vectors, which may need more.
        """
        return max(self.vector + max(self.product.work, 2 * self.vector), self.count * self.vector)

    def total(self, capacity: int) -> int:
        """The peak of all memory: during the search, or when the returned vectors are multiplied."""
        search = capacity * self.stored + self.beside()
        return self.product.kept + max(search, 2 * self.count * self.vector + self.product.work)

    def fitting(self, size: int) -> int:
        """The largest basis for which everything fits ``size``; if the basis is stored elsewhere, the basis alone."""
        if self.apart:
            return size // self.stored
        if 2 * self.count * self.vector + self.product.work + self.product.kept > size:
            return 0
        return (size - self.product.kept - self.beside()) // self.stored

    def capacity(self, memory: int | float | str | None, store: BasisPlace, most: int) -> int:
        """How many basis vectors to take.

        Without a budget it is a quarter of the free memory, counting kept graphs as free; a half if the search would be
        slow otherwise, and nine tenths if it would be impossible.
        """
        most = min(self.n, most)
        if memory is not None:
            allowed = parse_bytes(memory)
            capacity = min(most, self.fitting(allowed))
        elif self.apart:
            allowed = budget(None, store, self.device)
            capacity = min(most, self.fitting(allowed))
        else:
            give_back()
            free = available_bytes(self.device) + self.product.kept
            allowed = free * 9 // 10
            capacity = min(most, self.fitting(free // 4))
            comfort = min(most, self.count + COMFORT + self.sides - 1)
            if capacity < comfort:
                capacity = max(capacity, min(comfort, self.fitting(free // 2)))
            if capacity < self.fewest <= self.fitting(allowed):
                capacity = self.fewest
        if capacity < self.fewest:
            raise CurvlensError(self._refusal(allowed))
        return capacity

    def announce(self, capacity: int) -> None:
        """Log the memory that the search will use."""
        logger.info(
            "eigs takes %s at its peak: %s of graphs and a copy of the model kept for products, %s in a product and "
            "beside it, %s of a basis of %d vectors",
            readable(self.total(capacity)),
            readable(self.product.kept),
            readable(self.beside()),
            readable(capacity * self.stored),
            capacity,
        )

    def _refusal(self, allowed: int) -> str:
        """The error message: the missing memory, and advice for this case."""
        needed = self.fewest * self.stored if self.apart else self.total(self.fewest)
        half = replace(self, stored=self.n * torch.bfloat16.itemsize)
        elsewhere = self.total(0)
        advice = [f"give memory={_rounded(needed)!r}"] if needed <= available_bytes(self.device) else []
        if half.stored < self.stored and half.fitting(allowed) >= half.fewest:
            advice.append("keep the basis in store_dtype=torch.bfloat16")
        if not self.apart and elsewhere <= allowed:
            advice.append("keep the basis in a file with store='some/folder'")
        if self.count > 1 and replace(self, count=1).fitting(allowed) >= replace(self, count=1).fewest:
            advice.append("ask for fewer eigenvalues, as k=1")
        if self.product.spare > needed - allowed:
            advice.append("keep smaller graphs with Problem(..., memory='100MB')")
        vectors = f"{self.count} eigenvectors" if self.count > 1 else "One eigenvector"
        what = f"{vectors} of {self.n} numbers need{'s' * (self.count == 1)} {readable(needed)} at least"
        kept = f" ({readable(self.product.kept)} of them for the graphs of products)" if self.product.kept else ""
        return f"{what}{kept}, {readable(allowed)} are allowed. " + (
            f"To proceed, {', or '.join(advice)}." if advice else "Take a block of the operator, as H['h.0']."
        )


def _rounded(size: int) -> str:
    """A size rounded up, as a user types it."""
    return f"{-(-size // 10**6)}MB"
