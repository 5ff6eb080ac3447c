"""Families of architectures: rules that give the parameters of a model their names.

A rule matches the end of a parameter's name, so a model keeps its block names inside any wrapper. A model gets the
family that names most of its numbers; among equals, the one with the fewest rules.
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
    """Names a parameter: the end of its name, its block, and its axes.

    In ``parameter``, ``{i}`` is the number of the layer, ``{e}`` the number of an expert and ``{any}`` any name without
    a dot. In ``block``, ``*`` is the role from the axes, as in
    ``Rule("h.{i}.attn.c_attn.weight", "h.{i}.attn.*", "in (q/k/v head dim)")``.

    ``axes`` has a word for each axis of the tensor, in storage order. Words in brackets share one axis, which is their
    product.

    | tensor | axes |
    |---|---|
    | weight of `nn.Linear` | ``out in`` |
    | weight of Hugging Face's ``Conv1D`` | ``in out`` |
    | weight of `nn.Embedding` | ``in out`` |
    | bias, weight of a norm | ``out`` |
    | queries, keys or values, `nn.Linear` | ``(head dim) in``, and ``(head dim)`` of the bias |
    | the same in one tensor, one after the other | ``(q/k/v head dim) in`` |
    | the same in one tensor, head by head | ``(head q/k/v dim) in`` |
    | output projection of attention, `nn.Linear` | ``out (head dim)`` |
    | gate and up in one tensor | ``(gate/up out) in`` |

    The words: ``in`` and ``out`` are the inputs and outputs of the weight; ``head`` or ``expert`` divides the block
    into heads, and ``dim`` is the width of a head; ``q/k/v`` are roles of equal size; ``q:head+k:head+v:head`` are
    roles whose sizes `Family.sizes` gives. Any other word is an axis without a meaning.
    """

    parameter: str
    block: str
    axes: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The rule as a regular expression, with any prefix."""
        text = re.escape(self.parameter).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")
        return re.compile(rf"(?:(?P<prefix>.+)\.)?{text}".replace(r"\{any\}", r"[^.]+"), re.DOTALL)


@dataclass(frozen=True)
class Found:
    """A rule that matches a name."""

    rule: Rule
    block: str
    """The name of the block, with ``*`` in place of the role."""
    prefix: str
    """The part of the parameter's name before the match."""
    expert: int | None

    @property
    def roles(self) -> str:
        """All roles of a fused tensor, as in ``qkv``."""
        word = next((word for word in re.split(r"[\s()]+", self.rule.axes) if "/" in word or "+" in word), "")
        return "".join(role.partition(":")[0] for role in re.split(r"[/+]", word))


@dataclass(frozen=True)
class Family:
    """Naming rules for one kind of model. The first rule that matches a parameter is used.

    ``sizes`` maps a module (the owner of a parameter, or a module around it) to the sizes of roles of unequal size.
    """

    name: str
    rules: Sequence[Rule]
    sizes: Sizes | None = None
    checked: Sequence[str] = ()
    """Hugging Face model types whose layout was checked. Other types that match get a note from the doctor."""
    not_for: Sequence[str] = ()
    """Model types that have the same parameter names with a different layout."""

    def suits(self, model: nn.Module) -> bool:
        """Whether the family may be used for a model."""
        return model_type(model) not in self.not_for

    @cached_property
    def _ends(self) -> list[tuple[str, Rule]]:
        """Each rule with the last one or two words of its parameter, for a fast first selection."""
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
        """Cut a parameter by a rule; None if it does not fit. ``around``: the modules around it, the nearest first."""
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
    """``config.model_type`` of a Hugging Face model; None for other models."""
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind:
            return kind
    return None


def stored_as(axes: str, shape: tuple[int, ...], around: Sequence[nn.Module]) -> bool:
    """Whether the axes of a rule have the storage order of the module: `nn.Linear` out × in, Conv1D in × out."""
    owner = around[0]
    linear = isinstance(owner, nn.Linear)
    if len(shape) != 2 or not (linear or type(owner).__name__ == "Conv1D"):
        return True
    words = re.findall(r"\([^)]*\)|\S+", axes)
    if len(words) != len(shape):
        return True  # `cuts` finds that the rule does not fit
    first, second = words
    inputs_last = "in" in re.findall(r"\w+", second) or "out" in re.findall(r"\w+", first)
    return inputs_last == linear


HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
"""Attribute names for the number of query heads."""


def head_count(around: Sequence[nn.Module]) -> int | None:
    """The number of query heads from the nearest module around a parameter, or from its ``config``."""
    for module in around[:4]:
        for teller in (module, getattr(module, "config", None)):
            for name in HEAD_COUNTS:
                count = getattr(teller, name, None)
                if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                    return count
    return None


HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_head")
"""Attribute names for the width of a head."""


def head_width(around: Sequence[nn.Module]) -> int | None:
    """The width of a head from the nearest attention module around a parameter."""
    return width_and_teller(around)[0]


def width_and_teller(around: Sequence[nn.Module]) -> tuple[int | None, int]:
    """The width of a head, and the index of the module that has it (``len(around)`` if none has it)."""
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
        # nanoGPT and similar models have the width of the layer and the number of heads
        layer, heads = getattr(module, "n_embd", None), getattr(module, "n_head", None)
        if isinstance(layer, int) and isinstance(heads, int) and heads > 0 and layer % heads == 0:
            return layer // heads, i
    return None, len(around)


# Rules for common modules


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
    """Join lists of rules."""
    return tuple(rule for group in rules for rule in group)
