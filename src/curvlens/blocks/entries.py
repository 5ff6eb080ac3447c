"""Maps one parameter to its blocks, by the rules of a family."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import nn

from curvlens.blocks.axes import Cut
from curvlens.blocks.family import Family, Found
from curvlens.blocks.parts import Part

WRAPPERS = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|modules_to_save\.[^.]+)(?=\.|$)"
)
"""Words that compilers, sharding and adapters insert into the names of modules."""

ADAPTER = re.compile(
    r"(?P<base>.+)\.lora_(?:embedding_)?(?:A|B|magnitude_vector)(?:\.(?P<adapter>[^.]+))?(?:\.weight|\.bias)?",
    re.DOTALL,
)
PARAMETRISED = re.compile(r"(?P<base>.+)\.parametrizations\.(?P<name>[^.]+)\.original\d*", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A parameter (or a part of it) and its block."""

    parameter: str
    block: str
    rule: str
    prefix: str
    cut: Cut


def entries_of(model: nn.Module, family: Family, name: str, shape: tuple[int, ...]) -> list[Entry]:
    """The blocks of a parameter; a fused parameter has several."""
    clean = WRAPPERS.sub("", name).lstrip(".")
    adapter, parametrised = ADAPTER.fullmatch(clean), PARAMETRISED.fullmatch(clean)
    if adapter is not None:
        found = next(family.find(f"{adapter['base']}.weight"), None)
        return [] if found is None else [_adapted(model, found, name, shape, adapter["adapter"])]
    if parametrised is not None:
        found = next(family.find(f"{parametrised['base']}.{parametrised['name']}"), None)
        if found is None:
            return []
        block = found.block.replace("*", found.roles)
        return [Entry(name, block, f"{found.rule.parameter} {clean}", found.prefix, Cut("", Part(name, shape), {}))]
    around = modules_around(model, name)
    for found in family.find(clean):
        cuts = family.cut(found, name, shape, around)
        if cuts is not None:
            return [entry_of(found, name, cut) for cut in cuts]
    return []


def entry_of(found: Found, name: str, cut: Cut) -> Entry:
    """The entry that a rule makes of a part of a parameter."""
    heads = cut.heads if found.expert is None else {found.expert: cut.part}
    rule = found.rule.parameter if found.expert is None else f"{found.rule.parameter} {found.expert}"
    return Entry(name, found.block.replace("*", cut.role), rule, found.prefix, replace(cut, heads=heads))


def _adapted(model: nn.Module, found: Found, name: str, shape: tuple[int, ...], adapter: str | None) -> Entry:
    """The factors of a low-rank adapter: a separate block, named after the block of their weight."""
    block = found.block.replace("*", found.roles)
    called = f"{block}.lora" if adapter in (None, "default") else f"{block}.lora.{adapter}"
    return Entry(name, called, name, found.prefix, Cut("", oriented(model, name, shape), {}))


def modules_around(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that contain a parameter, from its owner out to the model."""
    module: nn.Module = model
    chain = [module]
    for item in name.split(".")[:-1]:
        inner = getattr(module, item, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
        chain.append(module)
    return chain[::-1]


def oriented(model: nn.Module, name: str, shape: tuple[int, ...]) -> Part:
    """A whole parameter as a part, with the axis order out × in for `nn.Linear`."""
    linear = isinstance(modules_around(model, name)[0], nn.Linear) and len(shape) == 2
    return Part(name, shape, order=(1, 0) if linear else None)
