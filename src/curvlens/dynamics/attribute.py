"""Which blocks and modules make up the curvature along one direction?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.blocks import Blocks, By
from curvlens.dynamics.direction import Direction, flat, length_of
from curvlens.dynamics.provenance import provenance
from curvlens.errors import CurvlensError
from curvlens.linalg.vectors import dot
from curvlens.operators import hessian
from curvlens.operators.base import Operator, Progress
from curvlens.operators.curvature import require_problem
from curvlens.operators.modules import recordings_of
from curvlens.problem import Problem
from curvlens.profiling.profiler import forms_along
from curvlens.results import Attribution, ByBlock, Estimate
from curvlens.results.profile import sum_tolerance
from curvlens.surroundings import as_found


@as_found
def attribute(
    problem: Problem,
    direction: Direction,
    by: By = "block",
    *,
    pairs: bool = False,
    modules: bool = False,
    product: Tensor | None = None,
    progress: Progress | None = None,
) -> Attribution:
    """uᵀHu split exactly by block, and by module: which of them bend the loss along u. Nothing is sampled.

    By block, uᵀHu = Σ_b u_bᵀ(Hu)_b: one product gives the parts of all blocks, of any granularity. By module, H is
    its Gauss–Newton part and one functional part for each module, uᵀHu = uᵀGu + Σ_m uᵀM_m u: one adjoint and one
    tangent pass (`docs/explanation/math.md`, "Attribution").

    Args:
        problem: where θ is.
        direction: u, a flat vector or a dict by parameter name, of any length but 0: a gradient, an update, an
            eigenvector, θ − θ₀.
        by: block, head, layer, role or parameter.
        pairs: also u_aᵀ H u_b for all pairs of blocks: one product for each block.
        modules: also by module.
        product: H @ direction, if it is known: saves a product.
        progress: called as ``progress(done, total)`` after every product.

    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)).double()
    >>> _ = torch.nn.init.ones_(model[0].weight), torch.nn.init.ones_(model[1].weight)
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> result = attribute(Problem(model, (one, 0 * one), MSE()), torch.tensor([1.0, 2.0]).double(), modules=True)
    >>> result.total, result.ggn, result.functional  # (a b)²: H = [[2, 4], [4, 2]], G = [[2, 2], [2, 2]]
    (26.0, 18.0, 8.0)
    >>> {name: float(part) for name, part in result.blocks.items()}
    {'0.weight': 10.0, '1.weight': 16.0}
    """
    require_problem(problem, "attribute")
    u, blocks = flat(problem, direction), problem.blocks.by(by)
    length = length_of(u)
    H, done = hessian(problem), 0
    planned = (product is None) + (len(blocks) if pairs else 0)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, planned)

    if product is None:
        Hu = H @ u
        tick()
    else:
        Hu = flat(problem, product, "product=H @ direction")
    parts = _by_block(blocks, u, Hu)
    total = dot(u, Hu)
    matrix = _pairs(H, blocks, u, tick) if pairs else None
    ggn, own, apart = _by_module(problem, u, total) if modules else (None, None, 0.0)
    return Attribution(
        total=total,
        norm=length,
        blocks=ByBlock({name: _exact(part) for name, part in parts.items()}, "uᵀHu", by),
        pairs=matrix,
        ggn=ggn,
        modules=own,
        mismatch=apart,
        products=done,
        provenance=provenance(problem),
    )


def _exact(value: float) -> Estimate:
    number, zero = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (value, 0.0))
    return Estimate(number, zero, 1)


def _by_block(blocks: Blocks, u: Tensor, Hu: Tensor) -> dict[str, float]:
    """u_bᵀ(Hu)_b for each block."""
    own, bent = blocks.split(u), blocks.split(Hu)
    return {name: dot(own[name], bent[name]) for name in blocks}


def _pairs(H: Operator, blocks: Blocks, u: Tensor, tick: Callable[[], None]) -> Tensor:
    """u_aᵀ H u_b for all pairs, symmetric to rounding."""
    own = blocks.split(u)
    rows = []
    for name in blocks:
        alone = blocks.join({other: part if other == name else torch.zeros_like(part) for other, part in own.items()})
        rows.append(list(_by_block(blocks, u, H @ alone).values()))
        tick()
    found = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return (found + found.T) / 2


def _by_module(problem: Problem, u: Tensor, total: float) -> tuple[float, dict[str, float], float]:
    """uᵀGu, uᵀM_m u by path, and by how much their sum misses uᵀHu."""
    recordings = recordings_of(problem, "attribute(modules=True)")
    outer, forms = forms_along(recordings, [u.contiguous()], 1, lambda: None)
    if recordings.blocked:
        where = next(iter(recordings.blocked))
        raise CurvlensError(
            f"The curvature cannot be split by module: {where or 'the model'!r} is not twice differentiable. Use "
            "attribute(..., modules=False), or a plain implementation of this module."
        )
    ggn, own = float(outer), {path: float(form) for path, form in forms.items()}
    size = abs(ggn) + sum(map(abs, own.values()))
    apart = abs(ggn + sum(own.values()) - total) / size if size else 0.0
    if apart > sum_tolerance(problem.dtype):
        raise CurvlensError(
            f"The curvature cannot be split by module: the parts differ from uᵀHu by {apart:.1g} of the sum of their "
            "sizes. Does a module write into a tensor that another one shares? Use attribute(..., modules=False)."
        )
    return ggn, own, apart
