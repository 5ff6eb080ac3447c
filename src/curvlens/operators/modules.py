"""The functional part M_m of one module, as an operator: H = G + Σ_m M_m."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlens._evaluation.graph import Parts
from curvlens._evaluation.recording import Recording
from curvlens._evaluation.recordings import Recordings
from curvlens._evaluation.sums import Table, summed
from curvlens._evaluation.totals import Total
from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, nearest
from curvlens.operators.base import Operator, Progress
from curvlens.operators.curvature import require_outputs, require_problem
from curvlens.operators.hessian import hessian
from curvlens.problem import Problem
from curvlens.results.profile import sum_tolerance
from curvlens.surroundings import as_found


def recordings_of(problem: Problem, asked: str = "profile") -> Recordings:
    """The recordings of a problem's data, shared by all users. Raise an error if the loss hides its outputs."""
    require_problem(problem, asked)
    require_outputs(problem, asked)
    return problem._evaluation.cache.recordings()


def require_path(recordings: Recordings, path: Any) -> None:
    """Raise an error if there is no module or step of attention at this path."""
    if not isinstance(path, str):
        raise CurvlensError(f"The path of a module is a text, such as 'h.0.attn'; got {path!r}.")
    known = recordings.known()
    if path not in known:
        raise CurvlensError(f"The model has no module {path!r}. {nearest(path, known)}")
    if path in recordings.hidden:
        raise CurvlensError(
            f"{path!r} runs inside a transformation of torch.func, such as vmap, so its part cannot be separated. It "
            f"is included in the part of {recordings.hidden[path] or 'the model'!r}."
        )


def check_sum(problem: Problem, recordings: Recordings) -> None:
    """Check that cutting the model at its modules does not change it: compare G + Σ_m M_m with H along one z.

    This is done once for these recordings. `curvlens.profile` compares along every probe, and reports the difference.
    """
    if recordings.adds_up:
        return
    H, layout = hessian(problem), problem.layout
    signs = torch.randint(2, (layout.size,), generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
    z = signs.to(H.device, H.dtype)
    try:
        truth = float(z.double() @ (H @ z).double())
    except CurvlensError:  # a module cannot be differentiated twice; it has an error of its own
        return
    total = Table()

    def term(recording: Recording, _: int) -> dict[str, Tensor]:
        own, outer = recording.forms([layout.unflatten(z)], 1)
        terms = torch.stack([outer.squeeze(), *(form.squeeze() for form in own.values())])
        return {"sum": terms.sum(), "sizes": terms.abs().sum()}

    count = summed(problem._evaluation, recordings, term, [total])
    apart = abs(float(total.values["sum"]) / count - truth) * count / max(float(total.values["sizes"]), 1e-300)
    if apart > sum_tolerance(H.dtype):
        raise CurvlensError(
            "The curvature cannot be split by module: the sum of G and the functional parts of all modules differs "
            f"from H by {apart:.1g} of the sum of their sizes. Does a module write into a tensor that another one "
            "shares, or does the forward pass differentiate? Use curvlens.hessian or curvlens.ggn, which take the "
            "model as a whole."
        )
    recordings.adds_up = True


class ModulePart(Operator):
    """M_m, or a block of it: T_mᵀ (λ_m · D²f_m) T_m."""

    def __init__(
        self, problem: Problem, recordings: Recordings, path: str, *, own: bool, rows: Layout, columns: Layout
    ) -> None:
        super().__init__(
            rows,
            columns,
            dtype=problem.dtype,
            device=problem.device,
            symmetric=rows == columns,
            name=f"Functional of {path or 'the model'}" + (" alone" if own else ""),
        )
        self.problem, self.path, self.own = problem, path, own
        self._recordings = recordings

    def _chosen(self, path: str) -> bool:
        return path == self.path or (not self.own and is_inside(path, self.path))

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        rows, columns = self.rows.whole, self.columns.whole
        whole = columns.embed(self.columns, vectors)
        totals = [Total(rows, self.problem.dtype, self.problem.device) for _ in range(vectors.shape[1])]
        done = 0

        def term(recording: Recording, j: int) -> Parts:
            parts = recording.product(columns.unflatten(whole[:, j].contiguous()), self._chosen)
            return {name: part for name, part in parts.items() if name in rows.shapes}

        def tick() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, None)

        count = summed(self.problem._evaluation, self._recordings, term, totals, tick)
        return rows.extract(self.rows, torch.stack([total.over(count) for total in totals], 1))

    def _block(self, rows: Layout, columns: Layout) -> ModulePart:
        return ModulePart(self.problem, self._recordings, self.path, own=self.own, rows=rows, columns=columns)

    def _transposed(self) -> ModulePart:
        return self._block(self.columns, self.rows)

    def provenance(self) -> dict[str, Any]:
        """A description of the operator and its problem, for the record of a result."""
        return {**super().provenance(), "n_tokens": self.problem.n_tokens, "loss": repr(self.problem.loss_function)}


def is_inside(path: str, other: str) -> bool:
    """Whether a path is that of a module inside another. Every path is inside the model, "".

    >>> is_inside("h.1.attn", "h.1"), is_inside("h.10", "h.1"), is_inside("h.1", "")
    (True, False, True)
    """
    return path != other and (not other or path.startswith(f"{other}."))


@as_found
def module_part(problem: Problem, path: str, *, own: bool = False) -> ModulePart:
    """The functional part of a module and of all modules inside it; with ``own`` of its own code alone.

    ``path`` is that of `nn.Module.named_modules`, or of a step of scaled dot-product attention: ``h.0.attn.softmax``.

    ``dense(progress=…)`` takes one pass for each column: half a minute for 2,000 parameters. For models that
    `assembly.read` knows, ``assembly.read(model).hessian(…).parts[path]`` is the same in closed form, and faster.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> module_part(problem, "1").shape
    (9, 9)
    """
    recordings = recordings_of(problem, "module_part")
    require_path(recordings, path)
    check_sum(problem, recordings)
    return ModulePart(problem, recordings, path, own=own, rows=problem.layout, columns=problem.layout)
