"""Checks for settings in which a result would be wrong. They run before any long work."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvlens import batches
from curvlens._evaluation.buffers import Writes
from curvlens._evaluation.pieces import Piece
from curvlens.batches import Batch
from curvlens.errors import CurvlensError, CurvlensWarning, NonFiniteLossError, a_kind, listing
from curvlens.losses import CausalLM, CrossEntropy, Loss

SumAndCount = Callable[[Piece], tuple[Tensor, float]]
"""The summed loss of a piece and its count."""


_RATES = ("p", "drop_prob", "dropout", "attention_dropout", "attn_dropout", "hidden_dropout", "layerdrop")
"""Attributes that hold a dropout rate: of torch, timm's DropPath, Hugging Face."""


def active_dropouts(model: nn.Module) -> list[str]:
    """The modules of a model that are in training mode and have a rate above zero."""
    found = []
    for name, module in model.named_modules():
        rates = [getattr(module, rate, None) for rate in _RATES]
        if module.training and any(isinstance(r, (int, float)) and not isinstance(r, bool) and r > 0 for r in rates):
            found.append(name)
    return found


def draws(device: torch.device, action: Callable[[], object]) -> bool:
    """Whether an action takes numbers from the random generator of a device."""
    before = rng_state(device)
    action()
    return not torch.equal(before, rng_state(device))


def rng_state(device: torch.device) -> Tensor:
    """The state of the random generators that a pass on a device may draw from."""
    own = torch.get_rng_state()
    return torch.cat([own, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else own


def active_batch_norms(model: nn.Module) -> list[str]:
    """The batch-norms of a model that are in training mode."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [name for name, m in model.named_modules() if isinstance(m, norms) and m.training]


def check_batch_norm(model: nn.Module) -> None:
    """Raise an error for batch-norm in training mode: it couples samples, and it changes with every pass."""
    active = active_batch_norms(model)
    if active:
        raise CurvlensError(
            f"Batch-norm is in training mode ({listing(active)}): it couples the samples of a batch, and its "
            "statistics change with every pass. Call model.eval()."
        )


def check_buffers(written: Writes) -> tuple[str, ...]:
    """The names of the buffers that a pass writes. Raise an error if the loss depends on them."""
    if written.matters:
        raise CurvlensError(
            f"The forward pass writes into buffers ({listing(written.names)}), and the loss depends on them: every "
            "pass computes a different function. Call model.eval(). If a module writes in evaluation mode too, let it "
            "write only `if self.training`."
        )
    return written.names


def check_not_written(names: Iterable[str]) -> None:
    """Raise an error if a pass wrote into buffers that the first pass did not write."""
    if names := list(names):
        raise CurvlensError(
            f"A forward pass wrote into buffers ({listing(names)}) that the first pass left alone. It is unknown "
            "whether the loss depends on them. Their values were restored. Call model.eval(), or write into them in "
            "every pass."
        )


def check_sum_and_count(loss: object, total: object, count: Any, piece: Piece) -> tuple[Tensor, float]:
    """Check what a loss returned for a piece: a finite scalar, converted to float64, and a number of tokens."""
    if not isinstance(total, Tensor) or total.numel() != 1:
        given = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else a_kind(total)
        raise CurvlensError(
            f"{loss!r} returned {given} as its sum, expected a scalar tensor. Return the sum over the tokens and their "
            "number: (losses.sum(), losses.numel())."
        )
    if isinstance(count, Tensor) and count.requires_grad:
        raise CurvlensError(
            f"The count of {loss!r} depends on the parameters. Return a plain number of tokens: (losses.sum(), "
            "losses.numel())."
        )
    try:
        tokens = float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CurvlensError(f"{loss!r} returned {count!r:.80} as its count, expected a number of tokens.") from error
    if not math.isfinite(tokens) or tokens < 0:
        raise CurvlensError(
            f"{loss!r} counted {tokens} tokens in batch {piece.index}, expected a finite number, 0 or more."
        )
    value = float(total.detach())
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"The loss of batch {piece.index} (samples from {piece.start}) is {value}. Look for NaN or infinite values "
            "in this batch and in the parameters. The computation stopped here."
        )
    return total.reshape(()).double(), tokens


def check_deterministic(
    model: nn.Module, evaluate: SumAndCount, again: SumAndCount, piece: Piece
) -> tuple[Tensor, float]:
    """Check that two passes over a batch give the same loss and leave the batch unchanged. Return the loss."""
    before = batches.fingerprint(piece.batch)
    with torch.no_grad():
        (first, count), (second, _) = evaluate(piece), again(piece)
    if before != batches.fingerprint(piece.batch):
        raise CurvlensError(
            "The forward pass writes into its inputs: a second pass over the same batch sees different values. Write "
            "`x = x * 2` instead of `x.mul_(2)`, or give the layer a copy."
        )
    active = active_dropouts(model)
    if not torch.isclose(first, second, rtol=1e-6):
        where = f" Active dropout: {listing(active)}." if active else ""
        raise CurvlensError(
            f"The loss is random: two passes over the first batch gave {float(first) / (count or 1):.8g} and "
            f"{float(second) / (count or 1):.8g}. Switch dropout off with model.eval().{where}"
        )
    with torch.no_grad():
        # With a small rate two passes may agree by chance; drawing random numbers is proof.
        random = bool(active) and draws(first.device, lambda: again(piece))
    if random:
        raise CurvlensError(
            f"Dropout or stochastic depth is active ({listing(active)}): every pass draws random numbers, though two "
            "passes over the first batch gave the same loss. Switch it off with model.eval()."
        )
    return first, count


def loss_through_outputs(
    loss: Loss, model: nn.Module, sum_and_count: Callable[[Any, Piece], tuple[Tensor, float]], piece: Piece
) -> tuple[Tensor, float]:
    """The summed loss and the count of a piece, from outputs cut off from the parameters.

    A loss must depend on the parameters through its outputs alone: at the outputs H is split into G and F.
    """
    with torch.no_grad():
        outputs = loss.outputs(model, piece.batch)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in batches.tensors(outputs)]
        total, count = sum_and_count(batches.replace_tensors(outputs, leaves), piece)
    known = {id(x) for x in leaves}
    for node in graph_nodes([total]):
        if hasattr(node, "variable") and id(node.variable) not in known:
            raise CurvlensError(
                f"{loss!r} depends on parameters beside the outputs (a penalty on weights?). The derivatives would "
                "miss them. Write the loss as a function of the model, (model, batch) -> (sum, count), or make the "
                "penalty part of the outputs."
            )
    return total.detach(), count


def graph_nodes(tensors: Iterable[Tensor], until: Iterable[Any] = ()) -> Iterator[Any]:
    """Every node of the autograd graph of the tensors, once. The search stops before the nodes of ``until``."""
    todo, seen = [x.grad_fn for x in tensors], set(until)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(parent for parent, _ in node.next_functions)


@contextmanager
def explained_batch(batch: Batch, dtype: torch.dtype, model: nn.Module, loss: Loss) -> Iterator[None]:
    """Explain the errors that torch and models raise for a batch that does not fit the model, and give the fix."""
    try:
        yield
    except ValueError as error:
        config = getattr(model, "config", None)
        plain = isinstance(loss, CrossEntropy) and not isinstance(loss, CausalLM)
        if not getattr(config, "is_encoder_decoder", False) or not plain:
            raise
        raise CurvlensError(
            f"The model is an encoder-decoder, and {type(loss).__name__} gives its decoder no input. Use "
            f"losses.CausalLM(), which makes the decoder's inputs from the labels. The model said: {error}"
        ) from error
    except IndexError as error:
        if "index out of range" not in str(error):  # the error may come from the user's own code
            raise
        raise CurvlensError(
            "An index of the first batch is beyond a table of the model: a token id is outside the vocabulary, or a "
            "sequence is longer than the position table. Call curvlens.doctor(model, data, loss) to see which. torch "
            f"said: {error}"
        ) from error
    except RuntimeError as error:
        if dtype == torch.float64 and "Expected mat_a to be" in str(error):
            raise CurvlensError(
                "The kernel that runs this model's experts has no float64. In Hugging Face models: "
                f"model.set_experts_implementation('eager'). torch said: {error}"
            ) from error
        other = {x.dtype for x in batches.tensors(batch) if x.is_floating_point()} - {dtype}
        if not other or "dtype" not in str(error):
            raise
        raise CurvlensError(
            f"The model is in {dtype}, the batch has tensors in {listing(map(str, other))}. Convert the tensors with "
            f"x.to({dtype}), or the model with model.double(). torch said: {error}"
        ) from error


def check_split(evaluate: SumAndCount, piece: Piece, dtype: torch.dtype) -> None:
    """Check that cutting a batch along its first axis does not change its loss."""
    size = piece.size
    if size is None:
        shapes = [tuple(x.shape) for x in batches.tensors(piece.batch)]
        raise CurvlensError(
            "A batch can only be cut if all its tensors have the samples as their first axis; these have shapes "
            f"{shapes}. Leave micro_batch out, or move the sample axis to the front."
        )
    with torch.no_grad():
        whole, n = evaluate(piece)
        parts = [evaluate(part) for part in piece.split(max(size // 2, 1))]
    total, count = sum(float(s) for s, _ in parts), sum(c for _, c in parts)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 2e-2)
    if abs(float(whole) - total) > tolerance * max(abs(float(whole)), 1e-3 * n) or abs(n - count) > 1e-9 * n:
        raise CurvlensError(
            f"Cutting a batch along its first axis changes its loss: {float(whole):.6g} as a whole, {total:.6g} in "
            "pieces. Either its samples are coupled, or its first axis is not the sample axis (sequence-first?). "
            "Leave micro_batch out, or give smaller batches."
        )


def warn_low_precision(dtype: torch.dtype | None, *, inside: bool = False) -> None:
    """Warn of half precision: in the parameters, or with ``inside`` in the forward pass."""
    digits = {torch.float16: 3, torch.bfloat16: 2}.get(dtype) if dtype is not None else None
    if digits is not None and inside:
        warnings.warn(
            f"The forward pass rounds to {str(dtype).removeprefix('torch.')} (it uses torch.autocast, or casts): "
            f"second derivatives carry about {digits} digits at best. Remove these casts, or use model.double(), which "
            "autocast leaves alone.",
            CurvlensWarning,
            stacklevel=4,
        )
    elif digits is not None:
        warnings.warn(
            f"The model is in {str(dtype).removeprefix('torch.')}: second derivatives carry about {digits} digits at "
            "best. Use model.float(), or model.double() for exact work.",
            CurvlensWarning,
            stacklevel=4,
        )


CANNOT_TWICE = (
    "A kernel of this model cannot be differentiated twice. Use the plain implementation of that layer "
    "(attn_implementation='eager' in Hugging Face models, no torch.compile, no custom fused kernels). torch said: {}"
)


WRITTEN = (
    "A tensor that the derivative needs was written into after it was used (x += …, inplace=True): its first value is "
    "lost. Write x = x + …, or give the layer a copy. {}"
)


def explained(error: Exception) -> Exception:
    """Translate torch's errors about missing second derivatives into a `CurvlensError`; return others unchanged."""
    text = str(error)
    if "checkpoint" in text.lower() or "checkpoint" in type(error).__name__.lower():
        return CurvlensError(
            "Gradient checkpointing is active. It recomputes layers under other settings. Switch it off "
            "(model.gradient_checkpointing_disable() in Hugging Face models) and limit memory with micro_batch= or "
            f"memory=. torch said: {text.strip().splitlines()[0] if text.strip() else type(error).__name__}"
        )
    if "modified by an inplace operation" in text:
        return CurvlensError(WRITTEN.format(f"torch said: {text.splitlines()[0]}"))
    return CurvlensError(CANNOT_TWICE.format(text.splitlines()[0])) if lacks_derivative(error) else error


def lacks_derivative(error: Exception) -> bool:
    """Whether torch says that a second derivative does not exist."""
    signs = ("derivative for", "double backward", "twice differentiable", "does not support", "once_differentiable")
    return any(sign in str(error) for sign in signs)
