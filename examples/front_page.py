"""The pictures of the README: a GPT that learned to add, by layer and role, and module by module.

Trains for half a minute on two cores, then measures for another.

    pip install 'curvlens[report]'
    python examples/front_page.py docs/figures/front
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import curvlens as cl
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig


def trained(*, steps: int = 1500, layers: int = 4, width: int = 32, seed: int = 0) -> cl.Problem:
    """A GPT that adds numbers of two digits, and the sums on which its curvature is taken."""
    torch.manual_seed(seed)
    task = Addition()
    model = GPT(GPTConfig(vocab=task.vocab, context=task.context, n_layer=layers, n_head=4, d_model=width))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for step in range(steps):
        tokens, labels = task.batch(64, seed=step + 1)
        optimiser.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return cl.Problem(model.double().eval(), task.batch(64, seed=0), cl.losses.CausalLM(shift=False))


def draw(problem: cl.Problem, folder: Path, *, samples: int = 64) -> None:
    """Write ``heat.svg`` and ``icicle.svg``."""
    cl.trace(cl.ggn(problem), samples, by="block").plot(folder / "heat.svg")
    cl.profile(problem, samples=16, top=False).plot(folder / "icicle.svg", deep=3)


def main() -> None:
    """Train, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    problem = trained()
    print(f"loss {problem.loss():.4f}, {problem.layout.size} parameters")
    draw(problem, folder)


if __name__ == "__main__":
    main()
