"""A problem: a model, data and a loss. It means one number, however the data is cut into batches."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlens import batches
from curvlens.batches import Data
from curvlens.blocks import Blocks, Family, Heads, Layout, map_blocks, watch
from curvlens.buffers import Watch, copies, writes
from curvlens.checks import (
    check_batch_norm,
    check_buffers,
    check_deterministic,
    check_not_written,
    check_split,
    check_sum_and_count,
    explained,
    explained_batch,
    loss_through_outputs,
    rng_state,
    warn_low_precision,
)
from curvlens.checksum import checksum
from curvlens.errors import CurvlensError, CurvlensWarning, a_kind, listing
from curvlens.exchange import apart, exchanged, isolated, lock_of
from curvlens.losses import FromModel, as_loss
from curvlens.memory import available_bytes, parse_bytes
from curvlens.parameters import choose, device_and_dtype, named
from curvlens.pieces import Piece
from curvlens.point import Point
from curvlens.precision import HALF, HalfInside, KeepFloat64, is_float64
from curvlens.sdpa import second_order
from curvlens.surroundings import Result, as_found, as_written, uncollected
from curvlens.totals import Total


class _FirstLoss(NamedTuple):
    """The summed loss of the first piece, from when the setting was checked."""

    place: tuple[int, int, int | None]
    state: tuple[Any, ...]
    total: float
    tokens: float


def _place(piece: Piece) -> tuple[int, int, int | None]:
    """Where a piece lies in the data."""
    return piece.index, piece.start, piece.stop


class Problem:
    """The loss Σ token losses / Σ valid tokens of a model over data, as a function of some of its parameters.

    Args:
        model: any ``nn.Module``, in the mode (``model.eval()``) in which it is to be looked at.
        data: batches that can be gone through again and again: a list, a ``DataLoader`` without shuffling, or one batch
            (a tensor, a dict, a tuple).
        loss: one of `curvlens.losses`, or a function ``(outputs, batch) → (sum, count)``.
        params: names or patterns of parameters or blocks; all that require a gradient, if not given.
        micro_batch: at most so many samples go through the model at a time. It changes memory and nothing else.
        memory: budget for graphs that are kept between products; half of what is free, if not given. Graphs that do not
            fit are rebuilt for every product, in smaller pieces where needed. It changes time and nothing else.
        blocks: names of your own for groups of parameters, ``{"early": "h.[01].*"}`` (what is not named keeps its
            block), or a `Family` of rules for an architecture that is not known.
        heads: how many heads the attention has, where the model does not tell it: 6, with grouped queries those of
            queries and keys, (6, 2), or by attention {"h.0.attn": 6}. It overrides what the model tells.

    The problem follows the model: products after a training step are those at the new parameters.

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
        self.model = model
        self.loss_function = copy.copy(as_loss(loss)).for_model(model)
        self.micro_batch = micro_batch
        chosen = choose(model, params, blocks, heads)
        shapes = {name: tuple(p.shape) for name, p in chosen.items()}
        self.layout = Layout(shapes, named(model, chosen, blocks, heads))
        self.device, self.dtype = device_and_dtype(model, chosen)
        self.memory = available_bytes(self.device) // 2 if memory is None else parse_bytes(memory)
        self._theta: Tensor | None = None
        self._count: float | None = None
        self._split_checked = False
        self._unused_said = False
        self._lone_number = False
        self._replaced = False
        self._attention_checked = False
        self._coarsest: torch.dtype | None = None
        self._engine: Any = None
        self._modes: frozenset[tuple[bool, ...]] = frozenset()
        self._written: tuple[str, ...] = ()
        self._first_loss: _FirstLoss | None = None
        self._draws = True
        """Whether going through the data or the model draws random numbers: it is not known before the first pass."""
        warn_low_precision(self.dtype)
        self._take(data)
        if self.blocks.headless or self.blocks.doubtful:  # a forward pass shows how many there are
            rules = blocks if isinstance(blocks, Family) else None
            seen = self._seen_splits(map_blocks(model, own=rules, heads=heads))
            self.layout = Layout(shapes, named(model, chosen, blocks, heads, seen))

    @as_found
    def _take(self, data: Any) -> None:
        with self.isolated():
            before = rng_state(self.device)
            self.data = Data(data)
            reading = not torch.equal(before, rng_state(self.device))
            self._draws = False
            self._check_setting()
        self._draws |= reading

    @as_found
    def _seen_splits(self, whole: Blocks) -> Any:
        """How a forward pass cuts the queries, keys and values of the attention layers whose heads are not certain.

        ``whole`` is the map of all parameters: queries tell the heads of outputs that were chosen alone.
        """
        unknown = [name for block in (*whole.headless, *whole.doubtful) for name in whole[block].parameters]
        with self.isolated(), as_written():
            piece = next(self.pieces())
            return apart(self.model, lambda: watch(self.model, unknown, lambda: self._evaluate(piece)))

    def __repr__(self) -> str:
        tokens = "" if self._count is None else f", {self._count:g} tokens"
        return (
            f"Problem({type(self.model).__name__}, {self.loss_function}, {len(self.layout.names)} parameters of "
            f"{self.layout.size} numbers, {str(self.dtype).removeprefix('torch.')} on {self.device}{tokens})"
        )

    @property
    def blocks(self) -> Blocks:
        """The parameters by layer and role, under the same names for every architecture; `Blocks.by` for others."""
        return self.layout.blocks

    # The loss and its gradient

    @as_found
    def loss(self) -> float:
        """The loss: one number, whatever the batches."""
        total, count = 0.0, 0.0
        with torch.no_grad(), self.isolated():
            for piece in self.pieces():
                s, c = self._evaluate(piece)
                total, count = total + s.item(), count + c
        return total / self.checked_count(count)

    @as_found
    def gradient(self) -> Tensor:
        """The gradient of the loss, flat, in the order of `layout`."""
        unused, count = set(self.layout.names), 0.0
        total = Total(self.layout, self.dtype, self.device)
        with torch.enable_grad(), self.isolated():
            for piece in self.pieces():
                leaves = self.leaves(self.layout.names)
                parts, c = self.at(leaves, partial(self._slope, piece, leaves))
                unused -= parts.keys()
                total.add(parts)
                count += c
                del parts  # before the next ones are computed
        self.say_unused(unused)
        return total.rounded_once(self.checked_count(count))

    def _slope(self, piece: Piece, leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """The gradient of the summed loss of a piece, where there is one, and its count."""
        s, c = self.sum_and_count(self.loss_function.outputs(self.model, piece.batch), piece)
        self.require_dependence(s.requires_grad)
        parts = torch.autograd.grad(s, list(leaves.values()), allow_unused=True)
        return {name: part for name, part in zip(leaves, parts, strict=True) if part is not None}, c

    @property
    def n_tokens(self) -> int | float:
        """What the summed loss is divided by: the number of valid tokens (with class weights their weight)."""
        if self._count is None:
            self.loss()
        assert self._count is not None
        return int(self._count) if self._count == int(self._count) else self._count

    # The point

    @property
    def theta(self) -> Tensor:
        """The chosen parameters as one flat vector (a copy)."""
        if self._theta is not None:
            return self._theta.clone()
        return self.layout.flatten(self._parameters(), dtype=self.dtype, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: all but the graphs, which belong to this problem at this point."""
        return {**self.__dict__, "_engine": None}

    def with_params(self, theta: Tensor | Mapping[str, Tensor]) -> Problem:
        """The same problem at another point, a flat vector or a dict of what differs; the model is not touched."""
        other = copy.copy(self)
        other._theta = self._as_vector(theta).clone()
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
        return theta.detach().to(device=self.device, dtype=self.dtype)

    def leaves(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """The named parameters as leaves of a new graph, sharing their memory."""
        parameters = self._parameters()
        if self._theta is None:
            return {name: nn.Parameter(parameters[name].detach()) for name in names}
        values = self.layout.unflatten(self._theta)
        return {name: nn.Parameter(values[name].to(parameters[name].dtype)) for name in names}

    def _parameters(self) -> dict[str, Tensor]:
        """The chosen parameters as the model has them now: they may have been replaced since."""
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

    def point(self) -> Point:
        """Where the model is now: modules, modes, parameters and buffers, to be compared with later."""
        return Point(self.model, self.moving(), self.device)

    def is_at(self, point: Point) -> bool:
        """Whether the model is still there."""
        return point.holds(self.model, self.moving(), self.device)

    def moving(self) -> list[Tensor]:
        """All tensors of the model that the loss may depend on and that may change."""
        fixed = () if self._theta is None else self.layout.shapes
        return [*self.model.buffers(), *(p for name, p in self.model.named_parameters() if name not in fixed)]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """One thread at a time, outside of inference mode, random numbers left alone."""
        with isolated(self.model, [self.device], draws=self._draws):
            yield

    # One piece at a time

    def pieces(self) -> Iterator[Piece]:
        """The data, batch by batch on the model's device, cut into micro-batches."""
        self._check_setting()
        offset, index = 0, -1
        for index, raw in enumerate(self.data):
            if index and self.loss_function.couples_batch and not getattr(self.loss_function, "per_batch", False):
                raise CurvlensError(
                    f"{self.loss_function!r} couples the samples of a batch, so its value depends on how the data is "
                    "cut. Give one batch, or say per_batch=True for the mean over the batches as they are."
                )
            piece = Piece(index, 0, offset, batches.to_device(raw, self.device))
            offset += 1 if piece.size is None else piece.size
            if piece.size == 0:
                continue
            if self.micro_batch is None:
                yield piece
            else:
                self.check_split(piece)
                yield from piece.split(self.micro_batch)
        self._check_weights(several=index > 0)

    def at(
        self,
        leaves: Mapping[str, nn.Parameter] | None,
        action: Callable[[], Result],
        *,
        twice: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Result:
        """Run something with ``leaves`` in the place of the model's parameters; ``twice`` for second derivatives.

        Backward passes belong inside too: checkpointed layers compute themselves anew in them. ``buffers`` are used in
        the place of the model's; if not given, copies of those that a pass writes.
        """
        # A loss of the model may look at requires_grad (weight decay does); elsewhere a constant saves half a graph.
        same = leaves is None or isinstance(self.loss_function, FromModel)
        if leaves is None:
            leaves = self.leaves(self.layout.names) if self._theta is not None else {}
        tensors = dict(leaves)
        for name, p in self.model.named_parameters():
            if p.requires_grad and name not in leaves:
                tensors[name] = nn.Parameter(p.detach(), requires_grad=same)
        attention = second_order()
        modes: list[TorchFunctionMode] = [attention] if twice else []
        if is_float64(self.model):
            modes.append(KeepFloat64())
        work = copies(self.model, self._written) if buffers is None else buffers
        others = Watch(self.model, tuple(work))
        try:
            result = exchanged(self.model, tensors, action, modes, work)
        except (RuntimeError, NotImplementedError) as error:
            raise explained(error) from error
        finally:
            surprising = others.put_back()
        check_not_written(surprising)
        self._replaced = self._replaced or attention.replaced
        return result

    def check_attention(self, piece: Piece, total: float) -> None:
        """The summed loss of a piece is the same with the model's own attention; looked at once."""
        if not self._replaced or self._attention_checked:
            return
        self._attention_checked = True
        own, count = self._own_loss(piece)
        # rounding of a sum of losses, each of size 1 or so
        allowed = min(1e4 * torch.finfo(self._coarsest or self.dtype).eps, 0.1) * (abs(own) + count)
        if not abs(own - total) <= allowed:
            raise CurvlensError(
                f"The summed loss of the first data is {own:.6g} with the model's own attention and {total:.6g} "
                "with the one that can be differentiated twice: they are not the same function. Use "
                "model.set_attn_implementation('eager') in models of Hugging Face."
            )

    def _own_loss(self, piece: Piece) -> tuple[float, float]:
        """The summed loss of a piece and its count with the model's own attention: known, or computed."""
        known = self._first_loss
        if known is not None and known.place == _place(piece) and known.state == self._state():
            return known.total, known.tokens
        with torch.no_grad():
            own, count = self._evaluate(piece)
        return own.item(), count

    def _state(self) -> tuple[Any, ...]:
        """What the loss depends on besides the data, in a few numbers."""
        point = [] if self._theta is None else [self._theta]
        cast = (torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type))
        return (cast, tuple(m.training for m in self.model.modules()), checksum([*self.moving(), *point]))

    def _evaluate(self, piece: Piece) -> tuple[Tensor, float]:
        """The summed loss of a piece and its count."""

        def action() -> tuple[Tensor, float]:
            return self.sum_and_count(self.loss_function.outputs(self.model, piece.batch), piece)

        if self._coarsest is not None:
            return self.at(None, action)
        # Once: whether fewer digits go through the model than its parameters have.
        with as_written(), HalfInside() as seen:
            result = uncollected(lambda: self.at(None, action))
        self._coarsest = seen.dtype or self.dtype
        if self.dtype not in HALF and not torch.is_autocast_enabled(self.device.type):
            warn_low_precision(seen.dtype, inside=True)
        return result

    def _evaluate_with(self, piece: Piece, buffers: Mapping[str, Tensor]) -> tuple[float, Mapping[str, Tensor]]:
        """The summed loss of a piece with other buffers, and the buffers that the pass leaves."""

        def action() -> tuple[float, Mapping[str, Tensor]]:
            total, _ = self.sum_and_count(self.loss_function.outputs(self.model, piece.batch), piece)
            return float(total), dict(self.model.named_buffers())

        with torch.no_grad():
            return self.at(None, action, buffers=buffers)

    def _evaluate_apart(self, piece: Piece) -> tuple[Tensor, float]:
        """As `_evaluate`; the loss is a function of the outputs alone, or an error says that it is not."""
        if isinstance(self.loss_function, FromModel):
            return self._evaluate(piece)
        return self.at(None, lambda: loss_through_outputs(self.loss_function, self.model, self.sum_and_count, piece))

    def sum_and_count(self, outputs: Any, piece: Piece) -> tuple[Tensor, float]:
        """The summed loss (a float64 scalar) and the count of a piece, both checked."""
        if isinstance(self.loss_function, FromModel):
            self._lone_number = len(outputs) == 1
        s, c = self.loss_function.sum_and_count(outputs, piece.batch)
        return check_sum_and_count(self.loss_function, s, c, piece)

    # What would make a result wrong

    def checked_count(self, count: float) -> float:
        """The total count, remembered; zero is an error."""
        if count == 0:
            raise CurvlensError(
                "No token of the data counts: every label is ignored (-100), or every mask is 0. Check the labels."
            )
        self._count = count
        return count

    def check_split(self, piece: Piece) -> None:
        """Make sure, once, that cutting a batch along its first axis leaves its loss alone."""
        if self.loss_function.couples_batch:
            raise CurvlensError(f"{self.loss_function!r} couples the samples of a batch: it cannot be cut.")
        if self._split_checked and piece.size is not None:
            return
        try:
            if self._coarsest is None:
                self._evaluate(piece)
            check_split(self._evaluate, piece, self._coarsest or self.dtype)
        except CurvlensError:
            self._check_weights(several=True)
            raise
        self._split_checked = (piece.size or 0) > 1

    def _check_weights(self, *, several: bool) -> None:
        """A lone number for each of several pieces cannot be averaged."""
        if several and self._lone_number:
            raise CurvlensError(
                "The loss returns one number, and the data comes in several pieces: how to weigh them is unknown. "
                "Return (sum, count) from the loss, or give one batch and leave micro_batch out."
            )

    def require_dependence(self, depends: bool) -> None:
        """The loss has to depend on the chosen parameters at all."""
        if not depends:
            raise CurvlensError(
                f"The loss does not depend on any of the chosen parameters ({listing(self.layout.names)}). Is the "
                "forward pass inside torch.no_grad(), or detached?"
            )

    def say_unused(self, names: Iterable[str]) -> None:
        """Parameters the loss does not depend on have rows of zeros; say so, once."""
        unused = [name for name in self.layout.names if name in set(names)]
        if unused and not self._unused_said:
            self._unused_said = True
            warnings.warn(
                f"The loss does not depend on {listing(unused)}: their rows are zero. Leave them out with params=.",
                CurvlensWarning,
                stacklevel=2,
            )

    def _check_setting(self) -> None:
        """Look at the first batch before any long work, and again when modules have changed their mode."""
        modes = tuple(m.training for m in self.model.modules())
        if modes in self._modes:
            return
        with isolated(self.model, [self.device]):
            self._check_modes(modes)

    def _check_modes(self, modes: tuple[bool, ...]) -> None:
        check_batch_norm(self.model)
        piece = Piece(0, 0, 0, batches.to_device(self.data.first(), self.device))
        if piece.size == 0:  # `pieces` leaves it out
            filled = next((batch for batch in self.data.source if batches.batch_size(batch) != 0), None)
            if filled is None:
                return
            piece = Piece(0, 0, 0, batches.to_device(filled, self.device))
        with explained_batch(piece.batch, self.dtype, self.model, self.loss_function):
            small = piece.split(self.micro_batch)[0] if self.micro_batch is not None and piece.size else piece
            before = checksum(self.model.parameters())
            copied = dataclasses.replace(small, batch=batches.map_tensors(Tensor.clone, small.batch))
            written = check_buffers(writes(self.model, partial(self._evaluate_with, copied), self.dtype))
            self._written = tuple({**dict.fromkeys(self._written), **dict.fromkeys(written)})  # of all modes so far
            if self.micro_batch is not None and piece.size != 0:
                self.check_split(piece)
                piece = small
            random = rng_state(self.device)
            total, count = check_deterministic(self.model, self._evaluate_apart, self._evaluate, piece)
            self._draws |= not torch.equal(random, rng_state(self.device))
            if before != checksum(self.model.parameters()):
                raise CurvlensError(
                    "The forward pass writes into the parameters (an Embedding with max_norm?): there is no fixed "
                    "point to take derivatives at. Switch that off."
                )
        self._first_loss = _FirstLoss(_place(piece), self._state(), float(total), count)
        self._modes |= {modes}
