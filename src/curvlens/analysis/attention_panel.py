"""The part of the attention panel that needs more than one forward pass: heads beside their curvature, and theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.analysis.heads import LEAST, ROLES
from curvlens.analysis.numbers import number, plain
from curvlens.dynamics.advice import short
from curvlens.report.content import Column, Content, Fold, Prose, Table, Words

Document = Mapping[str, Any]
TITLES = {"evenness": "entropy/log n", "sink": "sink", "m1": "M1", "m2": "M2", "m3": "M3"}
NAMES = {"q": "queries", "k": "keys", "v": "values", "m1": "M1", "m2": "M2"}
MOMENTS = (
    "M1 is the mean of the tokens that enter the layer under the attention weights, M2 and M3 are their second and "
    "third central moment: root mean squares of ‖M1‖, ‖M2‖_F and ‖M3‖_F over query tokens. In theory the part of G by "
    "the values goes with M1 (its Jacobian is M1 ⊗ I), the parts by queries and keys go with M2, the derivative of the "
    "softmax."
)


def heads(content: Document) -> list[Content]:
    """A table with a row for each head, and rank correlations."""
    found = content.get("attention_heads") or []
    body: list[Content] = []
    looks = [name for name in TITLES if any(name in row for row in found)]
    roles = [role for role in ROLES if any(role in row for row in found)]
    if found:
        rows: list[list[Words]] = [
            [
                f"{row['block'] or row['call']}.{row['head']}",
                *(plain(row.get(name)) for name in looks),
                *(number(row.get(role)) for role in roles),
            ]
            for row in found
        ]
        columns = [Column("head"), *(Column(TITLES[name], numbers=True) for name in looks)]
        columns += [Column(f"tr G of {role}", numbers=True) for role in roles]
        unmeasured = [] if roles else [Prose("The traces of G by head were not measured in this budget.", "faint")]
        table = Table(columns, rows, "heads", filtered=False)
        body.append(
            Fold("Each head: what it looks at, and its curvature", [Prose(MOMENTS), table, *unmeasured], "heads")
        )
    body += [Prose(words, "faint") for words in _unseen(content.get("attention", {}).get("calls", ()))]
    said = [
        f"{NAMES[each['moment']]} with tr G by the {NAMES[each['role']]} {short(each['correlation'], 2)} "
        f"(p = {short(each['p'], 2)})"
        for each in content.get("attention_ranks", ())
    ]
    if said:
        count = content["attention_ranks"][0]["heads"]
        words = (
            f"Rank correlations over {count} heads of all layers: {', '.join(said)}. p is the share of random orders "
            "with a correlation as large. The traces also depend on what is behind a layer, so they need not be 1."
        )
        body.append(Prose(words))
    elif roles and len(found) < LEAST:
        body.append(Prose(f"Rank correlations need {LEAST} heads; there are {len(found)}.", "faint"))
    return body


def _unseen(calls: Sequence[Document]) -> list[str]:
    """Why some calls have no moments, each reason once."""
    reasons: dict[str, list[str]] = {}
    for i, call in enumerate(calls):
        if "why" in call:
            reasons.setdefault(call["why"], []).append(str(i))
    return [f"No moments of call {', '.join(numbers)}: {why}" for why, numbers in reasons.items()]


def theory(content: Document) -> list[Content]:
    """The last attention layer: its traces of G in closed form beside the measured ones, or why there are none."""
    found = content.get("attention_theory")
    if not found:
        return []
    body: list[Content] = []
    rows: list[list[Words]] = [
        [
            f"{found['block']}.{role}",
            number(row["theory"]),
            number(row.get("measured")),
            plain(row.get("apart"), 2),
            plain(row.get("measured", {}).get("samples")),
        ]
        for role, row in found["rows"].items()
        if "theory" in row
    ]
    if rows:
        words = (
            f"The last attention layer, {found['block']}: the trace of G by its blocks in closed form (from the "
            "attention weights, M1, M2 and the curvature of the loss at the layer's outputs) beside the measured one. "
            "They are equal up to sampling: apart is their difference in standard errors, which few samples tell badly."
        )
        columns = [
            Column("block"),
            *(Column(title, numbers=True) for title in ("theory", "measured", "apart", "samples")),
        ]
        body += [Prose(words), Table(columns, rows, "theory", filtered=False)]
    reasons: dict[str, list[str]] = {}
    for role, row in found["rows"].items():
        if "why" in row:
            reasons.setdefault(row["why"], []).append(NAMES[role])
    for why, names in reasons.items():
        of = "" if len(names) == len(ROLES) else f" to {' and '.join(names)}"
        body.append(Prose(f"The closed form of the last attention layer does not apply{of}: {why}", "faint"))
    return body
