"""Buffers that a forward pass writes: refused where the loss depends on them, left as they are where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from interrupts import inside, interrupted_at, moments, surroundings
from small import direction, relative
from truth import Truth

X, Y = direction(24).view(6, 4), direction(6, 2).view(6, 1)


def rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def normed(seed: int, normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(normalise(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 1)).double()


class Counting(nn.Module):
    """Writes in every way, and uses nothing of it, or all."""

    def __init__(self, *, used: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.used = nn.Linear(4, 3), nn.Linear(3, 1), used
        self.calls: Tensor
        self.mean: Tensor
        self.replaced: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.replaced = self.replaced + 1
        y: Tensor = self.last(self.first(x - self.mean if self.used else x).tanh())
        return y


@pytest.mark.parametrize("steps", [0, 3, 300])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("normalise", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_is_refused_in_every_seed(
    normalise: Callable[[nn.Module], nn.Module], seed: int, steps: int
) -> None:
    """Also where the power iteration has arrived, and two passes give the same loss."""
    model = normed(seed, normalise)
    for _ in range(steps):
        model(X)
    before = inside(model)
    with pytest.raises(cl.CurvlensError, match=r"writes into buffers .*model.eval\(\)"):
        cl.Problem(model, (X, Y), cl.losses.MSE())
    assert inside(model) == before


@pytest.mark.parametrize("normalise", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_in_evaluation_mode(normalise: Callable[[nn.Module], nn.Module]) -> None:
    model = normed(0, normalise).eval()
    before = inside(model)
    found = cl.hessian(cl.Problem(model, (X, Y), cl.losses.MSE())).dense()
    assert inside(model) == before
    assert relative(found, Truth(model, [(X, Y)], rows, square=True).hessian) < 1e-12


def test_switching_to_training_is_refused_and_changes_nothing() -> None:
    model = normed(0, nn.utils.parametrizations.spectral_norm).eval()
    held, v = cl.Problem(model, (X, Y), cl.losses.MSE(), micro_batch=2), direction(31)
    H = cl.hessian(held)
    truth = H @ v
    model.train()
    before = inside(model)
    for act in (held.loss, held.gradient, lambda: H @ v, lambda: cl.profile(held, 4)):
        with pytest.raises(cl.CurvlensError, match="writes into buffers"):
            act()
        assert inside(model) == before
    model.eval()
    assert relative(H @ v, truth) < 1e-14


def test_what_is_written_and_never_used_stays_as_it_is() -> None:
    model = Counting().double()
    truth = Truth(model, [(X, Y)], rows, square=True).hessian
    before, versions = inside(model), [x._version for x in model.buffers()]
    held = cl.Problem(model, (X, Y), cl.losses.MSE())
    H = cl.hessian(held)
    assert relative(H.dense(), truth) < 1e-12
    assert relative(H.dense(), truth) < 1e-12
    assert cl.profile(held, 4, top=False).adds_up
    cl.doctor(held)
    held.gradient()
    assert inside(model) == before
    assert [x._version for x in model.buffers()] == versions


def test_statistics_that_are_used_are_refused() -> None:
    model = Counting(used=True).double()
    before = inside(model)
    with pytest.raises(cl.CurvlensError, match="'mean'"):
        cl.Problem(model, (X, Y), cl.losses.MSE())
    assert inside(model) == before


class Late(nn.Module):
    """Writes only where there are gradients, so that the first look does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() and torch.is_grad_enabled():
            self.get_buffer("calls").data.add_(1)
        y: Tensor = self.layer(x)
        return y


def test_a_late_write_is_told_and_put_back() -> None:
    model = Late().double()
    held, before = cl.Problem(model, (X, Y), cl.losses.MSE()), inside(model)
    with pytest.raises(cl.CurvlensError, match="that the first pass left alone"):
        cl.hessian(held) @ direction(5)
    assert inside(model) == before


class Table(nn.Module):
    """A table that is made longer when it is needed, as those of rotary positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.length = nn.Linear(1, 1), 2
        self.register_buffer("table", torch.arange(2).double())

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer("table", torch.arange(self.length).double())
        y: Tensor = self.layer(x[..., None]).tanh().squeeze(-1) * self.get_buffer("table")[: x.shape[1]]
        return y.sum(1, keepdim=True)


def test_a_table_that_grows_is_put_back_with_its_length() -> None:
    model = Table().double()
    before = inside(model)
    found = cl.hessian(cl.Problem(model, (X, Y), cl.losses.MSE())).dense()
    assert inside(model) == before
    assert model.length == 2
    assert relative(found, Truth(model, [(X, Y)], rows, square=True).hessian) < 1e-12


@pytest.mark.usefixtures("uncovered")
def test_interrupts_leave_buffers_alone() -> None:
    model = Counting().double()
    held, v = cl.Problem(model, (X, Y), cl.losses.MSE(), memory=0), direction(19)
    for action in (lambda: cl.hessian(held) @ v, lambda: cl.Problem(model, (X, Y), cl.losses.MSE())):
        action()
        before, around = inside(model), surroundings()
        for moment in random.Random(0).sample(moments(action), 20):
            interrupted_at(action, moment)
            assert inside(model) == before, moment
            assert surroundings() == around, moment
