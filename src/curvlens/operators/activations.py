"""The Hessian of the loss with respect to what a module gives: the curvature that arrives there from behind."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, listing, nearest
from curvlens.operators.base import Operator, Progress
from curvlens.operators.modules import Traces
from curvlens.problem import Problem

Of = Literal["hessian", "ggn", "functional"]


class ActivationHessian(Operator):
    """∂²ℓ/∂z² for the activations z that one call of a module gives, of all samples and tokens."""

    def __init__(self, traces: Traces, path: str, call: int, of: Of) -> None:
        shapes = {f"{path}[{i}]": _shape(trace.results[path][call]) for i, trace in enumerate(traces)}
        layout, problem = Layout(shapes), traces.problem
        super().__init__(
            layout,
            layout,
            dtype=problem.dtype,
            device=problem.device,
            symmetric=True,
            psd=of == "ggn" and problem.loss_function.convex,
            name=f"{of} by the activations of {path}",
        )
        self.problem, self.path, self.call, self.of = problem, path, call, of
        self._traces = traces

    def _apply(self, vectors: Tensor, progress: Progress | None) -> Tensor:
        out, count = torch.empty_like(vectors), 0.0
        for trace, (name, place) in zip(self._traces, self.rows.slices.items(), strict=True):
            for j in range(vectors.shape[1]):
                u = vectors[place, j].reshape(self.rows.shapes[name])
                part = trace.at_result(
                    self.path, self.call, u, outer=self.of != "functional", functional=self.of != "ggn"
                )
                out[place, j] = part.reshape(-1).to(out.dtype)
            count += trace.count
        return out / self.problem.checked_count(count)


def _shape(leaf: Tensor | None) -> tuple[int, ...]:
    assert leaf is not None  # checked before
    return tuple(leaf.shape)


def activation_hessian(
    problem: Problem, path: str, *, of: Of = "hessian", call: int = 0, traces: Traces | None = None
) -> ActivationHessian:
    """The Hessian, its Gauss–Newton or its functional part, with respect to the output of the module at ``path``.

    ``call`` says which, for a module that is called more than once.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> activation_hessian(problem, "1").dense().shape
    torch.Size([2, 2])
    """
    traces = Traces(problem) if traces is None else traces
    if of not in get_args(Of):
        raise CurvlensError(f"of={of!r}, expected one of {listing(get_args(Of))}.")
    for trace in traces:
        calls = trace.results.get(path, [])
        if all(leaf is None for leaf in calls):
            known = [p for p, given in trace.results.items() if any(leaf is not None for leaf in given)]
            raise CurvlensError(
                f"No module {path!r} gives activations that depend on parameters. {nearest(path, known)}"
            )
        if not 0 <= call < len(calls):
            often = "once: call=0" if len(calls) == 1 else f"{len(calls)} times, counted from 0"
            raise CurvlensError(f"call={call}; {path!r} is called {often}.")
        if calls[call] is None:
            raise CurvlensError(f"What call {call} of {path!r} gives depends on no parameter.")
    return ActivationHessian(traces, path, call, of)
