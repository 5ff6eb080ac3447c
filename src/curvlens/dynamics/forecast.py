"""Where would an optimiser go if the loss were quadratic, and when does the true loss part from that?

On the quadratic model every step is linear, so that the whole course stays in the block Krylov space of the gradient,
the momentum and, with weight decay, θ. There the optimiser is run on a small matrix (`docs/explanation/math.md`,
"Forecast").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvlens.dynamics.edge import edges, flattened, require_edge
from curvlens.dynamics.fresh import begun
from curvlens.dynamics.krylov import Krylov, krylov
from curvlens.dynamics.noisy import added_loss
from curvlens.dynamics.optimizers import Group, assumed, read
from curvlens.dynamics.provenance import provenance
from curvlens.dynamics.separated import Separated
from curvlens.dynamics.stepping import WITHOUT_MOMENTUM, Copies
from curvlens.errors import CurvlensError, NonFiniteLossError, listing
from curvlens.interrupts import must_be_whole
from curvlens.linalg.counted import whole
from curvlens.operators import hessian
from curvlens.operators.base import Progress
from curvlens.operators.curvature import require_problem
from curvlens.problem import Problem
from curvlens.results import Forecast, Status
from curvlens.surroundings import as_found

AGREEMENT = 0.05
"""Of the largest change so far: how far forecast and true loss may differ."""
CORRECTED = 1e-6
"""How far the bias corrections of one group may differ."""
GROWTH = 100.0
"""Of a displacement along negative curvature within the forecast: from there on it is said."""


@dataclass(frozen=True)
class Rule:
    """One linear step in coordinates x = δ/s, s² = η/P: the learning rate is 1 there."""

    kind: str
    beta: float
    intake: float
    """The part of a gradient that enters the momentum: 1 − dampening, or 1 − β₁."""
    nesterov: bool
    fresh: bool
    """Whether the momentum is empty: torch fills it with the first gradient as a whole."""
    corrected: float
    """Adam: the steps done, for the bias correction; infinite for none."""
    shrink: float
    """ηγ of weight decay apart from the gradient."""

    def run(self, g: Tensor, T: Tensor, m: Tensor, theta: Tensor, steps: int) -> Tensor:
        """(steps + 1, k): x after each step, for the gradient g + T x and the weights theta + x."""
        x, course, first = torch.zeros_like(g), [torch.zeros_like(g)], self.fresh
        for t in range(1, steps + 1):
            gradient = g + T @ x
            if self.shrink:
                x = x - self.shrink * (theta + x)
            if not self.beta and self.kind == "SGD":
                step = gradient
            else:
                m = gradient.clone() if first and self.kind == "SGD" else self.beta * m + self.intake * gradient
                step = gradient + self.beta * m if self.nesterov else m
                first = False
            if self.kind in ("Adam", "AdamW") and math.isfinite(self.corrected):
                step = step / (1 - self.beta ** (self.corrected + t))
            x = x - step
            course.append(x)
        return torch.stack(course)

    def respond(self, T: Tensor, kick: Tensor, steps: int) -> Tensor:
        """(steps, k): where a kick in the gradient of one step has moved x after 1, 2, … steps."""
        x, m, course = torch.zeros_like(kick), torch.zeros_like(kick), list[Tensor]()
        for t in range(steps):
            gradient = T @ x if t else kick
            m = self.beta * m + self.intake * gradient
            x = x - (gradient + self.beta * m if self.nesterov else m)
            course.append(x)
        return torch.stack(course)


@as_found
def forecast(
    problem: Problem,
    optimizer: Any,
    steps: int = 100,
    *,
    products: int | None = None,
    check: int | None = None,
    batch: int | None = None,
    samples: int = 32,
    seed: int = 0,
    order: Any = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Forecast:
    """Loss and distance of an optimiser on the quadratic model at θ, and the step at which the true loss parts from it.

    The model is L + gᵀδ + ½ δᵀHδ with the full gradient at every step. The preconditioner of Adam, RMSprop and Adagrad
    is frozen as it is now. From rest the course is in the Krylov space of the gradient; momentum and weight decay add
    start vectors. The numbers are exact up to step ``products``, and approximate after it.

    Args:
        problem: where θ is; the model is not touched.
        optimizer: as in `curvlens.stability`: a torch optimiser with its state, its state dict, or a description such
            as ``cl.dynamics.SGD(0.1, momentum=0.9)``.
        steps: how many steps to forecast.
        products: products with H for each start vector; ``min(steps, 50)`` by default.
        check: how many steps of the real optimiser to take on copies, with one gradient each, for comparison; all of
            them by default, 0 for none.
        batch: also the expected loss of SGD with batches of so many samples, drawn anew in each step. The noise has the
            covariance of single-sample gradients at θ.
        samples: samples whose gradients stand for that covariance, with 12 products each.
        seed: for their draw.
        order, fresh: as in `curvlens.stability`.
        progress: called as ``progress(done, total)`` after every product and every true step.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> result = forecast(Problem(model, (one, 0 * one), MSE()), cl.dynamics.SGD(0.25), steps=2)
    >>> result.losses.tolist(), result.departure  # the loss is w², and w halves
    ([1.0, 0.25, 0.0625], None)
    """
    require_problem(problem, "forecast")
    steps = _whole(steps, "steps", 1)
    degree = min(steps, 50) if products is None else _whole(products, "products", 1)
    true = steps if check is None else min(_whole(check, "check", 0), steps)
    groups = read(problem, optimizer, order, fresh=fresh, edged=True)
    groups, note = begun(problem, groups) if fresh else (groups, "")
    if batch is not None:
        _batch(problem, batch)
    g, theta = problem.gradient(), problem.theta
    rule, scale, decay, momentum = _rule(problem, groups, g)
    done, planned = 0, degree + true

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, max(planned, done))

    H = hessian(problem)

    def product(v: Tensor) -> Tensor:
        w: Tensor = scale * (H @ (scale * v).to(H.dtype))
        return (w if decay is None else w + scale.square() * decay * v).to(v.dtype)

    # the weights in the coordinates of x count where decay pulls at them
    slope = scale * g.double()
    pulled = slope if decay is None else slope + scale * decay * theta.double()
    starts = [pulled]
    if momentum is not None:
        starts.append(scale * momentum)
    if decay is not None:
        starts.append(slope)
    weights = (theta.double() / scale).where(scale > 0, 0.0) if rule.shrink else torch.zeros_like(slope)
    if rule.shrink:
        starts.append(weights)
    dtype = H.dtype if H.dtype.itemsize >= 4 else torch.float32
    space = krylov(product, [s.to(dtype) for s in starts], degree, tick)
    x, losses = _course(problem, space, rule, starts, slope, momentum, weights, scale, decay, steps)
    distances = torch.einsum("ti,ij,tj->t", x, space.gram(scale.square()), x).clamp(min=0).sqrt()
    distances = distances.where(x.isfinite().all(1), math.inf)
    losses = problem.loss() + losses
    mean, error, more = _with_noise(problem, rule, product, scale, losses, batch, samples, seed, decay is None, tick)
    true_losses, true_distances, status = _true(problem, groups, g, losses, true, tick)
    ended = ""
    if status is not Status.COMPLETE:
        ended = f"interrupted after {len(true_losses) - 1} of {true} steps of the optimiser"
    return Forecast(
        rule=groups[0].kind,
        losses=losses,
        distances=distances,
        exact=min(space.exact, steps),
        true_losses=true_losses,
        true_distances=true_distances,
        departure=_departure(losses, true_losses),
        agreement=AGREEMENT,
        products=space.products + more,
        status=status,
        mean=mean,
        mean_error=error,
        batch=batch,
        note="; ".join(filter(None, (note, assumed(optimizer), _bottomless(space.T, steps), ended))),
        provenance=provenance(problem),
    )


def _batch(problem: Problem, batch: Any) -> None:
    """Raise unless it is a number of samples that the data has."""
    size, count = _whole(batch, "batch", 1), Separated(problem, 1).count
    if size > count:
        raise CurvlensError(f"batch={size}, but the data has {count} samples. Expected 1 to {count}.")


def _bottomless(T: Tensor, steps: int) -> str:
    """A note if negative curvature, in steps of learning rate 1, makes the model fall without end within the steps."""
    lowest = float(torch.linalg.eigvalsh(T)[0]) if len(T) else 0.0
    if lowest >= 0 or steps * math.log1p(-lowest) < math.log(GROWTH):
        return ""
    return (
        f"the quadratic model has no minimum: along negative curvature steps grow {1 - lowest:.3g}-fold each time and "
        "the loss falls without limit, so only the steps before the true loss parts mean anything"
    )


def _with_noise(
    problem: Problem,
    rule: Rule,
    product: Callable[[Tensor], Tensor],
    scale: Tensor,
    losses: Tensor,
    batch: int | None,
    samples: int,
    seed: int,
    plain: bool,
    tick: Callable[[], None],
) -> tuple[Tensor | None, Tensor | None, int]:
    """The mean loss with noisy gradients, its error, and products; None if no batch was given."""
    if batch is None:
        return None, None, 0
    size = int(batch)
    if rule.kind != "SGD" or not plain or rule.intake != 1:
        raise CurvlensError(
            "batch= knows SGD with or without momentum, without dampening and weight decay. Describe it: "
            "cl.dynamics.SGD(0.1, momentum=0.9)."
        )

    def respond(T: Tensor, kick: Tensor) -> Tensor:
        return rule.respond(T, kick, len(losses) - 1)

    rise, error, products = added_loss(problem, product, scale, respond, _whole(samples, "samples", 2), seed, tick)
    zero = torch.zeros(1, dtype=torch.float64)
    return losses + torch.cat([zero, rise]) / size, torch.cat([zero, error]) / size, products


def _course(
    problem: Problem,
    space: Krylov,
    rule: Rule,
    starts: list[Tensor],
    slope: Tensor,
    momentum: Tensor | None,
    weights: Tensor,
    scale: Tensor,
    decay: Tensor | None,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """(steps + 1, k) coordinates, and the change of the loss at each of them."""
    zero = torch.zeros(len(space.T), dtype=torch.float64)
    m = zero if momentum is None else space.coordinates((scale * momentum).to(space.V.dtype))
    theta = space.coordinates(weights.to(space.V.dtype)) if rule.shrink else zero
    x = rule.run(space.coordinates(starts[0].to(space.V.dtype)), space.T, m, theta, steps)
    own = space.coordinates(slope.to(space.V.dtype))
    curvature = space.T if decay is None else space.T - space.gram(scale.square() * decay)
    change = x @ own + 0.5 * torch.einsum("ti,ij,tj->t", x, curvature, x)
    beyond = (~(change.isfinite() & x.square().sum(1).isfinite())).nonzero()
    if len(beyond):  # float64 ends
        first = int(beyond[0, 0])
        change[first:] = math.copysign(math.inf, float(change[first - 1]))
        x = x.clone()
        x[first:] = math.inf
    return x, change


def _rule(problem: Problem, groups: list[Group], g: Tensor) -> tuple[Rule, Tensor, Tensor | None, Tensor | None]:
    """The linear step; s = √(η/P); γ of decay in the gradient or None; the momentum or None."""
    rules = {_one(group) for group in groups}
    if len(rules) > 1:
        raise CurvlensError(
            "The parameter groups differ in momentum or in decoupled weight decay, so that a step is not one function "
            "of H. Describe one rule for all: cl.dynamics.AdamW(lr=1e-3, second_moment=v), or give a problem with the "
            "parameters of one group."
        )
    rule = rules.pop()
    scales, decays, moments = dict[str, Tensor | float](), dict[str, Tensor | float](), dict[str, Tensor | float]()
    start = problem.layout.unflatten(g.double())
    filled, waiting = False, list[str]()
    for group in groups:
        for name, edge in edges(group).items():
            lr = group.options["lr"] if group.kind in ("Adam", "AdamW") else edge.lr
            scales[name] = math.sqrt(lr) if edge.P is None else (lr / edge.P).sqrt()
            decays[name] = edge.decay
            held = _held(group, name, start[name])
            if held is not None and group.kind == "RMSprop" and edge.P is not None:
                held = held * edge.P  # torch divides before it adds to the momentum
            filled = filled or held is not None
            waiting += [name] if held is None else []
            moments[name] = 0.0 if held is None else held
    scale = flattened(problem, scales)
    decay = flattened(problem, decays) if any(isinstance(d, Tensor) or d for d in decays.values()) else None
    momentum = flattened(problem, moments) if filled and rule.beta else None
    if momentum is not None and rule.fresh and rule.intake != 1 and waiting:
        raise CurvlensError(
            f"{listing(waiting)} of the optimiser have no momentum yet and others do. torch fills an empty one with "
            "the whole first gradient, whatever the dampening, so that a step is not one function of H. Take one more "
            "step in which all parameters have a gradient."
        )
    return replace(rule, fresh=rule.fresh and not filled), scale, decay, momentum


def _held(group: Group, name: str, g: Tensor) -> Tensor | None:
    """The momentum of a parameter, if it has one."""
    state = group.state.get(name, {})
    if "exp_avg_sq" in state and "step" not in state:
        return g  # a rule that was described, long after its start
    for key in ("momentum_buffer", "exp_avg"):
        if isinstance(state.get(key), Tensor):
            return state[key].detach().double()  # type: ignore[no-any-return]
    return None


def _one(group: Group) -> Rule:
    """The step of a group."""
    require_edge(group)
    options, kind = group.options, group.kind
    if kind == "Preconditioned" and options["factor"] != 2:
        raise CurvlensError(WITHOUT_MOMENTUM.format(options["factor"]))
    if kind in ("Adam", "AdamW"):
        beta = options["betas"][0]
        known = [float(state["step"]) for state in group.state.values() if "step" in state]
        done = max(known) if known else math.inf
        if known and beta ** (min(known) + 1) - beta ** (done + 1) > CORRECTED:
            raise CurvlensError(
                f"The parameters of group {group.index} have taken {min(known):g} to {done:g} steps, so that their "
                "bias corrections differ and a step is not one function of H. Take more steps first, or give a "
                "problem with the parameters of equal age."
            )
        shrink = options["lr"] * options.get("weight_decay", 0.0) if kind == "AdamW" else 0.0
        return Rule("Adam", beta, 1 - beta, False, False, done, shrink)
    if kind == "SGD":
        beta, damp = options.get("momentum", 0.0), options.get("dampening", 0.0)
        return Rule("SGD", beta, 1 - damp if beta else 1.0, bool(options.get("nesterov")), True, math.inf, 0.0)
    if kind == "RMSprop" and options.get("centered"):
        raise CurvlensError(
            "RMSprop with centered=True subtracts its mean gradient, which is not frozen with its second moment. "
            "Forecasts know centered=False."
        )
    beta = options.get("momentum", 0.0) if kind == "RMSprop" else 0.0
    if kind == "Adagrad" and options.get("lr_decay"):
        raise CurvlensError("Adagrad with lr_decay changes its learning rate at every step. Forecasts know lr_decay=0.")
    return Rule("SGD", beta, 1.0, False, False, math.inf, 0.0)


def _true(
    problem: Problem, groups: list[Group], g: Tensor, losses: Tensor, steps: int, tick: Callable[[], None]
) -> tuple[Tensor, Tensor, Status]:
    """Loss and distance where the real optimiser goes."""
    found, far, status = [float(losses[0])], [0.0], Status.COMPLETE
    copies, start = Copies(problem, groups, g), problem.theta.double()
    try:
        for _ in range(steps):
            copies.step(g)
            point = copies.theta
            far.append(float((point - start).norm()))
            moved = problem.with_params(point.to(problem.dtype))
            try:
                found.append(moved.loss())
                g = moved.gradient()
            except NonFiniteLossError:
                found.append(math.inf)
                break
            tick()
    except KeyboardInterrupt:
        if must_be_whole():
            raise
        status, far = Status.INTERRUPTED, far[: len(found)]
    make: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    return torch.tensor(found, **make), torch.tensor(far, **make), status


def _departure(losses: Tensor, true: Tensor) -> int | None:
    """The first step at which they differ by more than 5 % of the largest change so far."""
    largest = 0.0
    for t in range(1, len(true)):
        largest = max(largest, abs(float(losses[t] - losses[0])))
        if not math.isfinite(largest) or not abs(float(true[t] - losses[t])) <= AGREEMENT * largest:
            return t
    return None


def _whole(value: Any, name: str, least: int) -> int:
    if not whole(value) or value < least:
        raise CurvlensError(f"{name}={value!r}, expected a whole number, {least} or more.")
    return int(value)
