"""The map of a model: which parts of its parameters go by which name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor

from curvlens.blocks.block import Block
from curvlens.blocks.cutting import embed, extract, overlap, union
from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError, listing, nearest

By = Literal["block", "head", "layer", "role", "parameter"]


class Blocks(Mapping[str, Block]):
    """Blocks by name, disjoint and covering all parameters. Print it, or `table` it, to see the map.

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
    ) -> None:
        self._blocks = {block.name: block for block in blocks}
        self.order = tuple(order)
        """What the blocks cover, in the order of a flat vector."""
        self.family = family
        """The architecture by which the names were given; None if it is not known."""
        self.tied = dict(tied or {})
        """Further names of tied parameters, and the one they go by."""
        self.unmapped = tuple(unmapped)
        """Parameters that the family does not name: each is a block by itself."""

    @classmethod
    def of_parameters(cls, parts: Iterable[Part]) -> Blocks:
        """One block a parameter."""
        parts = tuple(parts)
        return cls([Block(part.key, (part,)) for part in parts], parts)

    # A mapping

    def __getitem__(self, name: str) -> Block:
        block = self._called(name)
        if block is None:
            raise KeyError(f"No block is called {name!r}. {nearest(name, self._names())}")
        return block

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._called(name) is not None

    @property
    def size(self) -> int:
        """How many numbers all blocks have together."""
        return sum(part.size for part in self.order)

    # Other granularities

    def by(self, what: By) -> Blocks:
        """The same numbers by layer, role, parameter or head (experts count as heads)."""
        if what not in get_args(By):
            raise CurvlensError(f"by={what!r}, expected one of {listing(get_args(By))}.")
        if what == "parameter":
            blocks: list[Block] = [self._parameter(part) for part in self.order]
        elif what == "head":
            blocks = [head for block in self._blocks.values() for head in (block.heads or (block,))]
        elif what == "block":
            return self
        else:
            blocks = self._merged(lambda block: (block.layer or block.name) if what == "layer" else block.role)
        return Blocks(blocks, self.order, family=self.family, tied=self.tied, unmapped=self.unmapped)

    def _parameter(self, part: Part) -> Block:
        """A parameter as a block, with the order of axes that its blocks know."""
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
        """What of the blocks lies in some parts."""
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
        )

    def only(self, names: Iterable[str]) -> Blocks:
        """Some of the blocks, by their names."""
        chosen = [self._blocks[name] for name in names]
        order = self._sorted(part for block in chosen for part in block.parts)
        return Blocks(chosen, order, family=self.family, tied=self.tied, unmapped=self.unmapped)

    def grouped(self, patterns: Mapping[str, str | Iterable[str]]) -> Blocks:
        """The user's own blocks, each a name with block names, parameter names or patterns; the rest stays as it is."""
        own: list[Block] = []
        for name, wanted in patterns.items():
            block = Block(name, tuple(self.find([wanted] if isinstance(wanted, str) else wanted)))
            for other in own:
                twice = [part.key for part in block.parts if _shared(part, other.parts)]
                if twice:
                    raise CurvlensError(
                        f"The blocks {other.name!r} and {name!r} overlap: both have {listing(twice)}. Every parameter "
                        "belongs to one block."
                    )
            own.append(block)
        taken = [part for block in own for part in block.parts]
        rest = [left for block in self._blocks.values() for left in _without(block, taken)]
        clash = [block.name for block in rest if block.name in patterns]
        if clash:
            raise CurvlensError(
                f"{listing(clash)} would be the name of two blocks: your own, and what is left of the model's. Choose "
                "another name."
            )
        return Blocks([*own, *rest], self.order, family=self.family, tied=self.tied, unmapped=self.unmapped)

    # Names

    def _called(self, name: str) -> Block | None:
        if name in self._blocks:
            return self._blocks[name]
        return next((block for block in self._blocks.values() if name in block.aliases), None)

    def _names(self) -> list[str]:
        return [*self._blocks, *(alias for block in self._blocks.values() for alias in block.aliases)]

    def find(self, wanted: Iterable[str]) -> list[Part]:
        """The parts that names or patterns stand for, each once, in the order of a flat vector."""
        found: list[Part] = []
        for item in wanted:
            if not isinstance(item, str):
                raise CurvlensError(f"A block is asked for by its name, a text; got a {type(item).__name__}.")
            found += self._one(item)
        if not found:
            raise CurvlensError(f"No block was named. Known blocks: {listing(self)}.")
        return self._sorted(found)

    def _one(self, name: str) -> list[Part]:
        """What one name or pattern stands for: a block, a layer, a role, a head, a parameter."""
        block = self._called(name)
        if block is not None:
            return list(block.parts)
        parameter = self.tied.get(name, name)
        whole = [part for part in self.order if parameter in (part.key, part.parameter)]
        if whole:
            return whole
        for granularity in ("head", "layer", "role"):
            block = self.by(granularity)._called(name)
            if block is not None:
                return list(block.parts)
        hits = [part for block in self._blocks.values() if fnmatchcase(block.name, name) for part in block.parts]
        hits += [part for part in self.order if fnmatchcase(part.parameter, name)]
        hits = hits or [p for head in self.by("head").values() if fnmatchcase(head.name, name) for p in head.parts]
        if not hits:
            raise CurvlensError(self._unknown(name))
        return hits

    def _unknown(self, name: str) -> str:
        """What to say of a name that stands for nothing."""
        parameters = [part.key for part in self.order]
        known = list(dict.fromkeys([*self._names(), *self.by("head"), *parameters]))
        if any(other.startswith(f"{name}.") for other in known):
            return (
                f"No block or parameter is called {name!r}, but some names begin so. For all of them: {name + '.*'!r}."
            )
        return (
            f"No block or parameter is called {name!r} here (one that is frozen or was not chosen has no rows). "
            f"{nearest(name, known)} Blocks: {listing(self)}; print(problem.blocks) shows all."
        )

    def _sorted(self, parts: Iterable[Part]) -> list[Part]:
        """Each part once, in the order of a flat vector."""
        groups: dict[str, list[Part]] = {part.parameter: [] for part in self.order}
        for part in parts:
            groups[part.parameter].append(part)
        return [part for group in groups.values() for part in union(group)]

    # Vectors

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """A flat vector over all blocks, or columns of them, as one flat vector for each block."""
        if v.shape[0] != self.size:
            raise CurvlensError(f"The blocks have {self.size} numbers together, got shape {tuple(v.shape)}.")
        return {name: extract(self.order, block.parts, v) for name, block in self._blocks.items()}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The flat vector of its blocks; those that are missing are zero."""
        unknown = [name for name in parts if name not in self._blocks]
        if unknown or not parts:
            raise CurvlensError(f"{listing(unknown) or 'Nothing'} is no block here. Blocks: {listing(self)}.")
        return torch.stack([embed(self.order, self._blocks[name].parts, x) for name, x in parts.items()]).sum(0)

    # For people

    def table(self) -> str:
        """The map as text: every block with its numbers, heads and parameters."""
        rows = [("block", "numbers", "heads", "is")]
        for block in self._blocks.values():
            name = " = ".join((block.name, *block.aliases))
            rows.append((name, str(block.size), str(block.n_heads or ""), _shortened([p.key for p in block.parts])))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join([repr(self), *lines])

    def __repr__(self) -> str:
        unmapped = f", {len(self.unmapped)} without a name in it" if self.unmapped and self.family else ""
        return f"Blocks({len(self)} blocks, {self.size} numbers, family {self.family or 'unknown'}{unmapped})"

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, list[str]]:
        """By name, how to cut each block out of the parameters."""
        return {name: [part.key for part in block.parts] for name, block in self._blocks.items()}


def _shortened(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _shared(part: Part, others: Iterable[Part]) -> int:
    """How many numbers of a part lie in others, which are disjoint."""
    return sum(overlap(part, other) for other in others if other.parameter == part.parameter)


def _without(block: Block, taken: Sequence[Part]) -> list[Block]:
    """What of a block is not taken; head by head, if a part is taken in part."""
    shared = {part.key: _shared(part, taken) for part in block.parts}
    if not any(shared.values()):
        return [block]
    left = tuple(part for part in block.parts if not shared[part.key])
    if all(shared[part.key] in (0, part.size) for part in block.parts):
        heads = tuple(rest for head in block.heads for rest in _without(head, taken))
        return [replace(block, parts=left, heads=heads)] if left else []
    if not block.heads:
        raise CurvlensError(f"Block {block.name!r} is taken in part, and it has no heads to be divided by.")
    return [rest for head in block.heads for rest in _without(head, taken)]
