"""The heads of every attention of a model, where the rules of its family alone do not tell them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from curvlens.blocks.axes import Cut, DoesNotFitError, axis_with_heads, cuts
from curvlens.blocks.entries import WRAPPERS, Entry, entry_of, modules_around
from curvlens.blocks.family import Family, Found, stored_as
from curvlens.blocks.heads import Count, Said, told
from curvlens.blocks.splits import Seen, seen
from curvlens.errors import CurvlensError

FUSED = "q:head+k:head+v:head"
"""Queries, keys and values one behind the other, as many as there are of each."""


@dataclass(frozen=True)
class Member:
    """A parameter whose rule says that it has heads."""

    parameter: str
    shape: tuple[int, ...]
    found: Found
    around: Sequence[nn.Module] = field(repr=False)

    @property
    def role(self) -> str:
        """``q``, ``k``, ``v``, ``o``; ``qkv`` or ``kv`` of a fused tensor."""
        return self.found.roles or self.found.block.rpartition(".")[2]

    @property
    def size(self) -> int:
        """How many numbers lie along the axis of the heads."""
        return axis_with_heads(self.found.rule.axes, self.shape)[1]

    @property
    def interleaved(self) -> bool:
        """Whether queries, keys and values alternate head by head, so that nothing can be cut without their number."""
        words = axis_with_heads(self.found.rule.axes, self.shape)[0]
        return (
            len(self.role) > 1
            and "head" in words
            and words.index("head") < next((i for i, word in enumerate(words) if "/" in word), 0)
        )

    def cut(self, sizes: Mapping[str, int], *, equal: bool) -> list[Cut]:
        """The parts by role and head; ``equal`` if there are as many keys as queries."""
        axes = self.found.rule.axes
        if not equal and self.role == "qkv":
            axes = axes.replace("(q/k/v head dim)", FUSED)
        return cuts(self.parameter, self.shape, axes, sizes)


@dataclass(frozen=True)
class Attention:
    """The parameters of one attention."""

    members: tuple[Member, ...]

    @property
    def names(self) -> list[str]:
        """What a user may call it: as its blocks are called, with what stands before, or as the module."""
        first = self.members[0]
        path, prefix = first.found.block.rpartition(".")[0], first.found.prefix
        module = WRAPPERS.sub("", first.parameter).lstrip(".").split(".")[:-2]
        alone = path.partition(".")[2] if path.startswith(("enc.", "dec.")) else path
        names = [path, f"{prefix}.{path}".lstrip("."), f"h.{alone}" if alone != path else path, ".".join(module)]
        return list(dict.fromkeys(name for name in names if name))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of the axis of heads by role; a role whose weight and bias differ has none."""
        lengths: dict[str, set[int]] = {}
        for member in self.members:
            lengths.setdefault(member.role, set()).add(member.size)
        return {role: values.pop() for role, values in lengths.items() if len(values) == 1}

    def fit(self, count: Count) -> dict[str, list[Cut]] | None:
        """How every parameter is cut with these heads; None if the shapes do not allow them."""
        queries, sizes = count.queries, self.sizes
        keys = queries if count.keys is None else count.keys
        equal = keys == queries
        together = 3 * queries if equal else queries + 2 * keys
        own = sizes.get("q", sizes.get("o"))
        width = _divided(sizes["qkv"], together) if "qkv" in sizes else _divided(own, queries)
        inner = _divided(sizes["o"], queries) if "o" in sizes else width
        if not width or not inner or ("qkv" in sizes and inner != width):
            return None
        if not equal and any(member.interleaved for member in self.members):
            return None
        fused = {"q": queries * width, "k": keys * width, "v": keys * width}
        result: dict[str, list[Cut]] = {}
        for member in self.members:
            dim = inner if member.role in ("v", "o") else width
            try:
                result[member.parameter] = member.cut({**fused, "dim": dim}, equal=equal)
            except DoesNotFitError:
                return None
        return result if self._agrees(result, count) else None

    def _agrees(self, cut: Mapping[str, list[Cut]], count: Count) -> bool:
        """Queries and outputs have the number told, keys and values one number, which divides it."""
        heads: dict[str, set[int]] = {"queries": set(), "keys": set()}
        for member in self.members:
            for one in cut[member.parameter]:
                side = "queries" if (one.role or member.role) in ("q", "o") else "keys"
                heads[side].add(len(one.heads))
        keys = heads["keys"]
        if heads["queries"] - {count.queries} or len(keys) > 1 or 0 in keys:
            return False
        return all(count.queries % n == 0 and count.keys in (None, n) for n in keys)

    def misread(self, member: Member) -> bool:
        """Whether cutting a fused tensor into three equal roles, without its heads, would cut in the wrong place."""
        if member.role != "qkv":
            return member.interleaved
        return member.interleaved or ("o" in self.sizes and member.size != 3 * self.sizes["o"])


def _divided(size: int | None, count: int) -> int | None:
    return size // count if size and size % count == 0 else None


def attentions(model: nn.Module, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> list[Attention]:
    """Every attention that the rules of a family speak of."""
    groups: dict[tuple[str, str], list[Member]] = {}
    for name, shape in shapes.items():
        around = modules_around(model, name)
        for found in family.find(WRAPPERS.sub("", name).lstrip(".")):
            words = axis_with_heads(found.rule.axes, shape)[0]
            if words and stored_as(found.rule.axes, shape, around):
                path = found.prefix, found.block.rpartition(".")[0]
                groups.setdefault(path, []).append(Member(name, shape, found, around))
                break
    return [Attention(tuple(members)) for members in groups.values()]


@dataclass
class Completed:
    """The entries of a plan with their heads, and the parameters whose heads are not known."""

    entries: list[Entry]
    unknown: set[str]


def completed(entries: Iterable[Entry], every: Sequence[Attention], said: Said, splits: Seen | None) -> Completed:
    """Give every attention its heads: those the user said, those known already, told by modules, or seen in a pass."""
    own: dict[str, list[Entry]] = {}
    for entry in entries:
        own.setdefault(entry.parameter, []).append(entry)
    unknown: set[str] = set()
    for attention in every:
        wanted = said.of(attention.names)
        lacking = {m.parameter for m in attention.members if not _has_heads(own.get(m.parameter))}
        if wanted is None and not lacking:
            continue
        fits = ((count, attention.fit(count)) for count in ([wanted] if wanted else _counts(attention, splits)))
        cut = next((cut for _, cut in fits if cut is not None), None)
        if cut is not None:
            for m in attention.members:
                own[m.parameter] = [entry_of(m.found, m.parameter, one) for one in cut[m.parameter]]
            continue
        if wanted is not None:
            raise CurvlensError(
                f"heads={wanted} does not fit {attention.names[0]!r}: its queries, keys, values and outputs have "
                f"{attention.sizes} numbers. Expected a number of heads that divides them; with grouped queries give "
                "both, heads=(queries, keys)."
            )
        unknown |= lacking
        for m in attention.members:
            if m.parameter in lacking and attention.misread(m):
                own.pop(m.parameter, None)
    said.require_all_found()
    return Completed([entry for group in own.values() for entry in group], unknown)


def _has_heads(entries: Sequence[Entry] | None) -> bool:
    return bool(entries) and all(entry.cut.heads for entry in entries or ())


def _counts(attention: Attention, splits: Seen | None) -> Iterator[Count]:
    """What the modules tell, then what was seen in a forward pass."""
    for around in dict.fromkeys(tuple(member.around) for member in attention.members):
        yield from told(around)
    if splits is not None:
        by_role = {member.parameter: (member.size, member.interleaved) for member in attention.members}
        yield from seen(splits, by_role, attention.sizes.get("o"))
