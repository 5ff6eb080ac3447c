"""Kernels that cannot be differentiated twice, or only seem to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from curvlens.checkup import differences
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import listing

_FUSED = ("flash", "flex", "paged")
"""How the names of attention implementations of Hugging Face begin that curvlens cannot replace."""


def compiled(model: nn.Module) -> list[str]:
    """Modules that torch.compile has wrapped, or that were compiled in place."""
    found = []
    for name, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            found.append(name or "the model itself")
    return found


def check_compiled(patient: Patient) -> Iterator[Finding]:
    """torch.compile."""
    found = compiled(patient.model)
    if found:
        yield Finding(
            "compiled-model",
            "error",
            f"torch.compile is on {listing(found)}.",
            "What it compiles has no double backward, and attention inside of it cannot be replaced by one that has. "
            "The other checks were made without it.",
            "model = model._orig_mod  # for a part: model.part = model.part._orig_mod; or do not compile",
        )


def check_attention(patient: Patient) -> Iterator[Finding]:
    """Attention implementations of Hugging Face that are no call of ``F.scaled_dot_product_attention``."""
    found: dict[str, str] = {}
    for name, module in patient.model.named_modules():
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(chosen, str) and (chosen.startswith(_FUSED) or "/" in chosen):
            found.setdefault(chosen, name or "the model itself")
    if found:
        yield Finding(
            "fused-attention",
            "error",
            f"The attention implementation is {listing(found)} (first in {listing(found.values())}).",
            "Its kernel has no double backward, and it is not called in a way that curvlens can replace. No pass was "
            "made here.",
            "model.set_attn_implementation('eager')",
        )


def check_checkpointing(patient: Patient) -> Iterator[Finding]:
    """Gradient checkpointing of Hugging Face layers; it is on in training mode only."""
    found = [
        name or "the model itself"
        for name, module in patient.model.named_modules()
        if module.training and getattr(module, "gradient_checkpointing", False) is True
    ]
    if found:
        yield _checkpointing(f"Gradient checkpointing is switched on in {listing(found)}.")


def _checkpointing(what: str) -> Finding:
    return Finding(
        "gradient-checkpointing",
        "error",
        what,
        "Layers are computed anew during the backward pass, where second derivatives through them fail.",
        "model.gradient_checkpointing_disable()  # and bound memory with Problem(..., micro_batch=1)",
    )


def check_second_derivatives(patient: Patient) -> Iterator[Finding]:
    """One product H v on one sample: does it exist, and is it what differences of gradients say?"""
    problem = patient.problem
    assert problem is not None
    try:
        v, hv = differences.product(problem, patient.sample)
    except Exception as failure:
        text = str(failure).strip() or type(failure).__name__
        if "checkpoint" in text:
            yield _checkpointing(f"A layer is checkpointed: {text.splitlines()[-1]}")
            return
        yield Finding(
            "no-second-derivative",
            "error",
            f"One product H v on one sample failed: {text.splitlines()[0]}",
            "No Hessian, and no functional part, can be computed.",
            "model.set_attn_implementation('eager')  # or a plain implementation of the layer, in torch operations",
        )
        return
    if patient.half or torch.is_autocast_enabled(problem.device.type):
        return  # too few digits for differences
    dtype = torch.float32 if patient.coarse and problem.dtype is torch.float64 else problem.dtype
    slope = differences.slope_error(problem, patient.sample, v, dtype)
    if slope:
        yield Finding(
            "wrong-gradient",
            "error",
            "The gradient of one sample, along a random direction, is not the slope of its loss.",
            "Something on the way detaches, or changes gradients (stop-gradient, straight-through, a custom backward): "
            "products with H are not those of this loss. The size is the relative difference.",
            "y = f(x)  # instead of f(x.detach()), in the forward pass; no torch.no_grad() in it",
            slope,
        )
        return
    wrong = differences.error(problem, patient.sample, v, hv, dtype)
    if wrong:
        yield Finding(
            "wrong-second-derivative",
            "error",
            "H v on one sample is not the derivative of the gradient along v.",
            "A backward pass hides what its own derivative needs: most likely a torch.autograd.Function computes with "
            "detached tensors in it. Every Hessian is wrong, in silence. The size is the relative difference.",
            "ctx.save_for_backward(x)  # and compute with x itself in backward(), not with detached copies",
            wrong,
        )
