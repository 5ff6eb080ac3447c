"""The tree of a profile as an icicle chart that you can zoom into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from curvlens.errors import CurvlensError, a_kind, printable
from curvlens.report.assets import Assets
from curvlens.results import DIGITS, Estimate, Portion, Profile

SIGNED = "added up without their signs, so that nothing is taller than what it is in"
TOTAL = "Colour: sign and size of the total of the module"
QUANTITIES = {
    "share": (
        "share",
        " %",
        f"Height: the shares ⟨M, H⟩/‖H‖² of the own code of all modules in it, {SIGNED}. {TOTAL}. The shares of the "
        "GGN and of all own code add up to 100 %, and some may be negative.",
    ),
    "trace": (
        "trace",
        "",
        f"Height: the traces of the own code of all modules in it, {SIGNED}. {TOTAL}. The traces of the GGN and of all "
        "own code add up to that of the Hessian.",
    ),
    "top": (
        "part of λ_max",
        "",
        f"Height: what the own code of all modules in it contributes to the largest eigenvalue, uᵀMu, {SIGNED}. "
        f"{TOTAL}. The contributions of the GGN and of all own code add up to λ_max.",
    ),
    "frobenius": (
        "Frobenius norm",
        "",
        "Height: the norms of the own code of all modules in it, added up. Norms do not add up: this sum only bounds "
        "the norm of the whole, which is the colour.",
    ),
    "spectral": ("spectral norm", "", ""),
}
"""For each quantity: its name, its unit, and what the chart shows."""


@dataclass(frozen=True)
class Icicle:
    """The modules of a profile; the height of each is its contribution.

    ``quantity`` is what is shown at first: ``share``, ``trace``, ``top`` or ``frobenius``.
    """

    profile: Profile
    quantity: str = "share"

    def __post_init__(self) -> None:
        profile, quantity = self.profile, self.quantity
        if not isinstance(profile, Profile):
            raise CurvlensError(f"Expected a profile, as cl.profile(problem) returns it, got {a_kind(profile)}.")
        known = _known(profile)
        if quantity == "top" and quantity not in known:
            raise CurvlensError(
                "The profile has no contributions to the largest eigenvalue. Compute them: "
                "cl.profile(problem, top=True)."
            )
        if quantity not in known:
            raise CurvlensError(f"quantity={quantity!r}, expected one of {', '.join(map(repr, known))}.")

    def html(self, assets: Assets) -> str:
        """Empty elements that the script fills."""
        assets.needs("icicle.css", "icicle.js")
        place = assets.keep("icicles", _data(self.profile, self.quantity, _known(self.profile)))
        return f"""<div class="icicle" data-icicle="{place}">
<div class="bar"><div class="choice" role="group" aria-label="quantity"></div>
<nav class="crumbs" aria-label="zoom"></nav></div>
<noscript><p class="warn">The chart is drawn by a script; the table below has all numbers.</p></noscript>
<div class="panes">
<div class="whole"></div>
<div class="link"></div>
<div class="tree" role="tree" aria-label="modules"></div>
</div>
<div class="legend"><div class="scale"></div><p class="words"></p>
<p>Left: the Hessian as a whole, GGN and functional part on one scale; right: the functional part, module by module.
Point at a cell, or walk with the arrow keys, for all its numbers; click, or Enter, zooms in, Escape out. Errors are
standard errors, those of λ_max bounds.</p>
</div>
<div class="tip" role="tooltip" hidden></div>
</div>
"""


def _known(profile: Profile) -> list[str]:
    return [name for name in QUANTITIES if name != "spectral" and getattr(profile.hessian, name) is not None]


def _data(profile: Profile, quantity: str, known: list[str]) -> dict[str, Any]:
    """The data for the script: rows with parents before children, every number as [value, text, error]."""
    below, rows, todo = profile.tree(), list[dict[str, Any]](), [(profile[""], -1)]
    while todo:
        row, parent = todo.pop()
        name = printable(row.name) if row.path else "functional"
        numbers = {"own": _numbers(row.own), "total": _numbers(row.total)}
        rows.append(
            {"name": name, "path": printable(row.path), "kind": printable(row.kind), "parent": parent, **numbers}
        )
        place = len(rows) - 1
        todo += [(child, place) for child in reversed(below[row.path])]
    said = {name: dict(zip(("title", "unit", "legend"), QUANTITIES[name], strict=True)) for name in QUANTITIES}
    whole = {"ggn": _numbers(profile.ggn), "hessian": _numbers(profile.hessian)}
    return {"quantity": quantity, "known": known, "quantities": said, "rows": rows, **whole}


def _numbers(portion: Portion) -> dict[str, tuple[float | None, str, str]]:
    found = {name: getattr(portion, name) for name in QUANTITIES}
    return {name: _number(estimate, name) for name, estimate in found.items() if estimate is not None}


def _number(estimate: Estimate, name: str) -> tuple[float | None, str, str]:
    value = float(estimate)
    return value if math.isfinite(value) else None, *short(estimate, factor_of(name), DIGITS[name])


def short(estimate: Estimate, factor: float = 1.0, digits: int = 4) -> tuple[str, str]:
    """Value and error, with the sign as in the legend."""
    value, error = estimate.short(factor, digits)
    return value.replace("-", "−"), error.replace("-", "−")


def factor_of(name: str) -> float:
    """The factor that converts a number to its unit."""
    return 100.0 if QUANTITIES[name][1] else 1.0
