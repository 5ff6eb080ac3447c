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
    checked: Sequence[str] = ()
    """Model types of transformers whose names were checked; others may be named by their likeness."""
    not_for: Sequence[str] = ()
    """Model types whose parameters are called alike and mean something else."""

    def suits(self, model: nn.Module) -> bool:
        """Whether it may be tried on a model."""
        return model_type(model) not in self.not_for

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
        if not stored_as(axes, shape, around):
            return None
        sizes: dict[str, int] = {}
        width, teller = width_and_teller(around) if "dim" in axes or ":head" in axes else (None, len(around))
        if width is not None:
            sizes["dim"] = width
        for module in around if self.sizes is not None and "+" in axes else ():
            assert self.sizes is not None
            sizes = {**self.sizes(module), **sizes}
        try:
            found_cuts = cuts(parameter, shape, axes, sizes)
        except DoesNotFitError:
            return None
        heads = head_count(around[: teller + 1])
        queries = [
            cut for cut in found_cuts if cut.heads and (cut.role or found.block.rpartition(".")[2]) in ("q", "o")
        ]
        return None if heads is not None and any(len(cut.heads) != heads for cut in queries) else found_cuts


def model_type(model: nn.Module) -> str | None:
    """What transformers calls the architecture of a model; None of other models."""
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind:
            return kind
    return None


def stored_as(axes: str, shape: tuple[int, ...], around: Sequence[nn.Module]) -> bool:
    """Whether a rule reads a weight the way its owner stores it: `nn.Linear` out × in, Conv1D in × out."""
    owner = around[0]
    linear = isinstance(owner, nn.Linear)
    if len(shape) != 2 or not (linear or type(owner).__name__ == "Conv1D"):
        return True
    words = re.findall(r"\([^)]*\)|\S+", axes)
    if len(words) != len(shape):
        return True  # that the rule does not fit is found when it is to cut
    first, second = words
    inputs_last = "in" in re.findall(r"\w+", second) or "out" in re.findall(r"\w+", first)
    return inputs_last == linear


HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
"""What modules call the number of their query heads."""


def head_count(around: Sequence[nn.Module]) -> int | None:
    """How many query heads there are, as the nearest module around a parameter tells it; itself, or its config."""
    for module in around[:4]:
        for teller in (module, getattr(module, "config", None)):
            for name in HEAD_COUNTS:
                count = getattr(teller, name, None)
                if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                    return count
    return None


HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_head")
"""What modules call the width of a head."""


def head_width(around: Sequence[nn.Module]) -> int | None:
    """The width of a head, as the nearest attention module around a parameter tells it."""
    return width_and_teller(around)[0]


def width_and_teller(around: Sequence[nn.Module]) -> tuple[int | None, int]:
    """The width of a head, and which of the modules tells it; behind the last one if none does."""
    for i, module in enumerate(around[:4]):
        widths = {
            width
            for inner in module.modules()
            for name in HEAD_WIDTHS
            if isinstance(width := getattr(inner, name, None), int) and width > 0
        }
        if len(widths) == 1:
            return widths.pop(), i
        if widths:
            return None, len(around)
        # nanoGPT and its kin tell the width of the layer and the number of heads
        layer, heads = getattr(module, "n_embd", None), getattr(module, "n_head", None)
        if isinstance(layer, int) and isinstance(heads, int) and heads > 0 and layer % heads == 0:
            return layer // heads, i
    return None, len(around)


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
