"""A problem: a model, data and a loss. It is one number, which does not depend on how the data is batched."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlens._evaluation.checks import warn_low_precision
from curvlens._evaluation.evaluation import Evaluated, Evaluation, Slope
from curvlens._evaluation.exchange import apart
from curvlens._evaluation.parameters import choose, device_and_dtype, named
from curvlens._evaluation.sums import Number, summed
from curvlens._evaluation.totals import Total
from curvlens.batches import Data
from curvlens.blocks import Blocks, Family, Heads, Layout, map_blocks, require_real, watch
from curvlens.errors import CurvlensError, a_kind
from curvlens.losses import Loss, as_loss
from curvlens.memory import available_bytes, parse_bytes
from curvlens.surroundings import as_found, as_written


class Problem:
    """The loss Σ token losses / Σ valid tokens of a model over data, as a function of some of its parameters.

    Args:
        model: any ``nn.Module``, in the mode you want to measure, usually ``model.eval()``.
        data: batches that can be iterated over many times: a list, a ``DataLoader`` without shuffling, or one batch
            (a tensor, a dict, a tuple).
        loss: one of `curvlens.losses`, or a function ``(outputs, batch) → (sum, count)``.
        params: names or patterns of parameters or blocks. Default: all parameters that require a gradient.
        micro_batch: the most samples in one forward pass. It changes memory use and no result.
        memory: budget for graphs that are kept between products. Default: half of the free memory. Graphs that do not
            fit are rebuilt for every product, in smaller pieces where needed. It changes time and no result.
        blocks: your own names for groups of parameters, such as ``{"early": "h.[01].*"}`` (other parameters keep their
            blocks), or a `Family` of rules for an unknown architecture.
        heads: the number of attention heads, if the model does not state it: 6; (6, 2) for 6 query heads and 2 key
            heads; or {"h.0.attn": 6} by attention layer. It overrides what the model states.

    The problem follows the model: products after a training step use the new parameters.

    >>> model = nn.Linear(3, 1, bias=False).double()
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> problem = Problem(model, (x, torch.zeros(3, 1)), MSE())
    >>> abs(problem.loss() - model.weight.square().mean().item()) < 1e-15
    True
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: Any,
        params: str | Iterable[str] | None = None,
        *,
        micro_batch: int | None = None,
        memory: int | float | str | None = None,
        blocks: Mapping[str, str | Iterable[str]] | Family | None = None,
        heads: Heads | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CurvlensError(f"The model is {a_kind(model)}, expected a torch.nn.Module.")
        if micro_batch is not None and (not isinstance(micro_batch, int) or micro_batch < 1):
            raise CurvlensError(f"micro_batch={micro_batch!r}, expected a number of samples, 1 or more.")
        loss_function = copy.copy(as_loss(loss)).for_model(model)
        chosen = choose(model, params, blocks, heads)
        shapes = {name: tuple(p.shape) for name, p in chosen.items()}
        layout = Layout(shapes, named(model, chosen, blocks, heads))
        device, dtype = device_and_dtype(model, chosen)
        self._evaluation = Evaluation(
            model,
            loss_function,
            layout,
            device=device,
            dtype=dtype,
            memory=available_bytes(device) // 2 if memory is None else parse_bytes(memory),
            micro_batch=micro_batch,
        )
        warn_low_precision(dtype)
        self._take(data)
        if self.blocks.headless or self.blocks.doubtful:  # a forward pass shows how many heads there are
            rules = blocks if isinstance(blocks, Family) else None
            seen = self._seen_splits(map_blocks(model, own=rules, heads=heads))
            self._evaluation.layout = Layout(shapes, named(model, chosen, blocks, heads, seen))

    @as_found
    def _take(self, data: Any) -> None:
        self._evaluation.take(data)

    @as_found
    def _seen_splits(self, whole: Blocks) -> Any:
        """How a forward pass splits queries, keys and values, for attention layers with an uncertain number of heads.

        ``whole`` is the map of all parameters: the queries show the number of heads even if only outputs were chosen.
        """
        evaluation = self._evaluation
        unknown = [name for block in (*whole.headless, *whole.doubtful) for name in whole[block].parameters]
        with evaluation.isolated(), as_written():
            piece = next(evaluation.pieces())
            return apart(self.model, lambda: watch(self.model, unknown, lambda: evaluation.passed(piece)))

    def __repr__(self) -> str:
        count = self._evaluation.count
        tokens = "" if count is None else f", {count:g} tokens"
        return (
            f"Problem({type(self.model).__name__}, {self.loss_function}, {len(self.layout.names)} parameters of "
            f"{self.layout.size} numbers, {str(self.dtype).removeprefix('torch.')} on {self.device}{tokens})"
        )

    # What it is made of

    @property
    def model(self) -> nn.Module:
        """The model, which is never modified."""
        return self._evaluation.model

    @property
    def data(self) -> Data:
        """The data, batch by batch."""
        return self._evaluation.data

    @property
    def loss_function(self) -> Loss:
        """The loss."""
        return self._evaluation.loss_function

    @property
    def layout(self) -> Layout:
        """The order of the chosen parameters in flat vectors."""
        return self._evaluation.layout

    @property
    def blocks(self) -> Blocks:
        """The parameters by layer and role, with the same names for every architecture; see `Blocks.by` for others."""
        return self.layout.blocks

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._evaluation.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters and of all vectors."""
        return self._evaluation.dtype

    @property
    def micro_batch(self) -> int | None:
        """The most samples in one forward pass; None for whole batches."""
        return self._evaluation.micro_batch

    @property
    def memory(self) -> int:
        """The memory budget for kept graphs, in bytes."""
        return self._evaluation.memory

    # The loss and its gradient

    @as_found
    def loss(self) -> float:
        """The loss: one number, independent of the batching."""
        evaluation, total = self._evaluation, Number()

        def term(item: Evaluated, _: int) -> float:
            return item.total

        with torch.no_grad(), evaluation.isolated():
            count = summed(evaluation, evaluation.losses(), term, [total])
        return total.value / count

    @as_found
    def gradient(self) -> Tensor:
        """The gradient of the loss, flat, in the order of `layout`."""
        evaluation, total = self._evaluation, Total(self.layout, self.dtype, self.device)

        def term(item: Slope, _: int) -> dict[str, Tensor]:
            return item.parts

        with torch.enable_grad(), evaluation.isolated():
            count = summed(evaluation, evaluation.slopes(), term, [total])
        return total.rounded_once(count)

    @property
    def n_tokens(self) -> int | float:
        """The number that the summed loss is divided by: valid tokens, or their total weight with class weights."""
        if self._evaluation.count is None:
            self.loss()
        count = self._evaluation.count
        assert count is not None
        return int(count) if count == int(count) else count

    # The point

    @property
    def theta(self) -> Tensor:
        """The chosen parameters as one flat vector (a copy)."""
        if self._evaluation.theta is not None:
            return self._evaluation.theta.clone()
        return self.layout.flatten(self._evaluation.parameters(), dtype=self.dtype, device=self.device)

    def with_params(self, theta: Tensor | Mapping[str, Tensor]) -> Problem:
        """The same problem at another point. ``theta`` is a flat vector, or a dict of the parameters that differ.

        The model is not changed.
        """
        return self._with(self._evaluation.moved(self._as_vector(theta)))

    def _with(self, evaluation: Evaluation) -> Problem:
        """The same problem with another evaluation."""
        other = copy.copy(self)
        other._evaluation = evaluation
        return other

    def _as_vector(self, theta: Tensor | Mapping[str, Tensor]) -> Tensor:
        if isinstance(theta, Mapping):
            parts = {**self.layout.unflatten(self.theta), **theta}
            return self.layout.flatten(parts, dtype=self.dtype, device=self.device)
        if not isinstance(theta, Tensor) or theta.shape != (self.layout.size,):
            given = f"shape {tuple(theta.shape)}" if isinstance(theta, Tensor) else a_kind(theta)
            raise CurvlensError(
                f"Expected a flat vector of {self.layout.size} numbers or a dict by parameter name, got {given}."
            )
        require_real(theta)
        return theta.detach().to(device=self.device, dtype=self.dtype)
