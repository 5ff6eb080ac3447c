"""Checksums see every change of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlens.checksum import checksum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [(3,), (64, 64), (300, 1024)])
def test_checksums_see_changes(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(size) * 8).to(dtype)
    seen = {checksum([x])}

    def one_entry(t: Tensor) -> None:
        t.view(-1)[2] = not t.view(-1)[2] if dtype == torch.bool else 3 - t.view(-1)[2]

    changes: list[Callable[[Tensor], Any]] = [one_entry]
    if dtype.is_floating_point:
        changes += [Tensor.neg_, lambda t: t.mul_(2), lambda t: t.view(-1)[1].neg_(), lambda t: t.view(-1)[:2].neg_()]
        changes += [lambda t: t.add_(1), lambda t: t[..., ::2].neg_()]
    if len(size) > 1 and dtype != torch.bool:
        changes += [lambda t: t.copy_(t.flip(0)), lambda t: t.copy_(t.flip(1)), lambda t: t.copy_(t.roll(1, 0))]
        changes += [lambda t: t[0].copy_(t[1].clone())]
    for change in changes:
        changed = x.clone()
        change(changed)
        assert checksum([changed]) not in seen
    assert checksum([x.clone()]) in seen


def test_a_moved_entry_is_seen() -> None:
    sums = set()
    for place in range(0, 4096, 7):
        x = torch.zeros(4096, dtype=torch.float64)
        x[place] = 1
        sums.add(checksum([x]))
    assert len(sums) == len(range(0, 4096, 7))
    assert checksum([torch.zeros(2)]) != checksum([-torch.zeros(2)])
