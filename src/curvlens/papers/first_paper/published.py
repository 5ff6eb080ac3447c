"""The published fits of Figures 3a and 3b again, from exact norms of the authors' own networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.papers import authors
from curvlens.papers.experiment import Effort, Experiment, Number, Report, at_width
from curvlens.papers.first_paper import growth
from curvlens.papers.first_paper.equation5 import BELOW
from curvlens.papers.parts import PARTS, SIGNS
from curvlens.papers.setting import Norm, Weights, hessian_at
from curvlens.papers.sizes import marked, sized
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, where
from curvlens.report.charts import Chart, Slope
from curvlens.study import Config, Record

FITS: dict[tuple[Norm, str, str], tuple[str, tuple[float, float]]] = {
    ("none", "V", "total"): ("fig3a V total below 1, published networks", BELOW),
    ("none", "Q", "total"): ("fig3a Q total below 1, published networks", BELOW),
    ("none", "Q", "outer"): ("fig3a Q outer below 1, published networks", BELOW),
    ("none", "Q", "functional"): ("fig3a Q functional below 1, published networks", BELOW),
    ("pre", "V", "total"): ("fig3b V total whole, published networks", growth.WHOLE),
    ("pre", "Q", "total"): ("fig3b Q total whole, published networks", growth.WHOLE),
}
"""Which were refitted from the published results, by norm, block and part."""
OTHER = f"Not compared with the published fits, which are of all {authors.REPEATS} repeats at all σ."
"""Said of other points."""


def points(effort: Effort) -> list[Config]:
    """All of the authors' σ; a seed is one of their repeats."""
    norms: tuple[Norm, ...] = ("none", "pre")
    return [
        {"width": authors.WIDTH, "norm": norm, "sigma": sigma, "place": place, "seed": seed}
        for norm in norms
        for seed in effort.repeats(2, authors.REPEATS)
        for place, sigma in enumerate(authors.SIGMAS)
        if place % 6 == 0 or not effort.quick
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖, ‖H_f‖ and ‖H‖ of the query and the value block, exact."""
    network = authors.network(config["seed"])
    tables = authors.embeddings(config["seed"], config["place"], config["sigma"])
    weights = Weights(*tables, network.layers[0], network.unembed)
    H = hessian_at(weights, *authors.batch(), norm=config["norm"])
    hollow = config["norm"] == "none"
    return {
        "norms": {
            block: [
                H.norm(block, part) if hollow and (block, part) == ("V", "functional") else sized(H.norm(block, part))
                for part in PARTS
            ]
            for block in ("Q", "V")
        }
    }


def whole(records: Sequence[Record], every: Sequence[Config]) -> bool:
    """Whether the points are all those of the published results and no others, which would have other fits."""
    ours, theirs = ({str(sorted(config.items())) for config in of} for of in ([r.config for r in records], every))
    return ours == theirs


def networks(records: Sequence[Record]) -> str:
    """Whose they are."""
    more = len({record.config["seed"] for record in records}) > authors.REPEATS
    own = f"Networks that the authors measured, d = {authors.WIDTH}, drawn again from their seeds"
    return f"{own}, and further ones by the same rules" if more else own


def report(records: Sequence[Record]) -> Report:
    """The authors' fits, and what they are fitted to."""
    panels = []
    of: dict[Norm, list[Record]] = {"none": where(records, norm="none"), "pre": where(records, norm="pre")}
    for norm, figure in zip(of, ("3a", "3b"), strict=True):
        for block, name in (("Q", "query"), ("V", "value")):
            panels.append(growth.panel(of[norm], block, f"Figure {figure}, {name}", _lines(of[norm], norm, block)))
    curves = [(growth.curve(of[norm], block, part), *named) for (norm, block, part), named in FITS.items()]
    fits = [Number(name, _slope(line, window), 0.0, _ends(line, window)) for line, name, window in curves]
    chart = Chart(
        "published",
        "The networks of the published Figures 3a and 3b",
        f"{networks(records)}: weights of their own in every repeat, embeddings new at every σ, one batch for all; "
        "norms are exact. Grey: slopes, in Figure 3a drawn a little below, the "
        "mean over the repeats of one line each, ± its standard error: "
        + "; ".join(_told(of[norm], norm) for norm in of)
        + ".",
        panels,
        columns=2,
    )
    if not whole(records, points(Effort())):
        return Report((chart,), notes=(*marked(records), OTHER))
    return Report((chart,), (), at_width(records, fits), notes=marked(records))


def _slope(found: Sweep, window: tuple[float, float]) -> float:
    """The mean over the repeats, each with a line of its own."""
    return float(found.powers(window).mean())


def _ends(found: Sweep, window: tuple[float, float]) -> tuple[float, float]:
    inside = found.finite().within(*window).x
    return inside[0], inside[-1]


def _lines(records: Sequence[Record], norm: Norm, block: str) -> list[Slope]:
    """The fits of a block, but for that of H_f, which lies on that of H."""
    found = []
    for (of_norm, of_block, part), (_, window) in FITS.items():
        if (of_norm, of_block) == (norm, block) and part != "functional":
            line = growth.curve(records, block, part)
            power, ends = _slope(line, window), _ends(line, window)
            middle = line.finite().within(*window)
            at = float(middle.values.log().mean().exp())
            place = float(torch.tensor(middle.x, dtype=torch.float64).log().mean().exp())
            found.append(Slope(power, ends, (place, at / 3 if norm == "none" else at)))
    return found


def _told(records: Sequence[Record], norm: Norm) -> str:
    """The slopes of a figure, with their standard errors over the repeats."""
    texts = []
    for (of_norm, block, part), (_, window) in FITS.items():
        if of_norm == norm:
            powers = growth.curve(records, block, part).powers(window)
            error = float(powers.std()) / len(powers) ** 0.5
            texts.append(f"{float(powers.mean()):.4f} ± {error:.4f} ({SIGNS[part]}({block}))")
    return f"{', '.join(texts)} " + ("in Figure 3a, σ < 1" if norm == "none" else "in Figure 3b, all σ")


PUBLISHED = Experiment(
    "published",
    "The published networks of Figures 3a and 3b",
    f"{PAPER}, the authors' notebook",
    points,
    measure,
    report,
)
