"""The article's table "observation → recommendation", over measured numbers and with the verdict on each row.

A row is an observation with its numbers and errors. Its recommendation is given only if the observation is supported by
them, and if the claim behind it was seen to hold. "No advice" is an answer, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from curvlens.dynamics.advice import BEYOND, Content, percent, short, with_bound

HIGH = 100.0
"""A condition number above this is high."""
UNEVEN = 2.0
"""Layers differ if one has this many times the mean curvature per parameter of another."""
VERDICTS: Mapping[str, tuple[str, str]] = {
    "advice-adaptive": ("holds", ""),
    "advice-momentum": ("holds when", "momentum 0.9"),
    "advice-layerwise": ("undecided", ""),
    "depth-growth": ("holds when", "growth with Post-LN; growth with no norm; growth with Pre-LN"),
}
"""By claim of `docs/verdicts.md`: its verdict, and where it holds. A test compares them with the stored results."""


@dataclass(frozen=True)
class Recommendation:
    """One row of the table."""

    observation: str
    """What was measured, with its error; or why it is not known."""
    recommendation: str
    """What to do; "" is no advice."""
    reason: str
    """Why this is recommended, or why nothing is."""
    claim: str
    """The claim on the verdict page."""
    verdict: str
    panel: str
    """The section of the page that shows the evidence."""


@dataclass(frozen=True)
class Observed:
    """An observation: whether it is made (None: the numbers cannot tell), and its numbers in words."""

    made: bool | None
    text: str


@dataclass(frozen=True)
class Row:
    """A row of the article's table."""

    observe: Callable[[Content], Observed | None]
    recommendation: str
    claim: str
    part: str
    """Of the claim, the part that the recommendation rests on, where the claim has several."""
    missing: str
    panel: str

    def read(self, content: Content) -> Recommendation:
        """The row, for the numbers of one analysis."""
        verdict, where = VERDICTS[self.claim]
        supported = verdict == "holds" or (verdict == "holds when" and self.part in where)
        observed: Observed | None = None
        with suppress(*BEYOND):
            observed = self.observe(content)
        given = ""
        if observed is None:
            text, reason = f"Not known: {self.missing}.", "the observation needs more budget"
        elif observed.made is None:
            text, reason = observed.text, "the errors do not tell"
        elif not observed.made:
            text, reason = observed.text, "it is not the case here"
        elif not supported:
            text = observed.text
            reason = f"the article recommends: {self.recommendation.lower()} That is not seen to help"
        else:
            text, given = observed.text, self.recommendation
            reason = "seen to help in small GPTs" + (f", for {self.part}" if verdict == "holds when" else "")
        return Recommendation(text, given, reason, self.claim, verdict, self.panel)


def recommendations(content: Content) -> list[Recommendation]:
    """The rows of the article's table, for the numbers of one analysis."""
    return [row.read(content) for row in TABLE]


def _conditioned(content: Content) -> Observed | None:
    whole = content.get("whole", {})
    found = [(letter, whole[letter]["condition"]) for letter in ("H", "G") if "condition" in whole.get(letter, {})]
    if not found:
        return None
    letter, number = found[0]
    made = True if number["low"] > HIGH else False if number["high"] <= HIGH else None
    return Observed(
        made,
        f"The condition number of {letter} on the span of its {number['directions']:,} largest eigenvalues is "
        f"{short(number['value'])} ({short(number['low'])} to {short(number['high'])}); above {HIGH:g} is high.",
    )


def _negative(content: Content) -> Observed | None:
    whole = content.get("whole", {}).get("H", {})
    if whole.get("top") is None or whole.get("bottom") is None:
        return None
    bottom, top = whole["bottom"], whole["top"]
    made = True if bottom["high"] < 0 else False if bottom["low"] >= 0 else None
    share = f", {percent(abs(bottom['value'] / top['value']))} of λ_max in size" if top["value"] else ""
    return Observed(made, f"λ_min is {with_bound(bottom)}{share}.")


def _by_layer(content: Content) -> list[tuple[str, float, float, int]] | None:
    """Name, trace of G, its error and the number of parameters of every layer, in order; None if a block is missing."""
    cells = content.get("cells", {})
    traces = cells.get("G", cells.get("H", {})).get("trace", {})
    found: dict[str, tuple[float, float, int]] = {}
    for block in content.get("blocks", ()):
        if block["layer"] is None:
            continue
        if block["name"] not in traces:
            return None
        cell = traces[block["name"]]
        total, variance, size = found.get(block["layer"], (0.0, 0.0, 0))
        found[block["layer"]] = (total + cell["value"], variance + cell["stderr"] ** 2, size + block["size"])
    rows = [(name, total, math.sqrt(variance), size) for name, (total, variance, size) in found.items()]
    return rows if len(rows) > 1 and all(total > 0 for _, total, _, _ in rows) else None


def _ratio(above: tuple[float, float], below: tuple[float, float]) -> tuple[float, float]:
    """The quotient of two numbers with errors, and its error on the logarithm."""
    return above[0] / below[0], math.hypot(above[1] / above[0], below[1] / below[0])


def _varies(content: Content) -> Observed | None:
    rows = _by_layer(content)
    if rows is None:
        return None
    means = sorted((total / size, error / size, name) for name, total, error, size in rows)
    low, high = means[0], means[-1]
    value, error = _ratio((high[0], high[1]), (low[0], low[1]))
    sure, never = value * math.exp(-2 * error) > UNEVEN, value * math.exp(2 * error) < UNEVEN
    return Observed(
        True if sure else False if never else None,
        f"{high[2]} has {short(value, 2)} ({short(value * math.exp(-2 * error), 2)} to "
        f"{short(value * math.exp(2 * error), 2)}) times the mean curvature per parameter of {low[2]}; from {UNEVEN:g} "
        "on layers count as different.",
    )


def _grows(content: Content) -> Observed | None:
    rows = _by_layer(content)
    if rows is None:
        return None
    (first, *one), (last, *two) = rows[0], rows[-1]
    value, error = _ratio((two[0], two[1]), (one[0], one[1]))
    low, high = value * math.exp(-2 * error), value * math.exp(2 * error)
    return Observed(
        True if low > 1 else False if high < 1 else None,
        f"The trace of {last} is {short(value, 2)} ({short(low, 2)} to {short(high, 2)}) times that of {first}.",
    )


TABLE = (
    Row(
        _conditioned,
        "Use an adaptive optimiser, such as Adam.",
        "advice-adaptive",
        "",
        "no condition number in this budget",
        "spectrum",
    ),
    Row(
        _negative,
        "Use momentum.",
        "advice-momentum",
        "momentum 0.9",
        "λ_min was not measured in this budget",
        "spectrum",
    ),
    Row(
        _varies,
        "Give each layer a learning rate of its own, the inverse of its curvature.",
        "advice-layerwise",
        "one step size a layer",
        "the traces of some layers were not measured in this budget, or there is one layer only",
        "heat",
    ),
    Row(
        _grows,
        "Use Pre-LN.",
        "depth-growth",
        "that Pre-LN is the remedy",
        "the traces of some layers were not measured in this budget, or there is one layer only",
        "heat",
    ),
)
"""The rows, in the article's order."""
