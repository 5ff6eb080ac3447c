"""Appendix E: with more heads the functional part becomes sparse; whether it also becomes small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.calculus import attention
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.first_paper.layer import LENGTH
from curvlens.experiments.sources import PAPER
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Panel


def points(effort: Effort) -> list[Config]:
    """Heads that share a width, 8 with full values and 16 with values of low rank."""
    return [
        {"heads": heads, "value": value, "seed": seed}
        for value in ("full", "low rank")
        for heads in ((1, 2, 4) if effort.quick else (1, 2, 4, 8))
        for seed in effort.repeats(3, 10)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """How full the functional part is, its norm beside the outer part's, and what is zero by structure."""
    draw = Draws(config["seed"])
    width, heads = 8 if config["value"] == "full" else 16, config["heads"]
    d_k = width // heads
    x, y = draw(LENGTH, width), draw(LENGTH, width)
    wq, wk = draw(heads, width, d_k, scale=width**-0.5), draw(heads, width, d_k, scale=width**-0.5)
    value: Any = draw(heads, width, width, scale=width**-0.5)
    if config["value"] != "full":
        value = draw(heads, width, d_k, scale=width**-0.5), draw(heads, d_k, width, scale=d_k**-0.5)
    H = attention.hessian(x, wq, wk, value, target=y)
    outer, functional = H.outer.dense(), H.functional.dense()
    names = H.total.names
    between = max((H.norm((a, b), "functional") for a in names for b in names if a[1:] != b[1:]), default=0.0)
    hollow = max(H.norm(name, "functional") for name in names if name[0] in "VO")
    return {
        "filled": float((functional != 0).double().mean()),
        "outer": float(outer.norm()),
        "functional": float(functional.norm()),
        "between": between,
        "hollow": hollow,
    }


def report(records: Sequence[Record]) -> Report:
    """Sparser with more heads; whether it also matters less."""
    texts, panels, falling = [], [], []
    for value in ("full", "low rank"):
        of = where(records, value=value)
        filled = sweep(of, "heads", "filled")
        mass = Sweep(filled.x, sweep(of, "heads", "functional").values / sweep(of, "heads", "outer").values)
        panels.append(
            Panel(
                [
                    filled.curve("share of entries of $H_f$ that are not zero"),
                    mass.curve(r"$\|H_f\| / \|H_o\|$", colour=1),
                ],
                (),
                f"{value} value",
                "heads",
                "",
                "log",
                "log",
                ticks=(list(filled.x), [f"{x:g}" for x in filled.x]),
            )
        )
        ratios = mass.middle().tolist()
        entries = filled.values.mean(0).tolist()
        falling.append(ratios[-1] < 0.5 * ratios[0])
        texts.append(
            f"{value} value, {', '.join(f'{x:g}' for x in mass.x)} heads: ‖H_f‖/‖H_o‖ = "
            + ", ".join(f"{r:.2f}" for r in ratios)
            + "; entries of H_f not zero "
            + ", ".join(f"{e:.0%}" for e in entries)
        )
    between = max(record.result["between"] for record in records)
    hollow = max(record.result["hollow"] for record in records)
    chart = Chart(
        "heads",
        "More heads make the functional part sparse",
        "One layer of heads that share the width. The functional part has no entries between heads; its norm beside "
        "the outer part's is another matter.",
        panels,
    )
    findings = (
        Finding(
            "heads",
            "does not hold" if between else "holds" if all(falling) else "holds when",
            f"Norm of the functional part between heads: {between:g}. " + ". ".join(texts) + ".",
            ""
            if all(falling)
            else "as a count of entries; the norm of the functional part does not become small beside the outer one",
        ),
        Finding(
            "low-rank-value",
            "holds" if hollow == 0 else "does not hold",
            f"The functional part of the diagonal blocks of W_V and W_O is {hollow:g} for all heads.",
        ),
    )
    return Report((chart,), findings)


HEADS = Experiment("heads", "Multi-head attention", f"{PAPER}, Appendix E", points, measure, report)
