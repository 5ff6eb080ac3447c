"""No float32 islands in a float64 model; no change to any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens as cl

DOUBLE = nn.Linear(1, 1).double()
CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to, by name": lambda x: x.to(dtype=torch.float32),
    "to a device too": lambda x: x.to("cpu", torch.float32),
    "to another": lambda x: x.to(torch.ones(1, dtype=torch.float32)),
    "type": lambda x: x.type(torch.float32),
    "type by tensor type": lambda x: x.type(torch.FloatTensor),  # type: ignore[call-overload]
    "type by text": lambda x: x.type("torch.FloatTensor"),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float32)),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "softmax by position": lambda x: torch.softmax(x, -1, torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "new table": lambda x: torch.arange(3, dtype=torch.float32),
    "integers": lambda x: torch.arange(3).float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_float32_is_not_entered(cast: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    # A tensor made without a dtype is float32 all the same, so `like` tensors are built outside in users' code too.
    assert cast(x).dtype == torch.float32
    with cl.keep_dtype(DOUBLE):
        assert cast(x).dtype == torch.float64
    assert cast(x).dtype == torch.float32


def test_other_dtypes_are_left_alone() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with cl.keep_dtype(DOUBLE):
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        assert x.to(torch.int64).dtype == torch.int64
        assert x.type_as(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    for model in (nn.Linear(1, 1), nn.Linear(1, 1).bfloat16()):
        with cl.keep_dtype(model):
            assert x.float().dtype == torch.float32


def test_keep_dtype_passes_everything_on() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with cl.keep_dtype(nn.Linear(1, 1).double()):
        copied = x.to(torch.ones(1, dtype=torch.float32), copy=True)
        bits = torch.ones(2, dtype=torch.int32).view(torch.float32)
    assert copied.data_ptr() != x.data_ptr()
    assert bits.dtype == torch.float32
