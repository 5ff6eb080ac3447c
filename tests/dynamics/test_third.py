"""The third derivative along a line, against finite differences of uᵀHu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens._evaluation import third as module
from curvlens.dynamics import line
from quadratics import quadratic


def differences(problem: cl.Problem, u: Tensor, h: float = 2e-3) -> float:
    """d/dt uᵀH(θ + t u)u, to sixth order."""

    def curvature(t: float) -> float:
        return cl.hessian(problem.with_params(problem.theta + t * u)).quadratic(u)

    weights = {1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
    return sum(w * (curvature(k * h) - curvature(-k * h)) for k, w in weights.items()) / h


def along(problem: cl.Problem, seed: int = 1) -> tuple[float, float]:
    """The third derivative, and the finite differences."""
    u = small.direction(problem.layout.size, seed)
    u = u / u.norm()
    found = line(problem, 3 * u, radii=[0.1], third=True)
    assert found.third is not None
    return found.third, differences(problem, u)


class Instance(nn.Module):
    """Instance norms with weights, between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 7)
        self.n = nn.InstanceNorm1d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.n(self.a(x)))
        return y


NORMS: dict[str, Any] = {
    "layer norm by its native name": lambda x: torch.native_layer_norm(x, [6], None, None, 0.1)[0],
    "instance norm of torch": lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 0.1, False),
    "batch norm over the batch": lambda x: F.batch_norm(x, None, None, training=True, eps=0.1),
    "batch norm by its statistics": lambda x: F.batch_norm(x, torch.ones(4).double(), 2 * torch.ones(4).double()),
    "group norm": lambda x: F.group_norm(x, 2, eps=0.1),
    "RMS norm": lambda x: F.rms_norm(x, (6,), eps=0.1),
}


class Normed(nn.Module):
    """Any function between two linear maps."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 7), norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.norm(self.a(x)))
        return y


class Attending(nn.Module):
    """torch's own layer with attention, whose two norms and attention are fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
        self.out = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layer(self.embed(x)))
        return y


def problems() -> dict[str, Any]:
    def of(model: nn.Module, x: Tensor, y: Tensor) -> cl.Problem:
        return cl.Problem(model.double().eval(), (x, y), cl.losses.CrossEntropy())

    def make(name: str) -> cl.Problem:
        torch.manual_seed(3)
        tokens, labels = small.tokens_and_labels()
        if name == "gpt":
            return small.problem()
        if name == "pieces":
            return small.problem(micro_batch=2)
        if name == "torch's layer":
            return of(Attending(), tokens, labels)
        if name in NORMS:
            return of(Normed(NORMS[name]), torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(7, (3, 4)))
        return of(Instance(), torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(7, (3, 4)))

    return dict.fromkeys(("gpt", "pieces", "torch's layer", "instance norm", *NORMS), make)


@pytest.mark.parametrize("name", problems())
def test_against_differences_of_the_curvature(name: str) -> None:
    problem = problems()[name](name)
    for seed in (1, 2):
        found, expected = along(problem, seed)
        assert abs(found - expected) < 1e-6 * abs(expected)


def test_torch_alone_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the norms written out, the test above would fail."""
    monkeypatch.setattr(module, "layer_norm", torch.layer_norm)
    with pytest.raises(cl.CurvlensError, match="LayerNormBackward"):
        along(small.problem())
    monkeypatch.setattr(module, "_require_right", lambda _: None)
    found, expected = along(small.problem())
    assert abs(found - expected) > 1e-2 * abs(expected)


def test_a_norm_that_is_not_known_is_refused() -> None:
    model = Normed(lambda x: torch.ops.aten.layer_norm(x, [6], None, None, 0.1)).double()
    data = (torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(7, (3, 4)))
    problem = cl.Problem(model, data, cl.losses.CrossEntropy())
    u = small.direction(problem.layout.size)
    assert line(problem, u, radii=[0.1]).third is None
    with pytest.raises(cl.CurvlensError, match=r"NativeLayerNormBackward.*third=True out"):
        line(problem, u, radii=[0.1], third=True)


def test_a_third_derivative_that_is_none() -> None:
    torch.manual_seed(0)
    model = Normed(lambda x: torch.logcumsumexp(x, -1)).double()
    data = (torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(7, (3, 4)))
    problem = cl.Problem(model, data, cl.losses.CrossEntropy())
    with pytest.raises(cl.CurvlensError, match=r"third derivative along the direction is nan.*third=True"):
        line(problem, small.direction(problem.layout.size), radii=[0.1], third=True)


def test_norms_written_out() -> None:
    x, w, b = (small.direction(n, n).reshape(shape) for n, shape in ((48, (2, 4, 6)), (24, (4, 6)), (23, 23)))
    for shape in ((6,), (4, 6)):
        own = w[0] if len(shape) == 1 else w
        assert torch.allclose(
            module.layer_norm(x, shape, own, own - 1, 1e-3), F.layer_norm(x, shape, own, own - 1, 1e-3)
        )
    assert torch.allclose(module.layer_norm(x, 6), F.layer_norm(x, (6,)))
    assert torch.allclose(
        module.instance_norm(x, weight=b[:4], bias=b[4:8]), F.instance_norm(x, weight=b[:4], bias=b[4:8])
    )
    mean, var = b[:4], b[4:8].square()
    assert torch.equal(
        module.instance_norm(x, mean, var, use_input_stats=False), F.instance_norm(x, mean, var, use_input_stats=False)
    )
    half = x.bfloat16()
    assert module.layer_norm(half, (6,)).dtype == torch.bfloat16
    assert torch.allclose(module.layer_norm(half, (6,)).float(), F.layer_norm(half, (6,)).float(), atol=1e-2)


def test_a_quadratic_has_none() -> None:
    found = line(quadratic(), small.direction(5), radii=[1.0], third=True)
    assert found.third == 0.0
    assert found.table()[0]["cubic"] == found.table()[0]["model"]
    assert "third derivative 0" in repr(found)


def test_the_cubic_model_is_nearer_to_the_loss() -> None:
    problem = small.problem()
    found = line(problem, -problem.gradient(), radii=[0.02, 0.05], third=True)
    for row in found.table():
        if row["t"]:
            assert abs(row["cubic"] - row["loss"]) < 0.5 * abs(row["model"] - row["loss"])


@pytest.mark.filterwarnings("ignore:The operator is in float32")
def test_float32_and_a_users_loss() -> None:
    model, (tokens, labels) = small.gpt(), small.tokens_and_labels()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum"), int(
            (batch[1] >= 0).sum()
        )

    u = small.direction(sum(p.numel() for p in model.parameters()))
    wide = line(small.problem(), u, radii=[0.1], third=True)
    own = line(cl.Problem(model, (tokens, labels), cl.losses.FromModel(loss)), u, radii=[0.1], third=True)
    single = line(cl.Problem(model.float(), (tokens, labels), cl.losses.CrossEntropy()), u, radii=[0.1], third=True)
    assert wide.third is not None
    assert own.third is not None
    assert single.third is not None
    assert abs(own.third - wide.third) < 1e-9 * abs(wide.third)
    assert abs(single.third - wide.third) < 1e-3 * abs(wide.third)
