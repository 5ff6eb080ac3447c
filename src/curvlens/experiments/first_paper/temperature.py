"""Sections 3.2 and 4.3: temperature, from one-hot attention to even attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.calculus import attention
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.first_paper.layer import BLOCKS, LENGTH, WIDTH, curves, line, norms
from curvlens.experiments.sizes import sized
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid, sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Panel, Slope


def points(effort: Effort) -> list[Config]:
    """From one-hot attention to even attention."""
    return [
        {"temperature": temperature, "seed": seed}
        for seed in effort.repeats(5, 20)
        for temperature in grid(1e-3, 1e3, 13 if effort.quick else 25)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms, those of the split at the scores, and the entropy of the attention rows over its largest value."""
    draw = Draws(config["seed"])
    x, y = draw(LENGTH, WIDTH), draw(LENGTH, WIDTH)
    w = [draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for _ in range(3)]
    H = attention.hessian(x, w[0], w[1], w[2], target=y, temperature=config["temperature"])
    scores = x @ w[0] @ w[1].mT @ x.mT / math.sqrt(WIDTH) / config["temperature"]
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).mean() / math.log(LENGTH)
    return {
        "norms": norms(H),
        "t": [sized(H.t_outer().norm()), sized(H.t_functional().norm())],
        "entropy": float(entropy),
    }


def report(records: Sequence[Record]) -> Report:
    """The two parts of the query-key Hessian, and the whole between one-hot and even attention."""
    parts = [sweep(records, "temperature", "t", i) for i in range(2)]
    labels = (r"T-outer", r"T-functional")
    hot = (10.0, 1000.0)
    slopes = [part.law(hot).slope for part in parts]
    panels = [
        Panel(
            [part.curve(label, colour=i) for i, (part, label) in enumerate(zip(parts, labels, strict=True))],
            [
                Slope(power, (1.0, 1000.0), (10.0, part.within(9.9, 10.1).curve("").y[0] * 3), rf"$t^{{{power}}}$")
                for part, power in zip(parts, (-2, -1), strict=True)
            ],
            "split at the scores",
            "temperature $t$",
            "Frobenius norm",
            "log",
            "log",
        ),
        Panel(
            curves(
                records, "temperature", (("QQ", "outer"), ("QQ", "functional"), ("QK", "functional"), ("VV", "outer"))
            ),
            (),
            "blocks",
            "temperature $t$",
            "Frobenius norm",
            "log",
            "log",
        ),
    ]
    entropy = sweep(records, "temperature", "entropy")
    panels.append(Panel([entropy.curve("", shares=True)], (), "entropy", "temperature $t$", "entropy / log L", "log"))
    ratio = (parts[0].values / parts[1].values).log().mean(0).exp()
    share = _share(records)
    chart = Chart(
        "temperature",
        "Temperature: from one-hot attention to even attention",
        "One layer with Gaussian tokens. Left: the query-key Hessian split at the scores; dashed grey: 1/t² and "
        "1/t. Middle: blocks. Right: the entropy of the attention rows.",
        panels,
        columns=3,
    )
    cold = [
        float(line(records, "temperature", b, p).values[:, 0].log().mean().exp())
        for b, p in (("QQ", "outer"), ("VV", "outer"))
    ]
    warm = [float(line(records, "temperature", "QQ", "outer").middle().max())]
    good = abs(slopes[0] + 2) < 0.05 and abs(slopes[1] + 1) < 0.05
    findings = (
        Finding(
            "temperature",
            "holds when" if good else "does not hold",
            f"For t from 10 to 1000 the T-outer part falls with t^{slopes[0]:.3f} and the T-functional part with "
            f"t^{slopes[1]:.3f}. Their ratio is {float(ratio[-1]):.2g} at t = 1000, {float(ratio.max()):.2g} at its "
            f"largest (t = {parts[0].x[int(ratio.argmax())]:.2g}) and {float(ratio[0]):.2g} at t = 0.001.",
            "large t, where attention is even and only the factors act; for t → 0 attention becomes one-hot and "
            "both parts vanish",
        ),
        Finding(
            "one-hot",
            "holds" if cold[0] < 1e-3 * warm[0] else "holds when" if cold[0] < 0.1 * warm[0] else "does not hold",
            f"At t = 0.001 (mean entropy {float(entropy.values[:, 0].mean()):.1e} of its largest) ‖H_o(Q,Q)‖ is "
            f"{cold[0]:.2g}, at its largest {warm[0]:.2g}; ‖H_o(V,V)‖ is {cold[1]:.2g}.",
        ),
        Finding(
            "dispersed",
            _dispersed(share),
            "Share of the query-key blocks in ‖H_o‖², without their factors 1/t: "
            + ", ".join(f"{value:.0%} at entropy {at:.2f}" for at, value in share)
            + ".",
            "" if _dispersed(share) != "holds when" else "some entropies, not the largest",
        ),
    )
    return Report((chart,), findings)


def _share(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Of the blocks QQ, KK and QK in ‖H_o‖², beside the entropy, at a few temperatures.

    A query or key brings a factor 1/t of its own; without it what is left is what the attention matrix does.
    """
    entropy = sweep(records, "temperature", "entropy")
    t = torch.tensor(entropy.x, dtype=torch.float64)
    squares = {block: line(records, "temperature", block, "outer").values.square() for block in BLOCKS}
    inner = (squares["QQ"] + squares["KK"] + 2 * squares["QK"]) * t**4
    whole = inner + 2 * (squares["VQ"] + squares["VK"]) * t**2 + squares["VV"]
    shares, levels = (inner / whole).mean(0).tolist(), entropy.values.mean(0).tolist()
    wanted = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    places = sorted({min(range(len(levels)), key=lambda i, at=at: abs(levels[i] - at)) for at in wanted})  # type: ignore[misc]
    return [(levels[place], shares[place]) for place in places]


def _dispersed(share: Sequence[tuple[float, float]]) -> Verdict:
    """Dominant where attention is spread: at the highest entropies, or only somewhere."""
    at_even = share[-1][1] > 0.5
    return "holds" if at_even else "holds when" if any(value > 0.5 for _, value in share) else "does not hold"


TEMPERATURE = Experiment(
    "temperature",
    "Temperature, from one-hot to even attention",
    f"{PAPER}, Sections 3.2 and 4.3",
    points,
    measure,
    report,
)
