"""Figures 3 and 5: how the blocks of attention grow with the size σ of the embeddings, with norms and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from curvlens.calculus import exponents
from curvlens.experiments.experiment import Effort, Experiment, Law, Number, Report
from curvlens.experiments.setting import Norm, block_hessian
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, marked, number, sized, sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Panel, Slope

Part = Literal["outer", "functional", "total"]
PARTS: tuple[Part, ...] = ("outer", "functional", "total")
SIGNS = {"outer": "H_o", "functional": "H_f", "total": "H"}
DIAGONAL = ("Q", "K", "V", "O")
PAIRS = ("QK", "QV", "QO", "KV", "KO", "VO")
SMALL, WHOLE, LARGE = (0.01, 0.1), (0.01, 10.0), (1.0, 10.0)
WIDTH = 128
CROSSED = 5
"""Repeats for the blocks off the diagonal, which cost ten times as much."""


def grid(low: float, high: float, count: int) -> list[float]:
    """Places at equal distances of their logarithms, with few digits."""
    return [float(f"{x:.6g}") for x in np.geomspace(low, high, count)]


def _points(norm: Norm, effort: Effort, sigmas: Sequence[float]) -> list[Config]:
    width = 32 if effort.quick else WIDTH
    return [
        {"width": width, "norm": norm, "sigma": sigma, "seed": seed, "pairs": seed < CROSSED}
        for seed in effort.repeats(5, 20)
        for sigma in sigmas
    ]


def points_3a(effort: Effort) -> list[Config]:
    """20 σ from 0.01 to 10."""
    return _points("none", effort, grid(0.01, 10, 10 if effort.quick else 20))


def points_3b(effort: Effort) -> list[Config]:
    """The same, with Pre-LN."""
    return _points("pre", effort, grid(0.01, 10, 10 if effort.quick else 20))


def points_5(effort: Effort) -> list[Config]:
    """Those of Figure 3a, and evenly spaced ones from 0.1 to 1."""
    even = [round(x, 6) for x in np.linspace(0.1, 1, 10 if effort.quick else 20)]
    known = points_3a(effort)
    have = {config["sigma"] for config in known}
    return [*known, *_points("none", effort, [sigma for sigma in even if sigma not in have])]


def measure(config: Config) -> Mapping[str, Any]:
    """‖H_o‖, ‖H_f‖ and ‖H‖ of each block, exact."""
    H = block_hessian(config["width"], sigma=config["sigma"], seed=config["seed"], norm=config["norm"])
    found = {}
    for block in (*DIAGONAL, *(PAIRS if config["pairs"] else ())):
        hollow = config["norm"] == "none" and block in ("V", "O")
        values: list[float | str] = []
        for part in PARTS:
            value = H.norm(block if len(block) == 1 else (block[0], block[1]), part)
            values.append(value if hollow and part == "functional" else sized(value))
        found[block] = values
    return {"norms": found}


def curve(records: Sequence[Record], block: str, part: str) -> Sweep:
    """The norm of a block over σ."""
    having = [record for record in records if block in record.result["norms"]]
    return sweep(having, "sigma", "norms", block, PARTS.index(part))


def _panel(records: Sequence[Record], block: str, title: str, slopes: Sequence[Slope] = ()) -> Panel:
    lines = []
    for colour, part in enumerate(PARTS):
        found = curve(records, block, part)
        if not bool((found.values == 0).all()):
            label = rf"$\|{SIGNS[part]}({_letters(block)})\|_F$"
            style = "dashed" if part == "total" else "solid"
            lines.append(found.curve(label, colour=(0, 1, 6)[colour], style=style))
    return Panel(
        lines,
        slopes,
        title,
        r"standard deviation $\sigma$ of the embeddings",
        "Frobenius norm",
        "log",
        "log",
        lines=(1.0,),
    )


def _letters(block: str) -> str:
    return ", ".join(f"W_{letter}" for letter in (block if len(block) == 2 else block * 2))


def _predicted(records: Sequence[Record], block: str) -> list[Slope]:
    found = []
    for part in ("outer", "functional"):
        power = exponents.predicted(part, block * 2 if len(block) == 1 else block).data
        if power is not None:
            line = curve(records, block, part).curve("")
            found.append(Slope(power, (line.x[0], 1.0), (line.x[0], line.y[0] / 4), rf"$\sigma^{power}$"))
    return found


def report_3a(records: Sequence[Record]) -> Report:
    """Slopes against Equation 5."""
    charts = (
        Chart(
            "fig3a",
            "Growth of the query and value blocks with the size of the embeddings",
            "Frobenius norms of the diagonal blocks of one Transformer block without norms, cross-entropy of "
            "5-digit addition: mean over the seeds with its 95 % interval. Dashed grey: the powers of Equation 5, "
            "drawn a little below. The functional part of the value block is exactly zero.",
            [
                _panel(records, "Q", "query", _predicted(records, "Q")),
                _panel(records, "V", "value", _predicted(records, "V")),
                _local(records, "Q"),
                _local(records, "V"),
            ],
        ),
        Chart(
            "fig3a-all-blocks",
            "Growth of all blocks of the attention weights",
            "As before, for the blocks that the paper leaves out. Behind attention W_O belongs to the value: the "
            "pair (V, O) is a linear network of two layers.",
            [_panel(records, block, f"({', '.join(block * (3 - len(block)))})") for block in ("K", "O", *PAIRS)],
            columns=4,
        ),
    )
    numbers = []
    for block, part in (("V", "total"), ("Q", "total"), ("Q", "outer"), ("Q", "functional")):
        found = curve(records, block, part)
        numbers.append(found.slope(f"fig3a {block} {part} small", SMALL))
        if part == "total":
            numbers.append(found.slope(f"fig3a {block} {part} large", LARGE))
    zero = max(abs(number(record.result["norms"]["V"][1])) for record in records)
    numbers.append(Number("fig3a V functional", zero, 0.0))
    q, v = curve(records, "Q", "total"), curve(records, "V", "total")
    numbers.append(Sweep(q.x, q.values / v.values).slope("fig3a difference whole", WHOLE))
    findings = [
        _power("growth-value", curve(records, "V", "total"), 2),
        _power("growth-query", curve(records, "Q", "total"), 5),
        _power("growth-query-outer", curve(records, "Q", "outer"), 6),
        Finding(
            "value-functional",
            "holds" if zero == 0 else "does not hold",
            f"The largest norm over all σ and seeds is {zero:g}.",
        ),
        _all_blocks(records),
        _outer_at_large(records),
    ]
    return Report(charts, tuple(findings), tuple(numbers), _laws(records, predicted=True), marked(records))


def _laws(records: Sequence[Record], *, predicted: bool) -> tuple[Law, ...]:
    """Of every block and part that is not zero; W_O is not in Equation 5."""
    found = []
    for block in (*DIAGONAL, *PAIRS):
        for part in PARTS:
            line = curve(records, block, part)
            if bool((line.values == 0).all()):
                continue
            power = None
            if predicted and part != "total" and "O" not in block:
                power = exponents.predicted(part, block * 2 if len(block) == 1 else block).data
            name = f"{SIGNS[part]}({block[0]}, {block[-1]})"
            found.append(line.fitted(name, power))
    return tuple(found)


def _local(records: Sequence[Record], block: str) -> Panel:
    lines = []
    for colour, part in enumerate(PARTS):
        found = curve(records, block, part)
        if not bool((found.values == 0).all()):
            style = "dashed" if part == "total" else "solid"
            lines.append(found.local(f"${SIGNS[part]}$", colour=(0, 1, 6)[colour], style=style))
    powers = [exponents.predicted(part, block * 2).data for part in ("outer", "functional")]
    return Panel(
        lines,
        title=f"local slope, {'query' if block == 'Q' else 'value'}",
        x_label=r"$\sigma$",
        y_label=r"$d\,\log\|\cdot\|\,/\,d\,\log\sigma$",
        x_scale="log",
        lines=(1.0,),
        y_lines=[power for power in powers if power is not None],
    )


def _power(claim: str, found: Sweep, power: int) -> Finding:
    """Whether a curve is a power law, and until where."""
    law = found.law()
    low, high = law.interval
    small = found.slope("", SMALL)
    beyond = found.law(LARGE)
    right = abs(law.slope - power) < 0.05
    text = (
        f"σ^{law.slope:.3f} ({low:.3f} to {high:.3f}) for σ from {law.window[0]:.3g} to {law.window[1]:.3g}; "
        f"σ^{small.value:.4f} ± {small.error:.4f} for σ ≤ 0.1; σ^{beyond.slope:.2f} for σ from 1 to 10."
    )
    if not right:
        return Finding(claim, "does not hold", text)
    everywhere = abs(beyond.slope - power) < 0.05
    regime = "" if everywhere else f"σ ≤ {law.window[1]:.2g}; beyond, attention saturates and the power is smaller"
    return Finding(claim, "holds" if everywhere else "holds when", text, regime)


def _all_blocks(records: Sequence[Record]) -> Finding:
    worst, texts = 0.0, []
    blocks = ("QQ", "KK", "VV", "QK", "QV", "KV")
    for block in blocks:
        stored = block[0] if block[0] == block[1] else block
        for part in ("outer", "functional"):
            power = exponents.predicted(part, block).data
            if power is None:
                continue
            slope = curve(records, stored, part).law(SMALL).slope
            worst = max(worst, abs(slope - power))
            texts.append(f"{SIGNS[part]}({block[0]},{block[1]}) {slope:.3f} ({power})")
    return Finding(
        "growth-all",
        "holds when" if worst < 0.05 else "does not hold",
        "Measured (predicted) for σ ≤ 0.1: " + ", ".join(texts) + ".",
        "σ ≤ 0.1",
    )


def _outer_at_large(records: Sequence[Record]) -> Finding:
    """The share of the outer part at the largest σ, with the residual as it is."""
    texts, dominated = [], []
    for block in ("Q", "K", "V", "QK", "QV"):
        outer, functional = (curve(records, block, part).curve("").y[-1] for part in ("outer", "functional"))
        texts.append(f"{block}: {outer:.2g} against {functional:.2g}")
        dominated.append(outer > functional)
    verdict: Verdict = "holds" if all(dominated) else "holds when" if any(dominated) else "does not hold"
    which = ", ".join(b for b, yes in zip(("Q", "K", "V", "QK", "QV"), dominated, strict=True) if yes)
    return Finding(
        "outer-large",
        verdict,
        f"‖H_o‖ against ‖H_f‖ at σ = {curve(records, 'Q', 'outer').x[-1]:g}: " + "; ".join(texts) + ".",
        "" if verdict != "holds when" else f"the blocks {which}",
    )


def report_3b(records: Sequence[Record]) -> Report:
    """The same with Pre-LN, where no block is a power law."""
    chart = Chart(
        "fig3b",
        "Pre-LN: the blocks shrink with the size of the embeddings, and are no power laws",
        "As Figure 3a, with norms before attention, before the MLP and before the unembedding. Grey: one line "
        "through all σ, as in the paper. Below, the local slopes: they are not constant.",
        [
            _panel(records, "Q", "query", _fitted(records, "Q")),
            _panel(records, "V", "value", _fitted(records, "V")),
            _local_only(records, "Q"),
            _local_only(records, "V"),
        ],
    )
    q, v = curve(records, "Q", "total"), curve(records, "V", "total")
    both = Sweep(q.x, q.values / v.values)
    numbers = (
        v.slope("fig3b V total whole", WHOLE),
        q.slope("fig3b Q total whole", WHOLE),
        both.slope("fig3b difference whole", WHOLE),
    )
    law = q.law()
    spread = (min(law.local), max(law.local))
    near = abs(numbers[2].value) < 1
    verdict: Verdict = "does not hold" if not near else "holds" if spread[1] - spread[0] < 0.1 else "holds when"
    finding = Finding(
        "pre-ln",
        verdict,
        f"One line through all σ: {numbers[1].value:.2f} ± {numbers[1].error:.2f} (Q) and {numbers[0].value:.2f} ± "
        f"{numbers[0].error:.2f} (V), a difference of {numbers[2].value:.2f} ± {numbers[2].error:.2f}. "
        f"The local slope of Q goes from {spread[0]:.2f} to {spread[1]:.2f}.",
        "as a comparison of two averages; no exponent describes either curve" if verdict == "holds when" else "",
    )
    return Report((chart,), (finding,), numbers, _laws(records, predicted=False), marked(records))


def _fitted(records: Sequence[Record], block: str) -> list[Slope]:
    law = curve(records, block, "total").law(WHOLE)
    return [Slope(law.slope, WHOLE, (1.0, law.prefactor), rf"$\sigma^{{{law.slope:.2f}}}$")]


def _local_only(records: Sequence[Record], block: str) -> Panel:
    panel = _local(records, block)
    return Panel(
        panel.curves,
        title=panel.title,
        x_label=panel.x_label,
        y_label=panel.y_label,
        x_scale="log",
        lines=panel.lines,
        y_lines=(0.0,),
    )


def report_5(records: Sequence[Record]) -> Report:
    """The data of Figure 3a on linear axes."""
    panels = []
    for low, high in ((0.0, 1.0), (0.0, 10.0)):
        near = [record for record in records if record.config["sigma"] <= high]
        for block, name in (("Q", "query"), ("V", "value")):
            panel = _panel(near, block, rf"{name}, $\sigma\in({low:g}, {high:g})$")
            panels.append(Panel(panel.curves, (), panel.title, panel.x_label, panel.y_label))
    return Report(
        (
            Chart(
                "fig5",
                "Growth of the query and value blocks, linear axes",
                "The data of Figure 3a with evenly spaced σ from 0.1 to 1 added, on linear axes.",
                panels,
            ),
        )
    )


SOURCE = "What does it mean to be a Transformer?"
FIG3A = Experiment(
    "fig3a",
    "Growth of the blocks with the size of the embeddings",
    f"{SOURCE}, Figure 3a and Equation 5",
    points_3a,
    measure,
    report_3a,
)
FIG3B = Experiment(
    "fig3b",
    "The same with Pre-LN",
    f"{SOURCE}, Figure 3b",
    points_3b,
    measure,
    report_3b,
)
FIG5 = Experiment(
    "fig5",
    "Growth on linear axes",
    f"{SOURCE}, Figure 5",
    points_5,
    measure,
    report_5,
    data="fig3a",
)
