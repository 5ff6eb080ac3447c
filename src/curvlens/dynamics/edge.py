"""Where an optimiser leaves a quadratic: η λ_max(P⁻¹H) = c, from the eigenvalue −1 of one step.

One step maps a displacement and its momentum along an eigenvector by a 2 × 2 matrix; the edge is 1 + trace +
determinant = 0. P is frozen. With η and c of each parameter, P̃ = P c/η, and the edge is λ_max(P̃^-½ H P̃^-½) = 1
(`docs/explanation/math.md`, "Stability").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.dynamics.optimizers import MOMENTS, NO_EDGE, Group
from curvlens.errors import CurvlensError


@dataclass(frozen=True)
class Edge:
    """The edge of one parameter."""

    group: int
    P: Tensor | None
    """The preconditioner, float64; None is 1."""
    lr: float
    """η: with the bias correction of Adam."""
    factor: float
    """c: the largest stable η λ."""
    decay: float
    """γ of weight decay in the gradient, which adds γ to H."""
    shrink: float
    """ηγ of weight decay apart from the gradient."""

    def scale(self, name: str) -> Tensor | float:
        """P̃^-½ = √(η/(P c)), 0 where the learning rate is."""
        whole = self.lr / self.factor
        if self.P is None:
            return math.sqrt(whole)
        if whole and not bool((self.P > 0).all()):
            raise CurvlensError(
                f"The preconditioner of {name!r} has entries that are not above 0: a second moment is 0 and so is eps. "
                "Use eps=1e-8."
            )
        return (whole / self.P).sqrt() if whole else 0.0


def edges(group: Group) -> dict[str, Edge]:
    """The edge of every parameter of a group."""
    require_edge(group)
    make = {
        "SGD": _sgd,
        "Adam": _adam,
        "AdamW": _adam,
        "RMSprop": _rmsprop,
        "Adagrad": _adagrad,
        "Preconditioned": _by_hand,
    }[group.kind]
    found = {name: make(group, group.state.get(name, {})) for name in group.names}
    for edge in found.values():
        if not edge.factor > 0:
            raise CurvlensError(
                f"Group {group.index} has lr · weight_decay = {edge.shrink:g}: from 2 on the decay alone diverges. "
                "Lower one of the two."
            )
    return found


def require_edge(group: Group) -> None:
    """Raise for an optimiser whose step is no linear function of the gradient."""
    if group.kind == "Muon":
        raise CurvlensError(NO_EDGE)


def conventions(groups: list[Group]) -> str:
    """The formulas of the thresholds, each once."""
    said = list(dict.fromkeys(_convention(group.kind, group.options) for group in groups))
    if any("betas" in group.options for group in groups):
        said.append("papers that fold 1−β₁ into η write 2/η")
    return "; ".join(said)


def _convention(kind: str, options: dict[str, Any]) -> str:
    if kind == "SGD":
        beta, damp = options.get("momentum", 0), options.get("dampening", 0)
        if not beta:
            return "gradient descent: λ_max(H) < 2/η"
        if options.get("nesterov"):
            return f"Nesterov momentum β = {beta:g}: λ_max(H) < 2(1+β)/((1+2β) η)"
        damped = f", dampening d = {damp:g}: λ_max(H) < 2(1+β)/((1−d) η)" if damp else ": λ_max(H) < 2(1+β)/η"
        return f"momentum β = {beta:g}{damped}"
    sharpness = "λ_max(P^-½ H P^-½)"
    if kind in ("Adam", "AdamW"):
        beta, decay = options["betas"][0], options.get("weight_decay", 0)
        factor = 2 * (1 + beta) / (1 - beta)
        if kind == "AdamW" and decay:
            limit = f"(1+β₁)(2−ηγ)/((1−β₁) η), about {factor:g}/η"
            return f"AdamW, β₁ = {beta:g}, decay γ = {decay:g}, P = √v̂ + ε: {sharpness} < {limit}"
        return f"{kind}, β₁ = {beta:g}, P = √v̂ + ε: {sharpness} < 2(1+β₁)/((1−β₁) η) = {factor:g}/η"
    if kind == "Preconditioned":
        return f"P given by hand: {sharpness} < {options['factor']:g}/η"
    if kind == "RMSprop" and options.get("momentum"):
        return f"RMSprop, momentum β = {options['momentum']:g}, P = √v + ε: {sharpness} < 2(1+β)/η"
    return f"{kind}, P = √v + ε: {sharpness} < 2/η"


def _sgd(group: Group, state: dict[str, Any]) -> Edge:
    options = group.options
    beta, damp = options.get("momentum", 0.0), options.get("dampening", 0.0)
    if not beta:  # torch uses no dampening then
        factor = 2.0
    elif options.get("nesterov"):
        factor = 2 * (1 + beta) / (1 + 2 * beta)
    elif damp >= 1:
        raise CurvlensError(f"dampening={damp:g} with momentum takes no gradient at all. Expected less than 1.")
    else:
        factor = 2 * (1 + beta) / (1 - damp)
    return Edge(group.index, None, options["lr"], factor, options.get("weight_decay", 0.0), 0.0)


def _adam(group: Group, state: dict[str, Any]) -> Edge:
    options = group.options
    beta1, beta2 = options["betas"]
    moment = state["max_exp_avg_sq"] if options.get("amsgrad") else state[MOMENTS[group.kind]]
    v, lr = moment.detach().double(), options["lr"]
    step = float(state["step"]) if "step" in state else 0.0  # 0: described, both corrections are over
    if step:
        v, lr = v / (1 - beta2**step), lr / (1 - beta1**step)
    decay, apart = options.get("weight_decay", 0.0), group.kind == "AdamW"
    shrink = options["lr"] * decay if apart else 0.0
    factor = (1 + beta1) * (2 - shrink) / (1 - beta1)
    return Edge(group.index, v.sqrt() + options["eps"], lr, factor, 0.0 if apart else decay, shrink)


def _rmsprop(group: Group, state: dict[str, Any]) -> Edge:
    options = group.options
    v = state["square_avg"].detach().double()
    if options.get("centered"):
        v = (v - state["grad_avg"].detach().double().square()).clamp(min=0)
    factor = 2 * (1 + options.get("momentum", 0.0))
    P = v.sqrt() + options["eps"]
    return Edge(group.index, P, options["lr"], factor, options.get("weight_decay", 0.0), 0.0)


def _by_hand(group: Group, state: dict[str, Any]) -> Edge:
    options = group.options
    return Edge(group.index, state["P"], options["lr"], options["factor"], options["weight_decay"], 0.0)


def _adagrad(group: Group, state: dict[str, Any]) -> Edge:
    options = group.options
    P = state["sum"].detach().double().sqrt() + options["eps"]
    lr = options["lr"] / (1 + (float(state["step"]) - 1) * options.get("lr_decay", 0.0))
    return Edge(group.index, P, lr, 2.0, options.get("weight_decay", 0.0), 0.0)


def flattened(problem: Any, parts: dict[str, Tensor | float]) -> Tensor:
    """One number, or one for each entry, of every parameter as a flat vector of the problem."""
    flat = torch.empty(problem.layout.size, dtype=torch.float64, device=problem.device)
    for name, place in problem.layout.slices.items():
        part = parts[name]
        flat[place] = part.reshape(-1).to(flat) if isinstance(part, Tensor) else part
    return flat
