"""Table 1: how the Hessian of linear attention, a linear MLP and a linear CNN depends on the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from curvlens.calculus import attention, linear_mlp
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.parts import SIGNS, SPLIT
from curvlens.experiments.sizes import frobenius, marked, sized
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import grid, sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Curve, Panel
from curvlens.losses import MSE
from curvlens.operators import functional, ggn
from curvlens.problem import Problem

NETWORKS = {"attention": "linear attention", "mlp": "linear MLP", "cnn": "linear CNN"}


def points(effort: Effort) -> list[Config]:
    """Three linear networks: attention, an MLP and a CNN, of two layers, with a residual that is constant or scales."""
    return [
        {"network": network, "residual": residual, "sigma": sigma, "seed": seed}
        for network in ("attention", "mlp", "cnn")
        for residual in ("constant", "scaling")
        for seed in effort.repeats(3, 10)
        for sigma in grid(0.001, 0.1, 5 if effort.quick else 9)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖ and ‖H_f‖ over all weights of the network; target scales with the data or does not."""
    draw = Draws(config["seed"])
    x, y = config["sigma"] * draw(4, 9, 6), draw(4, 9, 6)
    y = y * config["sigma"] if config["residual"] == "scaling" else y
    if config["network"] == "attention":
        form = attention.hessian(x, 0.4 * draw(6, 6), 0.4 * draw(6, 6), 0.4 * draw(6, 6), target=y, kind="linear")
        return {part: sized(form.norm(None, part)) for part in SPLIT}
    if config["network"] == "mlp":
        dense = linear_mlp.hessian(x, [0.4 * draw(6, 6), 0.4 * draw(6, 6)], y)
        return {part: sized(getattr(dense, part).norm()) for part in SPLIT}
    cnn = nn.Sequential(nn.Conv1d(9, 9, 3, padding=1, bias=False), nn.Conv1d(9, 9, 3, padding=1, bias=False)).double()
    with torch.no_grad():
        for weight in cnn.parameters():
            weight.copy_(0.2 * draw(*weight.shape))
    problem = Problem(cnn, [(x, y)], MSE())
    return {
        "outer": sized(frobenius(ggn(problem).dense())),
        "functional": sized(frobenius(functional(problem).dense())),
    }


def report(records: Sequence[Record]) -> Report:
    """Powers of the data in both parts, against those of Σ = XᵀX/L and Ω = Xᵀ(F − Y)/L."""
    predicted = {
        ("attention", "constant"): (6, 3),  # Σ³ and Ω Σ
        ("attention", "scaling"): (6, 4),
        ("mlp", "constant"): (2, 1),  # Σ and Ω
        ("mlp", "scaling"): (2, 2),
    }
    slopes: dict[tuple[str, str], tuple[float, ...]] = {}
    for network in NETWORKS:
        for residual in ("constant", "scaling"):
            of = where(records, network=network, residual=residual)
            lines = [sweep(of, "sigma", part) for part in SPLIT]
            slopes[network, residual] = tuple(line.law((0.001, 0.01)).slope for line in lines)
    worst = max(abs(a - b) for case in predicted for a, b in zip(slopes[case], predicted[case], strict=True))
    apart = max(
        abs(a - b) for r in ("constant", "scaling") for a, b in zip(slopes["cnn", r], slopes["mlp", r], strict=True)
    )
    bars = []
    for colour, part in enumerate(SPLIT):
        powers = [found[colour] for found in slopes.values()]
        bars.append(Curve(f"${SIGNS[part]}$", list(range(len(powers))), powers, colour=colour, style="bars"))
    names = [
        f"{NETWORKS[network]}\n{residual}\nresidual".replace("linear ", "linear\n") for network, residual in slopes
    ]
    chart = Chart(
        "table1",
        "Powers of the data in the Hessian of linear networks",
        "Slopes of the norms of both parts over σ, σ ≤ 0.01: one layer of linear attention, an MLP and a CNN of two "
        "layers; with targets that do not scale with the data (constant residual) and ones that do.",
        [Panel(bars, y_label="power of σ", ticks=(list(range(len(slopes))), names))],
        columns=1,
    )

    def told(network: str) -> str:
        (a, b), (c, d) = slopes[network, "constant"], slopes[network, "scaling"]
        return f"{NETWORKS[network]}: H_o {a:.3f}, H_f {b:.3f}; with targets that scale {c:.3f} and {d:.3f}"

    findings = (
        Finding("table-1", "holds" if worst < 0.02 else "does not hold", f"{told('attention')}. {told('mlp')}."),
        Finding("cnn", "holds" if apart < 0.02 else "does not hold", f"{told('cnn')}."),
    )
    return Report((chart,), findings, (), (), marked(records))


TABLE1 = Experiment(
    "table1",
    "Linear attention beside a linear MLP and CNN",
    f"{PAPER}, Table 1",
    points,
    measure,
    report,
)
