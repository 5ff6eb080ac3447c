"""A multilayer perceptron of 13 parameters and its data."""

from __future__ import annotations

import torch
from torch import nn

from small import direction

X, Y = direction(10).view(5, 2), direction(5, 2).view(5, 1)


def net() -> nn.Sequential:
    """In float64, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
