"""What changes after a problem is posed is followed, refused or without effect."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import curvlens as cl
from mlp import X, Y, net
from small import direction, gpt, problem, relative, tokens_and_labels
from truth import Truth


def test_signs_written_through_data_are_followed() -> None:
    model = net()
    held = cl.Problem(model, (X, Y), cl.losses.MSE())
    H = cl.hessian(held)
    H.dense()
    model.get_parameter("0.weight").data.neg_()
    assert relative(H.dense(), cl.hessian(cl.Problem(model, (X, Y), cl.losses.MSE())).dense()) < 1e-14


@pytest.mark.parametrize("way", ["step", "load", "clamp", "data"])
@pytest.mark.parametrize("memory", [None, 0])
def test_equal_values_written_again_change_nothing(way: str, memory: int | None) -> None:
    """The first step of a warm-up has a rate of 0: tensors that graphs have saved are written, and no bit changes."""
    model = net()
    truth = Truth(model, [(X, Y)], lambda m, batch: (m(batch[0]), batch[1]), square=True).hessian
    H = cl.hessian(cl.Problem(model, (X, Y), cl.losses.MSE(), memory=memory))
    assert relative(H.dense(), truth) < 1e-12
    if way == "step":
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    elif way == "load":
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    else:
        for p in model.parameters():
            (p.data if way == "data" else p.detach()).clamp_(-100, 100)
    assert relative(H.dense(), truth) < 1e-12


def test_switching_to_training_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double().eval()
    held = cl.Problem(model, (X, Y), cl.losses.MSE())
    H, v = cl.hessian(held), direction(13)
    truth = H @ v
    model.train()
    for act in (held.loss, held.gradient, lambda: H @ v):
        with pytest.raises(cl.CurvlensError, match=r"model.eval\(\)"):
            act()
    model.eval()
    assert relative(H @ v, truth) < 1e-14


def test_a_loss_is_taken_as_it_is() -> None:
    weight = torch.ones(7, dtype=torch.float64)
    loss = cl.losses.CrossEntropy(weight=weight)
    held = cl.Problem(gpt(), tokens_and_labels(), loss)
    H, v = cl.hessian(held), direction(242)
    truth = H @ v
    loss.label_smoothing = 0.5
    weight[2] = 9
    assert relative(H @ v, truth) < 1e-14


def test_autocast_is_noticed() -> None:
    held = cl.Problem(gpt().float(), tokens_and_labels(), cl.losses.CrossEntropy())
    H, v = cl.hessian(held), direction(242)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = H @ v
    assert relative((H @ v).double(), cl.hessian(problem()) @ v) < 1e-5
    assert relative(low.double(), cl.hessian(problem()) @ v) > 1e-4
