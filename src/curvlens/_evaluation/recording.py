"""The second derivative of a model, module by module: H = G + Σ_m M_m (`docs/explanation/math.md`, "Attribution").

A forward pass is cut into segments z = f(leaves) (`curvlens._evaluation.recorder`). With the adjoint λ = ∂ℓ/∂z of a
segment and the tangent u of its leaves along a direction v of the parameters, its functional part is

    vᵀ M v' = ⟨λ, D²f[u, u']⟩.

The adjoint pass computes p(λ, leaves) = Jᵀλ for each segment by itself and keeps its graph. One reverse pass through
that graph gives all that a direction needs: ∂⟨p, u⟩/∂λ = J u is the tangent of z, and ∂⟨p, u⟩/∂leaves = ⟨λ, D²f[u, ·]⟩
is to be multiplied with u'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlens._evaluation.checks import CANNOT_TWICE, lacks_derivative
from curvlens._evaluation.exchange import apart
from curvlens._evaluation.graph import LossBoundary, Parts, once_differentiable
from curvlens._evaluation.pieces import Piece
from curvlens._evaluation.recorder import Recorder, Segment
from curvlens.errors import CurvlensError

if TYPE_CHECKING:
    from curvlens._evaluation.evaluation import Evaluation

CHUNK = 1 << 16
"""How many entries of a vector are multiplied at a time."""
Tangents = dict[int, Tensor]
"""Tangents of leaves, by identity; a missing leaf has tangent zero."""
Tick = Callable[[int, int], None]
"""(segments done, of how many)."""


@dataclass(eq=False)
class Pulled:
    """A segment with its adjoint pass: p(λ, leaves) = Jᵀ λ as a graph."""

    segment: Segment
    copies: list[Tensor]
    """Leaves of the outputs on which the loss depends."""
    adjoint: list[Tensor]
    """λ, as leaves of the graph of p."""
    leaves: list[Tensor]
    inputs: list[Tensor]
    """The tensors in the graphs of outputs and gradient that the leaves replaced."""
    gradient: list[Tensor]
    """p, one tensor for each leaf."""
    blocked: str = ""
    """Why the segment cannot be differentiated twice, or "". If it cannot, its part and all later ones are unknown."""

    def along(self, tangents: Tangents, *, bend: bool) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """J u, by output, and with ``bend`` ⟨λ, D²f[u, ·]⟩, by leaf. None means zero."""
        moving = [
            (p, tangents[id(leaf)]) for p, leaf in zip(self.gradient, self.leaves, strict=True) if id(leaf) in tangents
        ]
        count = len(self.adjoint)
        if not moving:
            return [None] * count, [None] * len(self.leaves)
        if not self.blocked:
            try:
                found = torch.autograd.grad(
                    [p for p, _ in moving],
                    [*self.adjoint, *(self.inputs if bend else ())],
                    [u.to(p.dtype) for p, u in moving],
                    retain_graph=True,
                    allow_unused=True,
                )
            except (RuntimeError, NotImplementedError) as error:
                if not lacks_derivative(error):
                    raise
                self.blocked = str(error).splitlines()[0]
        if self.blocked:  # NaN marks an unknown value, and propagates to every term that depends on it
            return [torch.full_like(w, math.nan) for w in self.adjoint], [
                torch.full_like(leaf, math.nan) for leaf in self.leaves
            ]
        return list(found[:count]), list(found[count:])


class Recording:
    """One piece of the data, as segments with their adjoints."""

    def __init__(self, evaluation: Evaluation, piece: Piece) -> None:
        self.evaluation = evaluation
        self.parameters = evaluation.leaves(evaluation.layout.names)
        self._names = {id(p): name for name, p in self.parameters.items()}
        with torch.enable_grad():
            self.inside(lambda: self._build(piece))

    def inside(self, action: Callable[[], Any]) -> Any:
        """Run an action with the parameters of this recording instead of the model's."""
        return self.evaluation.at(self.parameters, action, twice=True)

    def _build(self, piece: Piece) -> None:
        evaluation = self.evaluation
        recorder, outputs = self._recorded(piece)
        self.boundary = LossBoundary(evaluation, piece, outputs)
        self.ends = recorder.finish(self.boundary.flat(outputs))
        self.kinds, self.results, self.hidden = recorder.kinds, recorder.results, recorder.hidden
        evaluation.require_dependence(any(x.requires_grad for x in self.ends))
        self.pulled = self._pull_back(recorder.segments)
        last: dict[int, int] = {}
        for i, pulled in enumerate(self.pulled):
            last.update((id(leaf), i) for leaf in pulled.leaves)
        kept = {id(x) for x in (*self.ends, *self.parameters.values())}
        self._done = [[key for key, j in last.items() if j == i and key not in kept] for i in range(len(self.pulled))]

    def _recorded(self, piece: Piece) -> tuple[Recorder, Any]:
        """A cut forward pass. Tensors that modules write into are handed out as copies, or are not cut."""
        writable, whole = False, set[str]()
        while True:
            recorder = Recorder(self.evaluation.model, self.parameters, writable=writable, whole=whole)
            try:
                outputs = apart(self.evaluation.model, partial(self._watched, recorder, piece))
            except RuntimeError as error:
                if "appears to not have been used in the graph" in str(error):
                    raise CurvlensError(
                        "The model differentiates inside its forward pass (torch.autograd.grad), across the boundaries "
                        "of its modules. Its curvature cannot be split by module. Use curvlens.hessian or "
                        "curvlens.ggn, which take it as a whole."
                    ) from error
                if writable or "in-place" not in str(error):
                    raise
                writable = True
                continue
            if recorder.written and not writable:
                writable = True
            elif recorder.writers <= whole:
                return recorder, outputs
            whole |= recorder.writers

    def _watched(self, recorder: Recorder, piece: Piece) -> Any:
        with recorder.watch():
            return self.evaluation.loss_function.outputs(self.evaluation.model, piece.batch)

    def _pull_back(self, segments: Sequence[Segment]) -> list[Pulled]:
        """The adjoint pass: the segments that the loss depends on, in the order of the forward pass."""
        adjoints: Tangents = {}
        for end, w in zip(self.ends, self.boundary.gradient, strict=True):
            if end.requires_grad:
                adjoints[id(end)] = adjoints[id(end)] + w if id(end) in adjoints else w
        found: list[Pulled] = []
        for segment in reversed(segments):
            live = [(z, c) for z, c in zip(segment.outputs, segment.copies, strict=True) if id(c) in adjoints]
            if not live or not segment.leaves:  # the loss does not depend on it, or it depends on no parameter
                continue
            weights = [adjoints.pop(id(c)).detach().requires_grad_() for _, c in live]
            gradient = torch.autograd.grad(
                [z for z, _ in live], segment.inputs, weights, create_graph=True, allow_unused=True
            )
            found_by = zip(segment.leaves, segment.inputs, gradient, strict=True)
            triples = [(leaf, x, p) for leaf, x, p in found_by if p is not None]
            once = once_differentiable((p for *_, p in triples), until=(x.grad_fn for x in segment.inputs))
            for leaf, _, p in triples:
                key = id(leaf)
                if key in self._names:  # not needed for parameters; for a tied embedding it would be a copy
                    continue
                adjoints[key] = adjoints[key] + p.detach() if key in adjoints else p.detach()
            found.append(
                Pulled(
                    segment,
                    [c for _, c in live],
                    weights,
                    [leaf for leaf, _, _ in triples],
                    [x for _, x, _ in triples],
                    [p for _, _, p in triples],
                    "a function in it is marked once_differentiable" if once else "",
                )
            )
        return found[::-1]

    @property
    def blocked(self) -> dict[str, str]:
        """Paths that cannot be differentiated twice, with the reason. Only paths tried so far are known."""
        return {pulled.segment.path: pulled.blocked for pulled in self.pulled if pulled.blocked}

    @property
    def count(self) -> float:
        """The valid tokens of this piece."""
        return self.boundary.count

    def start(self, v: Parts) -> Tangents:
        """The tangents of the parameters along a direction v."""
        return {id(self.parameters[name]): part for name, part in v.items()}

    def ends_along(self, tangents: Tangents) -> list[Tensor]:
        """J v at the outputs."""
        return [tangents[id(x)] if id(x) in tangents else torch.zeros_like(x) for x in self.ends]

    def tensors(self) -> list[Tensor]:
        """The tensors that the recording holds besides saved tensors."""
        pulled = [x for p in self.pulled for x in (*p.gradient, *p.adjoint, *p.segment.outputs)]
        return [*pulled, *self.ends, *self.boundary.gradient, *self.boundary.flat(self.boundary.outputs)]

    @property
    def forms_bytes(self) -> int:
        """The most bytes that `forms` needs beside the recording, for one direction with ``bend`` and one without."""
        live, most, sizes = 0, 0, dict[int, int]()
        for pulled, done in zip(self.pulled, self._done, strict=True):
            sizes.update((id(c), c.nbytes) for c in pulled.copies)
            live += 2 * sum(c.nbytes for c in pulled.copies)
            most = max(most, live + sum(x.nbytes for x in pulled.leaves))
            live -= 2 * sum(sizes.get(key, 0) for key in done)
        return most

    def forms(
        self, directions: Sequence[Parts], bent: int, tick: Tick = lambda done, total: None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """vᵢᵀ M vⱼ for the first ``bent`` directions i and all j: by path, summed over its segments; and that of G.

        ``tick(done, total)`` is called with numbers of segments.
        """
        return self.inside(lambda: self._forms(directions, bent, tick))  # type: ignore[no-any-return]

    def _forms(self, directions: Sequence[Parts], bent: int, tick: Tick) -> tuple[dict[str, Tensor], Tensor]:
        tangents = [self.start(v) for v in directions]
        table: dict[str, Tensor] = {}
        for number, (pulled, done) in enumerate(zip(self.pulled, self._done, strict=True)):
            tick(number, len(self.pulled))
            bends: list[list[Tensor | None]] = []
            for i, t in enumerate(tangents):
                moved, bend = pulled.along(t, bend=i < bent)
                t.update((id(c), u) for c, u in zip(pulled.copies, moved, strict=True) if u is not None)
                if i < bent:
                    bends.append(bend)
            path = pulled.segment.path
            table.setdefault(path, torch.zeros(bent, len(directions), dtype=torch.float64, device="cpu"))
            for leaf, *bend in zip(pulled.leaves, *bends, strict=True):
                table[path] += products(bend, [t.get(id(leaf)) for t in tangents])
            bend, moved = [], []  # free k vectors of a module's parameters before the next segment
            for t in tangents:
                for key in done:
                    t.pop(key, None)
        at_ends = [self.ends_along(t) for t in tangents]
        outer = torch.zeros(bent, len(directions), dtype=torch.float64, device="cpu")
        curved = [self.boundary.curvature(t) for t in at_ends[:bent]]
        for k in range(len(self.ends)):
            outer += products([c[k] for c in curved], [t[k] for t in at_ends])
        return table, outer

    def product(self, v: Parts, chosen: Callable[[str], bool]) -> Parts:
        """Σ_m M_m v over the segments whose path is chosen."""
        last = max((i for i, pulled in enumerate(self.pulled) if chosen(pulled.segment.path)), default=-1)
        second = self.inside(lambda: self._second(self.start(v), self.pulled[: last + 1], chosen, outer=False))
        return {name: second[key] for key, name in self._names.items() if key in second}

    def at_result(self, path: str, call: int, u: Tensor, *, outer: bool, functional: bool) -> Tensor:
        """The Hessian with respect to the result of a module's call, applied to u: the part of G, of F, or both."""
        leaf = self.results[path][call]
        assert leaf is not None
        made = [i for i, pulled in enumerate(self.pulled) if any(c is leaf for c in pulled.copies)]
        after = self.pulled[made[0] + 1 :] if made else self.pulled if id(leaf) in self._names else []
        second = self.inside(lambda: self._second({id(leaf): u}, after, lambda _: functional, outer=outer))
        return second.get(id(leaf), torch.zeros_like(u))  # type: ignore[no-any-return]

    def _second(
        self, tangents: Tangents, through: Sequence[Pulled], chosen: Callable[[str], bool], *, outer: bool
    ) -> Tangents:
        """Second derivatives along tangents, of the chosen segments and, if ``outer``, of the loss, by leaf."""
        bends = list[list[Tensor | None]]()
        for pulled in through:
            wanted = chosen(pulled.segment.path)
            moved, bend = pulled.along(tangents, bend=wanted)
            if pulled.blocked:
                where = pulled.segment.path or "the model itself"
                raise CurvlensError(CANNOT_TWICE.format(f"{where!r}: {pulled.blocked}"))
            bends.append(bend if wanted else [])
            tangents.update((id(c), u) for c, u in zip(pulled.copies, moved, strict=True) if u is not None)
        second: Tangents = {}
        if outer:
            for end, curved in zip(self.ends, self.boundary.curvature(self.ends_along(tangents)), strict=True):
                second[id(end)] = second[id(end)] + curved if id(end) in second else curved
        for pulled, bend in zip(reversed(through), reversed(bends), strict=True):
            live = [
                (z, second.pop(id(c)))
                for z, c in zip(pulled.segment.outputs, pulled.segment.copies, strict=True)
                if id(c) in second
            ]
            found: Sequence[Tensor | None] = [None] * len(pulled.leaves)
            if live:
                found = torch.autograd.grad(
                    [z for z, _ in live], pulled.inputs, [w for _, w in live], retain_graph=True, allow_unused=True
                )
            for terms in (found, bend):
                for leaf, term in zip(pulled.leaves, terms, strict=bool(terms)):
                    if term is not None:
                        key = id(leaf)
                        second[key] = second[key] + term if key in second else term
        return second


def products(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> Tensor:
    """All inner products ⟨xᵢ, yⱼ⟩, summed in float64, on the CPU; None means zero."""
    result = torch.zeros(len(left), len(right), dtype=torch.float64, device="cpu")
    rows = [i for i, x in enumerate(left) if x is not None]
    columns = [j for j, y in enumerate(right) if y is not None]
    xs = [x.detach().reshape(-1) for x in left if x is not None]
    ys = [y.detach().reshape(-1) for y in right if y is not None]
    if not xs or not ys:
        return result
    total = torch.zeros(len(xs), len(ys), dtype=torch.float64, device=xs[0].device)
    for start in range(0, len(xs[0]), CHUNK):
        x, y = (torch.stack([v[start : start + CHUNK] for v in vs]).double() for vs in (xs, ys))
        total += x @ y.T
    result[torch.tensor(rows, device="cpu")[:, None], torch.tensor(columns, device="cpu")] = total.cpu()
    return result
