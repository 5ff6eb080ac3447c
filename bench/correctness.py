"""Errors on a small float64 problem, parameter by parameter: an error of the norm rows drowns in a total norm.

What the products should be is found twice, and neither time by the code under test. Dense: reverse over reverse,
``torch.autograd.functional.hessian``, for H; Jᵀ Λ J from dense Jacobian and dense loss Hessian for G. Differences:
central differences of the gradient for H; for G of the outputs and of the loss gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.costs import row_of
from bench.measuring import reason
from bench.methods import METHODS, Method
from bench.model import SMALL, Batch, TokenLoss, count, join, make_batch, make_model, split
from bench.tables import Results, Table, absent

EXACT = 1e-6
"""Below it a product counts as exact: rounding is far below it here, every fault found so far far above."""

PADDINGS = {"mixed": (6, 2, 4, 3), "sorted": (6, 5, 2, 1)}
"""Valid labels of the four samples. How much a wrong mean is off depends on how unequal the parts are: two cases."""
STEP = 1e-5
"""Step of the differences along a unit vector: rounding and the cubic term then both stay below 1e-9."""

Truth = dict[str, Tensor]
"""Kind of matrix → its product with the vector."""


# What it should be


def _functions(model: nn.Module, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y = batch

    def outputs(theta: Tensor) -> Tensor:
        values = dict(zip(params, split(theta, list(params.values())), strict=True))
        logits: Tensor = functional_call(model, values, (x,))
        return logits.flatten()

    def loss(logits: Tensor) -> Tensor:
        value: Tensor = TokenLoss()(logits.view(*x.shape, -1), y)
        return value

    return join(list(params.values())), outputs, loss


def dense(model: nn.Module, batch: Batch, v: Tensor) -> Truth:
    """H v, G v and their difference from dense matrices."""
    theta, outputs, loss = _functions(model, batch)
    with sdpa_kernel(SDPBackend.MATH):
        H = hessian(lambda t: loss(outputs(t)), theta)  # type: ignore[no-untyped-call]
        J = jacobian(outputs, theta)  # type: ignore[no-untyped-call]
        middle = hessian(loss, outputs(theta))  # type: ignore[no-untyped-call]
    Hv, Gv = H @ v, J.T @ (middle @ (J @ v))
    return {"Hessian": Hv, "GGN": Gv, "functional": Hv - Gv}


def differences(model: nn.Module, batch: Batch, v: Tensor) -> Truth:
    """The same from first derivatives only, with torch's own attention."""
    theta, outputs, loss = _functions(model, batch)

    def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(function(at), at)[0]

    def along(function: Callable[[Tensor], Tensor], at: Tensor, direction: Tensor) -> Tensor:
        return (function(at + STEP * direction) - function(at - STEP * direction)) / (2 * STEP)

    Hv = along(lambda t: gradient(lambda s: loss(outputs(s)), t), theta, v)
    with torch.no_grad():
        f, Jv = outputs(theta), along(outputs, theta, v)
    weight = along(lambda z: gradient(loss, z), f, Jv)
    Gv = gradient(lambda t: outputs(t) @ weight, theta)
    return {"Hessian": Hv, "GGN": Gv, "functional": Hv - Gv}


# What it is


def _group(name: str) -> str:
    for sign, group in (("norm", "norm"), ("attn", "attention"), ("mlp", "mlp")):
        if sign in name:
            return f"{group} bias" if name.endswith("bias") and group != "norm" else group
    return "embedding"


def row_errors(model: nn.Module, product: Tensor, truth: Tensor) -> dict[str, float]:
    """The largest relative error over the parameters of each group.

    Rows that vanish in exact arithmetic (key biases under softmax) are compared with the whole product instead.
    """
    errors: dict[str, float] = {}
    start, whole = 0, float(truth.norm())
    for name, p in model.named_parameters():
        part = slice(start, start + p.numel())
        start += p.numel()
        size = float(truth[part].norm())
        error = float((product[part] - truth[part]).norm()) / (size if size > 1e-9 * whole else whole)
        errors[_group(name)] = max(errors.get(_group(name), 0.0), error)
    return errors


def _cut(batch: Batch, *sizes: int) -> list[Batch]:
    x, y = batch
    return list(zip(x.split(sizes), y.split(sizes), strict=True))  # type: ignore[no-untyped-call]


def _padded(batch: Batch, padding: str) -> Batch:
    """Labels beyond the valid ones are -100."""
    x, y = batch
    y = y.clone()
    for row, valid in enumerate(PADDINGS[padding]):
        y[row, valid:] = -100
    return x, y


def _check(
    method: Method, model: nn.Module, batch: Batch, v: Tensor, truths: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    def product(batches: Sequence[Batch], *, unaided: bool | None = None) -> Tensor:
        return method.build(model, batches, unaided=unaided)(v)

    def change(whole: Batch, *sizes: int) -> float | None:
        if not method.splits:
            return None
        together = product([whole])
        return float((product(_cut(whole, *sizes)) - together).norm() / together.norm())

    padded = _padded(batch, "mixed")
    whole = product([padded])
    row: dict[str, Any] = {
        "dense": row_errors(model, whole, truths["dense"][method.kind]),
        "differences": row_errors(model, whole, truths["differences"][method.kind]),
        "padded_2_2": [change(_padded(batch, padding), 2, 2) for padding in PADDINGS],
        "ragged_3_1": [change(batch, 3, 1)],
        "padded_3_1": [change(_padded(batch, padding), 3, 1) for padding in PADDINGS],
    }
    try:
        alone = product([padded], unaided=True)
        error = float((alone - whole).norm() / whole.norm())
        row["fused"] = "runs" if error < EXACT else f"runs, {error:.1%} off"
    except Exception as error:
        row["fused"] = reason(error)
    return row


def measure() -> dict[str, Any]:
    """Errors of every row, and how well the two truths agree."""
    model, batch = make_model(SMALL, torch.float64), make_batch(SMALL)
    with torch.no_grad():  # norms at weight 1 and bias 0, and biases at 0, would be special points
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    v = torch.randn(count(model), dtype=torch.float64)
    v /= v.norm()
    padded = _padded(batch, "mixed")
    truths = {"dense": dense(model, padded, v), "differences": differences(model, padded, v)}
    agreement = {
        kind: row_errors(model, truths["differences"][kind], truths["dense"][kind]) for kind in truths["dense"]
    }
    rows: dict[str, Any] = {}
    for method in METHODS:
        try:
            rows[method.key] = _check(method, model, batch, v, truths)
        except Exception as error:
            rows[method.key] = {"not_run": reason(error)}
    return {"truths_differ": agreement, "rows": rows}


# In the report


def table(results: Results) -> Table:
    """Errors, and what splitting batches changes."""
    head = ["Product", "norm rows", "norm rows (differences)", "other rows", "2+2 padded", "3+1", "3+1 padded", "fused"]
    rows = []
    data = results["correctness"]
    for method in METHODS:
        row = row_of(data, method.key)
        if "not_run" in row:
            rows.append([method.name, *absent(row, 7)])
            continue
        others = max(error for group, error in row["dense"].items() if group != "norm")
        errors = [row["dense"]["norm"], row["differences"]["norm"], others]
        changes = [row[key] for key in ("padded_2_2", "ragged_3_1", "padded_3_1")]
        rows.append([method.name, *map(_error, errors), *map(_changes, changes), _fused(row["fused"])])
    differ = [error for groups in data.get("truths_differ", {}).values() for error in groups.values()]
    paddings = " / ".join(f"{', '.join(map(str, valid))} ({name})" for name, valid in PADDINGS.items())
    notes = [
        "Float64, 2-layer GPT of width 8, every parameter tensor by itself. “norm rows”: largest relative error over "
        "the weights and biases of LayerNorm, against a dense reverse-over-reverse Hessian (GGN: dense Jᵀ Λ J) and "
        "against central differences of the gradient. “other rows”: the same over all other parameters, dense.",
        f"The two truths differ by {max(differ, default=0.0):.0e} at most, which bounds the second column.",
        "“2+2”, “3+1”: relative change of the product when four samples come as two batches, with mean reduction; "
        f"“padded” for two sets of valid labels, the rest -100: {paddings}. “one batch”: takes no more than one.",
        "“fused”: does it run on a model that calls `F.scaled_dot_product_attention`, without help.",
    ]
    return Table("Correctness", head, rows, notes)


def _changes(values: list[float | None]) -> str:
    return " / ".join(_error(value) for value in values if value is not None) or "one batch"


def _error(value: float) -> str:
    return f"{value:.0e}" if value < EXACT else f"**{value:.1%}**"


def _fused(text: str) -> str:
    if text == "runs":
        return "runs"
    if "forward AD" in text:
        return "raises: no forward derivative"
    if "derivative for" in text:
        return "raises: no double backward"
    return text
