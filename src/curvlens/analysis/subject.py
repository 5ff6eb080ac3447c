"""What is analysed: its identity, by which a folder of results knows it, its outline, and its shuffled twin."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlens import batches
from curvlens.analysis.schedule import Outline
from curvlens.analysis.tokens import n_samples
from curvlens.checksum import checksum
from curvlens.errors import CurvlensError
from curvlens.losses import CausalLM
from curvlens.problem import Problem
from curvlens.profiling.depth import layer_path

VECTORS = 6 << 30
"""Bytes that the vectors of one unit may take. What is measured depends on it, so it does not follow the machine."""


def identity(problem: Problem, seed: int, optimizer: Any) -> dict[str, Any]:
    """Fingerprints of model, data and optimiser, and what else the numbers depend on."""
    moved = [] if problem._evaluation.theta is None else [problem.theta]  # by with_params: the model is as it was
    model = checksum([*moved, *problem.model.parameters(), *problem.model.buffers()])
    data = [batches.fingerprint(batch) for batch in problem.data.source]
    return {
        "model": _digest(model),
        "data": _digest(data),
        "loss": repr(problem.loss_function),
        "parameters": _digest(list(problem.layout.shapes.items())),
        "dtype": str(problem.dtype).removeprefix("torch."),
        "optimizer": "none" if optimizer is None else _digest(_state(optimizer)),
        "seed": seed,
    }


def outline(problem: Problem, *, has_ggn: bool, optimizer: Any, seed: int, budget: float, minimal: bool) -> Outline:
    """What the schedule has to know."""
    blocks = problem.blocks
    layers = dict.fromkeys(block.layer for block in blocks.values() if block.layer is not None)
    per_role: dict[str, int] = {}
    for block in blocks.values():
        if block.layer is not None:
            per_role[block.role] = per_role.get(block.role, 0) + 1
    by_layer = {layer: [b for b in blocks.values() if b.layer == layer] for layer in layers}
    paths = {
        layer: layer_path(problem.model, [name for b in found for name in b.parameters])
        for layer, found in by_layer.items()
    }
    return Outline(
        {name: block.size for name, block in blocks.items()},
        [role for role, count in per_role.items() if count > 1],
        {str(layer): path for layer, path in paths.items() if path},
        has_ggn,
        not blocks.headless and any(block.heads for block in blocks.values()),
        optimizer is not None,
        n_samples(problem),
        seed,
        budget,
        minimal,
        VECTORS // (problem.layout.size * problem.dtype.itemsize),
    )


def shuffled(problem: Problem, seed: int) -> Problem | None:
    """The same problem with the tokens of its inputs permuted and its labels kept; None where inputs are no tokens.

    A model that reads its inputs has a higher loss there. One whose vocabulary does not fit does not.
    """
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for batch in problem.data.source:
        twin = _shuffled(problem, batch, generator)
        if twin is None:
            return None
        changed.append(twin)
    try:
        return Problem(
            problem.model, changed, problem.loss_function, list(problem.layout.names), micro_batch=problem.micro_batch,
            memory=0,
        )  # fmt: skip
    except CurvlensError:
        return None


def _shuffled(problem: Problem, batch: Any, generator: torch.Generator) -> Any:
    inputs, labels = batches.split_target(batch)
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2:
        return None
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    if labels is None:
        if not isinstance(problem.loss_function, CausalLM):
            return None
        labels = ids.where(real, problem.loss_function.ignore_index)
    mixed = ids.clone()
    mixed[real] = ids[real][torch.randperm(int(real.sum()), generator=generator).to(ids.device)]
    if isinstance(inputs, Mapping):
        kept = {name: value for name, value in inputs.items() if name != "input_ids"}
        return {**kept, "input_ids": mixed, "labels": labels}
    return (mixed, labels)


def _digest(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _state(optimizer: Any) -> Any:
    """Numbers of an optimiser that a result depends on."""
    state = optimizer.state_dict() if hasattr(optimizer, "state_dict") else optimizer
    if not isinstance(state, Mapping):
        return repr(state)
    found: list[Any] = [type(optimizer).__name__]
    todo: list[Any] = [state]
    while todo:
        each = todo.pop()
        if isinstance(each, Tensor):
            found.append(checksum([each]))
        elif isinstance(each, Mapping):
            todo.extend(each[key] for key in sorted(each, key=str))
            found.append(sorted(map(str, each)))
        elif isinstance(each, (list, tuple)):
            todo.extend(each)
        elif isinstance(each, float) and math.isnan(each):
            found.append("nan")
        else:
            found.append(each)
    return found
