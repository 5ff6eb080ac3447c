"""Which parameters of a model a problem is a function of, and where they live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, listing


def choose(model: nn.Module, params: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to differentiate by: those named, or all that require a gradient.

    Frozen parameters are out, never rows of zeros; a tied tensor is there once, under its first name.
    """
    everything = dict(model.named_parameters())
    if not everything:
        raise CurvlensError(f"{type(model).__name__} has no parameters: there is nothing to differentiate by.")
    trainable = {name: p for name, p in everything.items() if p.requires_grad}
    if params is not None:
        wanted = [params] if isinstance(params, str) else list(params)
        known = Layout({name: tuple(p.shape) for name, p in everything.items()})
        names = known.match(_first_name(model, item, everything) for item in wanted)
        frozen = [name for name in names if name not in trainable and name in wanted]
        if frozen:
            raise CurvlensError(f"{listing(frozen)} is frozen. Call requires_grad_(True) on it, or leave it out.")
        trainable = {name: trainable[name] for name in names if name in trainable}
        everything = {name: everything[name] for name in names}
    if any(p.is_inference() for p in trainable.values()):
        raise CurvlensError(
            "The parameters were made in torch.inference_mode(), where nothing can be differentiated. Build the model "
            "outside of it."
        )
    if not trainable:
        raise CurvlensError(
            f"No trainable parameter: {listing(everything)}: requires_grad is False for all of them. "
            "Call model.requires_grad_(True), or requires_grad_(True) on those you want."
        )
    return trainable


def _first_name(model: nn.Module, name: str, known: Mapping[str, nn.Parameter]) -> str:
    """A tied tensor goes by its first name; any of its names may be given."""
    if not isinstance(name, str) or name in known:
        return name
    aliases = dict(model.named_parameters(remove_duplicate=False))
    return next((first for first, p in known.items() if p is aliases.get(name)), name)


def device_and_dtype(model: nn.Module, chosen: Mapping[str, nn.Parameter]) -> tuple[torch.device, torch.dtype]:
    """The one device of the model, and the dtype that holds all chosen parameters."""
    devices = {p.device: name for name, p in model.named_parameters()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise CurvlensError(f"The parameters are on several devices ({places}). Bring them to one: model.to(device).")
    dtype = next(iter(chosen.values())).dtype
    for p in chosen.values():
        dtype = torch.promote_types(dtype, p.dtype)
    if not dtype.is_floating_point:
        raise CurvlensError(f"The parameters are {dtype}; only real floating-point parameters have a Hessian here.")
    return next(iter(devices)), dtype
