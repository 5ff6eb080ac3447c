"""Families of architectures: rules that give the parameters of a model their names.

A rule matches the end of a parameter's name, so a model keeps its block names inside any wrapper. The family that
explains most numbers of a model is its own; among equals the one with the fewest rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from curvlens.blocks.axes import Cut, DoesNotFitError, cuts

Sizes = Callable[[nn.Module], Mapping[str, int]]


@dataclass(frozen=True)
class Rule:
    """``parameter``, in which ``{i}`` is the number of the layer, is (a part of) ``block`` and has these axes.

    In ``parameter``, ``{e}`` is the number of an expert and ``{any}`` any name without a dot. In ``block``, ``*`` is
    the role that the axes say, as in ``Rule("h.{i}.attn.c_attn.weight", "h.{i}.attn.*", "in (q/k/v head dim)")``.
    """

    parameter: str
    block: str
    axes: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """As a regular expression, whatever stands before it."""
        text = re.escape(self.parameter).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
        return re.compile(rf"(?:(?P<prefix>.+)\.)?{text}".replace(r"\{any\}", r"[^.]+"), re.DOTALL)


@dataclass(frozen=True)
class Found:
    """A rule that matches a name."""

    rule: Rule
    block: str
    """The name of the block, with ``*`` where the role belongs."""
    prefix: str
    """What stands before the part of the name that the rule speaks of."""
    expert: int | None

    @property
    def roles(self) -> str:
        """All roles of a fused tensor, as in ``qkv``."""
        word = next((word for word in re.split(r"[\s()]+", self.rule.axes) if "/" in word or "+" in word), "")
        return "".join(role.partition(":")[0] for role in re.split(r"[/+]", word))


@dataclass(frozen=True)
class Family:
    """Rules for one kind of model; the first that matches a parameter counts.

    ``sizes`` tells, of the module that owns a parameter or of one around it, the sizes of roles that are not equal.
    """

    name: str
    rules: Sequence[Rule]
    sizes: Sizes | None = None

    @cached_property
    def _ends(self) -> list[tuple[str, Rule]]:
        """Every rule with the last two words of its parameter, or the last one, to look at few of them."""
        result = []
        for rule in self.rules:
            words = rule.parameter.split(".")[-2:]
            result.append((words[-1] if "{" in words[0] else ".".join(words), rule))
        return result

    def find(self, name: str) -> Iterator[Found]:
        """The rules that match a name."""
        items = name.split(".")
        ends = {".".join(items[-2:]), items[-1]}
        for rule in (rule for end, rule in self._ends if end in ends):
            match = rule.pattern.fullmatch(name)
            if match is not None:
                groups = match.groupdict()
                block = rule.block.replace("{i}", groups.get("i") or "")
                expert = groups.get("e")
                yield Found(rule, block, groups["prefix"] or "", None if expert is None else int(expert))

    def cut(
        self, found: Found, parameter: str, shape: tuple[int, ...], around: Sequence[nn.Module]
    ) -> Sequence[Cut] | None:
        """What a rule makes of a parameter, if it fits; ``around`` are the modules that hold it, the nearest first."""
        axes = found.rule.axes
        sizes: dict[str, int] = {}
        width = head_width(around) if "dim" in axes or ":head" in axes else None
        if width is not None:
            sizes["dim"] = width
        for module in around if self.sizes is not None and "+" in axes else ():
            assert self.sizes is not None
            sizes = {**self.sizes(module), **sizes}
        try:
            return cuts(parameter, shape, axes, sizes)
        except DoesNotFitError:
            return None


HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_head")
"""What modules call the width of a head."""


def head_width(around: Sequence[nn.Module]) -> int | None:
    """The width of a head, as the nearest attention module around a parameter tells it."""
    for module in around[:4]:
        widths = {
            width
            for inner in module.modules()
            for name in HEAD_WIDTHS
            if isinstance(width := getattr(inner, name, None), int) and width > 0
        }
        if len(widths) == 1:
            return widths.pop()
        if widths:
            return None
    return None


# The shapes that most modules have


def linear(module: str, block: str) -> list[Rule]:
    """``nn.Linear``: weight out × in, and a bias."""
    return [Rule(f"{module}.weight", block, "out in"), Rule(f"{module}.bias", block, "out")]


def heads_out(module: str, block: str) -> list[Rule]:
    """``nn.Linear`` whose outputs are heads side by side: q, k, v."""
    return [Rule(f"{module}.weight", block, "(head dim) in"), Rule(f"{module}.bias", block, "(head dim)")]


def heads_in(module: str, block: str) -> list[Rule]:
    """``nn.Linear`` whose inputs are heads side by side: o."""
    return [Rule(f"{module}.weight", block, "out (head dim)"), Rule(f"{module}.bias", block, "out")]


def attention(path: str, block: str, names: str = "q_proj k_proj v_proj o_proj") -> tuple[Rule, ...]:
    """Four `nn.Linear` below a path, in the order q, k, v, o."""
    q, k, v, o = (f"{path}.{name}" for name in names.split())
    outward = ((q, "q"), (k, "k"), (v, "v"))
    return each(*(heads_out(module, f"{block}.{role}") for module, role in outward), heads_in(o, f"{block}.o"))


def embedding(module: str, block: str) -> list[Rule]:
    """``nn.Embedding``: one row for each token or position, which is X W with one-hot rows X."""
    return [Rule(f"{module}.weight", block, "in out")]


def norm(module: str, block: str) -> list[Rule]:
    """A norm with its weight and bias."""
    return [Rule(f"{module}.weight", block, "out"), Rule(f"{module}.bias", block, "out")]


def each(*rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """All rules of some lists."""
    return tuple(rule for group in rules for rule in group)
