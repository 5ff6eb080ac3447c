"""Has a tensor changed? An exact, position-dependent checksum of its bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_WIDTH = 1024
_SMALL = 1 << 16
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed number: spreads positions over all bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Some integers that stay the same as long as the tensors do.

    The bits are read as integers and laid out in rows of 1024; row and column sums, with arithmetic modulo 2^64, are
    combined with weights of their own. A single changed entry is always seen, and so is a permutation, but by an
    accident of 2^-64. Two passes over memory, about 1 % of a Hessian-vector product; small tensors go through together.
    """
    together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    sums = []
    for x in tensors:
        flat = _bits(x.detach())
        if flat.numel() < _SMALL:
            together[flat.device, flat.dtype].append(flat)
        else:
            sums.append(_sum(flat))
    sums += [_sum(torch.cat(group)) for group in together.values()]
    return tuple(torch.stack([s.cpu() for s in sums]).tolist()) if sums else ()


def _bits(x: Tensor) -> Tensor:
    """The tensor as a flat one of integers, eight bytes each where possible."""
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        x = x.int_repr()
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = x.contiguous().reshape(-1)
    wide = flat.numel() * flat.element_size() % 8 == 0 and flat.data_ptr() % 8 == 0
    return flat.view(torch.int64 if wide else _INTEGERS[flat.element_size()])


def _sum(flat: Tensor) -> Tensor:
    whole = flat[: len(flat) - len(flat) % _WIDTH].view(-1, _WIDTH)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in (whole.sum(1, dtype=torch.int64), whole.sum(0, dtype=torch.int64), flat[whole.numel() :].long()):
        weights = (2 * torch.arange(len(part), device=flat.device) + 1) * _ODD
        total = total * _ODD + (part * weights).sum()
    return total
