"""The edge of stability: torch's optimisers leave a quadratic just above it, and dense eigenvalues."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import curvlens as cl
import small
from curvlens import dynamics
from curvlens.dynamics.optimizers import read
from curvlens.dynamics.update import step
from curvlens.results import Status
from quadratics import TwoParts, diverges, frozen, quadratic

Make = Callable[[nn.Module], torch.optim.Optimizer]

RULES: dict[str, Make] = {
    "gradient descent": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "dampening without momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, dampening=0.5),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.8, dampening=0.5),
    "Nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.7, nesterov=True),
    "weight decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5, weight_decay=0.8),
}
PRECONDITIONED: dict[str, Make] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, betas=(0.9, 0.99)),
    "Adam with decay": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, betas=(0.5, 0.99), weight_decay=0.4),
    "Adam with decay apart": lambda m: torch.optim.Adam(
        m.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=0.7, decoupled_weight_decay=True
    ),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=0.7),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1),
    "RMSprop with momentum": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, momentum=0.6, weight_decay=0.2),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.3),
}


def two_groups(module: nn.Module, make: type[torch.optim.Optimizer], *options: dict[str, Any]) -> Any:
    assert isinstance(module, TwoParts)
    return make([{"params": [p], **o} for p, o in zip((module.a, module.b), options, strict=True)])  # type: ignore[call-arg]


GROUPS: dict[str, Make] = {
    "SGD": lambda m: two_groups(
        m,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
        {"lr": 0.4, "momentum": 0.3, "dampening": 0.2},
    ),
    "AdamW": lambda m: two_groups(
        m,
        torch.optim.AdamW,
        {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.5},
        {"lr": 0.7, "betas": (0.6, 0.99), "weight_decay": 0.0},
    ),
}


def multiply(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= factor


def at_edge(problem: cl.Problem, optimizer: torch.optim.Optimizer, target: float) -> None:
    """Multiply the learning rates until they are at a fraction of the edge."""
    for _ in range(4):
        multiply(optimizer, cl.stability(problem, optimizer, tol=1e-8).headroom)
    multiply(optimizer, target)
    assert (cl.stability(problem, optimizer, tol=1e-8).ratio > 1) == (target > 1)


@pytest.mark.parametrize("target", [0.98, 1.02])
@pytest.mark.parametrize("name", RULES)
def test_sgd_leaves_just_above_the_edge(name: str, target: float) -> None:
    problem = quadratic()
    optimizer = RULES[name](problem.model)
    at_edge(problem, optimizer, target)
    assert cl.stability(problem, optimizer).stable == (target < 1)
    assert diverges(problem, optimizer) == (target > 1)


@pytest.mark.parametrize("target", [0.98, 1.02])
@pytest.mark.parametrize("name", [*PRECONDITIONED, *(f"groups of {name}" for name in GROUPS)])
def test_frozen_moments_leave_just_above_the_edge(name: str, target: float) -> None:
    problem = quadratic()
    make = PRECONDITIONED[name] if name in PRECONDITIONED else GROUPS[name.removeprefix("groups of ")]
    optimizer = make(problem.model)
    hold = frozen(optimizer, at=4) if not isinstance(optimizer, torch.optim.SGD) else lambda: None
    at_edge(problem, optimizer, target)
    assert diverges(problem, optimizer, freeze=hold) == (target > 1)


@pytest.mark.parametrize("name", [*RULES, *PRECONDITIONED])
def test_the_headroom_leads_to_the_edge(name: str) -> None:
    problem = quadratic()
    optimizer = {**RULES, **PRECONDITIONED}[name](problem.model)
    if name in PRECONDITIONED:
        frozen(optimizer, at=4)
    multiply(optimizer, cl.stability(problem, optimizer, tol=1e-9).headroom)
    assert abs(cl.stability(problem, optimizer, tol=1e-9).ratio - 1) < 1e-6


def test_the_headroom_of_groups_stays_inside() -> None:
    problem = quadratic()
    optimizer = GROUPS["AdamW"](problem.model)
    frozen(optimizer, at=4)
    multiply(optimizer, cl.stability(problem, optimizer, tol=1e-9).headroom)
    assert 0.8 < cl.stability(problem, optimizer, tol=1e-9).ratio <= 1


# Against dense eigenvalues, on a GPT


def stepped(problem: cl.Problem, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.optim.Optimizer:
    """The optimiser after some steps with the problem's gradient."""
    for _ in range(steps):
        for name, part in problem.layout.unflatten(problem.gradient()).items():
            problem.model.get_parameter(name).grad = part.clone()
        optimizer.step()
    return optimizer


def dense_ratio(problem: cl.Problem, optimizer: torch.optim.AdamW) -> tuple[float, torch.Tensor]:
    """λ_max of P̃⁻¹H, from the matrix and by another formula for the factor: 1 + trace + determinant = 0."""
    H = cl.hessian(problem).dense()
    names = {p: name for name, p in problem.model.named_parameters()}
    by_name = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state, (beta, beta2) = optimizer.state[p], group["betas"]
            t = float(state["step"])
            P = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + group["eps"]
            lr, keep = group["lr"] / (1 - beta**t), 1 - group["lr"] * group["weight_decay"]
            # the step matrix of (m, w) at η λ/P = x: trace β + keep − (1−β) x, determinant β keep
            x = (1 + beta + keep + beta * keep) / (1 - beta)
            by_name[names[p]] = (lr / (P * x)).reshape(-1)
    scale = torch.cat([by_name[name] for name in problem.layout.names]).sqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * H * scale)
    return float(values[-1]), vectors[:, -1]


def gpt_problem() -> cl.Problem:
    return cl.Problem(small.gpt(), small.tokens_and_labels(), cl.losses.CrossEntropy())


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As everyone has them: matrices decay, vectors do not."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def test_adamw_with_groups_on_a_gpt() -> None:
    problem = gpt_problem()
    optimizer = torch.optim.AdamW(decay_groups(problem.model), lr=1e-3)
    stepped(problem, optimizer)
    result = cl.stability(problem, optimizer, tol=1e-8)
    ratio, vector = dense_ratio(problem, optimizer)
    assert abs(result.ratio - ratio) < 1e-9 * ratio + result.residual
    assert abs(abs(float(result.vector @ vector)) - 1) < 1e-6
    assert result.threshold is None
    assert result.sharpness is None
    assert abs(sum(result.mass.values()) - 1) < 1e-12
    assert list(result.mass) == list(problem.blocks)
    parts = problem.blocks.split(vector)
    assert all(abs(result.mass[name] - float(x.square().sum())) < 1e-6 for name, x in parts.items())
    assert [group["group"] for group in result.groups] == [0, 1]
    assert abs(sum(row["ratio"] for row in result.table()) - result.ratio) < 1e-12
    loose = cl.stability(problem, optimizer)
    assert loose.status is Status.CONVERGED
    assert abs(loose.ratio - ratio) <= max(loose.residual, 1e-2 * ratio)
    assert cl.stability(problem, optimizer, start=loose).products <= loose.products


def test_sharpness_and_threshold_of_one_group() -> None:
    problem = gpt_problem()
    optimizer = stepped(problem, torch.optim.Adam(problem.model.parameters(), lr=1e-3, betas=(0.9, 0.95)))
    result = cl.stability(problem, optimizer, tol=1e-8)
    P = {}
    for name, p in problem.model.named_parameters():
        P[name] = (optimizer.state[p]["exp_avg_sq"] / (1 - 0.95**3)).sqrt() + 1e-8
    d = problem.layout.flatten(P) ** -0.5
    top = torch.linalg.eigvalsh(d[:, None] * cl.hessian(problem).dense() * d)[-1]
    assert result.sharpness is not None
    assert result.threshold is not None
    assert abs(result.sharpness - float(top)) < 1e-6 * float(top)
    assert abs(result.threshold - 38 / (1e-3 / (1 - 0.9**3))) < 1e-6
    assert "38/η" in result.convention


def test_the_direction_is_where_the_parameters_leave_to() -> None:
    problem = quadratic()
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.1, weight_decay=0.3)
    hold = frozen(optimizer, at=5)
    at_edge(problem, optimizer, 1.05)
    direction = cl.stability(problem, optimizer, tol=1e-9).direction
    assert diverges(problem, optimizer, freeze=hold)
    assert abs(abs(float(problem.theta @ direction) / float(problem.theta.norm())) - 1) < 1e-2


# Where the optimiser comes from


def test_a_state_dict_is_the_optimizer() -> None:
    problem = gpt_problem()
    named = torch.optim.AdamW(problem.model.named_parameters(), lr=1e-3)
    plain = torch.optim.AdamW(problem.model.parameters(), lr=1e-3)
    expected = cl.stability(problem, stepped(problem, plain)).ratio
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert cl.stability(problem, saved).ratio == expected
    other = cl.Problem(copy.deepcopy(problem.model), small.tokens_and_labels(), cl.losses.CrossEntropy())
    assert cl.stability(other, saved).ratio == expected
    stepped(problem, named)
    assert cl.stability(problem, named.state_dict()).ratio == cl.stability(problem, named).ratio


def test_the_order_of_a_state_dict() -> None:
    problem = gpt_problem()
    groups = decay_groups(problem.model)
    optimizer = stepped(problem, torch.optim.AdamW(groups, lr=1e-3))
    names = {p: name for name, p in problem.model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    expected = cl.stability(problem, optimizer).ratio
    assert cl.stability(problem, optimizer.state_dict(), order=order).ratio == expected
    with pytest.raises(cl.CurvlensError, match=r"order=\[\.\.\.\]"):
        cl.stability(problem, optimizer.state_dict())
    with pytest.raises(cl.CurvlensError, match="in another order"):
        cl.stability(problem, optimizer.state_dict(), order=list(problem.layout.names))
    with pytest.raises(cl.CurvlensError, match="order has 2 names"):
        cl.stability(problem, optimizer.state_dict(), order=order[:2])


def test_a_description_equals_the_optimizer() -> None:
    problem = gpt_problem()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    rule = dynamics.SGD(0.1, momentum=0.9, weight_decay=0.01)
    assert cl.stability(problem, rule).ratio == cl.stability(problem, optimizer).ratio
    v = {name: torch.rand_like(p) + 0.1 for name, p in problem.model.named_parameters()}
    flat = problem.layout.flatten(v)
    described = cl.stability(problem, dynamics.AdamW(1e-3, weight_decay=0.1, second_moment=v), tol=1e-8)
    assert cl.stability(problem, dynamics.AdamW(1e-3, weight_decay=0.1, second_moment=flat), tol=1e-8).ratio == (
        described.ratio
    )
    assert described.threshold is not None
    assert abs(described.threshold - 1.9 * (2 - 1e-4) / 0.1 / 1e-3) < 1e-6
    # without a second moment: that of this gradient
    g = problem.gradient()
    own = cl.stability(problem, dynamics.Adam(1e-3, second_moment=g.square()))
    assert cl.stability(problem, dynamics.Adam(1e-3)).ratio == own.ratio


FRESH: dict[str, tuple[Make, float]] = {
    "Adam": (lambda m: torch.optim.Adam(m.parameters(), lr=0.1), 38.0),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True, weight_decay=0.0), 38.0),
    "RMSprop": (lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, centered=True), 2.0),
    "Adagrad": (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), 2.0),
}


@pytest.mark.parametrize("name", list(FRESH))
def test_before_the_first_step(name: str) -> None:
    """With g² in place of the second moments, against dense matrices; the step is torch's own first step."""
    problem = quadratic()
    make, factor = FRESH[name]
    optimizer = make(problem.model)
    result = cl.stability(problem, optimizer, fresh=True, update=True, tol=1e-9)
    scale = problem.gradient().abs().clamp(min=1e-30).rsqrt()
    H = cl.hessian(problem).dense()
    sharpness = float(torch.linalg.eigvalsh(scale[:, None] * H * scale)[-1])
    assert abs(result.ratio - 0.1 * sharpness / factor) < 1e-6 * result.ratio
    assert result.note.startswith("second moments taken as g² at this point")
    assert result.update is not None
    before, slope = problem.theta, problem.gradient()
    stepped(problem, optimizer, 1)
    assert abs(result.update.slope - float(slope @ (before - problem.theta))) < 1e-9 * abs(result.update.slope)
    # after that step the optimiser has moments of its own
    assert "second moments" not in cl.stability(problem, optimizer, fresh=True).note


def test_one_parameter_before_its_first_step() -> None:
    problem = quadratic()
    optimizer = stepped(problem, torch.optim.Adam(problem.model.parameters()))
    del optimizer.state[problem.model.get_parameter("b")]
    with pytest.raises(cl.CurvlensError, match="no second moment of 'b'"):
        cl.stability(problem, optimizer)
    assert "second moments of 'b' taken as g²" in cl.stability(problem, optimizer, fresh=True).note


def test_a_part_of_the_parameters() -> None:
    model = small.gpt()
    whole = cl.Problem(model, small.tokens_and_labels(), cl.losses.CrossEntropy())
    part = cl.Problem(model, small.tokens_and_labels(), cl.losses.CrossEntropy(), params="h.0.attn")
    optimizer = stepped(whole, torch.optim.Adam(model.parameters(), lr=1e-3))
    result = cl.stability(part, optimizer, tol=1e-8)
    assert 0 < result.ratio <= cl.stability(whole, optimizer, tol=1e-8).ratio
    assert result.vector.shape == (part.layout.size,)


def test_a_group_that_stands_still_takes_no_part() -> None:
    problem = quadratic()
    assert isinstance(problem.model, TwoParts)
    optimizer = torch.optim.SGD([{"params": [problem.model.a], "lr": 0.1}, {"params": [problem.model.b], "lr": 0.0}])
    top = torch.linalg.eigvalsh(cl.hessian(problem)["a"].dense())[-1]
    result = cl.stability(problem, optimizer, tol=1e-9)
    assert abs(result.ratio - 0.05 * float(top)) < 1e-9
    assert result.mass["b"] < 1e-12


# Along the step


@pytest.mark.parametrize("name", [*RULES, *PRECONDITIONED])
def test_the_step_is_that_of_torch(name: str) -> None:
    problem = quadratic()
    optimizer = {**RULES, **PRECONDITIONED}[name](problem.model)
    stepped(problem, optimizer, 2)
    d = step(problem, read(problem, optimizer, None), problem.gradient())
    before = problem.theta
    stepped(problem, optimizer, 1)
    assert small.relative(d, before - problem.theta) < 1e-9


def test_along_the_step_of_a_quadratic() -> None:
    problem = quadratic()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.05)
    update = cl.stability(problem, optimizer, update=True).update
    assert update is not None
    g, H = problem.gradient(), cl.hessian(problem)
    assert update.sharpness is not None
    assert abs(update.sharpness - H.quadratic(g) / float(g @ g)) < 1e-9
    assert abs(update.critical - 2 / (0.05 * update.sharpness)) < 1e-9
    assert abs(update.measured / update.critical - 1) < 0.05
    assert update.line.forward_open
    loss = problem.with_params(problem.theta - update.best * 0.05 * g).loss()
    assert loss < problem.loss()


def test_a_step_that_climbs() -> None:
    problem = quadratic()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=1e-4, momentum=0.9)
    stepped(problem, optimizer, 1)
    for p in problem.model.parameters():
        optimizer.state[p]["momentum_buffer"].mul_(-50)
    update = cl.stability(problem, optimizer, update=True).update
    assert update is not None
    assert update.slope < 0
    assert update.measured == update.critical == 0
    assert update.sharpness is None


# What cannot be answered


def test_wrong_optimizers() -> None:
    problem = quadratic()
    parameters = list(problem.model.parameters())
    with pytest.raises(cl.CurvlensError, match=r"a NAdam.*Known are torch.optim.SGD, Adam"):
        cl.stability(problem, torch.optim.NAdam(parameters))
    with pytest.raises(cl.CurvlensError, match="Take a step of the optimiser first"):
        cl.stability(problem, torch.optim.Adam(parameters))
    with pytest.raises(cl.CurvlensError, match="None of the tensors of the optimiser"):
        cl.stability(problem, torch.optim.SGD(TwoParts().parameters(), lr=0.1))
    with pytest.raises(cl.CurvlensError, match="does not move 'b'"):
        cl.stability(problem, torch.optim.SGD(parameters[:1], lr=0.1))
    with pytest.raises(cl.CurvlensError, match="The learning rate is 0"):
        cl.stability(problem, torch.optim.SGD(parameters, lr=0.0))
    with pytest.raises(cl.CurvlensError, match="maximize=True"):
        cl.stability(problem, torch.optim.SGD(parameters, lr=0.1, maximize=True))
    with pytest.raises(cl.CurvlensError, match="takes no gradient at all"):
        cl.stability(problem, torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=1.0))
    with pytest.raises(cl.CurvlensError, match=r"momentum=1\.5, expected 0 to below 1"):
        cl.stability(problem, torch.optim.SGD(parameters, lr=0.1, momentum=1.5))
    with pytest.raises(cl.CurvlensError, match=r"nesterov=True with momentum=0\.9 and dampening=0\.5"):
        cl.stability(problem, dynamics.SGD(0.1, momentum=0.9, dampening=0.5, nesterov=True))
    with pytest.raises(cl.CurvlensError, match="lr='a'"):
        cl.stability(problem, dynamics.SGD("a"))  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="momentum=1, expected 0 to below 1"):
        cl.stability(problem, dynamics.SGD(0.1, momentum=1.0))
    of_gpt = gpt_problem()
    with pytest.raises(cl.CurvlensError, match=r"Muon.*no edge"):  # and not that it moves a part only
        cl.stability(of_gpt, muon_and_adamw(of_gpt.model)[0])
    with pytest.raises(cl.CurvlensError, match="the decay alone diverges"):
        cl.stability(problem, stepped(problem, torch.optim.AdamW(parameters, lr=1.0, weight_decay=2.5)))
    with pytest.raises(cl.CurvlensError, match="above 0"):
        cl.stability(problem, dynamics.SGD(0.0))
    with pytest.raises(cl.CurvlensError, match="an int"):
        cl.stability(problem, 3)
    with pytest.raises(cl.CurvlensError, match="expected a Problem"):
        cl.stability(problem.model, dynamics.SGD(0.1))  # type: ignore[arg-type]


def test_wrong_states() -> None:
    problem = quadratic()
    optimizer = stepped(problem, torch.optim.Adam(problem.model.parameters()))
    saved = optimizer.state_dict()
    with pytest.raises(cl.CurvlensError, match="with 'state' and 'param_groups'"):
        cl.stability(problem, {"model": {}})
    older = copy.deepcopy(saved)
    del older["param_groups"][0]["decoupled_weight_decay"]
    assert cl.stability(problem, older).rule == "Adam"  # without decay the two are one
    older["param_groups"][0]["weight_decay"] = 0.1
    with pytest.raises(cl.CurvlensError, match="does not say whether it is of Adam or of AdamW"):
        cl.stability(problem, older)
    strange = copy.deepcopy(saved)
    del strange["param_groups"][0]["amsgrad"]
    with pytest.raises(cl.CurvlensError, match="belong to no known optimiser"):
        cl.stability(problem, strange)
    next(iter(optimizer.state.values()))["exp_avg_sq"][1] = float("nan")
    with pytest.raises(cl.CurvlensError, match="1 of 3 numbers in exp_avg_sq of 'a' are NaN"):
        cl.stability(problem, optimizer)
    with pytest.raises(cl.CurvlensError, match="second_moment has shape"):
        cl.stability(problem, dynamics.Adam(second_moment=torch.ones(2)))
    with pytest.raises(cl.CurvlensError, match="Use eps=1e-8"):
        cl.stability(problem, dynamics.Adam(eps=0.0, second_moment=torch.zeros(5)))


@pytest.mark.parametrize(
    "wrong", [{"lr": math.nan}, {"lr": -1.0}, {"lr": "x"}, {"betas": (1.0, 1.0)}, {"betas": 0.9}, {"eps": math.inf}]
)
def test_settings_of_a_file_that_torch_would_refuse(wrong: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    asked = cl.Problem(model, (torch.eye(2).double(), torch.zeros(2, 1).double()), cl.losses.MSE())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= wrong
    with pytest.raises(cl.CurvlensError, match=f"Group 0 of the optimiser has {next(iter(wrong))}="):
        cl.stability(asked, saved)


@pytest.mark.parametrize("groups", [[1], [{"params": 0}], None])
def test_groups_that_are_none(groups: Any) -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    asked = cl.Problem(model, (torch.eye(2).double(), torch.zeros(2, 1).double()), cl.losses.MSE())
    with pytest.raises(cl.CurvlensError, match="expected the state dict of an optimiser"):
        cl.stability(asked, {"state": {}, "param_groups": groups})


# Other optimisers: lists, Muon, P by hand, any of torch's kind


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As everyone has them: Muon for the matrices of the layers, AdamW for all else."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("h.")]
    others = [p for p in model.parameters() if not any(p is each for each in hidden)]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]


def test_a_list_of_optimizers_is_one_with_groups() -> None:
    problem = quadratic()
    assert isinstance(problem.model, TwoParts)
    a, b = problem.model.a, problem.model.b
    both = [torch.optim.SGD([a], lr=0.1, momentum=0.9), torch.optim.SGD([b], lr=0.4)]
    one = torch.optim.SGD([{"params": [a], "lr": 0.1, "momentum": 0.9}, {"params": [b], "lr": 0.4}])
    result, expected = (cl.stability(problem, each, tol=1e-9) for each in (both, one))
    assert result.ratio == expected.ratio
    assert [group["group"] for group in result.groups] == [0, 1]
    mixed = [torch.optim.SGD([a], lr=0.1), torch.optim.Adam([b], lr=0.01)]
    assert cl.stability(problem, mixed, fresh=True).rule == "SGD and Adam"
    with pytest.raises(cl.CurvlensError, match="Two of the optimisers move 'a'"):
        cl.stability(problem, [both[0], one])
    with pytest.raises(cl.CurvlensError, match="The list has 0 optimisers"):
        cl.stability(problem, [])
    with pytest.raises(cl.CurvlensError, match="give it alone"):
        cl.stability(problem, [dynamics.SGD(0.1), both[0]])


def test_muon_has_a_step_and_no_edge() -> None:
    problem = gpt_problem()
    optimizers = muon_and_adamw(problem.model)
    for optimizer in optimizers:
        stepped(problem, optimizer, 2)
    with pytest.raises(cl.CurvlensError, match=r"Muon.*no edge of stability.*next_step"):
        cl.stability(problem, optimizers)
    with pytest.raises(cl.CurvlensError, match="no edge of stability"):
        dynamics.forecast(problem, optimizers)
    update = dynamics.next_step(problem, optimizers)
    theta, g, H = problem.theta, problem.gradient(), cl.hessian(problem).dense()
    for name, part in problem.layout.unflatten(g).items():
        problem.model.get_parameter(name).grad = part.clone()
    for optimizer in optimizers:
        optimizer.step()
    d = theta - problem.theta
    with torch.no_grad():
        for name, part in problem.layout.unflatten(theta).items():
            problem.model.get_parameter(name).copy_(part)
    assert abs(update.slope - float(g @ d)) < 1e-9 * abs(update.slope)
    assert abs(update.curvature - float(d @ H @ d)) < 1e-9 * abs(update.curvature)
    assert update.sharpness is None  # two learning rates
    assert update.critical == 2 * update.best == 2 * update.slope / update.curvature
    # the critical step by brute force
    start, s = problem.loss(), update.measured
    assert problem.with_params(theta - 0.95 * s * d).loss() < start < problem.with_params(theta - 1.06 * s * d).loss()


def test_muon_from_its_state_dict() -> None:
    problem, name = gpt_problem(), "h.0.attn.q.weight"
    matrices = cl.Problem(problem.model, small.tokens_and_labels(), cl.losses.CrossEntropy(), params=name)
    optimizer = stepped(matrices, torch.optim.Muon([(name, problem.model.get_parameter(name))], lr=0.02))
    expected = dynamics.next_step(matrices, optimizer)
    found = dynamics.next_step(matrices, optimizer.state_dict())
    assert found.slope == expected.slope
    assert found.sharpness is not None
    assert abs(found.sharpness - found.curvature / (0.02 * found.slope)) < 1e-12 * abs(found.sharpness)


def test_a_step_that_climbs_and_one_beyond_float64() -> None:
    problem = quadratic()
    down, up = (
        dynamics.next_step(problem, torch.optim.SGD(problem.model.parameters(), lr=0.1, maximize=climbs))
        for climbs in (False, True)
    )
    assert up.slope == -down.slope < 0
    assert up.measured == 0.0
    model = nn.Linear(3, 1).double()
    huge = cl.Problem(model, (1e100 * torch.ones(4, 3).double(), torch.ones(4, 1).double()), cl.losses.MSE())
    with pytest.raises(cl.CurvlensError, match="beyond float64"):
        dynamics.next_step(huge, torch.optim.SGD(model.parameters(), lr=0.1))


def test_any_optimizer_steps_on_a_copy() -> None:
    problem = gpt_problem()
    optimizer = stepped(problem, torch.optim.NAdam(problem.model.parameters(), lr=1e-2), 2)
    before = copy.deepcopy(optimizer.state_dict())
    theta, g = problem.theta, problem.gradient()
    update = dynamics.next_step(problem, optimizer)
    assert torch.equal(problem.theta, theta)
    assert all(
        torch.equal(x, before["state"][i][key])
        for i, s in optimizer.state_dict()["state"].items()
        for key, x in s.items()
    )
    stepped(problem, optimizer, 1)
    assert abs(update.slope - float(g @ (theta - problem.theta))) < 1e-12 * abs(update.slope)
    assert update.sharpness is not None
    with pytest.raises(cl.CurvlensError, match="LBFGS cannot step from a gradient alone"):
        dynamics.next_step(problem, torch.optim.LBFGS(problem.model.parameters()))
    with pytest.raises(cl.CurvlensError, match="expected a Problem"):
        dynamics.next_step(problem.model, optimizer)  # type: ignore[arg-type]
    one, *others = problem.model.parameters()
    with pytest.raises(cl.CurvlensError, match="does not move"):
        dynamics.next_step(problem, torch.optim.NAdam(others))
    with pytest.raises(cl.CurvlensError, match="a dict beside a NAdam"):
        dynamics.next_step(problem, [torch.optim.NAdam(others), torch.optim.SGD([one], lr=0.1).state_dict()])
    both = dynamics.next_step(problem, [torch.optim.NAdam(others), torch.optim.SGD([one], lr=0.1)])
    assert both.sharpness is None


@pytest.mark.parametrize("target", [0.98, 1.02])
def test_a_preconditioner_by_hand(target: float) -> None:
    """As plain descent with P, run step by step; and as Adam's own with its factor."""
    problem = quadratic()
    P = torch.rand(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
    edge = cl.stability(problem, dynamics.Preconditioned(1.0, P), tol=1e-9)
    assert edge.sharpness is not None
    lr = target * 2 / edge.sharpness
    rule = dynamics.Preconditioned(lr, P)
    assert abs(cl.stability(problem, rule, tol=1e-9).ratio - target) < 1e-6
    H, x = cl.hessian(problem).dense(), small.direction(5)
    far = (torch.eye(5, dtype=torch.float64) - lr * H / P[:, None]).matrix_power(3000) @ x
    assert (float(far.norm()) > 1e3) == (target > 1)
    course = dynamics.forecast(problem, rule, 5)
    assert torch.allclose(course.losses, course.true_losses, rtol=1e-10)
    d = step(problem, read(problem, rule, None), problem.gradient())
    assert torch.allclose(d, lr * problem.gradient() / P)
    decayed = dynamics.Preconditioned(lr, P, weight_decay=0.5)
    assert torch.allclose(
        step(problem, read(problem, decayed, None), problem.gradient()),
        lr * (problem.gradient() + 0.5 * problem.theta) / P,
    )
    v = (P - 1e-8).square()
    adam = cl.stability(problem, dynamics.Adam(0.1, second_moment=v), tol=1e-9)
    named = dynamics.Preconditioned(0.1, problem.layout.unflatten(P), factor=38)
    assert abs(cl.stability(problem, named, tol=1e-9).ratio - adam.ratio) < 1e-9
    assert "38/η" in cl.stability(problem, named).convention
    for call in (lambda: dynamics.forecast(problem, named, 3), lambda: dynamics.next_step(problem, named)):
        with pytest.raises(cl.CurvlensError, match="factor=2 only"):
            call()
    for wrong in (dynamics.Preconditioned(0.1, P - 1), dynamics.Preconditioned(0.1, P, factor=0)):
        with pytest.raises(cl.CurvlensError, match="expected numbers above 0"):
            cl.stability(problem, wrong)
    with pytest.raises(cl.CurvlensError, match="preconditioner has shape"):
        cl.stability(problem, dynamics.Preconditioned(0.1, P[:2]))


def test_a_state_dict_of_another_model() -> None:
    optimizer = torch.optim.AdamW(
        [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))]}]
    )
    with pytest.raises(
        cl.CurvlensError, match=r"is of 2 parameters in 2 groups, and the model has \d+. Is it of another"
    ):
        cl.stability(small.problem(), optimizer.state_dict(), fresh=True)
