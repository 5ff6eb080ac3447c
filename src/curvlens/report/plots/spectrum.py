"""Eigenvalues and densities in three panels; the blocks in which eigenvectors live."""

from __future__ import annotations

from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import (
    CELL,
    GAP,
    altair,
    as_key,
    colour_of,
    data,
    labels,
    titled,
    whole_numbers,
)
from curvlens.results import Density, Eigs

MOST_BLOCKS = 24
"""Blocks that the masses of eigenvectors are shown for: the heaviest."""


def eigenvalues(result: Eigs, what: str = "values", by: str = "block") -> Any:
    """Histogram, sorted, cumulative; or with ``what="mass"`` the shares of blocks in the vectors."""
    if what == "mass":
        return _mass(result, by)
    if what != "values":
        raise CurvlensError(f"what={what!r}, expected 'values' or 'mass'.")
    records = [
        {"rank": i + 1, "value": value, "low": value - r, "high": value + r, "share": (i + 1) / len(result)}
        for i, (value, r) in enumerate(zip(result.values.tolist(), result.residuals.tolist(), strict=True))
    ]
    alt, colour = altair(), colour_of(result.provenance)
    base = alt.Chart(data(records)).properties(width=230, height=180)
    x = alt.X("value:Q", title="eigenvalue")
    histogram = base.mark_bar(color=colour).encode(
        x=alt.X("value:Q", bin=alt.Bin(maxbins=30), title="eigenvalue"),
        y=alt.Y("count()", title="how many", axis=whole_numbers()),
    )
    sides = base.encode(x=alt.X("rank:Q", title="rank"))
    ranked = alt.layer(
        sides.mark_rule(color=colour).encode(y="low:Q", y2="high:Q"),
        sides.mark_point(color=colour, filled=True, size=30).encode(
            y=alt.Y("value:Q", title="eigenvalue"), tooltip=["rank:Q", "value:Q"]
        ),
    )
    steps = base.mark_line(color=colour, interpolate="step-after").encode(
        x=x, y=alt.Y("share:Q", title="share of the eigenvalues found")
    )
    panels = {"histogram": histogram, "sorted": ranked, "cumulative": steps}
    charts = alt.hconcat(*(panel.properties(title=name) for name, panel in panels.items()))
    return titled(charts, "eigenvalues", result.provenance)


def _mass(result: Eigs, by: str) -> Any:
    """Where each eigenvector lives: the share of each block."""
    shares = result.mass(by)  # type: ignore[arg-type]
    heaviest = sorted(shares, key=lambda name: -max(shares[name]))[:MOST_BLOCKS]
    order = [name for name in shares if name in heaviest]
    values = [f"{i + 1}: {value:.4g}" for i, value in enumerate(result.values.tolist())]
    records = [
        {"block": printable(name), "key": as_key(printable(name)), "eigenvalue": values[i], "share": share}
        for name in order
        for i, share in enumerate(shares[name])
    ]
    alt = altair()
    chart = (
        alt.Chart(data(records))
        .mark_rect(stroke=GAP)
        .encode(
            x=alt.X("eigenvalue:N", sort=values, title="eigenvector, by its eigenvalue", axis=alt.Axis(labelAngle=-45)),
            y=alt.Y("key:N", sort=None, title=None, axis=labels()),  # in the order of the records
            color=alt.Color("share:Q", scale=alt.Scale(scheme="viridis", domain=[0, 1]), title="share"),
            tooltip=["block:N", "eigenvalue:N", alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(width=CELL * max(len(values), 4), height=18 * len(order))
    )
    return titled(chart, "eigenvectors", result.provenance)


def density(result: Density, points: int = 200) -> Any:
    """Histogram, sorted, cumulative: shares are of all eigenvalues."""
    alt, colour = altair(), colour_of(result.provenance)
    records = result.table(points)
    seen = [record["density"] for record in records if record["density"] > 0]
    floor = max(min(seen), 1e-6 * max(seen))
    for record in records:
        record["floor"] = floor
        record["density"] = max(record["density"], floor)
    base = alt.Chart(data(records)).properties(width=230, height=180)
    x = alt.X("x:Q", title="eigenvalue")
    y = alt.Y("density:Q", stack=None, scale=alt.Scale(type="log", domainMin=floor, nice=False), title="density")
    curve = base.mark_area(color=colour, opacity=0.35, line={"color": colour}, clip=True).encode(x=x, y=y, y2="floor:Q")
    band = base.mark_area(color=colour, opacity=0.25).encode(x=x, y="low:Q", y2="high:Q")
    line = base.mark_line(color=colour).encode(x=x, y=alt.Y("cumulative:Q", title="share up to it"))
    rank = alt.X("cumulative:Q", title="share of eigenvalues", scale=alt.Scale(domain=[0, 1]))
    ranked = base.mark_line(color=colour).encode(
        x=rank,
        y=alt.Y("x:Q", title="eigenvalue (symmetric log)", scale=alt.Scale(type="symlog", constant=_constant(result))),
        order="x:Q",
    )
    panels = {"density": curve, "sorted": ranked, "cumulative": alt.layer(band, line)}
    charts = alt.hconcat(*(panel.properties(title=name) for name, panel in panels.items()))
    return titled(charts, "spectral density", result.provenance)


def _constant(result: Density) -> float:
    """Below which a symmetric logarithm is linear: a thousandth of the largest eigenvalue."""
    return max(float(result.nodes.abs().max()) * 1e-3, 1e-300)
