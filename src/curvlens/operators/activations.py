"""The Hessian of the loss with respect to the output of a module."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from curvlens._evaluation.recording import Recording
from curvlens._evaluation.recordings import Recordings
from curvlens._evaluation.sums import OwnRows, summed
from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, listing, nearest
from curvlens.operators.base import Operator, Progress
from curvlens.operators.modules import check_sum, recordings_of
from curvlens.problem import Problem
from curvlens.surroundings import as_found

Of = Literal["hessian", "ggn", "functional"]


class ActivationHessian(Operator):
    """∂²ℓ/∂z² for the output z of one call of a module, over all samples and tokens."""

    def __init__(self, problem: Problem, recordings: Recordings, path: str, call: int, of: Of) -> None:
        shapes, said = [_shape(recording.results[path][call]) for recording in recordings], path or "the model"
        # one batch: no blocks; several batches: each is a block
        names = [said] if len(shapes) == 1 else [f"{said}[{i}]" for i in range(len(shapes))]
        layout = Layout(dict(zip(names, shapes, strict=True)))
        super().__init__(
            layout,
            layout,
            dtype=problem.dtype,
            device=problem.device,
            symmetric=True,
            psd=of == "ggn" and problem.loss_function.convex_on(problem.data),
            name=f"{of} by the activations of {said}",
        )
        self.problem, self.path, self.call, self.of = problem, path, call, of
        self._recordings = recordings

    def __getitem__(self, key: Any) -> Operator:
        """``A[path]`` is A itself. With several batches ``A["h.0[1]"]`` is the block of the second."""
        known = {self.path: list(self.rows.shapes), **{name: [name] for name in self.rows.shapes}}

        def meant(names: Any) -> list[str]:
            for name in (given := [names] if isinstance(names, str) else list(names)):
                if name not in known:
                    raise CurvlensError(f"{self!r} has no block {name!r}. Its blocks: {listing(self.rows.shapes)}.")
            return [block for name in given for block in known[name]]

        return super().__getitem__(tuple(map(meant, key if isinstance(key, tuple) else (key, key))))

    def _block(self, rows: Layout, columns: Layout) -> Operator:
        return self if rows == columns == self.rows else _Block(self, rows, columns)

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        out, shapes = torch.empty_like(vectors), list(self.rows.shapes.values())
        totals = [OwnRows(out[:, j], self.rows.slices.values()) for j in range(vectors.shape[1])]

        def term(recording: Recording, j: int) -> Tensor:
            piece = totals[j].place
            u = vectors[piece, j].reshape(shapes[totals[j].number])
            return recording.at_result(
                self.path, self.call, u, outer=self.of != "functional", functional=self.of != "ggn"
            )

        return out / summed(self.problem._evaluation, self._recordings, term, totals)


class _Block(Operator):
    """The block of some batches."""

    def __init__(self, whole: ActivationHessian, rows: Layout, columns: Layout) -> None:
        same = rows == columns
        options: dict[str, Any] = {"symmetric": same, "psd": same and whole.psd, "name": whole.name}
        super().__init__(rows, columns, dtype=whole.dtype, device=whole.device, **options)
        self._whole = whole

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        whole = self._whole
        return whole.rows.extract(self.rows, whole._apply(whole.rows.embed(self.columns, vectors), progress))

    def _transposed(self) -> Operator:
        return _Block(self._whole, self.columns, self.rows)


def _shape(leaf: Tensor | None) -> tuple[int, ...]:
    assert leaf is not None  # `activation_hessian` checks it
    return tuple(leaf.shape)


@as_found
def activation_hessian(problem: Problem, path: str, *, of: Of = "hessian", call: int = 0) -> ActivationHessian:
    """The Hessian, its Gauss–Newton or its functional part, with respect to the output of the module at ``path``.

    ``call`` selects a call of a module that is called more than once; -1 is the last. The order of the rows is that of
    the flattened output; several batches follow each other.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> activation_hessian(problem, "1").dense().shape
    torch.Size([2, 2])
    """
    recordings = recordings_of(problem, "activation_hessian")
    if of not in get_args(Of):
        raise CurvlensError(f"of={of!r}, expected one of {listing(get_args(Of))}.")
    if not isinstance(path, str):
        raise CurvlensError(f"The path of a module is a text, such as 'h.0.attn'; got {path!r}.")
    if isinstance(call, bool) or not isinstance(call, int):
        raise CurvlensError(f"call={call!r}; expected a whole number, counted from 0, or -1 for the last.")
    for recording in recordings:
        calls = recording.results.get(path, [])
        if (
            not calls
            and path in recording.kinds
            and path not in dict(problem.model.named_modules(remove_duplicate=False))
        ):
            around = path.rpartition(".")[0]
            raise CurvlensError(
                f"{path!r} is a step of attention inside the module {around!r}, and has no activations of its own. Use "
                f"{around!r}. The functional part of the step is module_part(problem, {path!r})."
            )
        if all(leaf is None for leaf in calls):
            known = [p for p, given in recording.results.items() if any(leaf is not None for leaf in given)]
            raise CurvlensError(f"No module {path!r} has an output that depends on parameters. {nearest(path, known)}")
        if not -len(calls) <= call < len(calls):
            often = "once: call=0" if len(calls) == 1 else f"{len(calls)} times, counted from 0"
            raise CurvlensError(f"call={call}; {path!r} is called {often}.")
        if calls[call] is None:
            raise CurvlensError(
                f"The output of call {call} of {path!r} does not depend on any parameter. Choose another call or "
                "module."
            )
    check_sum(problem, recordings)
    return ActivationHessian(problem, recordings, path, call, of)
