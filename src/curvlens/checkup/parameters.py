"""Parameters that are unused, frozen, untied, quantised, complex or offloaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from curvlens import batches
from curvlens._evaluation.pieces import Piece
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import listing

_SEVERAL = 8
"""A parameter counts as unused if none of the first batches, this many at most, uses it."""
_QUANTISED = ("Linear8bitLt", "Linear4bit", "QuantLinear", "WQLinear", "QLinear", "HQQLinear", "BitLinear")
"""Modules of bitsandbytes, GPTQ, AWQ, quanto, HQQ and BitNet, by their class names."""


def check_unused(patient: Patient) -> Iterator[Finding]:
    """Check that the loss of the first batches depends on each parameter. If not, leave it out with ``params=``."""
    problem = patient.problem
    assert problem is not None
    assert patient.batches is not None
    unused, read = set(problem.layout.names), 0
    for read, batch in enumerate(islice(iter(patient.batches), _SEVERAL), start=1):
        leaves = problem._evaluation.leaves(problem.layout.names)
        piece = Piece(read - 1, 0, 0, batches.to_device(batch, problem.device))

        def gradient(piece: Piece = piece, leaves: Any = leaves) -> tuple[torch.Tensor | None, ...]:
            outputs = problem.loss_function.outputs(problem.model, piece.batch)
            total, _ = problem._evaluation.sum_and_count(outputs, piece)
            return torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()

        with torch.enable_grad():
            parts = problem._evaluation.at(leaves, gradient)
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
        "Their rows and columns of H are zero, so every spectrum gets extra zeros. The size is their share of the "
        "parameters.",
        "Problem(..., params=[...])  # name the parameters that are used; or use all of them in the forward pass",
        sum(math.prod(problem.layout.shapes[name]) for name in names) / problem.layout.size,
    )


def check_frozen(patient: Patient) -> Iterator[Finding]:
    """Report frozen parameters. Call ``model.requires_grad_(True)`` if they should take part."""
    parameters = dict(patient.model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen and len(frozen) < len(parameters):
        total = sum(p.numel() for p in parameters.values())
        adapted = any(".lora_" in name for name in parameters if name not in frozen)
        fix = "model.requires_grad_(True)  # if they should take part"
        if adapted:
            fix = (
                "model.merge_and_unload().requires_grad_(True)  # for the weights; do nothing if you want the "
                "curvature of the adapters"
            )
        yield Finding(
            "frozen-parameters",
            "note",
            f"{len(frozen)} of {len(parameters)} parameters are frozen: {listing(frozen)}.",
            "The curvature has no rows and columns for them. The size is their share of all parameters.",
            fix,
            sum(parameters[name].numel() for name in frozen) / max(total, 1),
        )


def check_ties(patient: Patient) -> Iterator[Finding]:
    """Check for an embedding and an unembedding that should share one tensor. Tie them: ``model.tie_weights()``."""
    model = patient.model
    for a, b, why in (*_configured(model), *_equal(model)):
        yield Finding(
            "broken-tie",
            "warning",
            f"{a!r} and {b!r} are two separate tensors, but {why}.",
            "curvlens treats them as independent parameters with rows of their own. The curvature of the tied matrix "
            "would be the sum of both blocks and of the cross blocks.",
            "model.tie_weights()  # or: unembedding.weight = embedding.weight",
        )
        return


def _configured(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """A pair that the configuration of a Hugging Face model declares as tied."""
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
    """Pairs of a trainable embedding and a trainable linear layer with equal numbers."""
    tables, linear = (
        [(f"{name}.weight", m.weight) for name, m in model.named_modules() if isinstance(m, kind) and _trains(m.weight)]
        for kind in (nn.Embedding, nn.Linear)
    )
    for a, x in tables:
        for b, y in linear:
            same = x is not y and x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
            if same and x.device.type != "meta" and bool(x.any()) and torch.equal(x, y):
                yield a, b, "they hold equal numbers"


def _trains(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.requires_grad


def check_quantised(patient: Patient) -> Iterator[Finding]:
    """Check for quantised and complex parameters, which have no derivative here. Load the model without them."""
    found = []
    for name, module in patient.model.named_modules():
        kind = type(module)
        ours = kind.__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.q"))
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        packed = any(x.is_quantized or (x.dtype in (torch.int8, torch.uint8) and x.ndim >= 2) for x in tensors)
        # I-BERT's layers have the same class name, but compute in float unless `quant_mode` is set.
        named = kind.__name__ in _QUANTISED and getattr(module, "quant_mode", True) is not False
        if ours or packed or named:
            found.append(f"{name} ({kind.__name__})")
    if found:
        yield Finding(
            "quantised-weights",
            "error",
            f"Weights are quantised in {listing(found)}.",
            "They are constants: the curvature has no rows for them, and the loss includes their rounding.",
            "model = AutoModelForCausalLM.from_pretrained(name)  # without quantization_config; or model.dequantize()",
        )
    complex_ones = [name for name, p in patient.model.named_parameters() if p.is_complex() and p.requires_grad]
    if complex_ones:
        yield Finding(
            "complex-parameters",
            "error",
            f"Parameters are complex: {listing(complex_ones)}.",
            "curvlens computes Hessians of real parameters only.",
            "torch.view_as_real(p)  # store this as the parameter, and call torch.view_as_complex in the forward pass",
        )


def check_offloaded(patient: Patient) -> Iterator[Finding]:
    """Check that all parameters are in memory, not on the meta device or offloaded. Load without ``device_map``."""
    meta = [name for name, p in patient.model.named_parameters() if p.device.type == "meta"]
    hooked = [name for name, m in patient.model.named_modules() if _offloads(getattr(m, "_hf_hook", None))]
    if meta or hooked:
        yield Finding(
            "offloaded-parameters",
            "error",
            f"Parameters are not in memory: {listing(meta or hooked)} "
            f"({'meta device' if meta else 'fetched by hooks'}).",
            "Derivatives need the values of all parameters. The doctor did not run the model.",
            "model = AutoModelForCausalLM.from_pretrained(name)  # without device_map; or model.to_empty() and load",
        )


def _offloads(hook: Any) -> bool:
    """Whether a hook of accelerate, or one of several, offloads."""
    return bool(getattr(hook, "offload", False)) or any(map(_offloads, getattr(hook, "hooks", ())))
