"""``curvlens demo``: a small GPT learns to add; then its curvature, parameter by parameter."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from curvlens.data import Addition
from curvlens.losses import CausalLM
from curvlens.models import GPT, GPTConfig
from curvlens.operators import functional, ggn, hessian
from curvlens.problem import Problem

CONFIG = GPTConfig(vocab=12, context=17, n_layer=1, n_head=1, d_model=16, d_mlp=48)


def run_demo(*, steps: int, sequences: int, seed: int) -> None:
    """Train, then compute and print the exact norms of all diagonal blocks."""
    console = Console()
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        train(model, steps, progress)
        problem = Problem(model.double().eval(), Addition().batch(sequences, seed=seed), CausalLM(shift=False))
        norms = block_norms(problem, progress)
    loss, gradient = problem.loss(), problem.gradient()
    console.print(
        f"\n{problem.layout.size} parameters, {problem.n_tokens} digits to answer: loss {loss:.4f} "
        f"(guessing: {math.log(10):.4f}), gradient norm {gradient.norm():.3g}"
    )
    console.print(table(problem, norms))
    console.print(
        "Frobenius norms of the diagonal blocks, exact: every column of every block, in float64.\n"
        "H is the Hessian, G its Gauss-Newton part, F its functional part; H = G + F.\n"
        "Softmax does not see a key bias: its rows are zero, and what is printed is rounding."
    )


def train(model: GPT, steps: int, progress: Progress) -> None:
    """Some seconds of Adam on fresh sums."""
    task = progress.add_task("training", total=steps)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for step in range(steps):
        tokens, labels = Addition().batch(64, seed=step + 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        decay.step()
        progress.update(task, advance=1, description=f"training, loss {loss.item():.3f}")


def block_norms(problem: Problem, progress: Progress) -> dict[str, tuple[float, float, float]]:
    """‖H_bb‖, ‖G_bb‖ and ‖F_bb‖ of every parameter b."""
    operators = (hessian(problem), ggn(problem), functional(problem))
    task = progress.add_task("curvature", total=len(operators) * problem.layout.size)
    norms = {}
    for name in problem.layout.names:
        values = []
        for operator in operators:
            block = operator[name].dense(progress=lambda done, total: progress.advance(task))
            values.append(block.norm().item())
        norms[name] = (values[0], values[1], values[2])
    return norms


def table(problem: Problem, norms: dict[str, tuple[float, float, float]]) -> Table:
    """One row a parameter."""
    result = Table(title="Curvature by parameter")
    result.add_column("parameter")
    for heading in ("numbers", "‖H‖", "‖G‖", "‖F‖"):
        result.add_column(heading, justify="right")
    for name, values in norms.items():
        size = problem.layout.slices[name].stop - problem.layout.slices[name].start
        result.add_row(name, str(size), *(f"{value:.3e}" for value in values))
    return result
