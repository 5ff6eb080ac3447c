"""Detects whether a tensor has changed: by comparison with a copy, or by a checksum of its bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_WIDTH = 1024
_SMALL = 1 << 16
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed number
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def same_bits(x: Tensor, copy: Tensor) -> bool:
    """Whether two tensors of one shape and dtype agree to the last bit, in one pass over memory."""
    x, copy = x.detach(), copy.detach()
    if x.layout != torch.strided or x.is_quantized:
        return bool(torch.equal(_bits(x), _bits(copy)))
    if not x.is_contiguous() or not x.numel():
        return x.numel() == 0 or bool(torch.equal(_bits(x), _bits(copy)))
    flat, other = x.reshape(-1), copy.reshape(-1)
    wide = flat.numel() * flat.element_size() % 8 == 0 and flat.data_ptr() % 8 == 0 and other.data_ptr() % 8 == 0
    integers = torch.int64 if wide else _INTEGERS[flat.element_size()]
    return bool(torch.equal(flat.view(integers), other.view(integers)))


def checksum(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Integers that change if the tensors change.

    The bits are read as integers of at most 32 bits, in rows of 1024. Row and column sums are exact in 64 bits; each
    kind is added up with pseudo-random odd weights, modulo 2^64. So every change of a single entry is detected, and any
    other change (signs, scales, permutations) unless it keeps all row sums and all column sums. This takes two passes
    over memory; small tensors are processed together.
    """
    together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    sums: list[Tensor] = []
    for x in tensors:
        flat = _bits(x.detach())
        if flat.numel() < _SMALL:
            together[flat.device, flat.dtype].append(flat)
        else:
            sums += _sums(flat)
    for group in together.values():
        sums += _sums(torch.cat(group))
    return tuple(torch.stack([s.cpu() for s in sums]).tolist()) if sums else ()


def _bits(x: Tensor) -> Tensor:
    """The tensor as a flat tensor of integers."""
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        x = x.int_repr()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.contiguous().reshape(-1).view(_INTEGERS[x.element_size()])


def _sums(flat: Tensor) -> list[Tensor]:
    whole = flat[: len(flat) - len(flat) % _WIDTH].view(-1, _WIDTH)
    parts = (whole.sum(1, dtype=torch.int64), whole.sum(0, dtype=torch.int64), flat[whole.numel() :].long())
    return [(part * _weights(len(part), flat.device)).sum() for part in parts]


def _weights(count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers: multiples of the golden ratio, their upper bits folded into the lower ones."""
    x = (torch.arange(count, device=device) + 1) * _ODD
    x = (x ^ (x >> 29)) * _ODD
    return (x ^ (x >> 31)) | 1
