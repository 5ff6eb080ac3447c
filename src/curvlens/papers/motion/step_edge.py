"""Steps just below the edge of stability and just above it, and the learning rate at which the loss rises again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.dynamics.update import next_step
from curvlens.papers.comparisons import between, ratio
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.learners import trained
from curvlens.papers.shown import with_error
from curvlens.papers.signs import LEVEL, larger
from curvlens.papers.sources import ADAM_EDGE, GD_EDGE
from curvlens.papers.sweeps import bars, mean, where
from curvlens.papers.verdicts import Finding, all_of, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

RULES = {"gd": "gradient descent", "momentum": "momentum 0.9", "adam": "Adam"}
BELOW, ABOVE = 0.98, 1.02
"""Fractions of the edge."""
STEPS, START, LEFT = 100, 1e-6, 1e4
"""Steps of a run; the displacement that it begins with; the growth at which it has left and ends."""
FIT, FITTED = 300, 32
"""Steps of Adam on a few fixed samples, so that little negative curvature is left; its second moment is held then."""
SAMPLES = 64
FRACTIONS = (0.1, 0.5, BELOW)
"""Of 2/λ_max: learning rates at which the loss is to fall."""
STAGES = (0, 50, 400)
"""Steps of training before a single step is measured; quick, without the last."""
NEAR = 1.1
"""The factor within which two learning rates count as the same."""


def points(effort: Effort) -> list[Config]:
    """Three rules beside their edges, and single steps of gradient descent from networks at three stages."""
    seeds, stages = effort.repeats(2, 16), STAGES[:2] if effort.quick else STAGES
    ways: list[Config] = [{"rule": rule, "seed": seed} for seed in seeds for rule in RULES]
    return ways + [{"rule": "one step", "stage": stage, "seed": seed} for seed in seeds for stage in stages]


def measure(config: Config) -> Mapping[str, Any]:
    """The way of a small displacement beside the edge; or the loss after one step, and the critical learning rate."""
    task, seed = Addition(digits=2), config["seed"]
    model = trained(task, seed=seed, steps=config.get("stage", 0))
    batch = task.batch(SAMPLES if "stage" in config else FITTED, seed=stream(seed, "sequences"))
    problem = cl.Problem(model, [batch], cl.losses.CrossEntropy())
    if "stage" in config:
        return single(problem)
    moments = fitted(problem)
    held = moments if config["rule"] == "adam" else None
    return {f"{target:g}": way(problem, config["rule"], target, held) for target in (BELOW, ABOVE)}


def single(problem: cl.Problem) -> dict[str, Any]:
    """Of one step of gradient descent from here, with learning rates in units of 2/λ_max."""
    g = problem.gradient()
    edge = 2 / float(cl.eigs(cl.hessian(problem), 1, "largest", tol=1e-8).values[0])
    loss = problem.loss()
    after = [problem.with_params(problem.theta - part * edge * g).loss() for part in FRACTIONS]
    step = next_step(problem, cl.dynamics.SGD(edge))
    return {
        "loss": loss,
        "after": after,
        "critical": step.measured,
        "model": step.critical,
        "gradient": float(g.norm()),
        "edge": edge,
    }


def fitted(problem: cl.Problem, steps: int = FIT) -> list[Tensor]:
    """Let Adam fit the data of the problem; its v̂ by parameter."""
    model = problem.model
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        _set_gradients(model, problem.layout.unflatten(problem.gradient()))
        adam.step()
    correction = 1 - adam.param_groups[0]["betas"][1] ** steps
    return [adam.state[p]["exp_avg_sq"].clone() / correction for p in model.parameters()]


def way(problem: cl.Problem, rule: str, target: float, moments: list[Tensor] | None) -> list[float]:
    """Sizes of the component along the direction that leaves first, at every step, from 1.

    Torch's own optimiser runs on L(w) − g(w₀)ᵀw, whose gradient at w₀ is zero and whose Hessian is that of the loss.
    """
    model = problem.model
    begun = problem.theta.clone()
    slope = problem.gradient()
    optimizer = make(model, rule, moments)
    reached = cl.stability(problem, optimizer, tol=1e-7)
    for group in optimizer.param_groups:
        group["lr"] *= target / reached.ratio
    u = reached.direction
    P = torch.ones_like(u) if moments is None else torch.cat([v.sqrt().flatten() for v in moments]) + 1e-8
    size = float(u @ (P * u))

    def moved(theta: Tensor) -> None:
        parts = problem.layout.unflatten(theta)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(parts[name])

    moved(begun + START * u)
    found = [1.0]
    try:
        while len(found) <= STEPS and found[-1] < LEFT:
            _set_gradients(model, problem.layout.unflatten(problem.gradient() - slope))
            hold(optimizer, moments)
            optimizer.step()
            found.append(abs(float(u @ (P * (problem.theta - begun)))) / (START * size))
    finally:
        moved(begun)
    return found


def make(model: nn.Module, rule: str, moments: list[Tensor] | None) -> torch.optim.Optimizer:
    """Torch's optimiser: Adam long after its start, with these second moments and an empty first one."""
    if moments is None:
        beta = 0.0 if rule == "gd" else 0.9
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=beta, nesterov=rule == "nesterov")
    adam = torch.optim.Adam(model.parameters(), lr=1.0)
    for p, v in zip(model.parameters(), moments, strict=True):
        adam.state[p] = {"step": torch.tensor(1e9), "exp_avg": torch.zeros_like(p), "exp_avg_sq": v.clone()}
    return adam


def hold(optimizer: torch.optim.Optimizer, moments: list[Tensor] | None) -> None:
    """Second moments that the next step, which shrinks them first, uses as they were."""
    if moments is None:
        return
    group = optimizer.param_groups[0]
    for p, v in zip(group["params"], moments, strict=True):
        optimizer.state[p]["exp_avg_sq"].copy_(v / group["betas"][1])


def _set_gradients(model: nn.Module, parts: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.grad = parts[name].clone()


def report(records: Sequence[Record]) -> Report:
    """Displacements beside the edge of three rules, and critical learning rates beside 2/λ_max."""
    panels = [_panel(where(records, rule=rule), name) for rule, name in RULES.items()]
    steps = where(records, rule="one step")
    stages = {stage: where(steps, stage=stage) for stage in sorted({each.config["stage"] for each in steps})}
    measured, model = ([_sharpness(of, name) for of in stages.values()] for name in ("critical", "model"))
    panels.append(
        Panel(
            [bars("by line search", measured, 0), bars("quadratic model", model, 1)],
            title="critical sharpness along the gradient",
            x_label="steps of training",
            y_label=r"$(2/\eta_c) \,/\, \lambda_{\max}$",
            ticks=([float(i) for i in range(len(stages))], [f"{stage:g}" for stage in stages]),
            y_lines=(1.0,),
        )
    )
    chart = Chart(
        "step-edge",
        "Just below the edge of stability and just above it",
        "A GPT of two layers that has fitted its data. First three: the component along the direction that leaves "
        f"first, on the loss without its gradient at w₀, from a displacement of {START:g}, at {BELOW:g} and {ABOVE:g} "
        "of the edge: one line for each seed. Adam's second moment is held. Last, for GPTs that learn to add: the "
        "learning rate η_c at which the loss along the gradient is back at its value, as the sharpness 2/η_c in units "
        "of λ_max, by line search and of the quadratic model: means over the seeds with their 95 % intervals.",
        panels,
    )
    return Report((chart,), (_falls(stages), _critical(stages), _edge(records)))


def _panel(records: Sequence[Record], title: str) -> Panel:
    curves = []
    for i, record in enumerate(records):
        for colour, target in enumerate((BELOW, ABOVE)):
            sizes = record.result[f"{target:g}"]
            label = f"{target:g} of the edge" if not i else ""
            curves.append(Curve(label, list(range(len(sizes))), sizes, colour=colour, marker=False))
    return Panel(curves, title=title, x_label="step", y_label="component, from 1", y_scale="log")


def _sharpness(records: Sequence[Record], name: str) -> Number:
    """2/η_c over λ_max; 0 where the loss does not come back."""
    return mean("", [1 / float(record.result[name]) for record in records])


def _falls(stages: Mapping[int, Sequence[Record]]) -> Finding:
    parts: dict[str, bool | None] = {}
    texts, all_fell, count = [], 0, 0
    for stage, records in stages.items():
        before = [float(record.result["loss"]) for record in records]
        after = [[float(record.result["after"][i]) for record in records] for i in range(len(FRACTIONS))]
        fell = [sum(b < a for a, b in zip(before, each, strict=True)) for each in after]
        texts.append(f"after {stage:g} steps of training in {', '.join(f'{n} of {len(before)}' for n in fell)}")
        all_fell, count = all_fell + fell[-1], count + len(before)
        always = all_of(larger(before, each) for each in after)
        parts[f"after {stage:g} steps of training"] = False if min(fell) < len(before) else always
    shares = ", ".join(f"{part:g}" for part in FRACTIONS)
    return judged_parts(
        "loss-falls",
        f"Seeds in which one step of gradient descent with {shares} times 2/λ_max lowers the loss: "
        f"{'; '.join(texts)}. At {BELOW:g} times 2/λ_max it falls in {all_fell} of {count}. One that rises refutes it "
        f"there; sign test at {LEVEL:.0%}.",
        parts,
    )


def _critical(stages: Mapping[int, Sequence[Record]]) -> Finding:
    parts: dict[str, bool | None] = {}
    texts = []
    for stage, records in stages.items():
        found, model = _sharpness(records, "critical"), _sharpness(records, "model")
        own, local = (with_error(each.value, each.error) for each in (found, model))
        texts.append(f"after {stage:g} steps of training {own} by line search, {local} by the quadratic model")
        parts[f"after {stage:g} steps of training"] = between(found, 1 / NEAR, NEAR)
    return judged_parts(
        "critical-rate",
        "The sharpness 2/η_c along the gradient over λ_max, with η_c the learning rate at which the loss is back at "
        f"its value: {'; '.join(texts)}. Means over the seeds with their 95 % intervals; it is to be 1 within a factor "
        f"of {NEAR:g}.",
        parts,
    )


def _edge(records: Sequence[Record]) -> Finding:
    parts: dict[str, bool | None] = {}
    texts = []
    for rule, name in RULES.items():
        of = where(records, rule=rule)
        found = {
            target: ratio(_last(of, target), torch.ones(len(of), dtype=torch.float64)) for target in (BELOW, ABOVE)
        }
        grown = f"{found[ABOVE]} at {ABOVE:g}, where a run ends at {LEFT:g}"
        texts.append(f"{name} {found[BELOW]} at {BELOW:g} and {grown}")
        parts[name] = all_of((found[BELOW].below(), found[ABOVE].above()))
    return judged_parts(
        "edge-steps",
        f"A component of {START:g} along the direction that leaves first, after {STEPS} steps, times its size at the "
        f"start: {'; '.join(texts)}. The largest of the last ten steps; geometric means over the seeds with their 95 % "
        "intervals.",
        parts,
    )


def _last(records: Sequence[Record], target: float) -> Tensor:
    """The largest size of the last steps, as momentum oscillates; at most the size at which a run ends."""
    sizes = [max(map(float, r.result[f"{target:g}"][-10:])) for r in records]
    return torch.tensor(sizes, dtype=torch.float64).clamp(max=LEFT)


STEP_EDGE = Experiment(
    "step-edge",
    "Just below the edge of stability and just above it",
    f"{GD_EDGE} and {ADAM_EDGE}",
    points,
    measure,
    report,
)
