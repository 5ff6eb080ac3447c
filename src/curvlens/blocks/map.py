"""The map of a model: the named blocks and the parts of parameters they stand for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from curvlens.blocks.block import Block, layer_of
from curvlens.blocks.cutting import embed, extract, union
from curvlens.blocks.groups import groups, left_of
from curvlens.blocks.parts import Part
from curvlens.blocks.suggestion import own_blocks
from curvlens.blocks.table import lines
from curvlens.errors import CurvlensError, CurvlensWarning, a_kind, listing, nearest

By = Literal["block", "head", "layer", "role", "parameter"]
NAMED: tuple[By, ...] = ("head", "layer", "role")
"""Values of ``by=`` that need the names of a family."""

ATTENTION = re.compile(r"(?:^|\.)(?:attn|cross)\.(?:q|k|v|o|qkv|kv)$|(?i:attn|attention)\.\w+\.weight$")
"""Names of attention weights: blocks of a role, and parameters without a block name."""


def _unknown_heads(names: Iterable[str]) -> str:
    return (
        f"the number of heads of {listing(names)} is not known. Give it: Problem(..., heads=6), by attention "
        "heads={'h.0.attn': 6}, or for grouped queries (queries, keys) heads=(6, 2). For `curvlens blocks` add "
        "--heads 6."
    )


def _starts(name: str) -> Iterator[str]:
    """All beginnings of a name that end before a dot: ``h`` and ``h.0`` of ``h.0.attn``."""
    words = name.split(".")
    yield from (".".join(words[:i]) for i in range(1, len(words)))


class Blocks(Mapping[str, Block]):
    """Blocks by name. They are disjoint and cover all parameters. Print it to see the map.

    >>> blocks = Blocks.of_parameters([Part("w", (2, 3)), Part("b", (2,))])
    >>> {name: tuple(x.shape) for name, x in blocks.split(torch.arange(8.0)).items()}
    {'w': (6,), 'b': (2,)}
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        order: Sequence[Part],
        *,
        family: str | None = None,
        tied: Mapping[str, str] | None = None,
        unmapped: Sequence[str] = (),
        base: Blocks | None = None,
    ) -> None:
        self._blocks = {block.name: block for block in blocks}
        self.order = tuple(order)
        """The parts that the blocks cover, in the order of a flat vector."""
        self.family = family
        """The architecture family that gave the names; None if it is not known."""
        self.tied = dict(tied or {})
        """Maps the other names of tied parameters to their first name."""
        self.unmapped = tuple(unmapped)
        """Parameters that the family does not name. Each is a separate block."""
        self._base = self if base is None else base
        """The model's own map, from which groups are made. Layers, roles and heads are always looked up in it."""

    @classmethod
    def of_parameters(cls, parts: Iterable[Part]) -> Blocks:
        """One block for each parameter."""
        parts = tuple(parts)
        return cls([Block(part.key, (part,)) for part in parts], parts)

    # A mapping

    def __getitem__(self, name: str) -> Block:
        block = self._called(name)
        if block is None:
            raise KeyError(f"No block has the name {name!r}. {nearest(name, self._names())}")
        return block

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._called(name) is not None

    @property
    def size(self) -> int:
        """The number of entries of all blocks together."""
        return sum(part.size for part in self.order)

    # Other granularities

    def by(self, what: By) -> Blocks:
        """The same entries by layer, role, parameter or head (experts count as heads)."""
        if what not in get_args(By):
            raise CurvlensError(f"by={what!r}, expected one of {listing(get_args(By))}.")
        if what in NAMED and self.family is None and (what == "head" or not self.layers):
            row = "parameter" if len(self._base) == len(self.order) else "block"
            fix = "Give" if self.layers else f"Name its layers: Problem(..., {self.suggestion}), or give"
            warnings.warn(
                f"by={what!r}: the architecture is not known, so there is one row for each {row}. {fix} a Family of "
                "rules.",
                CurvlensWarning,
                stacklevel=3,
            )
        if what == "head":
            self._require_heads()
        return self if what == "block" else self._base._by(what)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order of the model; none if no block is in a layer."""
        return tuple(dict.fromkeys(layer for b in self._base._blocks.values() if (layer := layer_of(b.name))))

    @property
    def suggestion(self) -> str:
        """``blocks=`` for this model, as code, if its architecture is not known."""
        return own_blocks(part.parameter for part in self.order)

    @property
    def headless(self) -> list[str]:
        """Blocks with heads whose number is not known."""
        return [block.name for block in self._base._blocks.values() if block.heads_unknown]

    @property
    def doubtful(self) -> list[str]:
        """Blocks whose number of heads comes from a module outside of the attention. A forward pass can confirm it."""
        return [block.name for block in self._base._blocks.values() if block.heads_doubtful]

    def _require_heads(self) -> None:
        """Raise an error for heads whose number is not known; warn of attention weights that cannot be divided."""
        if self.headless:
            raise CurvlensError(f"by='head': {_unknown_heads(self.headless)}")
        whole = [b.name for b in self._base._blocks.values() if not b.heads and ATTENTION.search(b.name)]
        if whole and self.family is not None:
            warnings.warn(
                f"by='head': {listing(whole)} cannot be divided by heads; each is one row.",
                CurvlensWarning,
                stacklevel=4,
            )

    def _by(self, what: By) -> Blocks:
        if what == "parameter":
            blocks: list[Block] = [self._parameter(part) for part in self.order]
        elif what == "head":
            blocks = [head for block in self._blocks.values() for head in (block.heads or (block,))]
        else:
            blocks = self._merged(lambda block: (block.layer or block.name) if what == "layer" else block.role)
        return Blocks(blocks, self.order, family=self.family, tied=self.tied, unmapped=self.unmapped)

    def maps(self) -> dict[str, dict[str, list[str]]]:
        """`to_dict` by head, layer and role; empty if the architecture is not known and no block is in a layer."""
        if self.family is None and not self.layers:
            return {}
        known = [what for what in NAMED if what != "head" or not self.headless]
        return {what: self._base._by(what).to_dict() for what in known}

    def _parameter(self, part: Part) -> Block:
        """A parameter as a block, with the axis order of its blocks."""
        known = (own for block in self._blocks.values() for own in block.parts if own.key == part.key)
        aliases = tuple(alias for alias, name in self.tied.items() if name == part.parameter)
        return Block(part.key, (next(known, part),), aliases)

    def _merged(self, name: Callable[[Block], str]) -> list[Block]:
        groups: dict[str, list[Block]] = {}
        for block in self._blocks.values():
            groups.setdefault(name(block), []).append(block)
        return [
            replace(blocks[0], name=name)
            if len(blocks) == 1
            else Block(name, tuple(self._sorted(part for block in blocks for part in block.parts)))
            for name, blocks in groups.items()
        ]

    def within(self, parts: Sequence[Part]) -> Blocks:
        """The intersection of the blocks with some parts."""
        if [part.key for part in parts] == [part.key for part in self.order]:
            return self
        blocks = [inside for block in self._blocks.values() if (inside := block.within(parts)) is not None]
        names = {part.parameter for part in parts}
        return Blocks(
            blocks,
            parts,
            family=self.family,
            tied={alias: name for alias, name in self.tied.items() if name in names},
            unmapped=[name for name in self.unmapped if name in names],
            base=None if self._base is self else self._base.within(parts),
        )

    def only(self, names: Iterable[str]) -> Blocks:
        """The blocks with these names."""
        chosen = [self._blocks[name] for name in names]
        order = self._sorted(part for block in chosen for part in block.parts)
        return Blocks(chosen, order, family=self.family, tied=self.tied, unmapped=self.unmapped)

    def grouped(self, patterns: Mapping[str, str | Iterable[str]]) -> Blocks:
        """Group blocks under the user's own names: ``{name: block names, parameter names or patterns}``.

        Groups are the blocks of ``by="block"``. Blocks outside of the groups, layers, roles and heads do not change. If
        the architecture is not known, groups with names such as ``h.0.attn`` or ``h.0`` make layers and roles.
        """
        own = groups(patterns, self.find)
        taken = [part for block in own for part in block.parts]
        rest = [left for block in self._blocks.values() for left in left_of(block, taken)]
        for block in (*own, *(block for block in rest if block.name not in self._blocks)):
            meant = self._base._exact(block.name)
            if meant is not None and {part.key for part in meant} != {part.key for part in block.parts}:
                raise CurvlensError(
                    f"{block.name!r} would be the name of two blocks: your own, and a block of the model with other "
                    "parameters. Choose another name."
                )
        naming = self.family is None and any(layer_of(block.name) for block in own)
        base = None if naming else self._base
        return Blocks([*own, *rest], self.order, family=self.family, tied=self.tied, unmapped=self.unmapped, base=base)

    # Names

    def _called(self, name: str) -> Block | None:
        for blocks in (self._blocks, self._base._blocks):
            if name in blocks:
                return blocks[name]
        return next((block for block in self._base._blocks.values() if name in block.aliases), None)

    def _names(self) -> list[str]:
        base = self._base._blocks
        return list(dict.fromkeys([*self._blocks, *base, *(alias for b in base.values() for alias in b.aliases)]))

    def find(self, wanted: Iterable[str]) -> list[Part]:
        """The parts with these names or patterns, each once, in the order of a flat vector."""
        found: list[Part] = []
        for item in wanted:
            if not isinstance(item, str):
                raise CurvlensError(
                    f"The name of a block is a text; got {a_kind(item)}. Use a name such as "
                    f"H[{next(iter(self), '')!r}]."
                )
            found += self._one(item)
        if not found:
            raise CurvlensError(f"No block was named. Name at least one of the blocks {listing(self)}.")
        return self._sorted(found)

    def _one(self, name: str) -> Sequence[Part]:
        """The parts for one name or pattern."""
        exact = self._exact(name)
        if exact is not None:
            return exact
        blocks = (*self._blocks.values(), *self._base._blocks.values())
        hits = [part for block in blocks if fnmatchcase(block.name, name) for part in block.parts]
        hits += [part for part in self.order if fnmatchcase(part.parameter, name)]
        heads = self._base._by("head").values()
        hits = hits or [part for head in heads if fnmatchcase(head.name, name) for part in head.parts]
        if not hits:  # all names that begin with it: "h.0.attn" means "h.0.attn.*"
            start = f"{name}."
            hits = [part for block in blocks if block.name.startswith(start) for part in block.parts]
            hits += [part for part in self.order if part.parameter.startswith(start)]
        if not hits:
            raise CurvlensError(self._unknown(name))
        return hits

    def _exact(self, name: str) -> Sequence[Part] | None:
        """The parts of a block, parameter, head, layer or role with this name; None if there is none."""
        block = self._called(name)
        if block is not None:
            return block.parts
        parameter = self.tied.get(name, name)
        whole = [part for part in self.order if parameter in (part.key, part.parameter)]
        if whole:
            return whole
        found = (self._base._by(granularity)._called(name) for granularity in NAMED)
        return next((block.parts for block in found if block is not None), None)

    def _unknown(self, name: str) -> str:
        """The error message for an unknown name."""
        headless = [block for block in self.headless if any(fnmatchcase(f"{block}.{i}", name) for i in range(10))]
        block, _, number = name.rpartition(".")
        if headless or (block in self.headless and number.isdigit()):
            return f"{name!r} is a head, but {_unknown_heads(headless or [block])}"
        parameters = [part.key for part in self.order]
        known = list(dict.fromkeys([*self._names(), *self._base._by("head"), *parameters]))
        patterns = [f"*.{name}.*", f"*.{name}"]
        for names, pattern in product((self._names(), known), patterns):
            if any(fnmatchcase(other, pattern) for other in names):
                return (
                    f"No block or parameter is called {name!r}, but some names contain it. To select all of them, use "
                    f"{pattern!r}."
                )
        starts = dict.fromkeys(start for other in known for start in _starts(other))
        near = nearest(name, dict.fromkeys([*known, *starts]))
        near = f"{near} " if near.startswith("Did") else ""  # otherwise it lists the blocks, as the next sentence does
        if self.family is None and not self.layers and layer_of(name):
            return (
                f"No block or parameter is called {name!r}: the architecture is not known, so there are no layers. "
                f"Name them: Problem(..., {self.suggestion}). {near}Blocks: {listing(self)}."
            )
        return (
            f"No block or parameter is called {name!r} here (frozen parameters, and those not in params=, have no "
            f"rows). {near}Blocks: {listing(self)}; print(problem.blocks) shows all."
        )

    def _sorted(self, parts: Iterable[Part]) -> list[Part]:
        """Each part once, in the order of a flat vector."""
        groups: dict[str, list[Part]] = {part.parameter: [] for part in self.order}
        for part in parts:
            groups[part.parameter].append(part)
        return [part for group in groups.values() for part in union(group)]

    # Vectors

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """Split a flat vector over all blocks, or a matrix of columns, into one for each block."""
        if v.shape[0] != self.size:
            raise CurvlensError(
                f"The blocks have {self.size} numbers together. Expected a vector of that length, got shape "
                f"{tuple(v.shape)}."
            )
        return {name: extract(self.order, block.parts, v) for name, block in self._blocks.items()}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join the vectors of blocks to one flat vector. Missing blocks are zero."""
        unknown = [name for name in parts if name not in self._blocks]
        if unknown or not parts:
            given = f"the unknown names {listing(unknown)}" if unknown else "no block"
            raise CurvlensError(f"join was given {given}. Expected names among {listing(self)}.")
        return torch.stack([embed(self.order, self._blocks[name].parts, x) for name, x in parts.items()]).sum(0)

    # For people

    def table(self) -> str:
        """The map as text: each block with its size, heads and parameters."""
        return "\n".join([repr(self), *lines(self._blocks.values())])

    def __repr__(self) -> str:
        unmapped = f", {len(self.unmapped)} without a name in it" if self.unmapped and self.family else ""
        return f"Blocks({len(self)} blocks, {self.size} numbers, family {self.family or 'unknown'}{unmapped})"

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, list[str]]:
        """By name, the expressions that cut the block out of the parameters."""
        return {name: [part.key for part in block.parts] for name, block in self._blocks.items()}
