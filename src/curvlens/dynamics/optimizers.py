"""What an optimiser does to which parameter: its groups and its state, by the names of a problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvlens.dynamics.rules import Adam, AdamW, Described, Preconditioned
from curvlens.errors import CurvlensError, a_kind, listing
from curvlens.problem import Problem

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad),
        torch.optim.Muon,
    )
}
"""The optimisers whose groups and state are read here."""
EDGED = tuple(kind for kind in CLASSES if kind != "Muon")
"""Those that have an edge of stability."""
NO_EDGE = (
    "Muon orthogonalises its step, so it has no preconditioner P and no edge of stability. Measure along its step: "
    "cl.dynamics.next_step(problem, optimizer) gives the directional sharpness and the critical step."
)
KNOWN = (
    f"Known are torch.optim.{', '.join(EDGED)}, their state dicts, lists of them, and cl.dynamics.SGD, Adam and AdamW"
)
MOMENTS = {"Adam": "exp_avg_sq", "AdamW": "exp_avg_sq", "RMSprop": "square_avg", "Adagrad": "sum"}
"""Where their state has the second moment."""
_MARKS = {
    "SGD": ({"momentum", "dampening", "nesterov"}, set[str]()),
    "Adam": ({"betas", "eps", "amsgrad"}, {"momentum_decay"}),
    "RMSprop": ({"alpha", "centered"}, set[str]()),
    "Adagrad": ({"lr_decay", "initial_accumulator_value"}, set[str]()),
    "Muon": ({"ns_steps", "ns_coefficients"}, set[str]()),
}
"""A state dict does not say its class: the options that a group of each has, and has not."""


@dataclass(frozen=True)
class Group:
    """Some parameters of the problem with the same options."""

    kind: str
    """The class of torch."""
    index: int
    """Which group of the optimiser."""
    options: dict[str, Any]
    names: list[str]
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By parameter name, as torch has it."""


def read(
    problem: Problem, optimizer: object, order: Sequence[str] | None, *, fresh: bool = False, edged: bool = False
) -> list[Group]:
    """The groups of an optimiser, or of its state dict, or of a description, that move parameters of the problem.

    ``optimizer`` may be a list: each of them moves some of the parameters. With ``fresh`` second moments may be
    missing. With ``edged`` all of them must have an edge of stability.
    """
    given = members(optimizer)
    if len(given) == 1 and isinstance(given[0], Described):
        return [_described(problem, given[0])]
    found = [
        _of_state_dict(problem, each, order) if isinstance(each, Mapping) else _of_optimizer(problem, each)
        for each in given
    ]
    groups = [group for each in found for group in each]
    if len(given) > 1:
        groups = [replace(group, index=index) for index, group in enumerate(groups)]
    if edged and any(group.kind == "Muon" for group in groups):
        raise CurvlensError(NO_EDGE)
    require_moved(problem, [name for group in groups for name in group.names])
    for group in groups:
        _check(problem, group, fresh=fresh, edged=edged)
    if not any(float(group.options["lr"]) for group in groups):
        raise CurvlensError(
            "The learning rate is 0 in every group, so nothing moves and there is no edge. A schedule that warms up "
            "begins so: ask after its first step, or describe the rule: cl.dynamics.AdamW(lr=1e-3)."
        )
    return groups


def assumed(optimizer: object) -> str:
    """A note on a description of Adam that leaves its second moments out."""
    rule = optimizer[0] if isinstance(optimizer, (list, tuple)) and optimizer else optimizer
    if not isinstance(rule, (Adam, AdamW)) or rule.second_moment is not None:
        return ""
    return "second moments taken as g² at this point, as after many steps here; give second_moment= or an optimiser"


def members(optimizer: object) -> list[Any]:
    """One optimiser, or all of a list."""
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given or (len(given) > 1 and any(isinstance(each, Described) for each in given)):
        raise CurvlensError(
            f"The list has {len(given)} optimisers, expected some of torch.optim or their state dicts. A description "
            "such as cl.dynamics.SGD(0.1) is for all parameters: give it alone."
        )
    return given


def require_moved(problem: Problem, names: Sequence[str]) -> None:
    """Raise unless every parameter of the problem is moved, and by one optimiser."""
    still = [name for name in problem.layout.names if name not in set(names)]
    if still:
        raise CurvlensError(
            f"The optimiser does not move {listing(still)} of the problem. Leave them out: "
            "Problem(..., params=[names that it moves])."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CurvlensError(f"Two of the optimisers move {listing(twice)}. Give optimisers of different parameters.")


def unwrapped(optimizer: Any) -> Any:
    """torch's optimiser: wrappers of other libraries hold it in their attribute ``optimizer``."""
    inner = optimizer
    for _ in range(4):
        if isinstance(inner, torch.optim.Optimizer) and type(inner).__name__ in CLASSES:
            return inner
        inner = getattr(inner, "optimizer", inner)
    return inner


def _described(problem: Problem, rule: Described) -> Group:
    kind = type(rule).__name__
    names = list(problem.layout.names)
    if not _number(rule.lr) or not rule.lr > 0:
        raise CurvlensError(f"{kind}(lr={rule.lr!r}), expected a learning rate above 0.")
    state: dict[str, dict[str, Any]] = {}
    if isinstance(rule, Preconditioned):
        P = _given(problem, rule.preconditioner, "preconditioner")
        if not bool((P > 0).all()) or not rule.factor > 0:
            raise CurvlensError(
                f"Preconditioned(factor={rule.factor}) with a smallest entry of P of {float(P.min()):g}, expected "
                "numbers above 0 for both."
            )
        state = {name: {"P": part} for name, part in problem.layout.unflatten(P).items()}
    if isinstance(rule, (Adam, AdamW)):
        given = rule.second_moment
        flat = problem.gradient().double().square() if given is None else _given(problem, given, "second_moment")
        # No `step`: the moments are corrected already, and the learning rate is the one of a long run.
        state = {name: {"exp_avg_sq": part} for name, part in problem.layout.unflatten(flat).items()}
    group = Group(kind, 0, rule.options, names, state)
    _check(problem, group)
    return group


def _given(problem: Problem, given: Tensor | Mapping[str, Tensor], name: str) -> Tensor:
    """A number for each parameter, flat, in float64."""
    if isinstance(given, Mapping):
        return problem.layout.flatten(given, dtype=torch.float64, device=problem.device)
    if given.shape != (problem.layout.size,):
        raise CurvlensError(
            f"{name} has shape {tuple(given.shape)}, expected ({problem.layout.size},) or a dict by name."
        )
    return given.detach().to(problem.device, torch.float64)


def _of_optimizer(problem: Problem, optimizer: Any) -> list[Group]:
    optimizer = unwrapped(optimizer)
    kind = type(optimizer).__name__
    if CLASSES.get(kind) is not type(optimizer):
        raise CurvlensError(
            f"The optimiser is {a_kind(optimizer)}, whose rule is not known here. {KNOWN}. For others give the "
            "diagonal P by hand, cl.dynamics.Preconditioned(lr, P, factor=2), or measure along the step: "
            "cl.dynamics.next_step(problem, optimizer)."
        )
    names = {id(p): name for name, p in problem._evaluation.parameters().items()}
    groups = []
    decoupled = kind == "Adam" and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    kind = "AdamW" if decoupled else kind
    for index, group in enumerate(optimizer.param_groups):
        own = {names[id(p)]: p for p in group["params"] if id(p) in names}
        state = {name: dict(optimizer.state[p]) for name, p in own.items() if p in optimizer.state}
        groups.append(Group(kind, index, _options(group), list(own), state))
    if not any(group.names for group in groups):
        raise CurvlensError(
            "None of the tensors of the optimiser is a parameter of the problem. If the problem has a copy of the "
            "model, give stability(problem, optimizer.state_dict(), order=[names in the order of the optimiser])."
        )
    return [group for group in groups if group.names]


def _of_state_dict(problem: Problem, saved: Mapping[str, Any], order: Sequence[str] | None) -> list[Group]:
    given = saved.get("param_groups")
    raw = [each for each in given if isinstance(each, Mapping)] if isinstance(given, list) else []
    whole = isinstance(given, list) and len(raw) == len(given) and isinstance(saved.get("state"), Mapping)
    if not whole or not all(isinstance(group.get("params"), list) for group in raw):
        raise CurvlensError(
            f"The dict has the entries {listing(map(str, saved))}, expected the state dict of an optimiser, with "
            "'state' and 'param_groups'. Give torch.load('optimizer.pt', weights_only=True)."
        )
    keys = [key for group in raw for key in group["params"]]
    names = dict(zip(keys, _order(problem, raw, len(keys), order), strict=True))
    groups = []
    for index, group in enumerate(raw):
        own = {names[key]: key for key in group["params"] if names[key] in problem.layout.shapes}
        state = {name: dict(saved["state"][key]) for name, key in own.items() if key in saved["state"]}
        groups.append(Group(_kind(group), index, _options(group), list(own), state))
    return [group for group in groups if group.names]


def _kind(group: Mapping[str, Any]) -> str:
    """The class, by the options of a group."""
    found = [kind for kind, (has, lacks) in _MARKS.items() if has <= group.keys() and not lacks & group.keys()]
    if not found:
        raise CurvlensError(
            f"The state dict has the options {listing(map(str, group), 12)}, which belong to no known optimiser. "
            f"{KNOWN}."
        )
    if found[0] != "Adam":
        return found[0]
    if "decoupled_weight_decay" not in group and group.get("weight_decay"):
        raise CurvlensError(
            "The state dict does not say whether it is of Adam or of AdamW: an older torch wrote it. Say it: set "
            "group['decoupled_weight_decay'] = True (AdamW) or False (Adam) in each of its 'param_groups'."
        )
    return "AdamW" if group.get("decoupled_weight_decay") else "Adam"


def _order(problem: Problem, raw: list[Any], count: int, order: Sequence[str] | None) -> list[str]:
    """The names of the parameters in the order of the optimiser."""
    if order is None and all("param_names" in group for group in raw):
        order = [name for group in raw for name in group["param_names"]]
    everything = list(problem.model.named_parameters())
    if order is None and len(raw) == 1:
        for names in ([name for name, _ in everything], [name for name, p in everything if p.requires_grad]):
            if len(names) == count:
                return names
    if order is None:
        have = {len(everything), sum(p.requires_grad for _, p in everything)}
        groups = f"{len(raw)} group{'s' * (len(raw) != 1)}"
        if count not in have:
            raise CurvlensError(
                f"The state dict is of {count} parameters in {groups}, and the model has {len(everything)}. Is it of "
                "another model? If the optimiser moves only some parameters, make it from names: "
                "AdamW(model.named_parameters()), or give order=[...] to stability."
            )
        raise CurvlensError(
            f"The state dict numbers its {count} parameters in {groups} and does not name them. Make the optimiser "
            "from model.named_parameters(), or give their names in its order: stability(problem, state_dict, "
            "order=[...])."
        )
    if len(order) != count:
        raise CurvlensError(f"order has {len(order)} names; the state dict has {count} parameters.")
    return list(order)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers: learning rates and betas may be tensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(plain, value))
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    return {name: plain(value) for name, value in group.items() if name not in ("params", "param_names")}


def _check(problem: Problem, group: Group, *, fresh: bool = False, edged: bool = True) -> None:
    """That the state is there, whole and finite."""
    if edged and group.options.get("maximize"):
        raise CurvlensError("The optimiser has maximize=True and climbs. Stability is known for descent only.")
    _check_options(group)
    moment = MOMENTS.get(group.kind)
    missing = [name for name in group.names if moment is not None and moment not in group.state.get(name, {})]
    if missing and not fresh:
        what = (
            "no second moments yet" if len(missing) == len(group.names) else f"no second moment of {listing(missing)}"
        )
        raise CurvlensError(
            f"{group.kind} has {what}: a parameter gets one in its first step with a gradient. Take a step of the "
            "optimiser first, or give fresh=True to stability or forecast, which takes g² at this point in their place."
        )
    for name, state in group.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if key != "step" and value.ndim and tuple(value.shape) != problem.layout.shapes[name]:
                raise CurvlensError(
                    f"{key} of {name!r} has shape {tuple(value.shape)}, the parameter {problem.layout.shapes[name]}. "
                    "The state is of another model, or in another order: give order=[names]."
                )
            bad = int((~value.isfinite()).sum()) if value.is_floating_point() else 0
            if bad:
                raise CurvlensError(
                    f"{bad} of {value.numel()} numbers in {key} of {name!r} are NaN or infinite. The optimiser has "
                    "diverged: load a checkpoint from before."
                )


def _check_options(group: Group) -> None:
    """That the settings are those that torch allows: a file may hold others."""
    for name in ("lr", "eps", "weight_decay", "momentum", "dampening", "alpha", "lr_decay"):
        value = group.options.get(name, 0.0)
        if not _number(value) or (value < 0 and name != "dampening"):
            raise CurvlensError(f"Group {group.index} of the optimiser has {name}={value!r}, expected a number from 0.")
    if group.options.get("nesterov") and (group.options.get("dampening") or not group.options.get("momentum")):
        raise CurvlensError(
            f"Group {group.index} of the optimiser has nesterov=True with momentum={group.options.get('momentum', 0)} "
            f"and dampening={group.options.get('dampening', 0)}, expected a momentum above 0 and no dampening."
        )
    if group.options.get("momentum", 0.0) >= 1:
        raise CurvlensError(
            f"Group {group.index} of the optimiser has momentum={group.options['momentum']:g}, expected 0 to below 1: "
            "from 1 on old gradients never fade."
        )
    betas = group.options.get("betas", (0.0, 0.0))
    if not isinstance(betas, tuple) or len(betas) != 2 or not all(_number(beta) and 0 <= beta < 1 for beta in betas):
        raise CurvlensError(
            f"Group {group.index} of the optimiser has betas={betas!r}, expected two numbers from 0 to below 1."
        )


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
