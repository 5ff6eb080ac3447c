"""Figure 3a with the choices that it leaves open: a tied unembedding, and positions that do not grow with σ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from curvlens.data import Addition
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper import growth
from curvlens.papers.parts import PARTS, SIGNS
from curvlens.papers.ranges import LOCAL, following, judged_range, told
from curvlens.papers.setting import SEQUENCES, Weights, hessian_at, weights
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, grid, where
from curvlens.papers.verdicts import Finding
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

VARIANTS = {"tied": "unembedding tied", "positions": "positions fixed", "both": "tied, positions fixed"}
CURVES = (("V", "total"), ("Q", "total"), ("Q", "outer"), ("Q", "functional"))
MIDDLE = (0.1, 1.0)
LOWEST = -1.0
"""The smallest local slope that is drawn."""
POWERS = {("V", "total"): 2, ("Q", "total"): 5, ("Q", "outer"): 6, ("Q", "functional"): 5}
"""Of σ in Equation 5, where the whole block grows like its larger part."""
GAINED = {("V", "total"): 2, ("Q", "total"): 1, ("Q", "outer"): 2, ("Q", "functional"): 1}
"""Powers that an unembedding proportional to σ adds: it enters H_o twice, and H_f once."""


def points(effort: Effort) -> list[Config]:
    """The σ of Figure 3a, for every variant."""
    return [
        {"width": 32 if effort.quick else growth.WIDTH, "variant": variant, "sigma": sigma, "seed": seed}
        for variant in VARIANTS
        for seed in effort.repeats(3, 5)
        for sigma in grid(*growth.WHOLE, 7 if effort.quick else 10)
    ]


def at(variant: str, width: int, *, sigma: float, seed: int) -> Weights:
    """The weights of Figure 3a, with the unembedding of GPT-2, positions of the deviation of all weights, or both."""
    task = Addition()
    w = weights(width, sigma=sigma, seed=stream(seed, "weights"), task=task)
    if variant in ("positions", "both"):
        w = replace(w, pos=w.pos * (0.8 / math.sqrt(width) / sigma))
    return replace(w, unembed=w.embed.mT.contiguous()) if variant in ("tied", "both") else w


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖, ‖H_f‖ and ‖H‖ of the query and the value block, exact."""
    w = at(config["variant"], config["width"], sigma=config["sigma"], seed=config["seed"])
    H = hessian_at(w, *Addition().batch(SEQUENCES, seed=stream(config["seed"], "sequences")))
    norms = {}
    for block in ("Q", "V"):
        values = [H.norm(block, part) for part in PARTS]
        norms[block] = [
            value if block == "V" and part == "functional" else sized(value)
            for part, value in zip(PARTS, values, strict=True)
        ]
    return {"norms": norms}


def report(records: Sequence[Record]) -> Report:
    """The slopes of every variant beside those of Equation 5."""
    panels = []
    for variant, title in VARIANTS.items():
        of = where(records, variant=variant)
        curves = [
            _drawn(growth.curve(of, *each).local(f"${SIGNS[each[1]]}({each[0]})$", colour=i, style=_style(each[1])))
            for i, each in enumerate(CURVES)
        ]
        axes = (r"$\sigma$", r"$d\,\log\|\cdot\|\,/\,d\,\log\sigma$", "log")
        panels.append(Panel(curves, (), title, *axes, lines=(1.0,), y_lines=(2.0, 5.0, 6.0)))  # type: ignore[arg-type]
    width = records[0].config["width"]
    chart = Chart(
        "tying",
        "Growth with a tied unembedding, and with positions that do not grow",
        f"Local slopes of the blocks of Figure 3a (d = {width}, no norms) in three other readings of its setting: the "
        "unembedding is the embedding transposed, as in GPT-2; only the tokens have the standard deviation σ, and "
        f"the positions {0.8 / math.sqrt(width):.2g}, as all weights; both. Grey: the powers 2, 5 and 6 of Equation 5. "
        f"Slopes below {LOWEST:g} are left out: there the cross-entropy saturates, and the blocks fall to nothing.",
        panels,
        columns=3,
    )
    findings = (
        _growth("growth-tied", where(records, variant="tied"), _tied(records)),
        _growth("growth-positions", where(records, variant="positions"), _both(records)),
    )
    return Report((chart,), findings, notes=marked(records))


def _drawn(line: Curve) -> Curve:
    """Without what falls so steeply that nothing else could be seen beside it."""
    kept = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y >= LOWEST]
    return replace(line, x=[x for x, _ in kept], y=[y for _, y in kept])


def _style(part: str) -> Any:
    return "dashed" if part == "total" else "solid"


def _growth(claim: str, records: Sequence[Record], beside: str) -> Finding:
    """Where all four curves follow Equation 5."""
    lines = {each: growth.curve(records, *each) for each in CURVES}
    where_all = following((lines[each], float(power)) for each, power in POWERS.items())
    return judged_range(
        claim,
        f"Slopes for σ ≤ {growth.SMALL[1]:g}, then for σ from {MIDDLE[0]:g} to {MIDDLE[1]:g} (Equation 5): "
        f"{_slopes(lines, POWERS)}. {_ends(lines)} {beside} All four are within {LOCAL:g} of Equation 5 for "
        f"{told(where_all)}.",
        where_all,
    )


def _slopes(lines: Mapping[tuple[str, str], Sweep], powers: Mapping[tuple[str, str], int]) -> str:
    found = []
    for (block, part), line in lines.items():
        small, middle = (line.slope("", window) for window in (growth.SMALL, MIDDLE))
        found.append(
            f"{SIGNS[part]}({block}) {small.value:.3f} ± {small.error:.3f}, {middle.value:.2f} ± {middle.error:.2f} "
            f"({powers[block, part]})"
        )
    return "; ".join(found)


def _ends(lines: Mapping[tuple[str, str], Sweep]) -> str:
    """The first local slope, and what is left at the largest σ: a saturated cross-entropy has no curvature."""
    whole = {each: line for each, line in lines.items() if each[1] == "total"}
    firsts = ", ".join(f"{SIGNS[part]}({block}) {line.slopes()[0]:.2f}" for (block, part), line in whole.items())
    value = lines["V", "total"]
    sizes = value.values.nan_to_num(0.0)
    left = float((sizes[:, -1] / sizes.amax(1)).median())
    return (
        f"Between the two smallest σ: {firsts}. Of ‖H(V)‖ at its largest, {left:.2g} is left at σ = {value.x[-1]:g} "
        "(median over the seeds)."
    )


def _tied(records: Sequence[Record]) -> str:
    """Where the curves follow the powers that tying gives."""
    of = where(records, variant="tied")
    gained = following((growth.curve(of, *each), float(POWERS[each] + GAINED[each])) for each in CURVES)
    return (
        "A tied unembedding is proportional to σ: H_o gains two powers and H_f one, which makes 4, 6, 8 and 6. All "
        f"four are within {LOCAL:g} of those for {told(gained)}."
    )


def _both(records: Sequence[Record]) -> str:
    """The slopes with both."""
    of = where(records, variant="both")
    lines = {each: growth.curve(of, *each) for each in CURVES}
    return f"With a tied unembedding as well: {_slopes(lines, GAINED)}, in brackets the powers of the unembedding."


TYING = Experiment(
    "tying",
    "Growth with a tied unembedding or fixed positions",
    f"{PAPER}, Figure 3a",
    points,
    measure,
    report,
)
