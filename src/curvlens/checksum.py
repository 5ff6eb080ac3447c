"""Has a tensor changed? An exact, position-dependent checksum of its bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WIDTH = 1024
_ODD = (
    0x9E3779B97F4A7C15 - 2**64
)  # 2^64 divided by the golden ratio, as a signed number: spreads positions over all bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """One integer for each tensor.

    The bits are read as integers and laid out in rows of 1024; row and column sums, with arithmetic modulo 2^64, are
    combined with weights of their own. A single changed entry is always seen, and so is a permutation, but by an
    accident of 2^-64. Two passes over memory: about 1 % of a Hessian-vector product.
    """
    sums = [_checksum(x.detach()) for x in tensors]
    if not sums:
        return ()
    return tuple(torch.stack([s.to(sums[0].device) for s in sums]).tolist())


def _checksum(x: Tensor) -> Tensor:
    if x.layout != torch.strided or x.is_quantized:
        x = x.to_dense() if x.layout != torch.strided else x.int_repr()
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.contiguous().reshape(-1).view(_INTEGERS[x.element_size()])
    whole = flat[: len(flat) - len(flat) % _WIDTH].view(-1, _WIDTH)
    parts = (whole.sum(1, dtype=torch.int64), whole.sum(0, dtype=torch.int64), flat[whole.numel() :].to(torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in parts:
        weights = (2 * torch.arange(len(part), device=x.device) + 1) * _ODD
        total = total * _ODD + (part * weights).sum()
    return total
