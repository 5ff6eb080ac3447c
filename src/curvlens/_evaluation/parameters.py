"""Chooses the parameters that a problem depends on, and finds their device and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import nn

from curvlens.blocks import Blocks, Family, Heads, Seen, map_blocks
from curvlens.errors import CurvlensError, a_kind, listing

PLAIN = " Give the module from which it was scripted or traced."


Own = Mapping[str, str | Iterable[str]] | Family | None
"""The user's blocks: groups by name, or a family of rules."""


def choose(
    model: nn.Module, params: str | Iterable[str] | None, own: Own = None, heads: Heads | None = None
) -> dict[str, nn.Parameter]:
    """The parameters to differentiate with respect to: the named ones, or all that require a gradient.

    Frozen parameters are left out. A tied tensor appears once, under its first name.
    """
    everything = dict(model.named_parameters())
    if not everything:
        raise CurvlensError(
            f"{type(model).__name__} has no parameters, so there are no derivatives. Give a model with parameters."
        )
    trainable = {name: p for name, p in everything.items() if p.requires_grad}
    if params is not None:
        wanted = [params] if isinstance(params, str) else list(params)
        blocks = map_blocks(model, own=own if isinstance(own, Family) else None, heads=heads)
        names = _named(blocks, wanted, own if isinstance(own, Mapping) else {})
        first = {name: blocks.tied.get(name, name) for name in wanted}
        frozen = [name for name in wanted if first[name] in everything and first[name] not in trainable]
        if frozen:
            raise CurvlensError(f"{listing(frozen)} is frozen. Call requires_grad_(True) on it, or leave it out.")
        trainable = {name: trainable[name] for name in names if name in trainable}
        everything = {name: everything[name] for name in names}
    if any(p.is_inference() for p in trainable.values()):
        raise CurvlensError(
            "The parameters were made in torch.inference_mode(), so they have no derivatives. Build the model outside "
            "of it."
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CurvlensError(
                f"{path or 'The model'!r} is a ScriptModule, whose parameters cannot be exchanged.{PLAIN}"
            )
        sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if sparse and any(module.weight is p for p in trainable.values()):
            raise CurvlensError(
                f"{path!r} has sparse gradients, which cannot be differentiated twice. Set {path}.sparse = False."
            )
    if not trainable:
        raise CurvlensError(
            f"No trainable parameter: requires_grad is False for all of {listing(everything)}. Call "
            "model.requires_grad_(True), or requires_grad_(True) on those you want."
        )
    return trainable


def _named(blocks: Blocks, wanted: Sequence[str], groups: Mapping[str, str | Iterable[str]]) -> list[str]:
    """The parameters that the given names or patterns (of parameters, blocks or the user's groups) select."""
    names: list[str] = []
    for item in wanted:
        meant = groups.get(item, item) if isinstance(item, str) else [item]
        names += [meant] if isinstance(meant, str) else meant
    parts = blocks.find(names)
    taken = Counter[str]()
    for part in parts:
        taken[part.parameter] += part.size
    torn = [part for part in parts if taken[part.parameter] < prod(part.full)]
    if torn:
        cut = {part.parameter for part in torn}
        whole = {name for block in blocks.values() if cut & set(block.parameters) for name in block.parameters}
        names = [part.parameter for part in blocks.order if part.parameter in whole]
        name = wanted[0] if len(wanted) == 1 else "h.0.attn.q"
        raise CurvlensError(
            f"{torn[0].key} is a part of {torn[0].parameter!r}, and params= takes whole parameters. Use "
            f"params={(names[0] if len(names) == 1 else names)!r}, then take the block of the operator: H[{name!r}]."
        )
    return list(taken)


def named(
    model: nn.Module,
    chosen: Iterable[str],
    own: Own,
    heads: Heads | None = None,
    splits: Seen | None = None,
) -> Blocks:
    """The block map of the chosen parameters: by architecture or the user's family, with the user's groups."""
    if isinstance(own, Family):
        return map_blocks(model, chosen, own=own, heads=heads, splits=splits)
    blocks = map_blocks(model, chosen, heads=heads, splits=splits)
    if own is None:
        return blocks
    if not isinstance(own, Mapping):
        raise CurvlensError(f"blocks= is {a_kind(own)}, expected a dict of patterns by name, or a curvlens.Family.")
    return blocks.grouped(own)


def device_and_dtype(model: nn.Module, chosen: Mapping[str, nn.Parameter]) -> tuple[torch.device, torch.dtype]:
    """The device of the model, and the smallest dtype that holds all chosen parameters."""
    devices = {p.device: name for name, p in model.named_parameters()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise CurvlensError(f"The parameters are on several devices ({places}). Bring them to one: model.to(device).")
    if "meta" in {device.type for device in devices}:
        raise CurvlensError(
            "The parameters are on the meta device: they have shapes but no values (the model was built without "
            "weights, or they are offloaded). Load the weights: model.to_empty(device=...), then "
            "model.load_state_dict(weights)."
        )
    dtype = next(iter(chosen.values())).dtype
    for p in chosen.values():
        dtype = torch.promote_types(dtype, p.dtype)
    if not dtype.is_floating_point:
        raise CurvlensError(
            f"The parameters are {dtype}, expected real floating-point numbers. Choose others with params=."
        )
    return next(iter(devices)), dtype
