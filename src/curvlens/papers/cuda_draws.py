"""Normal numbers as torch draws them on a GPU, without one: Philox 4x32-10 and the Box–Muller transform.

A counter-based generator: thread t of the n-th call after `torch.manual_seed(s)` encrypts the counter (n, 0, t, 0) with
the key s (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, 2011), so that any number can be
had without those before it. A tensor with no more entries than the GPU has threads takes one number of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the two halves of the key grow by from round to round."""
LOW = 0xFFFFFFFF
Words = NDArray[np.uint64]
"""Of 32 bits each, in 64, so that products are whole."""


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four random words of each counter of four words."""
    a, b, c, d = counter
    for number in range(ROUNDS):
        first, second = ((half + number * step) & LOW for half, step in zip(key, WEYL, strict=True))
        left, right = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, b, c, d = (
            (right >> np.uint64(32)) ^ b ^ np.uint64(first),
            right & np.uint64(LOW),
            (left >> np.uint64(32)) ^ d ^ np.uint64(second),
            left & np.uint64(LOW),
        )
    return a, b, c, d


def normal(count: int, *, seed: int, call: int) -> NDArray[np.float32]:
    """What ``torch.empty(count, device="cuda").normal_()`` gives, as the ``call``-th one after the seed was set.

    To about 1e-6, by the GPU's own logarithm and sine. The calls before it have to be of as few numbers, and below 2³².

    >>> normal(4, seed=0, call=0).round(4)  # torch.manual_seed(0), torch.randn(4, device="cuda")
    array([-0.9247, -0.4253, -2.6438,  0.1452], dtype=float32)
    """
    none = np.zeros(count, dtype=np.uint64)
    counter = (none + np.uint64(call), none, np.arange(count, dtype=np.uint64), none)
    radius, angle, _, _ = (word.astype(np.float32) for word in philox(counter, (seed & LOW, seed >> 32)))
    unit, turn = np.float32(2.0**-32), np.float32(2 * np.pi * 2.0**-32)
    u, v = radius * unit + unit / 2, angle * turn + turn / 2
    found: NDArray[np.float32] = np.sqrt(-2 * np.log(u)) * np.sin(v)
    return found
