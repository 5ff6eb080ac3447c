"""Table 1: how the Hessian of linear attention, a linear MLP and a linear CNN depends on the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.calculus import attention, linear_mlp
from curvlens.losses import MSE
from curvlens.operators import functional, ggn
from curvlens.papers.comparisons import ROUNDING
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.differentiated import apart, functional_part
from curvlens.papers.first_paper.layer import BLOCKS
from curvlens.papers.parts import SIGNS, SPLIT, signed
from curvlens.papers.ranges import LOCAL, extent, following
from curvlens.papers.sizes import frobenius, marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import grid, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.problem import Problem
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

NETWORKS = {"attention": "linear attention", "mlp": "linear MLP", "cnn": "linear CNN"}
RESIDUALS = ("constant", "scaling")
PREDICTED = {
    ("attention", "constant"): (6, 3),  # Σ³ and Ω Σ
    ("attention", "scaling"): (6, 4),
    ("mlp", "constant"): (2, 1),  # Σ and Ω
    ("mlp", "scaling"): (2, 2),
}
CUBIC = 6.0
"""The power of σ in Σ³."""
TOLERANCE = 0.02
"""How far a slope may be from the predicted one."""


def points(effort: Effort) -> list[Config]:
    """Three linear networks: attention, an MLP and a CNN, of two layers, with a residual that is constant or scales."""
    return [
        {"network": network, "residual": residual, "sigma": sigma, "seed": seed}
        for network in ("attention", "mlp", "cnn")
        for residual in RESIDUALS
        for seed in effort.repeats(3, 10)
        for sigma in grid(0.001, 0.1, 5 if effort.quick else 9)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖ and ‖H_f‖ over all weights of the network; target scales with the data or does not."""
    draw = Draws(config["seed"])
    x, y = config["sigma"] * draw(4, 9, 6), draw(4, 9, 6)
    y = y * config["sigma"] if config["residual"] == "scaling" else y
    if config["network"] == "attention":
        return _attention(x, y, [0.4 * draw(6, 6) for _ in range(3)])
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


def _attention(x: Tensor, y: Tensor, weights: Sequence[Tensor]) -> dict[str, Any]:
    """And the outer part of every block; of the functional part on the diagonal, by automatic differentiation."""
    form = attention.hessian(x, weights[0], weights[1], weights[2], target=y, kind="linear")

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = x @ q @ k.mT @ x.mT / math.sqrt(q.shape[1]) @ x @ v
        return found

    functional = functional_part(output, weights, y)
    on_diagonal = [functional[i : i + 36, i : i + 36].norm() / functional.norm() for i in (0, 36, 72)]
    return {
        **{part: sized(form.norm(None, part)) for part in SPLIT},
        "blocks": {block: sized(form.norm((block[0], block[1]), "outer")) for block in BLOCKS},
        "hollow": float(max(on_diagonal)),
        "apart": apart(form.functional.dense(), functional),
    }


def report(records: Sequence[Record]) -> Report:
    """Powers of the data in both parts, against those of Σ = XᵀX/L and Ω = Xᵀ(F − Y)/L."""
    slopes: dict[tuple[str, str], tuple[float, ...]] = {}
    for network in NETWORKS:
        for residual in RESIDUALS:
            of = where(records, network=network, residual=residual)
            lines = [sweep(of, "sigma", part) for part in SPLIT]
            slopes[network, residual] = tuple(line.law((0.001, 0.01)).slope for line in lines)
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

    def written(network: str) -> str:
        (a, b), (c, d) = slopes[network, "constant"], slopes[network, "scaling"]
        return f"{NETWORKS[network]}: H_o {a:.3f}, H_f {b:.3f}; with targets that scale {c:.3f} and {d:.3f}"

    def near(network: str, residual: str, powers: Sequence[float]) -> bool:
        return all(abs(a - b) <= TOLERANCE for a, b in zip(slopes[network, residual], powers, strict=True))

    findings = (
        judged_parts(
            "table-1",
            f"Powers of σ, tolerance {TOLERANCE:g}. {written('attention')}. {written('mlp')}.",
            {f"{NETWORKS[case[0]]}, {case[1]} residual": near(*case, powers) for case, powers in PREDICTED.items()},
        ),
        judged_parts(
            "cnn",
            f"{written('cnn')}. {written('mlp')}. Within {TOLERANCE:g} counts as the same.",
            {f"{residual} residual": near("cnn", residual, slopes["mlp", residual]) for residual in RESIDUALS},
        ),
        _blocks(where(records, network="attention")),
    )
    return Report((chart,), findings, (), (), marked(records))


def _blocks(records: Sequence[Record]) -> Finding:
    """Of linear attention: every outer block, and the diagonal of the functional part."""
    of = where(records, residual="constant")  # the outer part knows no residual
    curves = {signed("outer", block): sweep(of, "sigma", "blocks", block) for block in BLOCKS}
    cubic = {name: following([(found, CUBIC)]) for name, found in curves.items()}
    hollow, closed = (max(record.result[name] for record in records) for name in ("hollow", "apart"))
    parts: dict[str, bool | None] = {name: found is not None and found.whole for name, found in cubic.items()}
    parts["the functional part is block-hollow"] = hollow <= ROUNDING
    return judged_parts(
        "linear-blocks",
        f"Local slopes of the outer blocks, to be within {LOCAL:g} of {CUBIC:g} at all σ: "
        + ", ".join(f"{name} {extent(found)}" for name, found in curves.items())
        + f". By automatic differentiation the diagonal blocks of H_f have at most {hollow:.1g} of ‖H_f‖, zero being "
        f"{ROUNDING:.0e}; the closed form agrees with it to {closed:.0e}.",
        parts,
    )


TABLE1 = Experiment(
    "table1",
    "Linear attention beside a linear MLP and CNN",
    f"{PAPER}, Table 1",
    points,
    measure,
    report,
    revision=2,
)
