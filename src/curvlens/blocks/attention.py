"""Finds the number of heads of each attention, where the rules of the family do not give it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from curvlens.blocks.axes import Cut, DoesNotFitError, axis_with_heads, cuts
from curvlens.blocks.entries import WRAPPERS, Entry, entry_of, modules_around
from curvlens.blocks.family import Family, Found, head_width, stored_as
from curvlens.blocks.heads import Count, Said, nearby, told
from curvlens.blocks.splits import Seen, alternate, seen
from curvlens.errors import CurvlensError

FUSED = "q:head+k:head+v:head"
"""Axes of a fused tensor: all queries, then all keys, then all values, with unequal numbers of heads."""


@dataclass(frozen=True)
class Member:
    """A parameter whose rule has an axis of heads."""

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
        """The length of the axis of heads."""
        return axis_with_heads(self.found.rule.axes, self.shape)[1]

    @property
    def interleaved(self) -> bool:
        """Whether q, k and v alternate head by head. Then the number of heads is needed to cut them apart."""
        words = axis_with_heads(self.found.rule.axes, self.shape)[0]
        return (
            len(self.role) > 1
            and "head" in words
            and words.index("head") < next((i for i, word in enumerate(words) if "/" in word), 0)
        )

    def cut(self, sizes: Mapping[str, int], *, equal: bool) -> list[Cut]:
        """The parts by role and head; ``equal`` says that keys and queries have the same number of heads."""
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
        """The names that ``heads=`` may use: the block's name, with or without its prefix, and the module's name."""
        first = self.members[0]
        path, prefix = first.found.block.rpartition(".")[0], first.found.prefix
        module = WRAPPERS.sub("", first.parameter).lstrip(".").split(".")[:-2]
        alone = path.partition(".")[2] if path.startswith(("enc.", "dec.")) else path
        names = [path, f"{prefix}.{path}".lstrip("."), f"h.{alone}" if alone != path else path, ".".join(module)]
        return list(dict.fromkeys(name for name in names if name))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of the axis of heads by role. Roles whose weight and bias differ are left out."""
        lengths: dict[str, set[int]] = {}
        for member in self.members:
            lengths.setdefault(member.role, set()).add(member.size)
        return {role: values.pop() for role, values in lengths.items() if len(values) == 1}

    @cached_property
    def near(self) -> int:
        """The number of modules around the first member that belong to this attention."""
        return nearby(member.around for member in self.members)

    @property
    def tells_width(self) -> bool:
        """Whether the attention itself has an attribute for the width of a head."""
        return head_width(self.members[0].around[: self.near]) is not None

    def counts(self, splits: Seen | None, *, told_too: bool) -> Iterator[tuple[Count, bool]]:
        """Possible numbers of heads, the likeliest first, each with whether it is certain."""
        far: list[Count] = []
        for around in dict.fromkeys(tuple(member.around) for member in self.members) if told_too else ():
            outermost = self.members[0].around[: self.near][-1]
            for count, certain in told(around, around.index(outermost) + 1 if outermost in around else 1):
                if certain:
                    yield count, True
                else:
                    far.append(count)
        if splits is not None:
            shown = seen(splits, self._by_role, self.sizes.get("o"))
            if shown is not None:
                yield shown, True
        if not self.alternates(splits):
            yield from ((count, False) for count in far)

    def alternates(self, splits: Seen | None) -> bool:
        """Whether a pass shows that the rows of a head are not contiguous. No rule can cut such heads."""
        return splits is not None and alternate(splits, self._by_role, self.sizes.get("o"))

    @property
    def _by_role(self) -> dict[str, tuple[int, bool]]:
        return {member.parameter: (member.size, member.interleaved) for member in self.members}

    def fit(self, count: Count) -> dict[str, list[Cut]] | None:
        """How each parameter is cut with this number of heads. None if the shapes do not fit it."""
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
        """Whether q and o have the given number of heads, and k and v one common number that divides it."""
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
        """Whether a cut of a fused tensor into three equal roles, without its heads, is in the wrong place."""
        if member.role != "qkv":
            return member.interleaved
        return member.interleaved or ("o" in self.sizes and member.size != 3 * self.sizes["o"])


def _divided(size: int | None, count: int) -> int | None:
    return size // count if size and size % count == 0 else None


def attentions(model: nn.Module, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> list[Attention]:
    """All attentions that the rules of a family match."""
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
    """Entries with their heads."""

    entries: list[Entry]
    unknown: set[str]
    """Parameters whose heads are not known."""
    doubtful: set[str]
    """Parameters whose number of heads comes from a module outside of the attention. A forward pass may correct it."""


def completed(entries: Iterable[Entry], every: Sequence[Attention], said: Said, splits: Seen | None) -> Completed:
    """Give each attention its number of heads.

    The sources, in this order: ``heads=`` of the user, attributes of the attention itself, views seen in a forward
    pass, attributes of outer modules.
    """
    own: dict[str, list[Entry]] = {}
    for entry in entries:
        own.setdefault(entry.parameter, []).append(entry)
    unknown: set[str] = set()
    doubtful: set[str] = set()
    for attention in every:
        wanted = said.of(attention.names)
        lacking = {m.parameter for m in attention.members if not _has_heads(own.get(m.parameter))}
        known = not lacking and (attention.tells_width or splits is None)
        if not lacking and not attention.tells_width:
            doubtful |= {m.parameter for m in attention.members}
        if wanted is None and known:
            continue
        counts = [(wanted, True)] if wanted else attention.counts(splits, told_too=bool(lacking))
        fits = ((attention.fit(count), certain) for count, certain in counts)
        cut, certain = next(((cut, certain) for cut, certain in fits if cut is not None), (None, False))
        if cut is not None:
            for m in attention.members:
                own[m.parameter] = [entry_of(m.found, m.parameter, one) for one in cut[m.parameter]]
            names = {m.parameter for m in attention.members}
            doubtful = doubtful - names if certain else doubtful | names
            continue
        if wanted is None and not lacking:
            if not attention.alternates(splits):
                continue
            lacking = {m.parameter for m in attention.members}
            for name in lacking:
                own[name] = [replace(entry, cut=replace(entry.cut, heads={})) for entry in own[name]]
        if wanted is not None:
            raise CurvlensError(
                f"heads={wanted} does not fit {attention.names[0]!r}: its queries, keys, values and outputs have "
                f"{attention.sizes} numbers. Give a number of heads that divides them; with grouped queries give "
                "both, heads=(queries, keys)."
            )
        unknown |= lacking
        for m in attention.members:
            if m.parameter in lacking and attention.misread(m):
                own.pop(m.parameter, None)
    said.require_all_found()
    entries = [entry for group in own.values() for entry in group]
    return Completed(entries, unknown, doubtful - unknown if splits is None else set())


def _has_heads(entries: Sequence[Entry] | None) -> bool:
    return bool(entries) and all(entry.cut.heads for entry in entries or ())
