"""Samples one by one, where they can be separated; batches where they cannot."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Container, Mapping
from types import GeneratorType

import torch
from torch import Tensor

from curvlens._evaluation.evaluation import Evaluation
from curvlens.errors import CurvlensError
from curvlens.operators import hessian
from curvlens.problem import Problem
from curvlens.study.budget import Budget


class Separated:
    """The data cut into samples, micro-batches or batches, and the gradient of each."""

    def __init__(self, problem: Problem, micro_batch: int) -> None:
        self.problem = problem
        self.evaluation: Evaluation = copy.copy(problem._evaluation)
        if not self.evaluation.reducer.alone:
            raise CurvlensError("noise needs all samples in one process. Give each process a problem of its own.")
        self.evaluation.micro_batch = None
        with torch.no_grad(), self.evaluation.isolated():
            sizes = [piece.size for piece in self.evaluation.pieces()]
            whole_batches = self.evaluation.loss_function.couples_batch or None in sizes
            if not whole_batches:
                self.evaluation.micro_batch = micro_batch
                sizes = [piece.size for piece in self.evaluation.pieces()]
        if not sizes:
            raise CurvlensError("The data has no samples. Give some.")
        self.name = "batch" if whole_batches or micro_batch > 1 else "sample"
        self.count = len(sizes)
        known = [size for size in sizes if size is not None]
        self.size = sum(known) / len(known) if len(known) == len(sizes) else 1.0

    def each(self, only: Container[int], use: Callable[[Tensor, float], None]) -> None:
        """Call ``use(∇S_i, c_i)`` for some of them, in the order of the data; gradients flat, in float64."""
        evaluation = self.evaluation
        slopes = evaluation.slopes(only)
        with torch.enable_grad(), evaluation.isolated():
            try:
                for slope in slopes:
                    use(self.flat(slope.parts), slope.count)
            finally:
                if isinstance(slopes, GeneratorType):  # also after an error, as in the sum over the data
                    slopes.close()

    def flat(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Parts by parameter name as a flat vector in float64; a missing name means zeros."""
        layout = self.problem.layout
        flat = torch.zeros(layout.size, dtype=torch.float64, device=self.evaluation.device)
        for name, part in parts.items():
            flat[layout.slices[name]] = part.detach().reshape(-1).double()
        return flat

    def allowed(self, budget: Budget | None, products: int) -> int:
        """How many gradients a budget is enough for: each is made twice, and has so many products."""
        if budget is None:
            return self.count
        if budget.gradients is not None:
            left, each = budget.gradients - 4.0 * products, 2 / self.count + 2.0 * products
            return max(math.floor(left / each + 1e-9), 0)
        start = time.monotonic()
        self.each(range(2), lambda _, __: None)
        each = time.monotonic() - start  # both passes of one
        if products:
            start = time.monotonic()
            hessian(self.problem) @ torch.ones(self.problem.layout.size, dtype=self.problem.dtype)
            each += products * (time.monotonic() - start)
        return max(math.floor((budget.seconds or 0.0) / max(each, 1e-9)), 0)
