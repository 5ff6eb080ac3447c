"""A network that can be computed and differentiated twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlens.assembly.circuit import Circuit, ForwardPass, Node, View, forward_pass
from curvlens.assembly.ledger import INPUT
from curvlens.assembly.linear import Lookup
from curvlens.assembly.loss import end
from curvlens.assembly.result import NetworkHessian
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.tensor_checks import alike
from curvlens.errors import CurvlensError, a_kind, nearest


class Network:
    """A circuit of primitives. Its input is tokens (…, T) if it has an embedding, otherwise states X (…, T, d)."""

    def __init__(self, parameters: Mapping[str, Tensor], width: int, embedding: tuple[View, ...] = ()) -> None:
        """``embedding``: the table of tokens, and optionally one of positions; ``width``: d."""
        alike(dict(parameters))
        flat = {name: tensor.detach() for name, tensor in parameters.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in flat.items()}
        vectors = frozenset(name for name, tensor in flat.items() if tensor.ndim == 1)
        self.circuit = Circuit({name: t[None] if name in vectors else t for name, t in flat.items()}, vectors=vectors)
        self.width, self.embedding = width, embedding

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.circuit.parameters.values())
        return f"Network of {len(self.circuit.nodes)} primitives with {count} parameters in {len(self.shapes)} tensors"

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in the order of the Hessian."""
        return tuple(self.shapes)

    @in_own_dtype
    def forward(self, X: Tensor) -> Tensor:
        """The outputs (…, T, c)."""
        found, batch = self._forward_pass(X)
        return found.output.reshape(*batch, *found.output.shape[1:])

    @in_own_dtype
    def hessian(
        self,
        X: Tensor,
        *,
        target: Tensor | None = None,
        labels: Tensor | None = None,
        grad: Tensor | None = None,
        curvature: Any = None,
        wrt: str | Iterable[str] | None = None,
    ) -> NetworkHessian:
        """The exact Hessian of a loss of the outputs.

        Args:
            X: Tokens (…, T) of integers, or states (…, T, d).
            target: For the square loss, the mean over all entries.
            labels: For cross-entropy, the mean over all labels other than -100; (…, T), a class for each token.
                Labels are not shifted: for a language model give ``tok[:, :-1], labels=tok[:, 1:]``.
            grad: For any other loss, ∂ℓ/∂outputs of each sample; the mean over the samples is taken.
            curvature: For that loss, the second derivative at every token, as in `curvlens.calculus.attention.hessian`.
            wrt: Names of parameters, and ``"X"`` for the (embedded) input; None for all parameters.
        """
        found, batch = self._forward_pass(X)
        loss = end(found.output, batch, target, labels, grad, curvature)
        return NetworkHessian(found, loss, self._wanted(wrt, found))

    def _wanted(self, wrt: str | Iterable[str] | None, found: ForwardPass) -> list[str]:
        """The names of the variables in the order of the parameters, X last."""
        if not isinstance(wrt, Iterable | None):
            raise CurvlensError(f"wrt is {a_kind(wrt)}; expected names of parameters, or None for all.")
        asked = list(self.shapes) if wrt is None else wrt.split() if isinstance(wrt, str) else list(wrt)
        known = [*self.shapes, INPUT]
        for name in asked:
            if name not in known:
                raise CurvlensError(f"wrt names {name!r}, which is not a parameter. {nearest(str(name), known)}")
        if not asked:
            raise CurvlensError("wrt is empty; name a parameter, or leave it out for all.")
        tables = [view.name for view in self.embedding if view.name in asked and found.nodes[0].output == 0]
        if INPUT in asked and tables:
            raise CurvlensError(
                f"wrt names {INPUT!r} and {tables[0]!r}, which {INPUT!r} is made of. Leave one of them out, or give "
                "embedded tokens instead of token ids."
            )
        return [name for name in known if name in asked]

    def _forward_pass(self, X: Any) -> tuple[ForwardPass, tuple[int, ...]]:
        """All states for an input, and the axes of its samples."""
        like = next(iter(self.circuit.parameters.values()))
        if not isinstance(X, Tensor):
            raise CurvlensError(f"X is {a_kind(X)}, expected a tensor.")
        if X.is_floating_point():
            if X.ndim < 2 or X.shape[-1] != self.width or not X.numel():
                raise CurvlensError(f"X has shape {tuple(X.shape)}, expected (…, tokens, {self.width}).")
            if (X.dtype, X.device) != (like.dtype, like.device):
                raise CurvlensError(f"X is {X.dtype} on {X.device}, the parameters are {like.dtype} on {like.device}.")
            return forward_pass(self.circuit, X.detach().reshape(-1, *X.shape[-2:])), tuple(X.shape[:-2])
        return self._embedded(X), tuple(X.shape[:-1])

    def _embedded(self, tokens: Tensor) -> ForwardPass:
        """All states for tokens."""
        if not self.embedding or tokens.dtype == torch.bool or tokens.is_complex():
            what = "numbers of tokens" if self.embedding else "states: this network has no embedding"
            raise CurvlensError(f"X is {tokens.dtype}, expected {what}.")
        tables = [self.circuit.parameters[view.name] for view in self.embedding]
        if not tokens.ndim or not tokens.numel():
            raise CurvlensError(f"Tokens of shape {tuple(tokens.shape)}, expected (…, T).")
        if int(tokens.min()) < 0 or int(tokens.max()) >= len(tables[0]):
            least, most = int(tokens.min()), int(tokens.max())
            raise CurvlensError(f"There are tokens from {least} to {most}; the embedding has {len(tables[0])} rows.")
        if len(tables) > 1 and tokens.shape[-1] > len(tables[1]):
            raise CurvlensError(f"{tokens.shape[-1]} tokens given, the table of positions has {len(tables[1])} rows.")
        rows = tokens.reshape(-1, tokens.shape[-1])
        front = Node("embedding", partial(Lookup, tokens=rows), tuple(self.embedding), 0)
        return forward_pass(self.circuit, rows, front)
