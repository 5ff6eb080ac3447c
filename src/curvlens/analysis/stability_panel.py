"""The section on stability: where each optimiser is, where its edge is, and what a search along its step says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvlens.analysis import charts
from curvlens.analysis.drawn import chart
from curvlens.analysis.numbers import number, plain, said
from curvlens.dynamics.advice import percent, short
from curvlens.report.content import Column, Content, Prose, Table, Words
from curvlens.report.page import Section

Document = Mapping[str, Any]
Record = tuple[str, Document]
EDGES = {"gradient descent": 2.0, "momentum 0.9": 3.8, "Nesterov 0.9": 2 * 1.9 / 2.8}
"""η λ_max at the edge of stability."""
ADAM, ADAM_EDGE = "Adam, v̂ = g²", 38.0
BLOCKS = 8
"""Blocks named as the first to leave."""


def records(content: Document) -> list[Record]:
    """What the bars are drawn from."""
    return edge_records(content) or rate_records(content)


def edge_records(content: Document) -> list[Record]:
    """Optimisers as shares of their edge: the one that was measured, and others at its learning rate."""
    found, top = content.get("stability"), content["whole"].get("H", {}).get("top")
    if not found or found.get("ratio") is None:
        return []
    shares: list[Record] = [
        (str(found["rule"]), {"value": float(found["ratio"]), "bound": float(found.get("residual") or 0.0)})
    ]
    rates = {group.get("lr") for group in found.get("groups") or ()}
    if len(rates) == 1 and top is not None and top["low"] > 0:
        rate = rates.pop()
        if rate:
            shares += [
                (f"{rule}, lr {short(rate)}", {"value": rate * top["value"] / c, "bound": rate * top["bound"] / c})
                for rule, c in EDGES.items()
            ]
    return shares


def rate_records(content: Document) -> list[Record]:
    """The largest stable learning rates."""
    top, adam = content["whole"].get("H", {}).get("top"), content.get("adam", {}).get("largest_rate")
    found: list[Record] = []
    if top is not None and top["low"] > 0:
        value, bound = top["value"], top["bound"]
        found = [(rule, {"value": c / value, "bound": c * bound / value**2}) for rule, c in EDGES.items()]
    return [*found, *([(ADAM, adam)] if adam else [])]


def searched(content: Document) -> dict[str, Document]:
    """By optimiser, the learning rate at which the loss along its step rises again."""
    found = {"gradient descent": _rates(content.get("descent"), 1.0)}
    adam = content.get("adam")
    if adam:
        found[ADAM] = _rates(adam.get("step"), adam["groups"][0]["lr"])
    return {rule: cells for rule, cells in found.items() if cells}


def _rates(step: Document | None, rate: float) -> Document:
    """Multiples of a step as learning rates: ``measured`` and ``critical``, as far as they are known."""
    if not step or step["climbs"]:
        return {}
    found: dict[str, Any] = {}
    if step["critical"] is not None:
        found["critical"] = rate * step["critical"]
    if step["measured"] is not None:
        found["measured"] = {
            name: rate * x if name != "exact" else x for name, x in step["measured"].items() if x is not None
        }
    return found


def bars(content: Document) -> charts.Spec:
    """A bar for each optimiser: its share of the edge, or its largest stable learning rate if no rate is known."""
    edges = edge_records(content)
    if edges:
        return charts.edge(edges, "share of the edge of stability")
    lines = {rule: cells["measured"] for rule, cells in searched(content).items() if "measured" in cells}
    return charts.rates(rate_records(content), lines)


def stability(content: Document) -> Section:
    """The section."""
    body, found, adam = list[Content](), content.get("stability"), content.get("adam")
    if records(content):
        body += chart("stability", lambda: bars(content))
    if found:
        body += _given(found)
    elif any("measured" in cells for cells in searched(content).values()):
        words = (
            "A bar ends at the edge. The orange mark is where the loss along the step rises again, by line search; "
            "the table has its number."
        )
        body.append(Prose(words, "faint"))
    body += _table(content)
    if adam:
        words = (
            f"{adam['convention']}. Second moments taken as g² at this point: what Adam has where the gradient "
            "has long been this one. To measure yours, give it: --optimizer optimizer.pt."
        )
        body.append(Prose(words, "faint"))
    for title, each in (("the optimiser", found), ("Adam", adam)):
        body += _leaving(title, each)
    words = (
        "The edge is local and quadratic: it says what a small displacement does. A line search looks at the loss "
        "itself, along one direction."
    )
    body.append(Prose(words, "faint"))
    return Section("stability", "Stability", "The learning rates at which the sharpest direction begins to grow.", body)


def _given(found: Document) -> list[Content]:
    """The optimiser that was given: its numbers, and its next step."""
    body: list[Content] = [Prose(str(found["convention"]), "faint")] if found.get("convention") else []
    share = {"value": found["ratio"], "bound": found.get("residual")} if found.get("ratio") is not None else None
    numbers = {
        "sharpness in its own metric": number(found.get("preconditioned")),
        "its edge": plain(found.get("threshold")),
        "share of the edge": number(share),
        "learning rates, times this, reach the edge": plain(found.get("headroom")),
    }
    step = found.get("step", {})
    if step and not step["climbs"]:
        numbers["steps until the loss rises again, by line search"] = number(step["measured"])
        numbers["the same by the quadratic model"] = plain(step["critical"])
        numbers["sharpness along the step"] = plain(step["sharpness"])
    rows: list[list[Words]] = [[title, words] for title, words in numbers.items() if words]
    body.append(Table([Column(str(found["rule"])), Column("value", numbers=True)], rows, "optimiser", filtered=False))
    body += [Prose(words) for words in (_said(step), _note(found)) if words]
    return body


def _said(step: Document) -> str:
    """What the search along the next step found."""
    if not step:
        return ""
    if step["climbs"]:
        return "The step that comes climbs: its slope along the gradient of this data is not negative."
    if not step["certain"]:
        return "Along the step that comes the loss changes by no more than rounding."
    model = "has no end" if step["critical"] is None else f"says {short(step['critical'])}"
    if step["measured"] is None:
        return f"The loss does not rise again up to {short(step['searched'])} steps; the quadratic model {model}."
    return (
        f"The step that comes may be {said(step['measured'])} times as long before the loss rises again (line search); "
        f"the quadratic model {model}."
    )


def _note(found: Document) -> str:
    note = str(found.get("note") or "")
    return f"{note[:1].upper()}{note[1:]}." if note else ""


def _table(content: Document) -> list[Content]:
    """Rules by their constant: the sharpness that they feel, and their largest stable learning rates."""
    top, adam, lines = content["whole"].get("H", {}).get("top"), content.get("adam"), searched(content)
    rows: list[list[Words]] = []
    for rule, cell in rate_records(content):
        own = adam["preconditioned"] if adam and rule == ADAM else top
        edge = ADAM_EDGE if rule == ADAM else EDGES[rule]
        line = lines.get(rule, {})
        rows.append(
            [rule, number(own), plain(edge), number(cell), plain(line.get("critical")), number(line.get("measured"))]
        )
    if not rows:
        return []
    titles = ("sharpness λ", "η λ at the edge", "largest stable η")
    columns = [Column("optimiser"), *(Column(title, numbers=True) for title in titles)]
    columns += [
        Column(title, numbers=True, group="η where the loss rises again") for title in ("quadratic", "searched")
    ]
    return [Table(columns, rows, "learning rates", filtered=False)]


def _leaving(title: str, found: Document | None) -> list[Content]:
    """The blocks where the direction that leaves first lives."""
    mass = sorted((found or {}).get("mass", {}).items(), key=lambda pair: -pair[1])
    if not mass:
        return []
    shown, rest = mass[:BLOCKS], mass[BLOCKS:]
    others = f"; {len(rest)} others hold {percent(sum(x for _, x in rest))}" if rest else ""
    words = f"What leaves first with {title}: share of each block in the sharpest direction, in its metric{others}."
    drawn = chart(f"first to leave with {title}", lambda: charts.bars(shown, "share of ‖x‖²"))
    listed = Prose(", ".join(f"{name} {percent(x)}" for name, x in shown))
    return [Prose(words), *(drawn or [listed])]
