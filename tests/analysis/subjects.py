"""Small problems to analyse."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig

MEASURED = ("cells", "heads", "whole", "spectrum", "eigenvectors", "depth", "noise", "spread", "point", "sanity")
ATTENTION = ("attention", "attention_heads", "attention_ranks", "attention_theory")


@cache
def adder() -> GPT:
    """A GPT of 1,696 parameters that learned a little of sums of one digit."""
    task = Addition(digits=1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=task.vocab, context=task.context, n_layer=2, n_head=2, d_model=8, d_mlp=16))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        tokens, labels = task.batch(64, seed=step + 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model.double().eval()


def batch() -> tuple[Tensor, Tensor]:
    return Addition(digits=1).batch(12, seed=0)


def problem() -> cl.Problem:
    return cl.Problem(adder(), batch(), cl.losses.CausalLM(shift=False))


def rows(model: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, labels = given
    return model(tokens)[labels != -100], labels[labels != -100]


def numbers(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All that was measured, without times and names."""
    for name in (*MEASURED, *ATTENTION):
        yield name, content.get(name)
