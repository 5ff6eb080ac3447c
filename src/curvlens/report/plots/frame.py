"""What all pictures share: Altair, colours and style, and records that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.errors import CurvlensError, printable

INK, BLUE, ORANGE = "#3b4252", "#0072b2", "#d55e00"
GAP = "#fefefe"
"""Between cells: the colour of the page, which its dark theme exchanges, as it does the ink."""
PARTS = {"hessian": INK, "ggn": BLUE, "functional": ORANGE}
OPERATORS = {"Hessian": "H (Hessian)", "GGN": "G (Gauss–Newton)", "Functional": "F (functional part)"}
SIGNED = {"scheme": "blueorange", "reverse": True}
"""Numbers of both signs: positive is blue, negative orange, as on pages and in the terminal."""
CELL = 26
"""Pixels of a cell of a heat map."""


def colour_of(provenance: Mapping[str, Any]) -> str:
    """The colour of the operator that a result is of: G blue, F orange, H and all others ink.

    >>> colour_of({"operator": "GGN"}) == BLUE, colour_of({}) == INK
    (True, True)
    """
    name = str(provenance.get("operator", "")).lower()
    return next((colour for part, colour in PARTS.items() if name.startswith(part)), INK)


def altair() -> Any:
    """Altair, or how to install it."""
    try:
        import altair
    except ImportError as error:
        raise CurvlensError("plot() needs Altair. Install it: pip install 'curvlens[report]'.") from error
    return altair


def whole_numbers() -> Any:
    """An axis of counts."""
    return altair().Axis(format="d", labelExpr="datum.value % 1 ? '' : datum.label")


def titled(chart: Any, what: str, provenance: Mapping[str, Any], caption: Sequence[str] = ()) -> Any:
    """With the operator that it is of, if that is known, and lines of text below it."""
    name = printable(str(provenance.get("operator", "")))
    title = f"{what} of {OPERATORS.get(name, name)}" if name else ""
    if not title and not caption:
        return chart
    text = {"text": title} if title else {"text": caption[0]}
    below = list(caption) if title else list(caption[1:])
    return chart.properties(title=altair().TitleParams(**text, **({"subtitle": below} if below else {})))


def as_key(name: str) -> str:
    """A name as a value of an axis. Vega fails on names that every JavaScript object has, such as ``constructor``."""
    return f"={name}"


def as_title(name: str) -> str:
    """A name as a whole title, for the same reason. Vega does not draw the space at its end.

    >>> as_title("constructor")
    'constructor '
    """
    return f"{name} "


def labels(**options: Any) -> Any:
    """An axis of values by `as_key`, labelled with the names."""
    return altair().Axis(labelExpr="slice(datum.label, 1)", **options)


def styled(chart: Any) -> Any:
    """In the style of all charts."""
    return (
        chart.configure_view(stroke=None)
        .configure_axis(
            labelColor=INK, titleColor=INK, titleFontWeight="normal", gridColor="#e5e9f0", domainColor="#aeb6c4"
        )
        .configure_title(anchor="start", color=INK, fontWeight="normal", fontSize=12, subtitleColor=INK)
        .configure_legend(titleFontWeight="normal", labelColor=INK, titleColor=INK)
    )


def graded(values: Sequence[str]) -> Any:
    """Colours of values that have an order: from light to dark blue."""
    light, dark = (0x9E, 0xC9, 0xE8), (0x1F, 0x2F, 0x5C)
    parts = [1 - i / max(len(values) - 1, 1) for i in reversed(range(len(values)))]
    mixed = [[round(a + (b - a) * part) for a, b in zip(light, dark, strict=True)] for part in parts]
    return altair().Scale(domain=list(values), range=["#" + "".join(f"{x:02x}" for x in each) for each in mixed])


def data(records: Sequence[dict[str, Any]]) -> Any:
    """Records as they are; no number that JSON does not have."""
    clean = [
        {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
        for record in records
    ]
    return altair().Data(values=clean)
