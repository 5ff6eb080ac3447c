"""The drawer of a block on the page: its facts, spectrum, heads, and the functional parts of its modules."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from curvlens.analysis.numbers import said
from curvlens.dynamics.advice import percent, short
from curvlens.report.drawer import Bars, Part, Rows, Shares
from curvlens.results import Estimate, Profile
from curvlens.results.base import from_plain

Document = Mapping[str, Any]
HEADS = 32
"""Heads shown in a drawer."""
MODULES = 4
"""Modules shown in a drawer: one, and those around it."""
CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")


def facts(content: Document, block: Document) -> list[tuple[str, str]]:
    """Label and value of what is known of a block, besides the numbers of the map."""
    name, point, vectors = block["name"], content.get("point", {}), content["eigenvectors"]
    found = []
    for title, key in (("gradient norm", "gradient_by_block"), ("weight norm", "weights_by_block")):
        if name in point.get(key, {}):
            found.append((title, short(point[key][name])))
    if vectors:
        found.append(("share of the top eigenvector", percent(vectors[-1]["mass"].get(name, 0.0))))
    for letter, of in content["cells"].items():
        rank = _effective_rank(of.get("trace", {}).get(name), of.get("norm", {}).get(name))
        if letter == "G" and rank:
            found.append(("effective rank of G, (tr G)²/‖G‖²_F", rank))
    listed = block["parameters"]
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    found.append(("parameters", ", ".join(listed[:6]) + more))
    return found


def _effective_rank(trace: Document | None, norm: Document | None) -> str:
    """(Σλ)²/Σλ² of a positive operator. The probes of both are the same, so their errors are added up."""
    if not trace or not norm or not trace["value"] or not norm["value"]:
        return ""
    value = (trace["value"] / norm["value"]) ** 2
    relative = [(each.get("stderr") or 0.0) / abs(each["value"]) for each in (trace, norm)]
    return said({"value": value, "stderr": 2 * value * sum(relative)})


def parts(content: Document) -> dict[str, list[Part]]:
    """For each block, what its drawer shows below the numbers."""
    densities = {each["block"]: each for each in content["spectrum"]["densities"] if each["block"] and _finite(each)}
    found = content.get("profile")
    profile = from_plain(json.loads(found["profile"])) if found else None
    heads: dict[str, list[tuple[str, Document]]] = {}
    for head, cell in content["heads"].items():
        block, _, number = head.rpartition(".")
        heads.setdefault(block, []).append((number, cell))
    shown: dict[str, list[Part]] = {}
    for block in content["blocks"]:
        name = block["name"]
        of: list[Part] = []
        if name in densities:
            of.append(_spectrum(densities[name]))
        if name in heads:
            of.append(_heads(heads[name]))
        if isinstance(profile, Profile):
            of += _modules(profile, block["parameters"])
        shown[name] = of
    return shown


def _finite(density: Document) -> bool:
    """Whether a density can be drawn."""
    numbers = [x for name in ("x", "share", "low", "high") for x in density[name]]
    return all(x is not None and math.isfinite(x) for x in numbers)


def _spectrum(density: Document) -> Shares:
    letter, count = density["operator"], density["probes"]
    how = f"{count} probe{'s' * (count != 1)}, band: 95 % interval" if count else "exact"
    about = density.get("numbers", {})
    if about:
        rank, negative = about["effective_rank"]["value"], about["negative_share"]["value"]
        how += f". Effective rank (Σ|λ|)²/Σλ² {short(rank)}, negative share of Σ|λ| {percent(negative)}"
    of = {"H": "hessian", "G": "ggn"}.get(letter, "hessian")
    return Shares(
        f"Spectrum of {letter}", density, f"Share of eigenvalues in a bin, {how}.",
        f'cl.density(cl.{of}(problem)["{{}}"])',
    )  # fmt: skip


def _heads(heads: Sequence[tuple[str, Document]]) -> Bars:
    bars = [(head, said(cell), cell["value"]) for head, cell in heads[:HEADS]]
    return Bars("Trace of G by head", bars, 'cl.trace(cl.ggn(problem), by="head")', len(heads) - len(bars))


def _modules(profile: Profile, parameters: Sequence[str]) -> Iterator[Rows]:
    """The functional part of the modules that hold some parameters, and of those around them."""
    paths = dict.fromkeys(path for each in parameters for path in _around(profile, each))
    rows = []
    for path in list(paths)[:MODULES]:
        total = profile.rows[path].total
        rows.append([f"{path} ({profile.rows[path].kind})", _number(total.trace), _number(total.share, 100.0, " %")])
    if rows:
        title = "Functional part of its modules"
        line = f"cl.profile(problem)[{json.dumps(next(iter(paths)))}]"
        yield Rows(title, ("module", "trace of M", "share ⟨M, H⟩/‖H‖²"), rows, line)


def _around(profile: Profile, parameter: str) -> Iterator[str]:
    """The module of a parameter and those around it, inside out, as far as the profile has them."""
    words = parameter.split(".")[:-1]
    for i in range(len(words), 0, -1):
        path = ".".join(words[:i])
        if path in profile.rows and profile.rows[path].kind not in CONTAINERS:
            yield path


def _number(each: Estimate, factor: float = 1.0, unit: str = "") -> str:
    value, error = float(each) * factor, float(each.stderr) * factor
    if not math.isfinite(value):
        return ""
    return said({"value": value, "stderr": error if math.isfinite(error) else None}) + unit
