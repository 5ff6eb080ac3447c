"""Subclasses of losses: a closed form is inherited only where the loss is."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import curvlens as cl
from mlp import net
from small import direction, gpt, relative, tokens_and_labels


def differences(at: cl.Problem, v: Tensor, eps: float = 1e-6) -> Tensor:
    above, below = at.with_params(at.theta + eps * v), at.with_params(at.theta - eps * v)
    return (above.gradient() - below.gradient()) / (2 * eps)


def test_a_subclass_with_another_loss() -> None:
    """It inherits a closed form of the old one, which must not be used."""

    class WithZ(cl.losses.CrossEntropy):
        def sum_and_count(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
            total, count = super().sum_and_count(outputs, batch)
            valid = (batch[1] != -100).unsqueeze(-1)
            return total + 0.1 * (outputs.logsumexp(-1, keepdim=True).square() * valid).sum(), count

    class Renamed(cl.losses.CrossEntropy):
        pass

    odd = cl.Problem(gpt(), tokens_and_labels(), WithZ())
    v = direction(242)
    assert relative(cl.hessian(odd) @ v, differences(odd, v)) < 1e-7
    assert relative(cl.ggn(odd) @ v + cl.functional(odd) @ v, cl.hessian(odd) @ v) < 1e-12
    assert not cl.ggn(odd).psd
    with pytest.raises(cl.CurvlensError, match="Define sample"):
        cl.fisher(odd) @ v
    assert cl.ggn(cl.Problem(gpt(), tokens_and_labels(), Renamed())).psd


def test_a_subclass_stays_itself_on_an_encoder_decoder() -> None:
    class Tenfold(cl.losses.CausalLM):
        pass

    model = net()
    model.config = type("Config", (), {"is_encoder_decoder": True})()
    loss = Tenfold(label_smoothing=0.1).for_model(model)
    assert isinstance(loss, Tenfold)
    assert not loss.shift
    assert loss.label_smoothing == 0.1
