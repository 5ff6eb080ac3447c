"""From a model to its map: every parameter gets its block, by the family that explains most of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch import nn

from curvlens.blocks.axes import Cut
from curvlens.blocks.block import Block
from curvlens.blocks.families import FAMILIES
from curvlens.blocks.family import Family, Found
from curvlens.blocks.map import Blocks
from curvlens.blocks.parts import Part

WRAPPERS = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|modules_to_save\.[^.]+)(?=\.|$)"
)
"""What compilers, sharding and adapters put between the names of modules."""

ADAPTER = re.compile(
    r"(?P<base>.+)\.lora_(?:embedding_)?(?:A|B|magnitude_vector)(?:\.(?P<adapter>[^.]+))?(?:\.weight|\.bias)?",
    re.DOTALL,
)
INSIDE = re.compile(r"(?:^|\.)(?:attn|cross|mlp|ssm)\.")
FUSED = re.compile(r"(?P<path>.+)\.(?P<roles>qkv|kv)")
PARAMETRISED = re.compile(r"(?P<base>.+)\.parametrizations\.(?P<name>[^.]+)\.original\d*", re.DOTALL)


def map_blocks(model: nn.Module, names: Iterable[str] | None = None, families: Sequence[Family] = FAMILIES) -> Blocks:
    """The named blocks of a model, or of some of its parameters.

    >>> from curvlens.models import GPT, GPTConfig
    >>> list(map_blocks(GPT(GPTConfig(vocab=5, context=4, n_layer=1))))[2:8]
    ['h.0.norm1', 'h.0.attn.q', 'h.0.attn.k', 'h.0.attn.v', 'h.0.attn.o', 'h.0.norm2']
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    whole = _mapped(model, shapes, families)
    if names is None:
        return whole
    # The family is that of the whole model, whichever of its parameters are asked for.
    return whole.within([Part(name, shapes[name]) for name in names])


def _mapped(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], families: Sequence[Family]) -> Blocks:
    tied = _tied(model, shapes)
    plans = [_Plan.make(model, family, shapes) for family in families if family.suits(model)]
    best = max(plans, key=lambda plan: (plan.explained, -len(plan.family.rules)), default=None)
    if best is None or not best.explained or 2 * best.explained < sum(prod(shape) for shape in shapes.values()):
        order = [Part(name, shape) for name, shape in shapes.items()]
        blocks = [Block(name, (_oriented(model, name, shape),)) for name, shape in shapes.items()]
        return Blocks(blocks, order, tied=tied, unmapped=list(shapes))
    return best.blocks(model, tied)


def _tied(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Further names of parameters, and the first one, by which they go."""
    first: dict[int, str] = {}
    tied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            tied[name] = first[id(p)]
    wanted = set(names)
    return {name: other for name, other in tied.items() if other in wanted}


def _around(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that hold a parameter, from its owner to the model."""
    module: nn.Module = model
    chain = [module]
    for item in name.split(".")[:-1]:
        inner = getattr(module, item, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
        chain.append(module)
    return chain[::-1]


def _oriented(model: nn.Module, name: str, shape: tuple[int, ...]) -> Part:
    """A parameter as a whole; that of `nn.Linear` is known to be out × in."""
    linear = isinstance(_around(model, name)[0], nn.Linear) and len(shape) == 2
    return Part(name, shape, order=(1, 0) if linear else None)


@dataclass(frozen=True)
class _Entry:
    """A parameter and where it goes."""

    parameter: str
    block: str
    rule: str
    prefix: str
    cut: Cut


@dataclass
class _Plan:
    """What a family makes of a model."""

    family: Family
    shapes: Mapping[str, tuple[int, ...]]
    entries: list[_Entry] = field(default_factory=list)

    @classmethod
    def make(cls, model: nn.Module, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> _Plan:
        """Go through all parameters."""
        plan = cls(family, shapes)
        for name, shape in shapes.items():
            plan.entries += _entries(model, family, name, shape)
        # A bias goes with its weight: if the rules do not fit the one, the other is no role of theirs.
        named = {entry.parameter for entry in plan.entries}
        weights = {name: f"{name[: -len('bias')]}weight" for name in named if name.endswith(".bias")}
        alone = {name for name, weight in weights.items() if weight in shapes and weight not in named}
        plan.entries = [entry for entry in plan.entries if entry.parameter not in alone]
        plan._tell_apart()
        return plan

    @property
    def explained(self) -> int:
        """How many numbers the family has names for; embeddings and heads alone make no family."""
        if not any(INSIDE.search(entry.block) for entry in self.entries):
            return 0
        return sum(prod(self.shapes[name]) for name in {entry.parameter for entry in self.entries})

    def _tell_apart(self) -> None:
        """Two towers with the same names inside keep what stands before them; what is still double loses its name."""
        for longer in (True, False):
            seen: dict[tuple[str, str, str], set[str]] = {}
            for entry in self.entries:
                key = (entry.block, entry.rule, "" if longer else entry.prefix)
                seen.setdefault(key, set()).add(entry.prefix if longer else entry.parameter)
            double = {key for key, values in seen.items() if len(values) > 1}
            if longer:
                towers = {prefix for key in double for prefix in seen[key]}
                self.entries = [
                    replace(entry, block=f"{entry.prefix}.{entry.block}".lstrip("."))
                    if entry.prefix in towers
                    else entry
                    for entry in self.entries
                ]
            else:
                self.entries = [e for e in self.entries if (e.block, e.rule, e.prefix) not in double]
        self._one_stack()

    def _one_stack(self) -> None:
        """``enc`` and ``dec`` are for models that have both."""
        stacks = {entry.block.partition(".")[0] for entry in self.entries} & {"enc", "dec"}
        if len(stacks) != 1:
            return
        stack = f"{stacks.pop()}."
        self.entries = [
            replace(entry, block=("h." if entry.block[len(stack)].isdigit() else "") + entry.block[len(stack) :])
            if entry.block.startswith(stack)
            else entry
            for entry in self.entries
        ]

    def blocks(self, model: nn.Module, tied: Mapping[str, str]) -> Blocks:
        """The map."""
        order = [Part(name, shape) for name, shape in self.shapes.items()]
        named: dict[str, list[_Entry]] = {}
        for entry in self.entries:
            named.setdefault(entry.block, []).append(entry)
        known = {entry.parameter for entry in self.entries}
        unmapped = [name for name in self.shapes if name not in known]
        aliases = self._aliases(tied)
        elsewhere = self._elsewhere(tied)
        blocks = []
        for name, entries in named.items():
            called = _left_over(name, entries) if name in elsewhere else name
            blocks.append(_block(called, entries, tuple(aliases.get(name, ()))))
        for name in unmapped:
            called = name if name not in named else f"parameter {name}"
            blocks.append(Block(called, (_oriented(model, name, self.shapes[name]),)))
        position = {name: i for i, name in enumerate(self.shapes)}
        blocks.sort(key=lambda block: min(position[name] for name in block.parameters))
        return Blocks(blocks, order, family=self.family.name, tied=tied, unmapped=unmapped)

    def _known_as(self, tied: Mapping[str, str]) -> Iterator[tuple[str, str, Found]]:
        """(first name, other name's block, rule) of every tied parameter that has a place under its other name too."""
        home = {entry.parameter: entry for entry in self.entries}
        # What stands before the names of a tower is said for all of it.
        told = {e.prefix for e in self.entries if e.prefix and e.block.startswith(f"{e.prefix}.")}
        for alias, name in tied.items():
            found = next(self.family.find(WRAPPERS.sub("", alias).lstrip(".")), None)
            if found is not None and name in home:
                tower = any(f"{prefix}.".startswith(f"{found.prefix}.") for prefix in told)
                before = f"{found.prefix}." if found.prefix and tower else ""
                yield name, before + found.block, found

    def _aliases(self, tied: Mapping[str, str]) -> dict[str, list[str]]:
        """What blocks would be called by the other names of their parameters, if all of these are tied."""
        home: dict[str, set[str]] = {}
        for entry in self.entries:
            home.setdefault(entry.block, set()).add(entry.parameter)
        there: dict[tuple[str, str], set[str]] = {}
        for name, block, _ in self._known_as(tied):
            for own, parameters in home.items():
                if name in parameters and block != own and "*" not in block:
                    there.setdefault((own, block), set()).add(name)
        aliases: dict[str, list[str]] = {}
        for (own, block), parameters in there.items():
            if parameters == home[own]:
                aliases.setdefault(own, []).append(block)
        return aliases

    def _elsewhere(self, tied: Mapping[str, str]) -> set[str]:
        """Blocks of which a part is tied to another block, or made of other parameters: the rest has a longer name."""
        blocks = {entry.block for entry in self.entries}
        gone = set()
        for name, block, found in self._known_as(tied):
            own = {entry.block for entry in self.entries if entry.parameter == name}
            gone |= {block.replace("*", role) for role in found.roles or "*"} - own
        for entry in self.entries:
            fused = FUSED.fullmatch(entry.block)
            if fused is not None and "parametrizations." in entry.parameter:
                gone |= {f"{fused['path']}.{role}" for role in fused["roles"]}
        return gone & blocks


def _entries(model: nn.Module, family: Family, name: str, shape: tuple[int, ...]) -> list[_Entry]:
    """Where a parameter goes; a fused one goes to several blocks."""
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
        return [_Entry(name, block, f"{found.rule.parameter} {clean}", found.prefix, Cut("", Part(name, shape), {}))]
    around = _around(model, name)
    for found in family.find(clean):
        cuts = family.cut(found, name, shape, around)
        if cuts is not None:
            return [_entry(found, name, cut) for cut in cuts]
    return []


def _entry(found: Found, name: str, cut: Cut) -> _Entry:
    heads = cut.heads if found.expert is None else {found.expert: cut.part}
    rule = found.rule.parameter if found.expert is None else f"{found.rule.parameter} {found.expert}"
    return _Entry(name, found.block.replace("*", cut.role), rule, found.prefix, replace(cut, heads=heads))


def _adapted(model: nn.Module, found: Found, name: str, shape: tuple[int, ...], adapter: str | None) -> _Entry:
    """The factors of a low-rank adapter are a block beside that of the weight they change."""
    block = found.block.replace("*", found.roles)
    called = f"{block}.lora" if adapter in (None, "default") else f"{block}.lora.{adapter}"
    return _Entry(name, called, name, found.prefix, Cut("", _oriented(model, name, shape), {}))


def _block(name: str, entries: Sequence[_Entry], aliases: tuple[str, ...]) -> Block:
    parts = tuple(entry.cut.part for entry in entries)
    counts = {len(entry.cut.heads) for entry in entries if entry.cut.heads}
    heads: list[Block] = []
    experts = {j for entry in entries for j in entry.cut.heads}
    if experts and (len(counts) == 1):
        for j in sorted(experts):
            own = tuple(entry.cut.heads[j] for entry in entries if j in entry.cut.heads)
            heads.append(Block(f"{name}.{j}", own))
        common = [entry for entry in entries if not entry.cut.heads]
        if common:
            heads.append(Block(_left_over(name, common), tuple(entry.cut.part for entry in common)))
    return Block(name, parts, aliases, tuple(heads))


def _left_over(name: str, entries: Sequence[_Entry]) -> str:
    """What of a block has no head, or is not tied: nearly always its bias."""
    bias = all(re.search(r"(?:bias|\bb_\w+)$", entry.parameter) for entry in entries)
    return f"{name}.{'bias' if bias else 'rest'}"
