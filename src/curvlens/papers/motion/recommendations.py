"""The recommendations of the article: whether an optimiser that follows one gets farther in as many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import curvlens as cl
from curvlens.blocks import By, map_blocks
from curvlens.data import Addition
from curvlens.models import GPT
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import matrices, rows
from curvlens.papers.learners import trained
from curvlens.papers.sizes import number
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import Sweep, mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

RULES = {
    "sgd": ("SGD", 1.0),
    "adam": ("Adam", 0.1),
    "adagrad": ("AdaGrad", 0.3),
    "momentum": ("momentum 0.9", 0.3),
    "clip": ("SGD, gradients clipped to norm 1", 3.0),
    "layers": ("one step size a layer", 1.0),
    "layers anew": ("one step size a layer, measured anew", 1.0),
    "blocks": ("one step size a block", 1.0),
}
"""Name, and the largest learning rate that is tried; for step sizes of layers and blocks in units of 1/|λ|_max."""
BY: dict[str, By] = {"layers": "layer", "layers anew": "layer", "blocks": "block"}
RATES = 5
"""For each rule, each √10 times smaller than the one before."""
STEPS, ANEW, SAMPLES = 200, 4, 64
"""Steps of training; how often the curvature is measured in them where it is anew; samples of a step."""
TEST = 512
"""Sequences on which the loss is measured, drawn apart from those of the training."""
ADVICE = {
    "advice-adaptive": ("adam", "adagrad"),
    "advice-momentum": ("clip", "momentum"),
    "advice-layerwise": ("layers", "layers anew", "blocks"),
}


def points(effort: Effort) -> list[Config]:
    """Every rule from the same initialisations; and what is observed there. Quick, without the slowest rule."""
    found: list[Config] = []
    for seed in effort.repeats(2, 6):
        found.append({"rule": "observed", "seed": seed})
        steps = STEPS // 10 if effort.quick else STEPS
        rules = [rule for rule in RULES if not (effort.quick and rule == "layers anew")]
        found += [{"rule": rule, "steps": steps, "seed": seed} for rule in rules]
    return found


def rates(rule: str) -> list[float]:
    """The learning rates that are tried, the largest last."""
    return [float(f"{RULES[rule][1] * 10 ** ((i + 1 - RATES) / 2):.3g}") for i in range(RATES)]


def measure(config: Config) -> Mapping[str, Any]:
    """The loss on other samples after training with each learning rate; or the curvature at initialisation."""
    if config["rule"] == "observed":
        return observed(trained(Addition(digits=2), seed=config["seed"], steps=0))
    by = BY.get(config["rule"])
    sizes = None if by is None else curvature(trained(Addition(digits=2), seed=config["seed"], steps=0), by, config, 0)
    return {"loss": [after(config, lr, sizes) for lr in rates(config["rule"])]}


def after(config: Config, lr: float, sizes: Sequence[float] | None) -> float:
    """The loss on other samples after training; infinite if it diverged."""
    task, rule, seed, steps = Addition(digits=2), config["rule"], config["seed"], config["steps"]
    model = trained(task, seed=seed, steps=0)
    optimizer = make(model, rule, lr, sizes)
    for step in range(steps):
        x, y = task.batch(SAMPLES, seed=stream(seed, f"step {step}"))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if rule == "clip" else math.inf)
        if not bool(norm.isfinite()):
            return math.inf
        if rule == "layers anew" and step and step % (steps // ANEW) == 0:
            for group, size in zip(optimizer.param_groups, curvature(model, "layer", config, step), strict=True):
                group["lr"] = lr / size
        optimizer.step()
    with torch.no_grad():
        x, y = task.batch(TEST, seed=stream(seed, "test"))
        loss = float(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return loss if math.isfinite(loss) else math.inf


def observed(model: GPT) -> dict[str, Any]:
    """Of each layer: |λ|_max over the median |λ|, and |λ|_max; of the whole: λ_min over λ_max."""
    H, _, places = matrices(model, SAMPLES // 4)
    layers = [torch.linalg.eigvalsh(H[of][:, of]) for of in (rows(places, f"h.{i}.") for i in range(2))]
    values = torch.linalg.eigvalsh(H)
    sizes = [each.abs() for each in layers]
    return {
        "condition": [float(each.max() / each.median()) for each in sizes],
        "top": [float(each.max()) for each in sizes],
        "negative": float(values[0] / values[-1]),
    }


def make(model: GPT, rule: str, lr: float, sizes: Sequence[float] | None) -> torch.optim.Optimizer:
    """Torch's optimiser, with a group for each layer or block where step sizes are over its curvature."""
    if sizes is not None:
        groups = [
            {"params": [model.get_parameter(name) for name in block.parameters], "lr": lr / size}
            for block, size in zip(map_blocks(model).by(BY[rule]).values(), sizes, strict=True)
        ]
        return torch.optim.SGD(groups, lr=lr)
    if rule == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    if rule == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if rule == "momentum" else 0.0)


def curvature(model: GPT, by: By, config: Config, step: int) -> list[float]:
    """|λ|_max of the Hessian's diagonal block of each layer or block, on samples of their own."""
    batch = Addition(digits=2).batch(SAMPLES, seed=stream(config["seed"], f"curvature {step}"))
    H = cl.hessian(cl.Problem(model, [batch], cl.losses.CrossEntropy()))
    found = []
    for block in map_blocks(model).by(by).values():
        top = cl.eigs(H[list(block.parameters)], 1, "magnitude", tol=0.01, check_copies=False)
        found.append(abs(float(top.values[0])))
    return found


def report(records: Sequence[Record]) -> Report:
    """Losses over the learning rates, and the best of each rule beside that of SGD."""
    measured = {record.config["rule"] for record in records}
    lines = {rule: _line(where(records, rule=rule), rule) for rule in RULES if rule in measured}
    best = {rule: tuned(line) for rule, line in lines.items()}
    panels = []
    for claim, rules in ADVICE.items():
        curves = []
        for colour, rule in enumerate(each for each in ("sgd", *rules) if each in lines):
            usable = lines[rule].finite()
            if usable.x:
                curves.append(usable.curve(RULES[rule][0], colour=colour))
        title = claim.removeprefix("advice-")
        panels.append(Panel(curves, title=title, x_label="learning rate", y_label="loss", x_scale="log"))
    found = {rule: _gain(lines, best, rule) for rule in lines if rule != "sgd"}
    panels.append(
        Panel(
            [
                Curve(
                    "",
                    list(range(len(found))),
                    [each.value for each in found.values()],
                    [each.low for each in found.values()],
                    [min(each.high, 2.0) for each in found.values()],
                    style="bars",
                )
            ],
            title="loss over that of SGD, both tuned",
            y_label="ratio",
            ticks=([float(i) for i in range(len(found))], ["\n" * (i % 2) + rule for i, rule in enumerate(found)]),
            y_lines=(1.0,),
            legend=False,
        )
    )
    chart = Chart(
        "recommendations",
        "The recommendations of the article",
        "A GPT of two layers learns to add: its loss on other samples after as many steps with each rule, over the "
        "learning rate, which is in units of 1/|λ|_max of a layer or block where each has a step size of its own. "
        "Last: with the learning rate of each rule that is best over all seeds, the loss over that of SGD in pairs of "
        "the same seed, and its 95 % interval.",
        panels,
    )
    return Report((chart,), tuple(_advice(records, claim, lines, best) for claim in ADVICE))


def _line(records: Sequence[Record], rule: str) -> Sweep:
    """The losses over the learning rates, by seed; NaN where a run diverged."""
    losses = [[number(loss) for loss in record.result["loss"]] for record in records]
    return Sweep(tuple(rates(rule)), torch.tensor(losses, dtype=torch.float64))


def tuned(line: Sweep) -> int | None:
    """The place of the learning rate with the lowest geometric mean over the seeds; None if none is finite in all."""
    logs = line.values.log().mean(0).nan_to_num(nan=math.inf)
    return int(logs.argmin()) if bool(logs.isfinite().any()) else None


def _gain(lines: Mapping[str, Sweep], best: Mapping[str, int | None], rule: str) -> Ratio:
    """The loss of a rule over that of SGD, both tuned."""
    own, plain = best[rule], best["sgd"]
    if own is None or plain is None:
        return Ratio(math.nan, 0.0, math.inf, 0)
    return ratio(lines[rule].values[:, own], lines["sgd"].values[:, plain])


def _advice(
    records: Sequence[Record], claim: str, lines: Mapping[str, Sweep], best: Mapping[str, int | None]
) -> Finding:
    """Whether the tuned rules have lower losses than tuned SGD."""
    parts: dict[str, bool | None] = {}
    texts = []
    for rule in (each for each in ADVICE[claim] if each in lines):
        found, own, name = _gain(lines, best, rule), best[rule], RULES[rule][0]
        inside = all(best[each] not in (None, 0, RATES - 1) for each in (rule, "sgd"))
        parts[name] = found.below() if inside else None
        at = "no learning rate" if own is None else f"a learning rate of {lines[rule].x[own]:g}"
        at += " in units of 1/|λ|_max" if rule in BY and own is not None else ""
        texts.append(f"{name} {found} with {at}{'' if inside else ', at the end of those tried'}")
    plain = best["sgd"]
    of = "" if plain is None else f" ({lines['sgd'].x[plain]:g})"
    return judged_parts(
        claim,
        f"{_observed(where(records, rule='observed'), claim)} The loss over that of SGD after as many steps, each with "
        f"its best of {RATES} learning rates{of}: {'; '.join(texts)}. Geometric means over the seeds with their 95 % "
        "intervals.",
        parts,
    )


def _observed(records: Sequence[Record], claim: str) -> str:
    """What the recommendation starts from, at initialisation."""
    if claim == "advice-momentum":
        share = mean("", [-number(record.result["negative"]) for record in records])
        return f"At initialisation λ_min is −{share.value:.2g} λ_max."
    name = "condition" if claim == "advice-adaptive" else "top"
    first, second = (mean("", [math.log(number(r.result[name][i])) for r in records]).value for i in range(2))
    if name == "top":
        return (
            f"At initialisation |λ|_max of the first layer is {math.exp(first - second):.2g} times that of the second."
        )
    return (
        f"At initialisation |λ|_max is {math.exp(first):.2g} times the median |λ| in the first layer and "
        f"{math.exp(second):.2g} times in the second."
    )


RECOMMENDATIONS = Experiment(
    "recommendations",
    "The recommendations of the article",
    f"{ARTICLE}, Section 6.4",
    points,
    measure,
    report,
)
