"""Cross-entropy in all its forms, with its output Hessian in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlens import batches
from curvlens.batches import Batch
from curvlens.calculus import losses as closed_form
from curvlens.errors import CurvlensError, a_kind
from curvlens.losses.base import Loss, Outputs, describe, main_output


class CrossEntropy(Loss):
    """``F.cross_entropy`` over the tokens of all batches: class indices, or probabilities of the logits' shape.

    ``class_dim`` is the axis of the classes in the outputs: the last by default, 1 in the layout of images.
    """

    convex = True

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        class_dim: int = -1,
    ) -> None:
        if not 0.0 <= label_smoothing <= 1.0:
            raise CurvlensError(f"label_smoothing is {label_smoothing}, expected a number between 0 and 1.")
        if weight is not None and (weight.ndim != 1 or not bool((weight >= 0).all())):
            raise CurvlensError(
                f"Class weights are one non-negative number per class, got shape {tuple(weight.shape)}."
            )
        self.weight = None if weight is None else weight.detach().clone()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.class_dim = self.row_dim = class_dim

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(weight={'yes' if self.weight is not None else None}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing})"
        )

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """What the model returns; the first entry of a tuple, the logits of a Hugging Face output."""
        return main_output(batches.call(model, batches.split_target(batch)[0]))

    def convex_on(self, data: Iterable[Batch]) -> bool:
        """True for class indices. For probabilities, True if no sum s is negative, because Λ = s (diag p − p pᵀ)."""
        if not self.convex or type(self).targets is not CrossEntropy.targets:
            return self.convex  # a subclass may need the outputs for its targets
        for batch in data:
            labels = batches.split_target(batch)[1]
            if not isinstance(labels, Tensor) or not labels.is_floating_point():
                return self.convex
            rows = labels.movedim(self.class_dim, -1).flatten(0, -2)
            if bool((self._mass(rows, rows) < 0).any()):
                return False
        return self.convex

    def targets(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The target of every token: class indices, or probabilities of the logits' shape."""
        return self._labels(batch)

    def _labels(self, batch: Batch) -> Tensor:
        labels = batches.split_target(batch)[1]
        if not isinstance(labels, Tensor):
            given = f"a mapping with {list(batch)}" if isinstance(batch, Mapping) else a_kind(batch)
            raise CurvlensError(
                f"{type(self).__name__} found no labels: the batch is {given}. Give a dict with 'labels', or a tuple "
                "(inputs, labels). As data=, a tuple is one batch and a list is many batches."
            )
        return labels

    def _rows(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits as (tokens, classes), and the targets as (tokens,) or (tokens, classes)."""
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or not outputs.ndim:
            raise CurvlensError(f"{type(self).__name__} expects logits as one tensor, got {describe(outputs)}.")
        targets = self.targets(outputs, batch)
        targets = targets if targets.is_floating_point() else targets.long()
        logits = outputs.movedim(self.class_dim, -1)
        if targets.is_floating_point():
            targets = targets.movedim(self.class_dim, -1) if targets.ndim == outputs.ndim else targets
            fits = targets.shape == logits.shape
        else:
            fits = targets.shape == logits.shape[:-1]
        if not fits:
            hint = ""
            if outputs.ndim > 2 and targets.shape == outputs.shape[:1] + outputs.shape[2:]:
                hint = " If the classes are axis 1 of the outputs, use CrossEntropy(class_dim=1)."
            raise CurvlensError(
                f"Outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(targets.shape)} do not fit: "
                f"expected one label for each of {tuple(logits.shape[:-1])} tokens.{hint}"
            )
        classes = logits.shape[-1]
        if targets.is_floating_point():
            return logits.reshape(-1, classes), targets.reshape(-1, classes)
        targets = targets.reshape(-1)
        counted = targets[targets != self.ignore_index]
        if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < classes):
            raise CurvlensError(
                f"Labels run from {int(counted.min())} to {int(counted.max())}, but there are {classes} classes. Give "
                f"tokens that do not count the label {self.ignore_index}."
            )
        return logits.reshape(-1, classes), targets

    def _weights(self, logits: Tensor) -> Tensor | None:
        if self.weight is None:
            return None
        if self.weight.numel() != logits.shape[-1]:
            raise CurvlensError(f"{self.weight.numel()} class weights given for {logits.shape[-1]} classes.")
        return self.weight.to(logits)

    def _mass(self, logits: Tensor, targets: Tensor) -> Tensor:
        """s_i = Σ_c q_ic: the factor of log-sum-exp in the loss of token i."""
        smoothing, classes = self.label_smoothing, logits.shape[-1]
        weight = self._weights(logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        weight = (logits.new_ones(classes) if weight is None else weight).to(wide)
        if targets.is_floating_point():
            smoothed = targets * (1 - smoothing) + smoothing / classes
            return (smoothed.to(weight) * weight).sum(-1)
        valid = targets != self.ignore_index
        own = weight[targets.where(valid, 0)]
        return ((1 - smoothing) * own + smoothing * weight.mean()) * valid

    def sum_and_count(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy, and the number of valid tokens (with class weights: the sum of their weights)."""
        logits, targets = self._rows(outputs, batch)
        logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        weight = self._weights(logits)
        token_losses = F.cross_entropy(
            logits,
            targets.to(logits.dtype) if targets.is_floating_point() else targets,
            weight=weight,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        if targets.is_floating_point():
            count = torch.tensor(float(len(targets)), dtype=torch.float64)
        else:
            valid = targets[targets != self.ignore_index]
            count = (
                torch.tensor(float(len(valid)), dtype=torch.float64) if weight is None else weight[valid].double().sum()
            )
        return token_losses.double().sum(), count

    def by_token(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of every token (NaN where it does not count), its label, and the class that the model prefers.

        All have the shape of the outputs without the axis of the classes. Labels that are probabilities count as their
        largest class.
        """
        logits, targets = self._rows(outputs, batch)
        labels = targets.argmax(-1) if targets.is_floating_point() else targets
        losses = F.cross_entropy(
            logits.double(), targets.double() if targets.is_floating_point() else targets,
            ignore_index=self.ignore_index, reduction="none",
        )  # fmt: skip
        counted = losses.where(labels != self.ignore_index, float("nan"))
        shape = outputs.movedim(self.class_dim, -1).shape[:-1]
        return counted.reshape(shape), labels.reshape(shape), logits.argmax(-1).reshape(shape)

    def _in_rows(self, outputs: Tensor, batch: Batch, apply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``apply(logits, mass)`` on (tokens, classes), in the layout of the outputs."""
        logits, targets = self._rows(outputs, batch)
        result = apply(logits, self._mass(logits, targets))
        return result.reshape(outputs.movedim(self.class_dim, -1).shape).movedim(-1, self.class_dim)

    def curvature(self, outputs: Tensor, batch: Batch, t: Tensor) -> Tensor:
        """s (diag p − p pᵀ) t, row by row."""
        t = t.movedim(self.class_dim, -1).reshape(-1, outputs.shape[self.class_dim])
        return self._in_rows(outputs, batch, lambda z, s: closed_form.cross_entropy_curvature(z, s, t))

    def sqrt_curvature(self, outputs: Tensor, batch: Batch, z: Tensor) -> Tensor:
        """√s (diag √p − p √pᵀ) z, row by row."""
        z = z.movedim(self.class_dim, -1).reshape(-1, outputs.shape[self.class_dim])
        return self._in_rows(outputs, batch, lambda f, s: closed_form.cross_entropy_sqrt_curvature(f, _with_root(s), z))

    def sample(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        """√s (p − e_y) with y drawn from p."""

        def draw(logits: Tensor, mass: Tensor) -> Tensor:
            uniform = torch.rand(len(logits), generator=generator, dtype=torch.float64).to(logits.device)
            return closed_form.cross_entropy_sample(logits, _with_root(mass), uniform)

        return self._in_rows(outputs, batch, draw)


def _with_root(mass: Tensor) -> Tensor:
    """The masses of the tokens. Raise an error if one is negative."""
    if bool((mass < 0).any()):
        raise CurvlensError(
            f"The labels of a token sum to {float(mass.min()):.3g}. With a negative sum the cross-entropy is no "
            "log-likelihood, and its output Hessian has no square root. Use ggn or hessian, which take such labels."
        )
    return mass
