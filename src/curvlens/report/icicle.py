"""The tree of a profile as an icicle: one HTML page that can be zoomed into, and fetches nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from curvlens.errors import CurvlensError, a_kind, printable
from curvlens.results import DIGITS, Estimate, Portion, Profile

MARK = '<meta name="generator" content="curvlens">'
"""Stands near the beginning of every page, by which it can be told from the pages of others."""
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
"""How each is called, its unit, and what is to be seen."""


def icicle(profile: Profile, quantity: str = "share") -> str:
    """A page with the modules of a profile as an icicle, and all numbers as a table.

    Args:
        profile: what `curvlens.profile` returned, or what was loaded.
        quantity: what the page shows at first: ``share``, ``trace``, ``top`` or ``frobenius``.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    >>> problem = Problem(model, (torch.ones(1, 2).double(), torch.zeros(1, 1)), MSE())
    >>> icicle(cl.profile(problem, samples=4)).startswith("<!doctype html>")
    True
    """
    if not isinstance(profile, Profile):
        raise CurvlensError(f"Expected a profile, as cl.profile(problem) returns it, got {a_kind(profile)}.")
    known = [name for name in QUANTITIES if name != "spectral" and getattr(profile.hessian, name) is not None]
    if quantity == "top" and quantity not in known:
        raise CurvlensError("The profile has no contributions to the largest eigenvalue: make it with top=True.")
    if quantity not in known:
        raise CurvlensError(f"quantity={quantity!r}, expected one of {', '.join(map(repr, known))}.")
    return _page(profile, _data(profile, quantity, known))


def _data(profile: Profile, quantity: str, known: list[str]) -> dict[str, Any]:
    """What the script draws: rows with parents before children, every number as [value, text, error]."""
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
    return value if math.isfinite(value) else None, *_short(estimate, _factor(name), DIGITS[name])


def _short(estimate: Estimate, factor: float = 1.0, digits: int = 4) -> tuple[str, str]:
    """Value and error, with the sign that the legend has."""
    value, error = estimate.short(factor, digits)
    return value.replace("-", "−"), error.replace("-", "−")


def _factor(name: str) -> float:
    return 100.0 if QUANTITIES[name][1] else 1.0


def _page(profile: Profile, data: dict[str, Any]) -> str:
    # Inside a script element only "<" could end it; "&" is data there.
    numbers = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    headline, note = _text(profile.headline), ""
    if profile.note:
        note = f'<p class="note">note: {_text(profile.note)}</p>'
    sign, mark = ("good", "✓") if profile.adds_up else ("bad", "✗")
    traces = [" ± ".join(filter(None, _short(p.trace))) for p in (profile.hessian, profile.ggn, profile[""].total)]
    split = (
        f"traces {traces[0]} = {traces[1]} + ({traces[2]})" if math.isfinite(profile.mismatch) else "traces not known"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{headline}</title>
<style>
{_asset("icicle.css")}</style>
</head>
<body>
<header>
<h1>Where the curvature comes from</h1>
<p>{headline}.</p>
<p>H = GGN + functional part; {split}.
<span class="{sign}">{mark} {_text(profile.check)}</span></p>
{note}
</header>
<div id="bar"><div id="choice" role="group" aria-label="quantity"></div><nav id="crumbs" aria-label="zoom"></nav></div>
<noscript><p class="note">The chart is drawn by a script; the table below has all numbers.</p></noscript>
<main id="chart">
<div id="whole"></div>
<div id="link"></div>
<div id="tree" role="tree" aria-label="modules"></div>
</main>
<div id="legend"><div id="scale"></div><p id="words"></p>
<p>Left: the Hessian as a whole, GGN and functional part on one scale; right: the functional part, module by module.
Point at a cell, or walk with the arrow keys, for all its numbers; click, or Enter, zooms in, Escape out. Errors are
standard errors, those of λ_max bounds.</p>
</div>
<details><summary>All numbers</summary><div class="scroll">{_table(profile)}</div></details>
<details><summary>Provenance</summary><dl>{_provenance(profile.provenance)}</dl></details>
<div id="tip" role="tooltip" hidden></div>
<script id="profile" type="application/json">{numbers}</script>
<script>
{_asset("icicle.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("curvlens.report").joinpath(name).read_text(encoding="utf-8")


def _text(words: object) -> str:
    """Names of users are hostile."""
    return escape(printable(str(words)))


def _table(profile: Profile) -> str:
    columns = [name for name in QUANTITIES if any(_held(portion, name) for portion in _portions(profile))]
    heads = "".join(f'<th colspan="2">{_text(QUANTITIES[name][0])}</th>' for name in columns)
    kinds = "<th>total</th><th>own</th>" * len(columns)
    lines = [_line("Hessian", "", profile.hessian, None, columns), _line("GGN", "", profile.ggn, None, columns)]
    lines += [_line(row.path or "functional", row.kind, row.total, row.own, columns) for row in profile]
    return (
        f'<table><thead><tr><th rowspan="2">module</th><th rowspan="2">class</th>{heads}</tr><tr>{kinds}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _portions(profile: Profile) -> Iterable[Portion]:
    yield profile.hessian
    for row in profile:
        yield row.total


def _held(portion: Portion, name: str) -> bool:
    return getattr(portion, name) is not None


def _line(path: str, kind: str, total: Portion, own: Portion | None, columns: Iterable[str]) -> str:
    cells = "".join(f"<td>{_said(total, name)}</td><td>{_said(own, name)}</td>" for name in columns)
    return f"<tr><th>{_text(path)}</th><td>{_text(kind)}</td>{cells}</tr>\n"


def _said(portion: Portion | None, name: str) -> str:
    estimate = getattr(portion, name, None)
    if estimate is None:
        return ""
    value, error = _short(estimate, _factor(name), DIGITS[name])
    unit = QUANTITIES[name][1] if not math.isnan(float(estimate)) else ""
    return _text(f"{value} ± {error}{unit}" if error else f"{value}{unit}")


def _provenance(about: dict[str, Any]) -> str:
    items = {key: json.dumps(x) if isinstance(x, (dict, list)) else x for key, x in about.items()}
    return "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in items.items())
