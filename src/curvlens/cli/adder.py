"""A small GPT that learned to add: the model of ``curvlens demo``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig


def trained(task: Addition, steps: int, *, seed: int, progress: Callable[[int, float], None] | None = None) -> GPT:
    """A GPT of 2 layers after ``steps`` steps of Adam on fresh sums, in float64 and in evaluation mode.

    It is trained in float32, which is faster. ``progress(step, loss)`` is called after each step. The same seed gives
    the same model, and torch's random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPTConfig(vocab=task.vocab, context=task.context, n_layer=2, n_head=2, d_model=16, d_mlp=48)
        model = GPT(config).float()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for step in range(steps):
        tokens, labels = task.batch(64, seed=step + 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        decay.step()
        if progress is not None:
            progress(step + 1, loss.item())
    return model.double().eval()
