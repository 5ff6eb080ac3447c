"""What a problem refuses: losses, models and requests that would give a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from mlp import X, Y, net
from small import direction, problem, tokens_and_labels


def penalised() -> cl.Problem:
    model = net()
    return cl.Problem(
        model, (X, Y), lambda o, b: (o.square().sum() + sum(p.square().sum() for p in model.parameters()), 1)
    )


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.mul_(2))
        return y


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator = net(), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + torch.randn(y.shape, generator=self.generator, dtype=y.dtype)


def max_norm() -> cl.Problem:
    table = nn.Embedding(7, 4, max_norm=0.1).double()
    return cl.Problem(nn.Sequential(table, nn.Linear(4, 7).double()), tokens_and_labels(), cl.losses.CrossEntropy())


class TwoOutputs(cl.losses.Loss):
    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        y = model(batch[0])
        return y, y.tanh()

    def sum_and_count(self, outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        return outputs[0].square().sum() + outputs[1].sum(), 5


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters beside the outputs": (penalised, "beside the outputs"),
    "count with a gradient": (lambda: cl.Problem(net(), (X, Y), cl.losses.FromModel(counted)).gradient(), "count of"),
    "count that is no number": (lambda: cl.Problem(net(), (X, Y), lambda o, b: (o.sum(), None)), "as its count"),
    "input written to": (lambda: cl.Problem(WritesInput(), (X, Y), cl.losses.MSE()), "writes into its inputs"),
    "noise of its own": (lambda: cl.Problem(Noisy(), (X, Y), cl.losses.MSE()), "The loss is random"),
    "weights rewritten": (max_norm, "writes into the parameters"),
    "Fisher of two outputs": (
        lambda: cl.empirical_fisher(cl.Problem(net(), (X, Y), TwoOutputs())) @ direction(13),
        "2 tensors",
    ),
    "sum over different parameters": (
        lambda: cl.hessian(problem())["h.0.attn.q.weight"] + cl.hessian(problem())["h.0.attn.k.weight"],
        "different parameters",
    ),
    "complex factor": (lambda: cl.hessian(problem()) * (1 + 2j), "real number"),
}


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    y = model(batch[0])
    return y.square().sum(), y.detach().abs().sum() + model.get_parameter("0.weight").square().sum()


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        act()


@pytest.mark.parametrize("seed", range(8))
def test_dropout_that_happens_to_drop_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.001), nn.Linear(4, 2)).double()
    data = (torch.randn(5, 3).double(), torch.randint(2, (5,)))
    with pytest.raises(cl.CurvlensError, match=r"model.eval\(\)"):
        cl.Problem(model, data, cl.losses.CrossEntropy())
    assert cl.Problem(model.eval(), data, cl.losses.CrossEntropy()).loss() > 0
