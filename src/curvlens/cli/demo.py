"""``curvlens demo``: a small GPT learns to add; then its curvature, as a whole and by layer and role."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from curvlens.data import Addition
from curvlens.linalg import density, eigs, frobenius, trace
from curvlens.losses import CausalLM
from curvlens.models import GPT, GPTConfig
from curvlens.operators import functional, ggn, hessian
from curvlens.problem import Problem
from curvlens.report.terminal import tables
from curvlens.results import Density

CONFIG = GPTConfig(vocab=12, context=17, n_layer=2, n_head=2, d_model=16, d_mlp=48)


def run_demo(*, steps: int, sequences: int, samples: int, seed: int) -> None:
    """Train, then compute and print spectra and estimates with their errors, of the whole and of all blocks."""
    console = Console()
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        train(model, steps, progress)
        problem = Problem(model.double().eval(), Addition().batch(sequences, seed=seed), CausalLM(shift=False))
        whole, spectrum = overview(problem, 2 * samples, progress)
        tables = by_block(problem, samples, progress)
    loss, gradient = problem.loss(), problem.gradient()
    console.print(
        f"\n{problem.layout.size} parameters, {problem.n_tokens} digits to answer: loss {loss:.4f} "
        f"(guessing: {math.log(10):.4f}), gradient norm {gradient.norm():.3g}"
    )
    console.print(whole)
    console.print(
        "Eigenvalues with their residuals, which bound the error; traces and norms with standard errors, from "
        f"{2 * samples} products each."
    )
    console.print(f"\nSpectral density of H: {spectrum}")
    console.print(spectrum.text(), markup=False, highlight=False)
    console.print("┴ marks 0: most eigenvalues are near it, single ones stand out.\n")
    for found in tables:
        console.print(found)
    console.print(
        f"Norms and traces with standard errors, from {samples} products with each block of H and F and "
        f"{8 * samples} backward passes for all of G; eigenvalues with residuals.\n"
        "All blocks of G come from the same samples, so the errors in its columns are correlated.\n"
        "H is the Hessian, G its Gauss-Newton part, F its functional part; H = G + F, which rows of the traces show "
        "within their errors only."
    )


def train(model: GPT, steps: int, progress: Progress) -> None:
    """Train with Adam for some seconds, on new additions in every step."""
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


def overview(problem: Problem, samples: int, progress: Progress) -> tuple[RenderableType, Density]:
    """Ends of the spectrum, trace and norm of H, G and F; the density of H."""
    rows: list[tuple[str, ...]] = []
    task = progress.add_task("spectrum", total=None)
    for name, make in {"H": hessian, "G": ggn, "F": functional}.items():
        operator = make(problem)
        ends = eigs(operator, 1, "both", tol=1e-6, progress=follow(progress, task, f"eigenvalues of {name}"))
        sampled = [
            estimate(operator, samples, progress=follow(progress, task, f"{what} of {name}"))
            for what, estimate in (("trace", trace), ("norm", frobenius))
        ]
        pairs = zip(ends.values.tolist(), ends.residuals.tolist(), strict=True)
        rows.append((name, *(eigenvalue(value, residual) for value, residual in pairs), *map(str, sampled)))
    spectrum = density(hessian(problem), probes=2, steps=80, progress=follow(progress, task, "density of H"))
    headings = ("λ min", "λ max", "trace", "Frobenius norm")
    return tables.table(("operator", *headings), rows, title="Curvature as a whole", numbers=headings), spectrum


def follow(progress: Progress, task: TaskID, description: str) -> Callable[[int, int | None], None]:
    """A callback that shows each search in the same progress bar."""

    def told(done: int, total: int | None) -> None:
        progress.update(task, description=description, completed=done, total=total)

    return told


def by_block(problem: Problem, samples: int, progress: Progress) -> list[RenderableType]:
    """Norm, trace and largest eigenvalue of every diagonal block of H, G and F: one table each."""
    operators = {"H": hessian(problem), "G": ggn(problem), "F": functional(problem)}
    cells: dict[tuple[str, str, str], str] = {}
    task = progress.add_task("blocks", total=3 * len(operators) * len(problem.blocks))
    for letter, operator in operators.items():
        progress.update(task, description=f"blocks of {letter}")
        # Those of G come all from the same backward passes: many samples cost little.
        spent = 8 * samples if letter == "G" else samples
        for quantity, estimates in (
            ("Frobenius norm", frobenius(operator, spent, by="block")),
            ("trace", trace(operator, spent, by="block")),
        ):
            cells.update({(quantity, name, letter): str(estimate) for name, estimate in estimates.items()})
            progress.advance(task, len(problem.blocks))
        for name, block in operator.blocks().items():
            top = eigs(block, 1, tol=1e-3)
            cells["λ max", name, letter] = eigenvalue(float(top.values[0]), float(top.residuals[0]))
            progress.advance(task)
    return [
        table(quantity, list(problem.blocks), operators, cells) for quantity in ("Frobenius norm", "trace", "λ max")
    ]


def table(
    quantity: str, blocks: list[str], letters: Iterable[str], cells: Mapping[tuple[str, str, str], str]
) -> RenderableType:
    """A table with one row per block and one column per operator."""
    letters = tuple(letters)
    rows = ((name, *(cells[quantity, name, letter] for letter in letters)) for name in blocks)
    return tables.table(("block", *letters), rows, title=f"{quantity} by layer and role", numbers=letters)


def eigenvalue(value: float, residual: float) -> str:
    """An eigenvalue with the bound of its error."""
    if not residual:
        return f"{value:.4g}"
    return f"{value:.4g} ± {residual:.0e}" if abs(value) > residual else f"0 ± {residual:.0e}"
