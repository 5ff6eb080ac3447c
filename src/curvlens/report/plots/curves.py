"""Numbers along an axis: quantities over the layers, a residual over the steps, a histogram."""

from __future__ import annotations

from typing import Any

from curvlens.errors import CurvlensError, printable
from curvlens.report.plots.frame import INK, PARTS, altair, as_key, colour_of, data, labels, titled, whole_numbers
from curvlens.results import Estimate, Propagation, Solution


def propagation(result: Propagation, quantity: str = "trace") -> Any:
    """Curves over the layers, by parameters and by activations."""
    alt = altair()
    if quantity not in ("trace", "frobenius", "top", "bottom"):
        raise CurvlensError(f"quantity={quantity!r}, expected 'trace', 'frobenius', 'top' or 'bottom'.")
    records = [
        {
            "level": printable(record[result.by]),
            "key": as_key(printable(record[result.by])),
            "of": f"by {record['of']}",
            "part": record["part"],
            "value": record[quantity],
            "low": record[quantity] - record[f"{quantity}_error"],
            "high": record[quantity] + record[f"{quantity}_error"],
        }
        for record in result.table()
        if record[quantity] is not None
    ]
    levels = [as_key(printable(name)) for name in result.levels]
    colour = alt.Color("part:N", scale=alt.Scale(domain=list(PARTS), range=list(PARTS.values())), title=None)
    charts = []
    for side in dict.fromkeys(record["of"] for record in records):
        own = [record for record in records if record["of"] == side]
        base = alt.Chart(data(own)).encode(x=alt.X("key:N", sort=levels, title=None, axis=labels()), color=colour)
        lines = base.mark_line(point=True).encode(
            y=alt.Y("value:Q", title=quantity), tooltip=["level:N", "part:N", "value:Q"]
        )
        band = base.mark_rule().encode(y="low:Q", y2="high:Q")
        charts.append(alt.layer(band, lines).properties(title=side, width=max(160, 40 * len(levels)), height=200))
    return alt.hconcat(*charts)


def residuals(result: Solution) -> Any:
    """The residual of a solution, step by step."""
    alt = altair()
    return (
        alt.Chart(data(result.table()))
        .mark_line(color=INK)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("residual:Q", title="relative residual", scale=alt.Scale(type="log")),
        )
        .properties(width=420, height=220)
    )


def histogram(result: Estimate) -> Any:
    """A histogram of many numbers, as of a diagonal."""
    if result.value.ndim == 0:
        raise CurvlensError(f"The estimate is one number, {result}: there is nothing to draw.")
    alt = altair()
    chart = (
        alt.Chart(data([{"value": value} for value in result.value.reshape(-1).tolist()]))
        .mark_bar(color=colour_of(result.provenance))
        .encode(
            x=alt.X("value:Q", bin=alt.Bin(maxbins=60), title="value"),
            y=alt.Y("count()", scale=alt.Scale(type="symlog"), title="how many (symmetric log)", axis=whole_numbers()),
        )
        .properties(width=420, height=220)
    )
    return titled(chart, str(result.provenance.get("quantity", "values")), result.provenance)
