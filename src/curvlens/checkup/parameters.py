"""Parameters that are not what they seem: unused, frozen, untied, quantised, elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from curvlens import batches
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import listing
from curvlens.pieces import Piece

_SEVERAL = 8
"""A parameter that so many batches do not use is called unused."""
_QUANTISED = ("Linear8bitLt", "Linear4bit", "QuantLinear", "WQLinear", "QLinear", "HQQLinear", "BitLinear")
"""Modules of bitsandbytes, GPTQ, AWQ, quanto, HQQ and BitNet, by their class names."""


def check_unused(patient: Patient) -> Iterator[Finding]:
    """Parameters that no batch of the first few leads a gradient to."""
    problem = patient.problem
    assert problem is not None
    assert patient.batches is not None
    unused, read = set(problem.layout.names), 0
    for read, batch in enumerate(islice(iter(patient.batches), _SEVERAL), start=1):
        leaves = problem.leaves(problem.layout.names)
        piece = Piece(read - 1, 0, 0, batches.to_device(batch, problem.device))

        def gradient(piece: Piece = piece, leaves: Any = leaves) -> tuple[torch.Tensor | None, ...]:
            outputs = problem.loss_function.outputs(problem.model, piece.batch)
            total, _ = problem.sum_and_count(outputs, piece)
            return torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()

        with torch.enable_grad():
            parts = problem.at(leaves, gradient)
        unused -= {name for name, part in zip(leaves, parts, strict=False) if part is not None}
        if not unused:
            return
    names = [name for name in problem.layout.names if name in unused]
    everything = len(names) == len(problem.layout.names)
    yield Finding(
        "unused-parameters",
        "error" if everything else "warning",
        f"The loss of {'the first batch' if read == 1 else f'the first {read} batches'} does not depend on "
        f"{listing(names)}.",
        "Their rows and columns are zero: they add nothing but zeros to every spectrum. The size is their share of "
        "the parameters.",
        "Problem(..., params=[...])  # those that are used; or bring them into the forward pass",
        sum(math.prod(problem.layout.shapes[name]) for name in names) / problem.layout.size,
    )


def check_frozen(patient: Patient) -> Iterator[Finding]:
    """How much of the model takes no part."""
    parameters = dict(patient.model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen and len(frozen) < len(parameters):
        total = sum(p.numel() for p in parameters.values())
        adapted = any(".lora_" in name for name in parameters if name not in frozen)
        fix = "model.requires_grad_(True)  # if they were meant to take part"
        if adapted:
            fix = (
                "model.merge_and_unload().requires_grad_(True)  # for the weights; nothing, if the curvature of the "
                "adapters is what you want"
            )
        yield Finding(
            "frozen-parameters",
            "note",
            f"{len(frozen)} of {len(parameters)} parameters are frozen: {listing(frozen)}.",
            "They have no rows and no columns: the curvature is that of the others. The size is their share of all "
            "numbers.",
            fix,
            sum(parameters[name].numel() for name in frozen) / max(total, 1),
        )


def check_ties(patient: Patient) -> Iterator[Finding]:
    """An embedding and an unembedding that should be one tensor and are two."""
    model = patient.model
    for a, b, why in (*_configured(model), *_equal(model)):
        yield Finding(
            "broken-tie",
            "warning",
            f"{a!r} and {b!r} are two tensors, but {why}.",
            "They are taken for independent: there are rows for both, and the sum of both blocks and of what lies "
            "between them, which is the curvature of the tied matrix, is nowhere.",
            "model.tie_weights()  # or: unembedding.weight = embedding.weight",
        )
        return


def _configured(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """What the configuration of a Hugging Face model says."""
    config = getattr(model, "config", None)
    ends = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    if not getattr(config, "tie_word_embeddings", False) or not all(map(callable, ends)):
        return
    if not getattr(model, "_tied_weights_keys", None):
        return  # this class never ties
    try:
        first, second = (getattr(end(), "weight", None) for end in ends if end is not None)
    except (NotImplementedError, AttributeError):
        return
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    if first is None or second is None or not (first.requires_grad and second.requires_grad):
        return
    if first is not second and first.shape == second.shape:
        pair = names.get(id(first), "the embedding"), names.get(id(second), "the unembedding")
        yield (*pair, "config.tie_word_embeddings is True")


def _equal(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Embeddings and linear layers of the same shape and the same numbers; one that is frozen has no rows."""
    tables, linear = (
        [(f"{name}.weight", m.weight) for name, m in model.named_modules() if isinstance(m, kind) and _trains(m.weight)]
        for kind in (nn.Embedding, nn.Linear)
    )
    for a, x in tables:
        for b, y in linear:
            same = x is not y and x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
            if same and x.device.type != "meta" and bool(x.any()) and torch.equal(x, y):
                yield a, b, "they hold the same numbers"


def _trains(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.requires_grad


def check_quantised(patient: Patient) -> Iterator[Finding]:
    """Weights that are integers: nothing can be differentiated by them."""
    found = []
    for name, module in patient.model.named_modules():
        kind = type(module)
        ours = kind.__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.q"))
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        packed = any(x.is_quantized or (x.dtype in (torch.int8, torch.uint8) and x.ndim >= 2) for x in tensors)
        # I-BERT's layers are called alike, and compute as they are stored unless they are told to quantise.
        named = kind.__name__ in _QUANTISED and getattr(module, "quant_mode", True) is not False
        if ours or packed or named:
            found.append(f"{name} ({kind.__name__})")
    if found:
        yield Finding(
            "quantised-weights",
            "error",
            f"Weights are quantised in {listing(found)}.",
            "They are constants: the curvature has no rows for them, and rounding inside of their layers is part of "
            "the loss.",
            "model = AutoModelForCausalLM.from_pretrained(name)  # without quantization_config; or model.dequantize()",
        )
    complex_ones = [name for name, p in patient.model.named_parameters() if p.is_complex() and p.requires_grad]
    if complex_ones:
        yield Finding(
            "complex-parameters",
            "error",
            f"{listing(complex_ones)} are complex.",
            "Only real parameters have a Hessian here.",
            "torch.view_as_real(p)  # as the parameter, torch.view_as_complex of it in the forward pass",
        )


def check_offloaded(patient: Patient) -> Iterator[Finding]:
    """Parameters that are not in memory: on the meta device, or fetched by hooks when their layer runs."""
    meta = [name for name, p in patient.model.named_parameters() if p.device.type == "meta"]
    hooked = [name for name, m in patient.model.named_modules() if _offloads(getattr(m, "_hf_hook", None))]
    if meta or hooked:
        yield Finding(
            "offloaded-parameters",
            "error",
            f"Parameters are not there: {listing(meta or hooked)} ({'meta device' if meta else 'fetched by hooks'}).",
            "There is no point to take derivatives at. No forward pass was made here.",
            "model = AutoModelForCausalLM.from_pretrained(name)  # without device_map; or model.to_empty and load",
        )


def _offloads(hook: Any) -> bool:
    """Whether a hook of accelerate, or one of several, offloads."""
    return bool(getattr(hook, "offload", False)) or any(map(_offloads, getattr(hook, "hooks", ())))
