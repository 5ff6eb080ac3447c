"""``curvlens demo``: a small GPT learns to add; then its curvature, as a whole and parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from curvlens.data import Addition
from curvlens.linalg import density, eigs, frobenius, trace
from curvlens.losses import CausalLM
from curvlens.models import GPT, GPTConfig
from curvlens.operators import functional, ggn, hessian
from curvlens.problem import Problem
from curvlens.results import Density

SAMPLES = 64
CONFIG = GPTConfig(vocab=12, context=17, n_layer=1, n_head=1, d_model=16, d_mlp=48)


def run_demo(*, steps: int, sequences: int, seed: int) -> None:
    """Train, then compute and print spectra, estimates with their errors, and exact norms of all diagonal blocks."""
    console = Console()
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        train(model, steps, progress)
        problem = Problem(model.double().eval(), Addition().batch(sequences, seed=seed), CausalLM(shift=False))
        whole, spectrum = overview(problem, progress)
        norms = block_norms(problem, progress)
    loss, gradient = problem.loss(), problem.gradient()
    console.print(
        f"\n{problem.layout.size} parameters, {problem.n_tokens} digits to answer: loss {loss:.4f} "
        f"(guessing: {math.log(10):.4f}), gradient norm {gradient.norm():.3g}"
    )
    console.print(whole)
    console.print(
        "Eigenvalues with their residuals, which bound the error; traces and norms with standard errors, from "
        f"{SAMPLES} products each."
    )
    console.print(f"\nSpectral density of H: {spectrum}")
    console.print(spectrum.text(), markup=False, highlight=False)
    console.print("┴ marks 0: most eigenvalues are near it, single ones stand out.\n")
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


def overview(problem: Problem, progress: Progress) -> tuple[Table, Density]:
    """Ends of the spectrum, trace and norm of H, G and F; the density of H."""
    result = Table(title="Curvature as a whole")
    result.add_column("operator")
    for heading in ("λ min", "λ max", "trace", "Frobenius norm"):
        result.add_column(heading, justify="right")
    task = progress.add_task("spectrum", total=None)
    for name, make in {"H": hessian, "G": ggn, "F": functional}.items():
        operator = make(problem)
        ends = eigs(operator, 1, "both", tol=1e-6, progress=follow(progress, task, f"eigenvalues of {name}"))
        sampled = [
            estimate(operator, SAMPLES, progress=follow(progress, task, f"{what} of {name}"))
            for what, estimate in (("trace", trace), ("norm", frobenius))
        ]
        pairs = zip(ends.values.tolist(), ends.residuals.tolist(), strict=True)
        result.add_row(
            name,
            *(
                f"{value:.5g} ± {residual:.0e}" if abs(value) > residual else f"0 ± {residual:.0e}"
                for value, residual in pairs
            ),
            *map(str, sampled),
        )
    spectrum = density(hessian(problem), probes=2, steps=80, progress=follow(progress, task, "density of H"))
    return result, spectrum


def follow(progress: Progress, task: TaskID, description: str) -> Callable[[int, int | None], None]:
    """The bar of one search after the other."""

    def told(done: int, total: int | None) -> None:
        progress.update(task, description=description, completed=done, total=total)

    return told


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
