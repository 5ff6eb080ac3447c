"""The functional part M_m of one module, as an operator: H = G + Σ_m M_m."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, nearest
from curvlens.operators.base import Operator, Progress
from curvlens.operators.curvature import require_problem
from curvlens.operators.engine import engine_of
from curvlens.operators.hessian import hessian
from curvlens.operators.meter import Meter
from curvlens.operators.segments import Trace, require_outputs
from curvlens.pieces import Piece
from curvlens.point import Point
from curvlens.problem import Problem
from curvlens.results.profile import sum_tolerance
from curvlens.surroundings import as_found
from curvlens.totals import Total


class Traces:
    """The data of a problem as traces: kept while they fit its memory budget, built anew for every pass if not."""

    def __init__(self, problem: Problem, asked: str = "profile") -> None:
        require_problem(problem, asked)
        require_outputs(problem, asked)
        self.problem = problem
        self.kinds: dict[str, str] = {}
        """What there is a path of: modules by their class, and steps of attention; known after the first pass."""
        self.hidden: dict[str, str] = {}
        """Modules that ran where nothing can be cut, and the modules that called them; known after the first pass."""
        self._kept: list[Trace] | None = None
        self._checked = False
        self._blocked: dict[str, str] = {}
        self._point: Point | None = None
        self.kept_bytes = self.largest_bytes = self.forms_bytes = self.output_bytes = 0
        """What the kept traces hold, the largest, its forms (`Trace.forms_bytes`) and its outputs; after a pass."""
        self.seconds = 0.0
        """How long it took to build them."""

    def __iter__(self) -> Iterator[Trace]:
        problem = self.problem
        with problem.isolated():
            if self._point is None or not problem.is_at(self._point):
                self._kept, self._point = None, engine_of(problem).point()
            if self._kept is not None:
                problem.data.check_unchanged()
                for trace in self._kept:
                    yield trace
                    self._blocked.update(trace.blocked)
                return
            engine, kept, pieces = engine_of(problem), list[Trace](), self._pieces()
            room = before = problem.memory - engine.kept_bytes
            self.seconds = 0.0
            for piece in pieces:
                started = time.perf_counter()
                meter = Meter(problem, None)
                trace = meter.watch(partial(Trace, problem, piece))
                for x in trace.tensors():
                    meter.count(x)
                self.seconds += time.perf_counter() - started
                self.largest_bytes = max(self.largest_bytes, meter.bytes)
                self.forms_bytes = max(self.forms_bytes, trace.forms_bytes)
                self.output_bytes = max(self.output_bytes, sum(x.nbytes for x in trace.ends))
                self.kinds.update(trace.kinds)
                self.hidden.update(trace.hidden)
                room -= meter.bytes
                if room >= 0:
                    kept.append(trace)
                else:
                    kept.clear()
                yield trace
                self._blocked.update(trace.blocked)
                del trace  # before the next one is built
            self._kept = kept if room >= 0 else None
            self.kept_bytes = before - room if room >= 0 else 0

    def _pieces(self) -> Iterator[Piece]:
        engine = engine_of(self.problem)
        try:
            engine.prepare()
        except CurvlensError:  # a model that has no Hessian may still have parts that are known
            return self.problem.pieces()
        return engine.pieces()

    @property
    def blocked(self) -> dict[str, str]:
        """Paths that turned out not to be twice differentiable, and why."""
        return self._blocked

    def known(self) -> dict[str, str]:
        """What every path is."""
        if not self.kinds:
            for _ in self:
                pass
        return self.kinds

    def require(self, path: Any) -> None:
        """There has to be a module, or a step of attention, of this path."""
        if not isinstance(path, str):
            raise CurvlensError(f"The path of a module is a text, as in 'h.0.attn', got {path!r}.")
        known = self.known()
        if path not in known:
            raise CurvlensError(f"The model has no module {path!r}. {nearest(path, known)}")
        if path in self.hidden:
            raise CurvlensError(
                f"{path!r} runs inside a transformation of torch.func, such as vmap, where nothing can be told apart: "
                f"its part is in that of {self.hidden[path] or 'the model'!r}."
            )

    def check(self) -> None:
        """Cut at its modules the model has to be the same function: G + Σ_m M_m is compared with H, along one z.

        Once for these traces. `curvlens.profile` compares them along every probe, and has a result all the same.
        """
        if self._checked:
            return
        H, layout = hessian(self.problem), self.problem.layout
        signs = torch.randint(2, (layout.size,), generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
        z = signs.to(H.device, H.dtype)
        try:
            truth = float(z.double() @ (H @ z).double())
        except CurvlensError:  # some module cannot be differentiated twice, and has an error of its own
            return
        terms, count = list[float](), 0.0
        for trace in self:
            own, outer = trace.forms([layout.unflatten(z)], 1)
            terms += [float(outer), *map(float, own.values())]
            count += trace.count
        apart = abs(sum(terms) / count - truth) * count / max(sum(map(abs, terms)), 1e-300)
        if apart > sum_tolerance(H.dtype):
            raise CurvlensError(
                f"Cut at its modules, the model is another function: G and the functional parts of all modules are off "
                f"from H by {apart:.1g} of the sum of their sizes. Does a module write into a tensor that another "
                "shares, or does the forward pass differentiate? curvlens.hessian and curvlens.ggn take it as it is."
            )
        self._checked = True


class ModulePart(Operator):
    """M_m, or a block of it: T_mᵀ (λ_m · D²f_m) T_m."""

    def __init__(self, traces: Traces, path: str, *, own: bool, rows: Layout, columns: Layout) -> None:
        problem = traces.problem
        super().__init__(
            rows,
            columns,
            dtype=problem.dtype,
            device=problem.device,
            symmetric=rows == columns,
            name=f"Functional of {path or 'the model'}" + (" alone" if own else ""),
        )
        self.problem, self.path, self.own = problem, path, own
        self._traces = traces

    def _chosen(self, path: str) -> bool:
        return path == self.path or (not self.own and is_inside(path, self.path))

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        rows, columns = self.rows.whole, self.columns.whole
        whole = columns.embed(self.columns, vectors)
        totals = [Total(rows, self.problem.dtype, self.problem.device) for _ in range(vectors.shape[1])]
        count, done = 0.0, 0
        for trace in self._traces:
            for j, total in enumerate(totals):
                parts = trace.product(columns.unflatten(whole[:, j].contiguous()), self._chosen)
                total.add({name: part for name, part in parts.items() if name in rows.shapes})
                done += 1
                if progress is not None:
                    progress(done, None)
            count += trace.count
            del trace
        count = self.problem.checked_count(count)
        return rows.extract(self.rows, torch.stack([total.over(count) for total in totals], 1))

    def _block(self, rows: Layout, columns: Layout) -> ModulePart:
        return ModulePart(self._traces, self.path, own=self.own, rows=rows, columns=columns)

    def _transposed(self) -> ModulePart:
        return self._block(self.columns, self.rows)

    def provenance(self) -> dict[str, Any]:
        """What it is, and of which problem."""
        return {**super().provenance(), "n_tokens": self.problem.n_tokens, "loss": repr(self.problem.loss_function)}


def is_inside(path: str, other: str) -> bool:
    """Whether a path is that of a module inside another; everything is inside the model, "".

    >>> is_inside("h.1.attn", "h.1"), is_inside("h.10", "h.1"), is_inside("h.1", "")
    (True, False, True)
    """
    return path != other and (not other or path.startswith(f"{other}."))


@as_found
def module_part(problem: Problem, path: str, *, own: bool = False, traces: Traces | None = None) -> ModulePart:
    """The functional part of a module and all that is in it, or with ``own`` of its own code alone.

    ``path`` is that of `nn.Module.named_modules`, or of a step of scaled dot-product attention: ``h.0.attn.softmax``.

    ``dense(progress=…)`` takes a pass a column, half a minute at 2,000 parameters. For models that `assembly.read`
    knows, ``assembly.read(model).hessian(…).parts[path]`` is the same in closed form, and faster.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> module_part(problem, "1").shape
    (9, 9)
    """
    traces = Traces(problem, "module_part") if traces is None else traces
    traces.require(path)
    traces.check()
    return ModulePart(traces, path, own=own, rows=problem.layout, columns=problem.layout)
