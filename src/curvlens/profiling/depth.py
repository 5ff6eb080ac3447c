"""`curvlens.propagation`: the curvature of every layer, by its parameters and by its activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from curvlens.errors import CurvlensError
from curvlens.linalg import eigs
from curvlens.linalg.compression import trace_and_norm
from curvlens.linalg.counted import CountedOperator
from curvlens.operators import Operator, functional, ggn, hessian
from curvlens.operators.activations import Of, activation_hessian
from curvlens.operators.base import Progress
from curvlens.operators.modules import recordings_of
from curvlens.problem import Problem
from curvlens.profiling.statistics import bounded
from curvlens.results.propagation import PARTS, Amount, Level, Propagation

OPERATORS: dict[str, Callable[[Problem], Operator]] = {"hessian": hessian, "ggn": ggn, "functional": functional}


def propagation(
    problem: Problem,
    samples: int = 16,
    *,
    by: Literal["layer", "role"] = "layer",
    seed: int = 0,
    tol: float = 1e-4,
    progress: Progress | None = None,
) -> Propagation:
    """The curvature at each layer of a model: trace, norm and both ends of the spectrum of H, G, F.

    Each layer has two matrices: the block of its own parameters, and the Hessian with respect to the activations that
    leave it, from which the curvature of its parameters follows. ``by="role"`` combines all layers: all queries
    of attention, and so on. Roles have parameters only.

    Eigenvalues are computed first. Their part of trace and norm is exact, and the rest is sampled, so a norm is never
    below the spectral norm. If a matrix has no negative eigenvalues, the smallest is not computed.

    Args:
        problem: Model, data and loss.
        samples: Products for each trace and each norm.
        by: One row for each layer, or for each role.
        seed: The seed of the probes.
        tol: The residual of the eigenvalues, relative to the spectral norm.
        progress: ``progress(done, total)`` is called after each matrix.
    """
    if by not in ("layer", "role"):
        raise CurvlensError(f"by={by!r}, expected 'layer' or 'role'.")
    recordings = recordings_of(problem, "propagation")  # a reference: all activations share them
    recordings.known()
    layers = {block.layer for block in problem.blocks.values()} - {None}
    if not layers:
        raise CurvlensError(
            "No parameter is in a known layer. If the architecture is unknown, name its layers: "
            "Problem(..., blocks={'h.0': ...}). If params= excludes all layers, leave params= out."
        )
    blocks = problem.blocks.by(by)
    names = [name for name in blocks if by == "role" or name in layers]
    paths = {name: layer_path(problem.model, blocks[name].parameters) for name in names} if by == "layer" else {}
    total, done = len(names) * len(PARTS) * (2 if paths else 1), 0

    def measured(operator: Operator) -> Amount:
        nonlocal done
        found = _amount(operator, samples, seed, tol)
        done += 1
        if progress is not None:
            progress(done, total)
        return found

    levels: dict[str, Level] = {}
    wholes = {part: make(problem) for part, make in OPERATORS.items()}
    for name in names:
        own = {part: measured(whole[name]) for part, whole in wholes.items()}
        given: dict[str, Amount] = {}
        if name in paths:
            parts: tuple[Of, ...] = ("hessian", "ggn", "functional")
            given = {  # the last call, if it runs more than once
                of: measured(activation_hessian(problem, paths[name], of=of, call=-1)) for of in parts
            }
        levels[name] = Level(name, own, given)
    provenance = CountedOperator(wholes["hessian"], symmetric=True).provenance(seed=seed, tol=tol)
    return Propagation(levels, by, samples, provenance=provenance)


def layer_path(model: nn.Module, parameters: Sequence[str]) -> str:
    """The path of the module that contains all these parameters, and that runs: not a list of modules."""
    words = [name.split(".")[:-1] for name in parameters]
    common: list[str] = []
    for level in zip(*words, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    while common and isinstance(model.get_submodule(".".join(common)), (nn.ModuleList, nn.ModuleDict)):
        common.pop()
    return ".".join(common)


def _amount(operator: Operator, samples: int, seed: int, tol: float) -> Amount:
    # The low end of a psd matrix is near 0, and most products would go into it.
    found = eigs(operator, k=1, ends="largest" if operator.psd else "both", tol=tol, seed=seed, check_copies=False)
    ends = [
        bounded(value, residual, found.products, found.status)
        for value, residual in zip(found.values.double().cpu(), found.residuals.double().cpu(), strict=True)
    ]
    trace, frobenius = trace_and_norm(operator, found, samples, seed)
    return Amount(trace=trace, frobenius=frobenius, top=ends[-1], bottom=None if operator.psd else ends[0])
