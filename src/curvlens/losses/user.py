"""Losses defined by the user."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from curvlens.batches import Batch
from curvlens.errors import CurvlensError
from curvlens.losses.base import Loss, Outputs, describe


class FromOutputs(Loss):
    """A user's ``(outputs, batch) → (sum, count)``, or any object with the two methods of the protocol."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.convex = bool(getattr(loss, "convex", False))
        self.couples_batch = bool(getattr(loss, "couples_batch", False))
        self.row_wise = bool(getattr(loss, "row_wise", True))
        self.row_dim = int(getattr(loss, "row_dim", -1))
        for method in ("outputs", "curvature", "sqrt_curvature", "sample"):
            if hasattr(loss, method):
                setattr(self, method, getattr(loss, method))

    def __repr__(self) -> str:
        return f"FromOutputs({getattr(self._loss, '__name__', type(self._loss).__name__)})"

    def sum_and_count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Any]:
        """Call the user's function and check that it returned a pair."""
        try:
            result = getattr(self._loss, "sum_and_count", self._loss)(outputs, batch)
        except (AttributeError, TypeError) as error:
            if "not callable" not in str(error):
                if not _about_the_outputs(error, outputs):
                    raise
                raise CurvlensError(
                    f"The loss failed: {error}. It is given what the model returns, here {describe(outputs)}. For "
                    "Hugging Face outputs, these are the logits. Take what you need, such as outputs[0] of a tuple."
                ) from error
            raise CurvlensError(
                f"The loss was called with (outputs, batch) and tried to call its arguments: {error}. If it is a "
                "function of the model itself, call its first parameter `model`, or wrap it: losses.FromModel(loss)."
            ) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise CurvlensError(
                f"The loss returned {describe(result)}, expected (sum of the token losses, number of tokens). Return "
                "both, without dividing. A function of the model itself has `model` as its first parameter."
            )
        return result


def _about_the_outputs(error: Exception, outputs: Outputs) -> bool:
    """Whether a loss expected other outputs: a tensor instead of a tuple, or a whole output instead of its logits."""
    kind = type(outputs).__name__
    return f"{kind!r} object has no attribute" in str(error) or f"must be Tensor, not {kind}" in str(error)


class FromModel(Loss):
    """A user's ``(model, batch) → number`` or ``→ (sum, count)``. It hides the outputs: H exists, but not G and F."""

    def __init__(self, function: Callable[[nn.Module, Batch], Any]) -> None:
        self._function = function

    def __repr__(self) -> str:
        return f"FromModel({getattr(self._function, '__name__', type(self._function).__name__)})"

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Any, ...]:
        """What the function returned: a sum and a count, or one number without a count."""
        result = self._function(model, batch)
        return result if isinstance(result, tuple) else (result,)

    def sum_and_count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Any]:
        """The pair; a single number counts once."""
        if len(outputs) > 2:
            raise CurvlensError(f"The loss returned {len(outputs)} values, expected a number or (sum, count).")
        return outputs[0], outputs[1] if len(outputs) == 2 else 1


def as_loss(loss: Any) -> Loss:
    """Convert what the user gave to a `Loss`."""
    if isinstance(loss, type) and issubclass(loss, Loss):
        raise CurvlensError(f"The loss is the class {loss.__name__}, not an instance. Make one: {loss.__name__}().")
    if isinstance(loss, Loss):
        return _without_stale_forms(loss)
    if hasattr(loss, "sum_and_count"):
        return FromOutputs(loss)
    if isinstance(loss, nn.modules.loss._Loss):
        raise CurvlensError(
            f"The loss is the module {type(loss).__name__}, whose reduction hides how many tokens it counted. Use "
            "losses.CrossEntropy() or losses.MSE(), or a function (outputs, batch) -> (sum, count)."
        )
    if getattr(loss, "__module__", None) == "torch.nn.functional":
        raise CurvlensError(
            f"F.{getattr(loss, '__name__', 'loss')} is a function of (input, target), whose reduction hides how many "
            "tokens it counted. Use losses.CrossEntropy() or losses.MSE(), or a function (outputs, batch) -> "
            "(sum, count)."
        )
    if callable(loss):
        return FromModel(loss) if _takes_model(loss) else FromOutputs(loss)
    raise CurvlensError(
        f"The loss is {describe(loss)}, expected one of curvlens.losses, such as losses.CrossEntropy(), or a function "
        "(outputs, batch) -> (sum, count)."
    )


def _without_stale_forms(loss: Loss) -> Loss:
    """Reset inherited closed forms if a subclass redefines only `sum_and_count`: its derivatives differ."""
    order = type(loss).__mro__

    def rank(method: str) -> int:
        return next(i for i, kind in enumerate(order) if method in vars(kind))

    stale = [m for m in ("curvature", "sqrt_curvature", "sample") if rank("sum_and_count") < rank(m)]
    if not stale:
        return loss
    adapted = copy.copy(loss)
    for method in stale:
        setattr(adapted, method, getattr(Loss, method).__get__(adapted))
    adapted.convex = adapted.convex and "curvature" not in stale
    return adapted


def _takes_model(function: Callable[..., Any]) -> bool:
    """Whether the first parameter is called ``model`` (or ``module``, ``net``) or annotated as a module."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    if first is None:
        return False
    annotation = first.annotation
    is_module = isinstance(annotation, type) and issubclass(annotation, nn.Module)
    return first.name in ("model", "module", "net") or is_module or str(annotation).endswith("Module")
