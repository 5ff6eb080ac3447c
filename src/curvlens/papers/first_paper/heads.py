"""Appendix E: with more heads the functional part becomes sparse; whether it also becomes small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.papers.comparisons import DOMINATES, ROUNDING, Ratio, ratio
from curvlens.papers.draws import Draws
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.first_paper.differentiated import apart, functional_part
from curvlens.papers.first_paper.layer import LENGTH
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import Sweep, sweep, where
from curvlens.papers.verdicts import Finding, judged, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

HALF = 0.5
"""The share of entries below which a part has few."""
VALUES = {
    "full": "full value",
    "low rank": "value of low rank, W_O of variance 1/d_K",
    "low rank, 1/d": "value of low rank, W_O of variance 1/d",
}
"""The variance 1/d_K makes the output of a head as large with any number of heads, 1/d that of all heads together."""


def points(effort: Effort) -> list[Config]:
    """Heads that share a width, 8 with full values and 16 with values of low rank."""
    return [
        {"heads": heads, "value": value, "seed": seed}
        for value in VALUES
        for heads in ((1, 2, 4) if effort.quick else (1, 2, 4, 8))
        for seed in effort.repeats(3, 10)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The norms of both parts, and of the functional part by automatic differentiation how full it is and where.

    What is zero by structure is zero in the closed form whatever is true: it is read off the differentiated one.
    """
    draw = Draws(config["seed"])
    width, heads = 8 if config["value"] == "full" else 16, config["heads"]
    d_k = width // heads
    x, y = draw(LENGTH, width), draw(LENGTH, width)
    wq, wk = draw(heads, width, d_k, scale=width**-0.5), draw(heads, width, d_k, scale=width**-0.5)
    value: Any = draw(heads, width, width, scale=width**-0.5)
    if config["value"] != "full":
        size = width if config["value"] == "low rank, 1/d" else d_k
        value = draw(heads, width, d_k, scale=width**-0.5), draw(heads, d_k, width, scale=size**-0.5)
    H = attention.hessian(x, wq, wk, value, target=y)
    weights = {"Q": wq, "K": wk} | ({"V": value} if config["value"] == "full" else dict(zip("VO", value, strict=True)))

    def output(*own: Tensor) -> Tensor:
        """The sum over the heads, of weights head by head."""
        per, summed = len(weights), torch.zeros_like(y)
        for q, k, *v in (own[first : first + per] for first in range(0, len(own), per)):
            out = (x @ q @ k.mT @ x.mT / math.sqrt(d_k)).softmax(-1) @ x
            for factor in v:
                out = out @ factor
            summed = summed + out
        return summed

    functional = functional_part(output, [weight[head] for head in range(heads) for weight in weights.values()], y)
    names = H.total.names  # head by head as well: Q0, K0, V0, Q1, …
    sizes = [weights[name[0]][0].numel() for name in names]
    parts = {
        (a, b): float(block.norm() / functional.norm())
        for a, rows in zip(names, torch.split(functional, sizes), strict=True)
        for b, block in zip(names, torch.split(rows, sizes, 1), strict=True)
    }
    return {
        "filled": float((functional.abs() > ROUNDING * functional.abs().max()).double().mean()),
        "outer": float(H.outer.norm()),
        "functional": float(functional.norm()),
        "between": max((size for (a, b), size in parts.items() if a[1:] != b[1:]), default=0.0),
        "hollow": max(size for (a, b), size in parts.items() if a == b and a[0] in "VO"),
        "apart": apart(H.functional.dense(), functional),
    }


def report(records: Sequence[Record]) -> Report:
    """Sparser with more heads; whether it also matters less."""
    texts, panels = [], []
    trends: dict[str, Ratio] = {}
    sparse: dict[str, bool | None] = {}
    small: dict[str, bool | None] = {}
    for value, name in VALUES.items():
        of = where(records, value=value)
        filled = sweep(of, "heads", "filled")
        outer, functional = sweep(of, "heads", "outer"), sweep(of, "heads", "functional")
        mass = Sweep(filled.x, functional.values / outer.values)
        panels.append(
            Panel(
                [
                    filled.curve("share of entries of $H_f$ that are not zero"),
                    mass.curve(r"$\|H_f\| / \|H_o\|$", colour=1),
                ],
                (),
                name,
                "heads",
                "",
                "log",
                "log",
                ticks=(list(filled.x), [f"{x:g}" for x in filled.x]),
            )
        )
        entries = filled.values.mean(0).tolist()
        most = ratio(outer.values[:, -1], functional.values[:, -1])
        trends[value] = ratio(mass.values[:, -1], mass.values[:, 0])
        sparse[name] = all(a > b for a, b in pairwise(entries)) and entries[-1] < HALF
        small[name] = most.above(DOMINATES)
        texts.append(
            f"{name}, {', '.join(f'{x:g}' for x in mass.x)} heads: entries of H_f not zero "
            + ", ".join(f"{e:.0%}" for e in entries)
            + "; ‖H_f‖/‖H_o‖ = "
            + ", ".join(f"{r:.2f}" for r in mass.middle().tolist())
            + f", the last over the first {trends[value]}; ‖H_o‖/‖H_f‖ with the most heads {most}"
        )
    own, whole = (trends[value].below() for value in ("low rank", "low rank, 1/d"))
    if own != whole:
        said = {True: "is", False: "is not", None: "cannot be seen to be"}
        texts.append(
            "With a value of low rank, whether ‖H_f‖ shrinks beside ‖H_o‖ as heads are added depends on the scale of "
            f"W_O: it {said[own]} so with 1/d_K and {said[whole]} so with 1/d"
        )
    closed = max(record.result["apart"] for record in records)
    chart = Chart(
        "heads",
        "The functional part with more heads: how full, and how large",
        "One layer of heads that share the width. The functional part by automatic differentiation; the closed form "
        f"agrees with it to {closed:.0e}. Both are drawn on one axis: a share of entries, and a ratio of norms.",
        panels,
        columns=3,
    )
    return Report((chart,), (_heads(records, sparse, small, texts), _low_rank(records)))


def _heads(
    records: Sequence[Record],
    sparse: Mapping[str, bool | None],
    small: Mapping[str, bool | None],
    texts: Sequence[str],
) -> Finding:
    """Zero between heads, and beside that: most entries the outer part's alone, and most of the norm."""
    between = max(record.result["between"] for record in records)
    parts = {f"as a count of entries, {name}": holds for name, holds in sparse.items()}
    parts |= {f"by norm, {name}": holds for name, holds in small.items()}
    hollow = max(record.result["hollow"] for record in where(records, value="full"))
    text = (
        f"By automatic differentiation blocks of H_f between heads are {between:.1g} of ‖H_f‖, and the blocks (V, V) "
        f"of a full value {hollow:.1g}. {'. '.join(texts)}. The outer part dominates if H_f has fewer entries with "
        f"every step and at last less than {HALF:.0%}, and ‖H_o‖ is {DOMINATES:g} times ‖H_f‖."
    )
    if between > ROUNDING:
        return judged("heads", text, holds=False)
    return judged_parts("heads", text, parts)


def _low_rank(records: Sequence[Record]) -> Finding:
    of = [record for record in records if record.config["value"] != "full"]
    hollow = {f"heads: {n}": max(r.result["hollow"] for r in where(of, heads=n)) for n in _counts(of)}
    return judged_parts(
        "low-rank-value",
        "By automatic differentiation the diagonal blocks of W_V and W_O have of ‖H_f‖ at most "
        + ", ".join(f"{share:.1g} ({name})" for name, share in hollow.items())
        + f"; zero is at most {ROUNDING:.0e}.",
        {name: share <= ROUNDING for name, share in hollow.items()},
    )


def _counts(records: Sequence[Record]) -> list[int]:
    return sorted({record.config["heads"] for record in records})


HEADS = Experiment("heads", "Multi-head attention", f"{PAPER}, Appendix E", points, measure, report, revision=2)
