"""Trace, Frobenius norm and diagonal of an operator, each with its standard error."""

from __future__ import annotations

from typing import Any, Unpack, get_args, overload

from curvlens.blocks import By
from curvlens.errors import CurvlensError, listing, nearest
from curvlens.linalg.roots import all_blocks, has_roots
from curvlens.linalg.rounds import each_block
from curvlens.linalg.sampling import Options, Quantity, estimate, root
from curvlens.operators import Operator
from curvlens.results import ByBlock, Estimate
from curvlens.surroundings import as_found


@overload
def trace(operator: Any, samples: int | None = None, *, by: None = None, **options: Unpack[Options]) -> Estimate: ...
@overload
def trace(operator: Any, samples: int | None = None, *, by: By, **options: Unpack[Options]) -> ByBlock: ...
def trace(
    operator: Any, samples: int | None = None, *, by: By | None = None, **options: Unpack[Options]
) -> Estimate | ByBlock:
    """tr A, from ``samples`` products (default 32), or to a relative accuracy ``rtol``.

    ``by="block"`` gives the traces of all diagonal blocks, by layer and role (or ``by="head"``, ``"layer"``,
    ``"role"``, ``"parameter"``). For a Gauss–Newton matrix one backward pass for each sample serves all blocks.
    With as many samples as rows the result is exact. After Ctrl-C the result has the samples drawn so far.

    Options:

    - ``rtol`` instead of ``samples``: the half-width of the 95 % interval relative to the value; ``max_samples`` limits
      the samples for it;
    - ``seed``;
    - ``memory`` for the deflated vectors, and ``store``, ``"cpu"`` or a folder, where to keep them;
    - ``progress(done, total)``, counted over all blocks;
    - ``budget``, with ``by``, for all blocks together: a time (``"2m"``) or a cost (``"200 gradients"``, see
      `curvlens.linalg.limits`). Every block gets a first value from a few products, and the rest of the budget goes to
      the largest blocks. ``.note`` says what was spent, which blocks had fewer samples and which were not measured.

    >>> trace(torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)))
    Estimate(6 (exact), 3 products)
    """
    _check_names("trace", options)
    return _dispatch("trace", operator, samples, by, options)


@overload
def frobenius(
    operator: Any, samples: int | None = None, *, by: None = None, **options: Unpack[Options]
) -> Estimate: ...
@overload
def frobenius(operator: Any, samples: int | None = None, *, by: By, **options: Unpack[Options]) -> ByBlock: ...
def frobenius(
    operator: Any, samples: int | None = None, *, by: By | None = None, **options: Unpack[Options]
) -> Estimate | ByBlock:
    """‖A‖_F; arguments and options as for `trace`.

    >>> frobenius(torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64)))
    Estimate(5 (exact), 2 products)
    """
    _check_names("frobenius", options)
    square = _dispatch("square", operator, samples, by, options)
    if isinstance(square, Estimate):
        return root(square)
    norms = {name: root(block) for name, block in square.items()}
    return ByBlock(norms, "Frobenius norm", square.by, square.note, square.status)


@as_found
def diagonal(operator: Any, samples: int | None = None, **options: Unpack[Options]) -> Estimate:
    """diag A, entry by entry; ``rtol`` is for the vector as a whole. Options as for `trace`, without ``by``.

    >>> diagonal(torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))).value
    tensor([3., 4.], dtype=torch.float64)
    """
    if "by" in options:
        by = {**options}["by"]
        raise CurvlensError(
            f"diagonal takes no by={by!r}: it is a vector over all parameters. Split it: "
            f"problem.blocks.by({by!r}).split(diagonal(operator).value)."
        )
    _check_names("diagonal", options)
    _check_budget(options.get("budget"))
    return estimate("diagonal", operator, samples, **options)


@as_found
def _dispatch(
    quantity: Quantity, operator: Any, samples: int | None, by: By | None, options: Options
) -> Estimate | ByBlock:
    budget = options.get("budget")
    if by is None:
        _check_budget(budget)
        return estimate(quantity, operator, samples, **options)
    if by not in get_args(By):
        raise CurvlensError(f"by={by!r}, expected one of {listing(get_args(By))}, or None for the whole operator.")
    if not isinstance(operator, Operator) or operator.rows != operator.columns:
        raise CurvlensError(
            f"by={by!r} needs a square operator made by curvlens, which has named blocks; got {operator!r}."
        )
    if has_roots(operator):
        return all_blocks(quantity, operator, samples, by=by, **options)
    return each_block(quantity, operator, samples, by, budget, options)


def _check_budget(budget: object) -> None:
    if budget is not None:
        raise CurvlensError(
            f"budget={budget!r} needs by='block'. Limit a single estimate with samples= or max_samples=."
        )


def _check_names(function: str, options: Options) -> None:
    """Raise for an unknown option, with the name of the function that was called."""
    known = ["samples", "by", *Options.__annotations__]
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {nearest(name, known)}")
