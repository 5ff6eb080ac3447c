"""Makes the map of a model: each parameter gets its block by the rules of the family that names most of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch import nn

from curvlens.blocks.attention import attentions, completed
from curvlens.blocks.block import Block
from curvlens.blocks.entries import WRAPPERS, Entry, entries_of, modules_around, oriented
from curvlens.blocks.families import FAMILIES
from curvlens.blocks.family import Family, Found, stored_as
from curvlens.blocks.heads import Heads, Said
from curvlens.blocks.map import Blocks
from curvlens.blocks.parts import Part
from curvlens.blocks.splits import Seen
from curvlens.errors import CurvlensError, listing, nearest

INSIDE = re.compile(r"(?:^|\.)(?:attn|cross|mlp|ssm)\.")
FUSED = re.compile(r"(?P<path>.+)\.(?P<roles>qkv|kv)")


def map_blocks(
    model: nn.Module,
    names: Iterable[str] | None = None,
    families: Sequence[Family] = FAMILIES,
    *,
    own: Family | None = None,
    heads: Heads | None = None,
    splits: Seen | None = None,
) -> Blocks:
    """The named blocks of a model, or of some of its parameters.

    ``own`` is a family of the user, which is used even if it names little of the model. ``heads`` gives the number of
    heads, ``splits`` the views seen in a forward pass.

    >>> from curvlens.models import GPT, GPTConfig
    >>> list(map_blocks(GPT(GPTConfig(vocab=5, context=4, n_layer=1))))[2:8]
    ['h.0.norm1', 'h.0.attn.q', 'h.0.attn.k', 'h.0.attn.v', 'h.0.attn.o', 'h.0.norm2']
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if own is not None:
        whole = _by_own_rules(model, shapes, own, Said(heads), splits)
    else:
        whole = _mapped(model, shapes, families, Said(heads), splits)
    if names is None:
        return whole
    # The whole model decides its family, so that the names do not depend on the selected parameters.
    return whole.within([Part(name, shapes[name]) for name in names])


def _mapped(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    families: Sequence[Family],
    said: Said,
    splits: Seen | None,
) -> Blocks:
    tied = _tied(model, shapes)
    plans = [_Plan.make(model, family, shapes) for family in families if family.suits(model)]
    best = max(plans, key=lambda plan: (plan.explained, -len(plan.family.rules)), default=None)
    if best is None or not best.explained or 2 * best.explained < sum(prod(shape) for shape in shapes.values()):
        order = [Part(name, shape) for name, shape in shapes.items()]
        blocks = [Block(name, (oriented(model, name, shape),)) for name, shape in shapes.items()]
        said.require_all_found()
        return Blocks(blocks, order, tied=tied, unmapped=list(shapes))
    best.find_heads(model, said, splits)
    return best.blocks(model, tied)


def _by_own_rules(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], family: Family, said: Said, splits: Seen | None
) -> Blocks:
    """The map by the rules of a user. They must fit each parameter that they name."""
    plan = _Plan(family, shapes, own=True)
    plan.find_heads(model, said, splits)
    placed = {entry.parameter for entry in plan.entries} | plan.headless
    ruled = {name: next(family.find(WRAPPERS.sub("", name).lstrip(".")), None) for name in shapes}
    for name, found in ruled.items():
        if found is not None and name not in placed and not entries_of(model, family, name, shapes[name]):
            raise CurvlensError(
                f"A rule of the family {family.name!r} does not fit: {found.rule.parameter!r} has the axes "
                f"{found.rule.axes!r}, but {name!r} has the shape {shapes[name]}{_storage(model, name)}. "
                f"{_wanted(model, name, shapes[name], found.rule.axes)}"
            )
    if not plan.entries:
        rules = list(dict.fromkeys(rule.parameter for rule in family.rules))
        near = nearest(rules[0].replace("{i}", "0"), shapes) if rules else ""
        raise CurvlensError(
            f"No rule of the family {family.name!r} names a parameter of {type(model).__name__}. Rules: "
            f"{listing(rules)}. Parameters: {listing(shapes)}. {near if near.startswith('Did') else ''}".rstrip()
            + " Write a rule as the end of a parameter's name, with {i} for the number of the layer."
        )
    return plan.blocks(model, _tied(model, shapes))


def _wanted(model: nn.Module, name: str, shape: tuple[int, ...], axes: str) -> str:
    """For the message: the axes to write."""
    around = modules_around(model, name)
    if stored_as(axes, shape, around):
        return (
            "Change the axes of the rule: one word for each axis, or words in brackets whose sizes multiply to its "
            "length."
        )
    if isinstance(around[0], nn.Linear):
        return "Use 'out in', or with heads '(head dim) in' or 'out (head dim)': the words in and out name the axes."
    return "Use 'in out', or with heads 'in (head dim)' or '(head dim) out': the words in and out name the axes."


def _storage(model: nn.Module, name: str) -> str:
    """For the message: the storage order of a weight, which a rule may have transposed."""
    owner = modules_around(model, name)[0]
    linear = isinstance(owner, nn.Linear)
    known = name.endswith("weight") and (linear or type(owner).__name__ == "Conv1D")
    return f" (out × in, as {type(owner).__name__})" if known and linear else " (in × out, as Conv1D)" if known else ""


def _tied(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Maps the other names of tied parameters to their first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            tied[name] = first[id(p)]
    wanted = set(names)
    return {name: other for name, other in tied.items() if other in wanted}


@dataclass
class _Plan:
    """The assignment of parameters to blocks by one family."""

    family: Family
    shapes: Mapping[str, tuple[int, ...]]
    entries: list[Entry] = field(default_factory=list)
    headless: set[str] = field(default_factory=set)
    """Parameters with heads whose number is not known."""
    doubtful: set[str] = field(default_factory=set)
    """Parameters whose number of heads comes from a module outside of the attention."""
    own: bool = False
    """Whether the family is the user's. Its rules are then used unchanged."""

    @classmethod
    def make(cls, model: nn.Module, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> _Plan:
        """Assign all parameters."""
        plan = cls(family, shapes)
        for name, shape in shapes.items():
            plan.entries += entries_of(model, family, name, shape)
        plan._settle()
        return plan

    def find_heads(self, model: nn.Module, said: Said, splits: Seen | None) -> None:
        """Give each attention its heads. Entries are made anew, since prefixes depend on what has a name."""
        found = [entry for name, shape in self.shapes.items() for entry in entries_of(model, self.family, name, shape)]
        done = completed(found, attentions(model, self.family, self.shapes), said, splits)
        position = {name: i for i, name in enumerate(self.shapes)}
        self.entries = sorted(done.entries, key=lambda entry: position[entry.parameter])
        self.headless, self.doubtful = done.unknown, done.doubtful
        self._settle()

    def _settle(self) -> None:
        # If the rules do not fit a weight, its bias gets no block name either.
        named = {entry.parameter for entry in self.entries}
        weights = {name: f"{name[: -len('bias')]}weight" for name in named if name.endswith(".bias")}
        alone = {name for name, weight in weights.items() if weight in self.shapes and weight not in named}
        alone = set() if self.own else alone
        self.entries = [entry for entry in self.entries if entry.parameter not in alone]
        self._tell_apart()

    @property
    def explained(self) -> int:
        """The number of entries that the family names; 0 if it names only embeddings and output heads."""
        if not any(INSIDE.search(entry.block) for entry in self.entries):
            return 0
        return sum(prod(self.shapes[name]) for name in {entry.parameter for entry in self.entries})

    def _tell_apart(self) -> None:
        """Add prefixes to the names of two towers with the same names. Names that are still double are removed."""
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
        """Rename ``enc`` or ``dec`` to ``h`` in models that have only one of them."""
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
        named: dict[str, list[Entry]] = {}
        for entry in self.entries:
            named.setdefault(entry.block, []).append(entry)
        known = {entry.parameter for entry in self.entries}
        unmapped = [name for name in self.shapes if name not in known]
        aliases = self._aliases(tied)
        elsewhere = self._elsewhere(tied)
        blocks = []
        for name, entries in named.items():
            called = _left_over(name, entries) if name in elsewhere else name
            block = _block(called, entries, tuple(aliases.get(name, ())))
            headless = not block.heads and not self.headless.isdisjoint(block.parameters)
            doubtful = not self.doubtful.isdisjoint(block.parameters)
            blocks.append(replace(block, heads_unknown=headless, heads_doubtful=doubtful))
        for name in unmapped:
            called = name if name not in named else f"parameter {name}"
            part = oriented(model, name, self.shapes[name])
            blocks.append(Block(called, (part,), heads_unknown=name in self.headless))
        position = {name: i for i, name in enumerate(self.shapes)}
        blocks.sort(key=lambda block: min(position[name] for name in block.parameters))
        return Blocks(blocks, order, family=self.family.name, tied=tied, unmapped=unmapped)

    def _known_as(self, tied: Mapping[str, str]) -> Iterator[tuple[str, str, Found]]:
        """(first name, block of the other name, rule) of each tied parameter whose other name matches a rule."""
        home = {entry.parameter: entry for entry in self.entries}
        # A tower has its prefix in all of its names.
        told = {e.prefix for e in self.entries if e.prefix and e.block.startswith(f"{e.prefix}.")}
        for alias, name in tied.items():
            found = next(self.family.find(WRAPPERS.sub("", alias).lstrip(".")), None)
            if found is not None and name in home:
                tower = any(f"{prefix}.".startswith(f"{found.prefix}.") for prefix in told)
                before = f"{found.prefix}." if found.prefix and tower else ""
                yield name, before + found.block, found

    def _aliases(self, tied: Mapping[str, str]) -> dict[str, list[str]]:
        """Other names of blocks whose parameters are all tied: the block names of their other parameter names."""
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
        """Blocks with a part that is tied to another block or computed from other parameters. The rest is renamed."""
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


def _block(name: str, entries: Sequence[Entry], aliases: tuple[str, ...]) -> Block:
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


def _left_over(name: str, entries: Sequence[Entry]) -> str:
    """The name for the rest of a block that has no head or is not tied. It is almost always the bias."""
    bias = all(re.search(r"(?:bias|\bb_\w+)$", entry.parameter) for entry in entries)
    return f"{name}.{'bias' if bias else 'rest'}"
