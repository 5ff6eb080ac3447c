"""The exact Hessian of a network at a point: the whole, the Gauss–Newton part, and the part of every primitive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from curvlens.assembly.circuit import ForwardPass, View
from curvlens.assembly.elimination import Elimination
from curvlens.assembly.ledger import INPUT, Assembled, Ledger
from curvlens.assembly.loss import End
from curvlens.assembly.products import product
from curvlens.calculus.form import Form, Key, not_a_part
from curvlens.calculus.own_dtype import in_own_dtype
from curvlens.calculus.room import require_room
from curvlens.errors import CurvlensError, a_kind, listing, nearest

CHUNK = 1 << 25
"""Numbers in the tangents of all states that are held at a time: 256 MB in float64."""


WHOLE = ("total", "ggn", "functional")
"""The parts that do not belong to one primitive."""


class NetworkHessian:
    """H = GGN + Σ_m M_m, with the part M_m of the primitive m. Each is a form, assembled at its first use.

    ``H.total["q", "k"]`` is a block, ``H.ggn.dense()`` a matrix, ``H.parts["attn.softmax"]`` the form of a primitive.
    """

    def __init__(self, forward: ForwardPass, loss: End, wrt: Sequence[str]) -> None:
        self._forward, self._loss = forward, loss
        self._adjoints = forward.adjoints(loss.gradient)
        self._like = forward.output
        self._moved = [forward.states[0], *forward.circuit.parameters.values()]
        self._versions = [tensor._version for tensor in self._moved]
        x = forward.states[0]
        self.shapes: dict[str, tuple[int, int]] = {}
        for name in wrt:
            rows, columns = (
                (x[..., 0].numel(), x.shape[-1]) if name == INPUT else forward.circuit.parameters[name].shape
            )
            self.shapes[name] = (rows, columns)
        self.size = sum(rows * columns for rows, columns in self.shapes.values())
        self._made: dict[str, Form] = {}
        self._sources: dict[str, list[int]] = {}
        for position, (node, primitive) in enumerate(zip(forward.nodes, forward.at, strict=True)):
            if primitive.curved:
                self._sources.setdefault(node.name, []).append(position)

    def __repr__(self) -> str:
        return (
            f"Hessian of a network ({self.size} × {self.size}; {len(self.shapes)} blocks each way, "
            f"{len(self._sources)} parts and the Gauss–Newton part)"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy. It has tensors of its own, whose changes are counted from now on."""
        self.__dict__.update(state)
        self._versions = [tensor._version for tensor in self._moved]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in the order of `dense`."""
        return tuple(self.shapes)

    @cached_property
    def total(self) -> Form:
        """H."""
        return self._assemble("total", "Hessian of a network")

    @cached_property
    def ggn(self) -> Form:
        """The Gauss–Newton matrix Σ Jᵀ Λ J of the outputs."""
        return self._assemble("ggn", "Gauss–Newton matrix of a network")

    @cached_property
    def functional(self) -> Form:
        """H − GGN, the sum of all parts."""
        return self._assemble("functional", "Functional part of a network's Hessian")

    @property
    def parts(self) -> Mapping[str, Form]:
        """M_m by the name of the primitive; each is assembled at its first use and kept."""
        return ModuleForms(self)

    def _part(self, name: str) -> Form:
        if not isinstance(name, str) or name not in self._sources:
            raise CurvlensError(f"There is no part {name!r}. {nearest(str(name), self._sources)}")
        if name not in self._made:
            self._made[name] = self._assemble(name, f"Part of {name} in a network's Hessian")
        return self._made[name]

    @property
    def part_names(self) -> tuple[str, ...]:
        """The primitives with a part, in the order of computation."""
        return tuple(self._sources)

    @in_own_dtype
    def matvec(self, v: Tensor, part: str = "total") -> Tensor:
        """H v without building H, or M v for a part; v is (size,), or (size, k) for the columns of a matrix."""
        if not isinstance(v, Tensor) or v.ndim not in (1, 2) or len(v) != self.size or v.is_complex():
            given = f"shape {tuple(v.shape)}, {v.dtype}" if isinstance(v, Tensor) else a_kind(v)
            raise CurvlensError(
                f"The Hessian takes a vector of {self.size} numbers (blocks {listing(self.shapes)}) or a "
                f"({self.size}, k) matrix, got {given}."
            )
        with_loss, sources = self._selected(part)
        columns = v.detach().to(self._like).reshape(self.size, -1)
        direction: dict[str, Tensor] = {}
        pieces = torch.split(columns, [rows * width for rows, width in self.shapes.values()])
        for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            axes = self._forward.states[0].shape if name == INPUT else shape
            direction[name] = piece.reshape(*axes, -1)
        curvature = self._loss.apply if with_loss else None
        result = product(self._forward, self._adjoints, direction, curvature, sources)
        return torch.cat([result[name].reshape(-1, columns.shape[1]) for name in self.shapes]).reshape(v.shape)

    def __getitem__(self, key: object) -> NoReturn:
        not_a_part(key, ("total", "ggn", "functional"))

    # Unlike products, these build the matrix of the part

    def norm(self, block: Key | None = None, part: str = "total") -> float:
        """The Frobenius norm of a block (a name, or a pair of names) or of the whole; of H, or of ``part``."""
        return self._form(part).norm(block)

    def trace(self, block: str | None = None, part: str = "total") -> float:
        """The trace of a diagonal block or of the whole; of H, or of ``part``."""
        return self._form(part).trace(block)

    def diagonal(self, block: str | None = None, part: str = "total") -> Tensor:
        """The diagonal of a diagonal block or of the whole; of H, or of ``part``."""
        return self._form(part).diagonal(block)

    def _form(self, part: str) -> Form:
        """``"total"``, ``"ggn"``, ``"functional"``, or the part of a primitive."""
        self._known(part)
        form: Form = getattr(self, part) if part in WHOLE else self.parts[part]
        return form

    def _known(self, part: str) -> None:
        if part in WHOLE or part in self._sources:
            return
        hint = nearest(str(part), [*WHOLE, *self._sources])
        if part == "outer":
            hint = "The outer part of a network is the Gauss–Newton matrix: 'ggn'."
        elif part in self.shapes:
            hint = "It is a parameter: a block is one argument, a name or a pair of names in brackets."
        raise CurvlensError(f"There is no part {part!r}. {hint}")

    def _selected(self, part: str) -> tuple[bool, list[int]]:
        """Whether the curvature of the loss is included, and which primitives' curvature is."""
        if self._versions != [tensor._version for tensor in self._moved]:
            raise CurvlensError("A parameter or the input was changed in place since; call hessian again.")
        every = [position for positions in self._sources.values() for position in positions]
        self._known(part)
        if part in WHOLE:
            return part != "functional", [] if part == "ggn" else every
        return False, self._sources[part]

    @in_own_dtype
    @torch.no_grad()
    def _assemble(self, part: str, title: str) -> Form:
        """The matrix of a part: column by column if it is smaller than the largest state, else by elimination."""
        widest = max(self._forward.size(state) for state in self._forward.states)
        instead = "Without building it: `matvec`; or fewer parameters: `wrt=`."
        if self.size <= widest:
            require_room(2 * self.size**2, self._like, title, instead)
            return Assembled(self.shapes, self._by_columns(part), title)
        with_loss, sources = self._selected(part)
        refs = [ref for node in self._forward.nodes for ref in node.inputs]
        uses = [ref for ref in refs if isinstance(ref, View) and ref.name in self.shapes]
        width = sum(use.of(self._forward.circuit.parameters[use.name]).numel() for use in uses)
        width += math.prod(self.shapes[INPUT]) if INPUT in self.shapes else 0
        work = 2 * len(self._like) * widest * (width + 2 * widest) + width * self.size
        require_room(width**2 + work, self._like, f"{title}, with room to work in,", instead)
        ledger = Ledger(self.shapes, width, self._like)
        elimination = Elimination(self._forward, self._adjoints, ledger)
        elimination.run(self._loss.dense() if with_loss else None, sources)
        return ledger.form(title)

    def _by_columns(self, part: str) -> Tensor:
        """The matrix of a part, by products with unit vectors, as many at a time as memory allows."""
        numbers = sum(state.numel() for state in self._forward.states.values())
        units = torch.eye(self.size, dtype=self._like.dtype, device=self._like.device)
        step = max(1, CHUNK // numbers)
        matrix = torch.cat([self.matvec(chunk, part) for chunk in torch.split(units, step, 1)], 1)
        return (matrix + matrix.T).div_(2)


class ModuleForms(Mapping[str, Form]):
    """The functional parts by name; each is assembled at its first use."""

    def __init__(self, hessian: NetworkHessian) -> None:
        self._hessian = hessian

    def __getitem__(self, name: str) -> Form:
        return self._hessian._part(name)

    def __repr__(self) -> str:
        return f"ModuleForms({', '.join(self)})"

    def __contains__(self, name: object) -> bool:
        return name in self._hessian.part_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._hessian.part_names)

    def __len__(self) -> int:
        return len(self._hessian.part_names)
