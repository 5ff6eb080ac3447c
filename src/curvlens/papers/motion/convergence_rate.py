"""Full-batch gradient descent on a GPT: the rate that is seen, the one by the Hessian's spectrum, and conditioning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.dynamics import convergence, forecast
from curvlens.papers.comparisons import between, seeds
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.learners import trained
from curvlens.papers.sizes import number
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.results import Convergence
from curvlens.study import Config, Record

TRAINED = 100
"""Steps of Adam before."""
RULES: dict[str, dict[str, Any]] = {
    "gradient descent": {},
    "heavy ball": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
}
DEPTHS = ("inputs", "layer 1", "layer 2", "last norm")
ZERO = 1e-12
"""Of the largest eigenvalue: rounding."""
CLOSE = 0.1
"""Of the logarithm of the rate seen: how far a prediction may be off."""
LEAST = 0.1
"""The power of the condition number from which on it affects the time of convergence."""


def points(effort: Effort) -> list[Config]:
    """A GPT's unembedding alone, and all of its weights."""
    sizes = {
        "unembedding": {"samples": 32, "steps": 600} if effort.quick else {"samples": 128, "steps": 3000},
        "all weights": {"samples": 16, "steps": 60} if effort.quick else {"samples": 64, "steps": 400},
    }
    return [{"part": part, **size, "seed": seed} for part, size in sizes.items() for seed in effort.repeats(2, 6)]


def measure(config: Config) -> Mapping[str, Any]:
    """Runs of gradient descent with and without momentum, and what the spectrum says of each."""
    task, seed = Addition(digits=2), config["seed"]
    model = trained(task, seed=seed, steps=TRAINED)
    data = task.batch(config["samples"], seed=stream(seed, "sequences"))
    if config["part"] == "all weights":
        return {"runs": [everywhere(model, data, rule, config["steps"]) for rule in ("gradient descent", "heavy ball")]}
    inputs, runs = states(model, data[0]), []
    kept = data[1] >= 0
    most = config["steps"] / 15
    for rule in RULES:
        for condition in (most / 10, most / 3, most):
            runs.append(alone(inputs["last norm"][kept], data[1][kept], rule, condition, config["steps"]))
    for depth in DEPTHS:
        runs.append(alone(inputs[depth][kept], data[1][kept], "gradient descent", None, config["steps"]))
        runs[-1]["depth"] = depth
    return {"runs": runs}


def states(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What an unembedding could read: before the first layer, behind each, and behind the last norm."""
    found = dict[str, Tensor]()

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out=None: found.__setitem__(name, (args[0] if out is None else out).detach())

    layers: Any = model.h
    hooks = [layers[0].register_forward_pre_hook(keep("inputs"))]
    hooks += [layer.register_forward_hook(keep(f"layer {i + 1}")) for i, layer in enumerate(layers)]
    hooks.append(model.unembed.register_forward_pre_hook(keep("last norm")))  # type: ignore[union-attr]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def alone(x: Tensor, y: Tensor, rule: str, condition: float | None, steps: int) -> dict[str, Any]:
    """An unembedding from zero on: a convex loss, whose curvature is nowhere above c = ½ λ_max(XᵀX/n). η = 1/c.

    With a condition number weight decay is c over it. Without one there is no decay.
    """
    model = nn.Linear(x.shape[1], int(y.max()) + 1, bias=False).double()
    nn.init.zeros_(model.weight)
    problem = cl.Problem(model, (x, y), cl.losses.CrossEntropy())
    top = 0.5 * float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1])
    decay = 0.0 if condition is None else top / condition
    path = course(lambda: F.cross_entropy(model(x), y), list(model.parameters()), 1 / (top + decay), decay, rule, steps)
    values = torch.linalg.eigvalsh(cl.hessian(problem).dense())
    spectrum = values[values > ZERO * values[-1]] + decay  # logits that shift together: no gradient there, ever
    found = convergence(**path, spectrum=spectrum, **RULES[rule])
    return {
        "rule": rule,
        "decay": condition is not None,
        "condition": float(found.condition[-1]),
        **kept_numbers(found),
    }


def everywhere(model: nn.Module, data: tuple[Tensor, Tensor], rule: str, steps: int) -> dict[str, Any]:
    """All weights from where Adam left them, with a quarter of 1/λ_max of there as the learning rate."""
    problem = cl.Problem(model, data, cl.losses.CrossEntropy())
    start = problem.theta.clone()
    H = cl.hessian(problem)
    rate = 0.25 / float(cl.eigs(H, 1, tol=1e-3).values[0])
    x, y = data
    loss = lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # noqa: E731
    path = course(loss, list(model.parameters()), rate, 0.0, rule, steps)
    ends = cl.eigs(H, 1, ends="both", tol=1e-3).values
    found = convergence(**path, spectrum=ends, **RULES[rule])
    ahead = forecast(problem, cl.dynamics.SGD(rate, **RULES[rule]), steps // 4, products=min(steps // 4, 50))
    nn.utils.vector_to_parameters(start, model.parameters())
    fallen, said = (float(each[0] - each[-1]) for each in (ahead.true_losses, ahead.losses))
    return {
        "rule": rule,
        "bottom": float(ends[0]),
        "departure": ahead.departure,
        "ahead": steps // 4,
        "fallen": [fallen, said],
        **kept_numbers(found),
    }


def course(
    loss: Callable[[], Tensor], parameters: list[nn.Parameter], rate: float, decay: float, rule: str, steps: int
) -> dict[str, Any]:
    """Losses, gradients and parameters of torch's SGD; decay is part of the loss."""
    optimizer = torch.optim.SGD(parameters, lr=rate, **RULES[rule])
    losses, gradients, places = [], [], []
    for step in range(steps + 1):
        optimizer.zero_grad()
        now = loss()
        if decay:
            now = now + 0.5 * decay * sum(p.square().sum() for p in parameters)
        now.backward()  # type: ignore[no-untyped-call]
        losses.append(float(now.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        places.append(torch.cat([p.detach().flatten() for p in parameters]))
        if step < steps:
            optimizer.step()
    return {
        "losses": losses,
        "gradients": torch.stack(gradients),
        "parameters": torch.stack(places),
        "learning_rate": rate,
    }


def kept_numbers(found: Convergence) -> dict[str, Any]:
    """The rates, and the gradient along the way."""
    low, high = found.rate.interval()
    places = torch.linspace(0, len(found.gradients) - 1, 41).long()
    return {
        "seen": float(found.rate),
        "low": low,
        "high": high,
        "predicted": found.predicted,
        "slowest": found.slowest,
        "steps": places.tolist(),
        "gradients": found.gradients[places].tolist(),
    }


# What it says


def close(run: Mapping[str, Any]) -> bool:
    """Whether the predicted rate is the one seen: to 10 % of its logarithm, or within its interval."""
    seen, low, high, said = (number(run[name]) for name in ("seen", "low", "high", "predicted"))
    if not (seen > 0 and said > 0):
        return False
    return low <= said <= high or abs(math.log(said) - math.log(seen)) <= CLOSE * abs(math.log(seen))


def always(each: Sequence[bool]) -> bool | None:
    """Whether something is so in all repeats: not if it is so in half of them or fewer; None between, or if there is
    one repeat only.

    >>> always([True, True]), always([True, False]), always([True, True, False]), always([True])
    (True, False, None, None)
    """
    if len(each) < 2 or len(each) / 2 < sum(each) < len(each):
        return None
    return all(each)


def chosen(records: Sequence[Record], part: str, **entries: Any) -> list[Mapping[str, Any]]:
    """The runs of a part that have these entries."""
    runs = [run for record in where(records, part=part) for run in record.result["runs"]]
    return [run for run in runs if entries.items() <= run.items()]


def report(records: Sequence[Record]) -> Report:
    """Rates seen and predicted, and what the condition number has to do with them."""
    return Report((chart(records),), (rates(records), conditioning(records)))


def rates(records: Sequence[Record]) -> Finding:
    """The spectrum against the rate that is seen; the whole quadratic model against the loss."""
    parts, texts = dict[str, bool | None](), list[str]()

    def add(name: str, runs: Sequence[Mapping[str, Any]]) -> None:
        good = [close(run) for run in runs]
        falls = [run for run in runs if number(run["predicted"]) < 1]
        off = [math.log(number(run["seen"])) / math.log(number(run["predicted"])) for run in falls]
        said = f"seen over predicted {min(off):.3g} to {max(off):.3g}" if off else "no fall is predicted"
        texts.append(f"{name}: {said}, close in {sum(good)} of {len(good)} runs")
        parts[name] = always(good)

    for rule in RULES:
        add(f"unembedding with weight decay, {rule}", chosen(records, "unembedding", rule=rule, decay=True))
    add("unembedding without decay, gradient descent", chosen(records, "unembedding", decay=False))
    for rule in ("gradient descent", "heavy ball"):
        add(f"all weights, {rule}", chosen(records, "all weights", rule=rule))
    for rule in ("gradient descent", "heavy ball"):
        runs = chosen(records, "all weights", rule=rule)
        name = f"all weights, {rule}, all of the quadratic model at a late point"
        parted = [run["departure"] for run in runs]
        parts[name] = always([step is None for step in parted])
        ahead, first = runs[0]["ahead"], [step for step in parted if step is not None]
        when = f", first at step {min(first)}" if first else ""
        texts.append(f"{name}: within {ahead} steps the loss parts from it in {len(first)} of {len(runs)}{when}")
    count = len({record.config["seed"] for record in records})
    if count < 2:
        parts = dict.fromkeys(parts)
    text = (
        f"From {seeds(count)}. The rate is the factor of ‖g‖ in a step over the last half of a run; that by the "
        f"slowest eigenvalue at its end is close if its logarithm is right to {CLOSE:.0%}. The loss parts from the "
        "quadratic model where they differ by 5 % of its largest change. Logarithms of the rates: "
        f"{'; '.join(texts)}."
    )
    return judged_parts("convergence-rate", text, parts)


def power(runs: Sequence[Sequence[Mapping[str, Any]]]) -> Number:
    """The power of the condition number that the time of convergence grows with: a slope for each seed."""
    slopes = []
    for of in runs:
        x = torch.tensor([number(run["condition"]) for run in of], dtype=torch.float64).log()
        y = torch.tensor([-1 / math.log(min(number(run["seen"]), 1 - 1e-15)) for run in of], dtype=torch.float64).log()
        kept = x.isfinite() & y.isfinite()
        x, y = x[kept] - x[kept].mean(), y[kept]
        if len(x) > 1 and float(x.square().sum()) > 0:
            slopes.append(float((x @ y) / x.square().sum()))
    return mean("power", slopes) if slopes else Number("power", math.nan, math.inf)


def conditioning(records: Sequence[Record]) -> Finding:
    """Whether worse conditioned problems converge more slowly."""
    every = sorted({record.config["seed"] for record in records})
    parts, texts = dict[str, bool | None](), list[str]()
    for name, decay in (("with weight decay, which sets it", True), ("without, from layer to layer", False)):
        of = [chosen(where(records, seed=seed), "unembedding", rule="gradient descent", decay=decay) for seed in every]
        found = power(of)
        parts[name] = between(found, LEAST, math.inf)
        values = [number(run["condition"]) for runs in of for run in runs]
        said = f"{found.value:.3f} ± {found.error:.3f} for {min(values):.2g} to {max(values):.2g}"
        texts.append(f"{name}: {said}")
    text = (
        "The time of convergence, −1/log of the rate seen, grows with a power of the condition number; gradient "
        f"descent on an unembedding. Means over {seeds(len(every))} with their 95 % intervals; {LEAST:g} and more "
        f"counts as an effect. {'; '.join(texts)}."
    )
    return judged_parts("conditioning-speed", text, parts)


def chart(records: Sequence[Record]) -> Chart:
    """Gradients along the runs of the first seed, and rates seen against predicted."""
    seed = records[0].config["seed"]
    panels = []
    for part, title in (("unembedding", "unembedding alone"), ("all weights", "all weights")):
        curves = []
        for colour, rule in enumerate(RULES):
            runs = [run for run in chosen(where(records, seed=seed), part, rule=rule) if run.get("decay", True)]
            if runs:
                run = runs[-1]
                pairs = [(t, number(g)) for t, g in zip(run["steps"], run["gradients"], strict=True) if number(g) > 0]
                curves.append(Curve(rule, [t for t, _ in pairs], [g for _, g in pairs], colour=colour, marker=False))
        panels.append(Panel(curves, title=title, x_label="step", y_label=r"$\|g\|$", y_scale="log"))
    ends = (1e-6, 1.0)
    lines = [Curve("equal", ends, ends, colour=3, style="dashed", marker=False)]
    for colour, (name, decay) in enumerate((("with decay", True), ("without", False))):
        pairs = [
            (1 - number(run["predicted"]), 1 - number(run["seen"]))
            for run in chosen(records, "unembedding", rule="gradient descent", decay=decay)
        ]
        pairs = sorted((max(x, ends[0]), max(y, ends[0])) for x, y in pairs)
        lines.append(Curve(name, [x for x, _ in pairs], [y for _, y in pairs], colour=colour, style="dotted"))
    panels.append(
        Panel(
            lines,
            title="gradient descent on the unembedding",
            x_label="1 − rate by the spectrum",
            y_label="1 − rate seen",
            x_scale="log",
            y_scale="log",
        )
    )
    return Chart(
        "convergence-rate",
        "How fast gradient descent settles, and what the spectrum says",
        "Left: ‖g‖ of full-batch gradient descent, heavy ball and Nesterov, on the unembedding of a GPT with weight "
        "decay and on all weights, in one seed. Right: 1 − rate seen over the last half of a run against 1 − rate by "
        f"the smallest eigenvalue at its end, in all seeds; numbers below {ends[0]:g} are drawn there.",
        panels,
    )


CONVERGENCE_RATE = Experiment(
    "convergence-rate",
    "Rates of convergence by the spectrum",
    f"{ARTICLE}, Sections 1.2 and 8",
    points,
    measure,
    report,
)
