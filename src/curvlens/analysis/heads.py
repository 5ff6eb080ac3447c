"""What each head looks at beside its curvature, and the last attention layer: theory beside measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import scipy.stats
import torch

from curvlens.analysis.estimates import estimate, shown

Document = Mapping[str, Any]
LOOKS = ("evenness", "sink", "m1", "m2", "m3")
ROLES = "qkv"
PAIRS = (("m2", "q"), ("m2", "k"), ("m1", "v"))
"""Moments with the role whose part of G theory ties to them."""
LEAST = 6
"""Heads from which a rank correlation is computed."""
SHUFFLES = 9999


def by_head(calls: Sequence[Document], traces: Document) -> list[dict[str, Any]]:
    """A row for each call and head: what it looks at, and the trace of G by its q, k, v where it was measured.

    Keys and values that a group of heads shares stand with each of them.
    """
    rows = []
    for number, call in enumerate(calls):
        place, count = call.get("block", ""), len(call["sink"])
        shared = {role: _count(traces, f"{place}.{role}.") for role in ROLES}
        for head in range(count):
            row: dict[str, Any] = {"call": number, "block": place, "head": head}
            row |= {name: call[name][head] for name in LOOKS if name in call}
            for role, own in shared.items():
                if own and count % own == 0:
                    row[role] = traces[f"{place}.{role}.{head * own // count}"]
            rows.append(row)
    return rows


def _count(traces: Document, start: str) -> int:
    return sum(name.startswith(start) and name.removeprefix(start).isdigit() for name in traces)


def ranks(rows: Sequence[Document]) -> list[dict[str, Any]]:
    """Spearman's rank correlations over all heads, with the share of random orders that are as correlated."""
    found = []
    for moment, role in PAIRS:
        pairs = [(row[moment], row[role]["value"]) for row in rows if moment in row and role in row]
        pairs = [(x, y) for x, y in pairs if y is not None]
        if len(pairs) < LEAST or any(len(set(values)) < 2 for values in zip(*pairs, strict=True)):
            continue
        x, y = (torch.as_tensor(scipy.stats.zscore(scipy.stats.rankdata(v))) for v in zip(*pairs, strict=True))
        generator = torch.Generator().manual_seed(0)
        orders = torch.rand(SHUFFLES, len(x), generator=generator, dtype=torch.float64).argsort(-1)
        own, others = float((x * y).mean()), (x[orders] * y).mean(-1)
        p = (1 + int((others.abs() >= abs(own) - 1e-12).sum())) / (SHUFFLES + 1)
        found.append({"moment": moment, "role": role, "correlation": own, "p": p, "heads": len(x)})
    return found


def beside(theory: Document, measured: Document) -> dict[str, Any]:
    """The closed form of the last attention layer, and the measured traces of its blocks of G.

    ``apart`` is their difference in standard errors.
    """
    rows = {}
    for role in ROLES:
        row: dict[str, Any] = {}
        if role in theory["trace"]:
            row["theory"] = shown(estimate(theory["trace"][role]))
        name = f"{theory['block']}.{role}"
        if name in measured:
            row["measured"] = measured[name]
        if row.keys() == {"theory", "measured"}:
            error = math.hypot(*(each["stderr"] or 0.0 for each in row.values()))
            gap = abs(row["theory"]["value"] - row["measured"]["value"])
            row["apart"] = gap / error if error else None
        if role in theory["why"]:
            row["why"] = theory["why"][role]
        rows[role] = row
    return {"block": theory["block"], "rows": rows}
