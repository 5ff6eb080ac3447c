"""Errors on a small float64 problem, parameter by parameter: an error of the norm rows drowns in a total norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.child import serve
from bench.methods import METHODS, Method, reason
from bench.model import SMALL, Batch, make_batch, make_model
from bench.truth import dense, differences

EXACT = 1e-6
"""Below it a product counts as exact: rounding is far below it here, every fault found so far far above."""

PADDINGS = {"mixed": (6, 2, 4, 3), "sorted": (6, 5, 2, 1)}
"""Valid labels of the four samples. How much a wrong mean is off depends on how unequal the parts are: two cases."""


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
    v = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
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


if __name__ == "__main__":
    serve(measure)
