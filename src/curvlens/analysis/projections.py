"""Where the weights of attention are used: the tokens that queries, keys and values are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlens import batches
from curvlens.blocks import Blocks
from curvlens.blocks.block import Block

PLACE = re.compile(r"(?P<place>(?:.*\.)?(?:attn|cross))\.(?P<role>[qkvo])", re.DOTALL)
"""Names of the blocks of an attention."""
PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"}
"""Functions of torch that multiply tokens with a weight."""


class Site(NamedTuple):
    """A role of an attention, such as the queries of ``h.0.attn``."""

    place: str
    role: str


class Weights(NamedTuple):
    """The weights of one role by head: W (heads, d, d_head) and its bias (heads, d_head), if it is in the block."""

    W: Tensor
    bias: Tensor | None

    def of(self, X: Tensor) -> Tensor:
        """X W + b for tokens (B, L, d): (B, heads, L, d_head)."""
        found = X[:, None] @ self.W
        return found if self.bias is None else found + self.bias[:, None]


class Projections:
    """Follows the weights of all attentions through a forward pass. Make it inside the pass, of its parameters."""

    def __init__(self, blocks: Blocks, present: Mapping[str, Tensor]) -> None:
        self.blocks, self.present = blocks, present
        self.inputs: dict[Site, Tensor] = {}
        """What each weight was multiplied with last."""
        self.uses: dict[Site, int] = {}
        self._sites: dict[str, list[Site]] = {}
        for name, block in blocks.items():
            found = PLACE.fullmatch(name)
            if found is not None:
                weight = max(block.parts, key=lambda part: part.size)
                self._sites.setdefault(weight.parameter, []).append(Site(found["place"], found["role"]))
        self._held = {id(p): (p, name) for name, p in present.items() if name in self._sites}

    def used(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Site], Tensor] | None:
        """The roles whose weight a call multiplies, and the tokens that it is multiplied with."""
        if getattr(func, "__name__", "") not in PRODUCTS:
            return None
        given = [x for x in batches.tensors((args, kwargs)) if x.is_floating_point() and x.ndim > 1]
        names = [self._held[id(x)][1] for x in given if id(x) in self._held]
        tokens = [x for x in given if id(x) not in self._held]
        return (self._sites[names[0]], tokens[0]) if len(names) == 1 and len(tokens) == 1 else None

    def saw(self, sites: list[Site], tokens: Tensor) -> None:
        """Take note of a product."""
        for site in sites:
            self.inputs[site] = tokens.detach()
            self.uses[site] = self.uses.get(site, 0) + 1

    def follow(self, args: Any, result: Any) -> None:
        """Views of a weight stand for it."""
        if not args or not isinstance(args[0], Tensor) or id(args[0]) not in self._held:
            return
        weight, name = self._held[id(args[0])]
        for view in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(view, Tensor) and view is not weight and view._is_view() and view.numel() == weight.numel():
                self._held[id(view)] = (view, name)

    def weights(self, site: Site) -> Weights | None:
        """By head, in the order of X W; None if the heads are not known or are no plain matrices."""
        block = self.blocks.get(".".join(site))
        heads = [] if block is None else [h for h in block.heads if h.name.rpartition(".")[2].isdigit()]
        found = [self._matrix(head) for head in heads]
        matrices = [pair for pair in found if pair is not None]
        if not found or len(matrices) < len(found):
            return None
        biases = [b for _, b in matrices if b is not None]
        return Weights(torch.stack([W for W, _ in matrices]), torch.stack(biases) if biases else None)

    def _matrix(self, head: Block) -> tuple[Tensor, Tensor | None] | None:
        pieces = [part.take(self.present[part.parameter].detach().reshape(-1)).reshape(-1) for part in head.parts]
        shapes = [part.in_math() for part in head.parts]
        if len(shapes) > 2 or len(shapes[0]) < 2:
            return None
        d = shapes[0][0]
        values = torch.split(head.to_math(torch.cat(pieces)), [part.size for part in head.parts])
        W = values[0].view(d, -1)
        if len(values) == 1:
            return W, None
        return (W, values[1]) if len(values[1]) == W.shape[1] else None


def layouts(x: Tensor, samples: int, tokens: int) -> Iterator[Tensor]:
    """Ways to read a tensor as (samples, tokens, …), the likeliest first."""
    if x.shape[:2] == (samples, tokens):
        yield x.flatten(2) if x.ndim > 2 else x[..., None]
    elif x.ndim == 2 and x.shape[0] == samples * tokens:
        yield x.reshape(samples, tokens, -1)
    if x.ndim > 2 and x.shape[:2] == (tokens, samples):
        yield x.flatten(2).transpose(0, 1)
    elif x.ndim == 2 and x.shape[0] == samples * tokens:
        yield x.reshape(tokens, samples, -1).transpose(0, 1)


def near(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if x.shape != y.shape:
        return False
    eps = torch.finfo(x.dtype if x.dtype.itemsize > y.dtype.itemsize else y.dtype).eps
    x, y = x.double(), y.double()
    return bool((x - y).norm() <= max(1e4 * eps, 1e-9) * y.norm())
