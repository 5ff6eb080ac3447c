"""Runs one model: at a point, over data, with a loss, one piece of the data at a time.

Everything that a `Problem` computes goes through here. Parameters and buffers are exchanged for the duration of a pass,
torch's global states are restored, and the first passes check the setting (`curvlens._evaluation.setting`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlens import batches
from curvlens._evaluation import setting
from curvlens._evaluation.buffers import Watch, copies
from curvlens._evaluation.cache import Cache
from curvlens._evaluation.checks import check_not_written, check_sum_and_count, explained, rng_state
from curvlens._evaluation.exchange import exchanged, isolated, lock_of
from curvlens._evaluation.pieces import Piece
from curvlens._evaluation.point import Point
from curvlens._evaluation.reducer import ALONE, Reducer
from curvlens.batches import Data
from curvlens.blocks import Layout
from curvlens.errors import CurvlensError, CurvlensWarning, listing
from curvlens.losses import FromModel, Loss
from curvlens.precision import HALF, HalfInside, KeepFloat64, is_float64
from curvlens.sdpa import second_order
from curvlens.surroundings import Result, as_written, uncollected


@dataclass(frozen=True)
class Evaluated:
    """The summed loss of one piece."""

    total: float
    count: float


@dataclass(frozen=True)
class Slope:
    """The gradient of the summed loss of one piece, by parameter; a name that is missing means zeros."""

    parts: dict[str, Tensor]
    count: float


class Evaluation:
    """A model, its loss and its data, as a function of the parameters of ``layout``.

    ``memory`` is the budget for kept graphs, in bytes. ``reducer`` adds up the sums of several processes.
    """

    data: Data

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        memory: int,
        micro_batch: int | None = None,
        reducer: Reducer = ALONE,
    ) -> None:
        self.model = model
        self.loss_function = loss
        self.layout = layout
        self.device, self.dtype = device, dtype
        self.memory = memory
        self.micro_batch = micro_batch
        self.reducer = reducer
        self.theta: Tensor | None = None
        """The parameters as a flat vector, if they differ from those of the model."""
        self.count: float | None = None
        """The number that the summed loss is divided by, once it is known."""
        self.checked = setting.Checked()
        self._cache: Cache | None = None

    def take(self, data: Any) -> None:
        """Use this data, and check the setting with its first batch."""
        with self.isolated():
            before = rng_state(self.device)
            self.data = Data(data)
            reading = not torch.equal(before, rng_state(self.device))
            self.checked.draws = False
            setting.check(self)
        self.checked.draws |= reading

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy: everything but the graphs, which belong to this evaluation."""
        return {**self.__dict__, "checked": copy.copy(self.checked), "_cache": None}

    def moved(self, theta: Tensor) -> Evaluation:
        """The same evaluation at another point."""
        other = copy.copy(self)
        other.theta = theta.clone()
        return other

    def within(self, memory: int) -> Evaluation:
        """The same evaluation with graphs of its own and ``memory`` bytes for them."""
        other = copy.copy(self)
        other.memory = max(memory, 0)
        return other

    @property
    def cache(self) -> Cache:
        """The graphs: one cache for all operators and for the profiler."""
        if self._cache is None:
            self._cache = Cache(self)
        return self._cache

    # The point

    def parameters(self) -> dict[str, Tensor]:
        """The chosen parameters of the model. They are looked up again: they may have been replaced."""
        with lock_of(self.model):
            present = dict(self.model.named_parameters())
        for name, shape in self.layout.shapes.items():
            p = present.get(name)
            if p is None or tuple(p.shape) != shape or p.device != self.device:
                raise CurvlensError(
                    f"The model has changed: {name!r} is gone or different. Build a new Problem for it."
                )
        dtypes = {present[name].dtype for name in self.layout.names}
        if any(torch.promote_types(self.dtype, dtype) != self.dtype for dtype in dtypes) or self.dtype not in dtypes:
            raise CurvlensError(f"The model is no longer in {self.dtype}. Build a new Problem for it.")
        return {name: present[name] for name in self.layout.names}

    def leaves(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """The named parameters as leaves of a new graph, sharing their memory."""
        parameters = self.parameters()
        if self.theta is None:
            return {name: nn.Parameter(parameters[name].detach()) for name in names}
        values = self.layout.unflatten(self.theta)
        return {name: nn.Parameter(values[name].to(parameters[name].dtype)) for name in names}

    def point(self) -> Point:
        """The present state of the model (modules, modes, parameters, buffers), to compare with later."""
        return Point(self.model, self.moving(), self.device)

    def is_at(self, point: Point) -> bool:
        """Whether the model is still in this state."""
        return point.holds(self.model, self.moving(), self.device)

    def moving(self) -> list[Tensor]:
        """All tensors of the model that the loss may depend on and that may change."""
        fixed = () if self.theta is None else self.layout.shapes
        return [*self.model.buffers(), *(p for name, p in self.model.named_parameters() if name not in fixed)]

    # One pass

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Hold the model's lock, switch inference mode off, and restore random generators afterwards."""
        with isolated(self.model, [self.device], draws=self.checked.draws):
            yield

    def at(
        self,
        leaves: Mapping[str, nn.Parameter] | None,
        action: Callable[[], Result],
        *,
        twice: bool = False,
        mode: second_order | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Result:
        """Run ``action`` with ``leaves`` instead of the model's parameters; ``twice`` for second derivatives,
        ``mode`` for others.

        Backward passes must run inside too, because checkpointed layers recompute themselves there. ``buffers`` replace
        the model's. By default these are copies of the buffers that a pass writes.
        """
        # A loss from the model may read requires_grad (weight decay does). Elsewhere a constant saves half a graph.
        same = leaves is None or isinstance(self.loss_function, FromModel)
        if leaves is None:
            leaves = self.leaves(self.layout.names) if self.theta is not None else {}
        tensors = dict(leaves)
        moved = {} if self.theta is None else self.layout.unflatten(self.theta)
        for name, p in self.model.named_parameters():
            if name in leaves:
                continue
            if name in moved:  # a chosen parameter that this graph does not differentiate by
                tensors[name] = nn.Parameter(moved[name].to(p.dtype), requires_grad=same)
            elif p.requires_grad:
                tensors[name] = nn.Parameter(p.detach(), requires_grad=same)
        attention = mode or second_order()
        modes: list[TorchFunctionMode] = [attention] if twice or mode else []
        if is_float64(self.model):
            modes.append(KeepFloat64())
        work = copies(self.model, self.checked.written) if buffers is None else buffers
        others = Watch(self.model, tuple(work))
        try:
            result = exchanged(self.model, tensors, action, modes, work)
        except (RuntimeError, NotImplementedError) as error:
            raise explained(error) from error
        finally:
            surprising = others.put_back()
        check_not_written(surprising)
        self.checked.attention_replaced |= attention.replaced
        return result

    def sum_and_count(self, outputs: Any, piece: Piece) -> tuple[Tensor, float]:
        """The summed loss (a float64 scalar) and the count of a piece, both checked."""
        if isinstance(self.loss_function, FromModel):
            self.checked.lone_number = len(outputs) == 1
        s, c = self.loss_function.sum_and_count(outputs, piece.batch)
        return check_sum_and_count(self.loss_function, s, c, piece)

    def passed(self, piece: Piece) -> tuple[Tensor, float]:
        """The summed loss of a piece and its count, by one forward pass."""

        def action() -> tuple[Tensor, float]:
            return self.sum_and_count(self.loss_function.outputs(self.model, piece.batch), piece)

        if self.checked.coarsest is not None:
            return self.at(None, action)
        # The first pass looks for tensors of lower precision than the parameters.
        with as_written(), HalfInside() as seen:
            result = uncollected(lambda: self.at(None, action))
        self.checked.coarsest = seen.dtype or self.dtype
        if self.dtype not in HALF and not torch.is_autocast_enabled(self.device.type):
            setting.warn_low_precision(seen.dtype, inside=True)
        return result

    # All passes: `curvlens._evaluation.sums` adds them up

    def pieces(self) -> Iterator[Piece]:
        """The data, batch by batch on the model's device, cut into micro-batches."""
        setting.check(self)
        offset, index = 0, -1
        for index, raw in enumerate(self.data):
            if index and self.loss_function.couples_batch and not getattr(self.loss_function, "per_batch", False):
                raise CurvlensError(
                    f"{self.loss_function!r} couples the samples of a batch, so its value depends on how the data is "
                    "split into batches. Give one batch, or use per_batch=True for the mean over the batches as given."
                )
            piece = Piece(index, 0, offset, batches.to_device(raw, self.device))
            offset += 1 if piece.size is None else piece.size
            if piece.size == 0:
                continue
            if self.micro_batch is None:
                yield piece
            else:
                setting.check_cut(self, piece)
                yield from piece.split(self.micro_batch)
        setting.check_weights(self, several=index > 0)

    def losses(self) -> Iterator[Evaluated]:
        """The summed loss of every piece."""
        for piece in self.pieces():
            total, count = self.passed(piece)
            yield Evaluated(total.item(), count)

    def slopes(self, only: Container[int] | None = None) -> Iterator[Slope]:
        """The gradient of every piece, or of some, by their places in the order of the data."""
        unused = set(self.layout.names)
        for place, piece in enumerate(self.pieces()):
            if only is not None and place not in only:
                continue
            leaves = self.leaves(self.layout.names)
            slope = self.at(leaves, lambda piece=piece, leaves=leaves: self._slope(piece, leaves))  # type: ignore[misc]
            unused -= slope.parts.keys()
            yield slope
            del slope  # before the next one is computed
        if only is None:
            self.say_unused(unused)

    def _slope(self, piece: Piece, leaves: Mapping[str, Tensor]) -> Slope:
        s, c = self.sum_and_count(self.loss_function.outputs(self.model, piece.batch), piece)
        self.require_dependence(s.requires_grad)
        parts = torch.autograd.grad(s, list(leaves.values()), allow_unused=True)
        return Slope({name: part for name, part in zip(leaves, parts, strict=True) if part is not None}, c)

    # What would make a result wrong

    def remember_count(self, count: float) -> float:
        """Store and return the count of all data. Raise an error if it is zero."""
        if count == 0:
            raise CurvlensError(
                "No token of the data counts: every label is ignored (-100), or every mask is 0. Check the labels."
            )
        self.count = count
        return count

    def require_dependence(self, depends: bool) -> None:
        """Raise an error if the loss depends on none of the chosen parameters."""
        if not depends:
            raise CurvlensError(
                f"The loss does not depend on any of the chosen parameters ({listing(self.layout.names)}). Is the "
                "forward pass inside torch.no_grad(), or detached?"
            )

    def say_unused(self, names: Iterable[str]) -> None:
        """Warn, once, of parameters that the loss does not depend on: their rows are zero."""
        unused = [name for name in self.layout.names if name in set(names)]
        if unused and not self.checked.unused_said:
            self.checked.unused_said = True
            warnings.warn(
                f"The loss does not depend on {listing(unused)}: their rows are zero. Leave them out with params=.",
                CurvlensWarning,
                stacklevel=2,
            )
