"""Kernels without a second derivative, or with a wrong one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from curvlens.checkup import differences
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import listing

_FUSED = ("flash", "flex", "paged")
"""First letters of the Hugging Face attention implementations that curvlens cannot replace."""


def compiled(model: nn.Module) -> list[str]:
    """Modules that torch.compile has wrapped, or that were compiled in place."""
    found = []
    for name, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            found.append(name or "the model itself")
    return found


def check_compiled(patient: Patient) -> Iterator[Finding]:
    """Check for torch.compile, which has no second derivative. Unwrap the model: ``model = model._orig_mod``."""
    found = compiled(patient.model)
    if found:
        yield Finding(
            "compiled-model",
            "error",
            f"torch.compile is on {listing(found)}.",
            "Compiled code has no double backward, and curvlens cannot replace the attention inside it. The other "
            "checks ran without torch.compile.",
            "model = model._orig_mod  # for a submodule: model.part = model.part._orig_mod; or do not compile",
        )


def check_attention(patient: Patient) -> Iterator[Finding]:
    """Check that Hugging Face attention calls ``F.scaled_dot_product_attention``. If not, choose ``"eager"``."""
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
            "Its kernel has no double backward, and curvlens cannot replace it. The doctor did not run the model.",
            "model.set_attn_implementation('eager')",
        )


def check_checkpointing(patient: Patient) -> Iterator[Finding]:
    """Check for gradient checkpointing in Hugging Face layers (on in training mode only). Disable it."""
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
        "Checkpointed layers run again in the backward pass, and second derivatives through them fail.",
        "model.gradient_checkpointing_disable()  # to bound memory, use Problem(..., micro_batch=1)",
    )


def check_second_derivatives(patient: Patient) -> Iterator[Finding]:
    """Check gradient and H v of one sample against finite differences. If they differ, fix the named backward."""
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
            "curvlens cannot compute the Hessian or its functional part.",
            "model.set_attn_implementation('eager')  # or write the layer in plain torch operations",
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
            "On one sample, the gradient along a random direction differs from the slope of the loss.",
            "The forward pass detaches a tensor or changes gradients (stop-gradient, straight-through, a custom "
            "backward). Products with H do not belong to this loss. The size is the relative difference.",
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
            "A custom backward() is not differentiable itself: most likely a torch.autograd.Function computes with "
            "detached tensors. Every Hessian is wrong, without an error. The size is the relative difference.",
            "ctx.save_for_backward(x)  # and compute with x in backward(), not with detached copies",
            wrong,
        )
