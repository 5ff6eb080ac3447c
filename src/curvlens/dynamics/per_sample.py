"""Losses, gradients and Hessian products of single samples, reduced to what means over samples need.

A weighted sum Σ_i w_i of samples has the loss wᵀl, the squared gradient norm wᵀ(g gᵀ)w, the trace wᵀt and the squared
Frobenius norm wᵀKw of its Hessian. So n numbers and n × n matrices stand for every order and every number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlens.dynamics.separated import Separated
from curvlens.errors import CurvlensError

GROUPS = 4
"""Of probes, for errors."""
MOST = 1 << 28
"""Numbers of the gradients, or of the products with one probe, that are held at a time: 2 GiB."""


@dataclass(frozen=True)
class PerSample:
    """Samples by their means: l_i = S_i/c_i and so on. All float64, on the CPU."""

    loss: Tensor
    """(n,)."""
    count: Tensor
    """(n,): tokens."""
    gradients: Tensor | None = None
    """(n, n): ⟨g_i, g_j⟩, in the subspace if there is one."""
    traces: Tensor | None = None
    """(n,): tr H_i."""
    trace_products: Tensor | None = None
    """(n, n): tr H_i tr H_j, without bias."""
    hessians: Tensor | None = None
    """(n, n): ⟨H_i, H_j⟩."""
    dimension: int = 0
    """Of the space around θ."""
    products: int = 0
    """Products with the Hessian of one sample."""
    without: tuple[PerSample, ...] = ()
    """The same with one group of the probes left out each: for errors."""


def losses(separated: Separated, tick: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """l_i and c_i of all samples."""
    sums, counts = list[float](), list[float]()
    evaluation = separated.evaluation
    with torch.no_grad(), evaluation.isolated():
        for each in evaluation.losses():
            sums.append(each.total)
            counts.append(each.count)
            tick()
    S, c = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (sums, counts))
    return _mean(S, c), c


def measured(
    separated: Separated,
    basis: Tensor | None,
    probes: int,
    seed: int,
    tick: Callable[[], None],
    within: Tensor | None = None,
    *,
    errors: bool = False,
) -> PerSample:
    """All of it. With a basis (rows) exactly, by a product for each of its rows; else by random probes.

    ``within`` is 1 for the entries that span the space around θ, and 0 for the others. With ``errors`` also with
    groups of probes left out.
    """
    n, size = separated.count, separated.problem.layout.size
    if n * size > MOST:
        raise CurvlensError(
            f"The gradients of {n} samples of {size:,} numbers are more than 2 GiB. Give a problem with fewer samples "
            f"({max(MOST // size, 1)}), or curvature=False for the losses alone."
        )
    generator = torch.Generator().manual_seed(seed)
    device, dtype = separated.problem.device, separated.problem.dtype
    gradient = torch.zeros(n, size, dtype=torch.float64, device=device)
    sums, counts = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)

    def keep(i: int, graph_total: float, graph_count: float, parts: Tensor) -> None:
        sums[i], counts[i] = graph_total, graph_count
        gradient[i] = parts if within is None else parts * within.to(parts)

    directions = basis.to(device, dtype) if basis is not None else _signs(probes, size, generator, device, dtype)
    if within is not None:
        directions = directions * within.to(directions)
    forms = torch.zeros(n, len(directions), dtype=torch.float64)
    parts = _groups(len(directions), n) if errors and basis is None else 1
    grams = torch.zeros(parts, n, n, dtype=torch.float64)
    for j, z in enumerate(directions):
        rows = torch.zeros(n, size, dtype=torch.float64, device=device)
        _pass(separated, z, rows, keep if not j else None, tick)
        rows = rows / counts.clamp(min=1e-300).to(device)[:, None]
        forms[:, j] = (rows @ z.double()).cpu()
        if within is not None:
            rows = rows * within.to(rows)
        if basis is not None:
            rows = rows @ basis.to(device, torch.float64).T
        grams[j % parts] += (rows @ rows.T).cpu()
    g = gradient / counts.clamp(min=1e-300).to(device)[:, None]
    loss, products = _mean(sums, counts), n * len(directions)
    if basis is not None:
        g = g @ basis.to(device, torch.float64).T
        traces = forms.sum(1)
        pairs = torch.outer(traces, traces)
        return PerSample(loss, counts, (g @ g.T).cpu(), traces, pairs, grams[0], len(basis), products)
    dimension, inner = size if within is None else int(within.sum()), (g @ g.T).cpu()

    def estimated(forms: Tensor, gram: Tensor) -> PerSample:
        m = forms.shape[1]
        pairs = (torch.outer(forms.sum(1), forms.sum(1)) - forms @ forms.T) / (m * (m - 1))
        return PerSample(loss, counts, inner, forms.mean(1), pairs, gram / m, dimension, products)

    whole, group = grams.sum(0), torch.arange(len(directions)) % parts
    left_out = [estimated(forms[:, group != j], whole - grams[j]) for j in range(parts)] if parts > 1 else []
    return replace(estimated(forms, whole), without=tuple(left_out))


def _groups(probes: int, samples: int) -> int:
    """Groups of probes to leave out one at a time: two probes have to be left, and the groups have to be held."""
    if probes < 3:
        return 1
    most = min(probes, GROUPS)
    return most if (most + 1) * samples**2 <= MOST or probes < 4 else 2


def _pass(
    separated: Separated,
    z: Tensor,
    rows: Tensor,
    keep: Callable[[int, float, float, Tensor], None] | None,
    tick: Callable[[], None],
) -> None:
    """The summed Hessian of every sample times z, into the rows."""
    layout, evaluation = separated.problem.layout, separated.evaluation
    v = layout.unflatten(z)
    with torch.enable_grad(), evaluation.isolated():
        graphs = evaluation.cache.graphs(layout.names)
        try:
            for i, graph in enumerate(graphs):
                if keep is not None:
                    parts = {name: g for name, g in graph.gradient.items() if g is not None}
                    keep(i, graph.total, graph.count, separated.flat(parts))
                rows[i] = separated.flat(graph.second(layout.names, v, functional=False, retain=graph.kept))
                tick()
        finally:
            graphs.close()  # type: ignore[attr-defined]


def _signs(count: int, size: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    signs = torch.randint(2, (count, size), generator=generator, device="cpu") * 2 - 1
    return signs.to(device, dtype)


def _mean(S: Tensor, c: Tensor) -> Tensor:
    return torch.where(c > 0, S / c.clamp(min=1e-300), torch.zeros_like(S))
