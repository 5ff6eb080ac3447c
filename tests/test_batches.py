"""Batches without samples, and tensors of a batch that are no samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from mlp import X, Y, net
from small import direction, relative


@pytest.mark.parametrize("memory", ["1GiB", 0])
def test_a_batch_without_samples(memory: Any) -> None:
    data = [(X[:2], Y[:2]), (X[:0], Y[:0]), (X[2:], Y[2:])]
    truth = cl.hessian(cl.Problem(net(), (X, Y), cl.losses.MSE())) @ direction(13)
    H = cl.hessian(cl.Problem(net(), data, cl.losses.MSE(), memory=memory))
    for _ in range(3):
        assert relative(H @ direction(13), truth) < 1e-13
    first_empty = cl.Problem(net(), data[1:], cl.losses.MSE(), micro_batch=1)
    assert first_empty.n_tokens == 3


def test_a_mask_without_samples_is_not_cut() -> None:
    """As many tokens as sequences: the mask could be taken for samples, and the model does not take half of it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.layer(x, src_mask=mask)
            return y

    x, model = direction(64).view(4, 4, 4), Masked().double().eval()
    data = ((x, torch.zeros(4, 4, dtype=torch.float64)), x)
    kept, tight = (cl.Problem(model, data, cl.losses.MSE(), memory=m) for m in ("1GiB", 0))
    v = direction(kept.layout.size)
    assert relative(cl.hessian(tight) @ v, cl.hessian(kept) @ v) < 1e-13
