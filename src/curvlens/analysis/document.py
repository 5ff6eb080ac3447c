"""All that an analysis knows, as one plain document: what the page shows and what ``analysis.json`` holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from curvlens.analysis import heads
from curvlens.analysis.estimates import (
    cautious,
    difference,
    enclosed,
    end_of_spectrum,
    estimate,
    pooled,
    pooled_norm,
    shown,
    total,
)
from curvlens.analysis.extremes import atoms, condition, gap
from curvlens.analysis.instrument import DENSITY
from curvlens.analysis.known import Known
from curvlens.analysis.signal import noise_of
from curvlens.analysis.steps import optimisers
from curvlens.problem import Problem
from curvlens.results import Density, Estimate
from curvlens.study import Record

SCHEMA = 1
GRID = 64
"""Points of a density on a page."""


def document(problem: Problem, known: Known, about: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with errors by name. What was not measured is not there."""
    start, sanity, checkup = known.last("start"), known.last("sanity"), known.last("doctor")
    found: dict[str, Any] = {"schema": SCHEMA, **about, "blocks": _blocks(problem)}
    if start is not None:
        found["point"] = dict(start.result)
    if sanity is not None:
        found["sanity"] = dict(sanity.result)
    if checkup is not None:
        found["doctor"] = list(checkup.result["findings"])
    found["cells"] = cells(known)
    found["heads"] = _heads(known)
    found["whole"] = whole(known)
    found["spectrum"] = _spectrum(known)
    found["eigenvectors"] = _eigenvectors(known)
    found["heterogeneity"] = heterogeneity(known)
    for kind in ("profile", "attention"):
        record = known.last(kind)
        if record is not None:
            found[kind] = dict(record.result)
    found |= optimisers(known)
    found |= _attention(known, found)
    noise = known.last("noise")
    if noise is not None:
        found["noise"] = noise_of(noise.result)
    found["depth"] = {
        record.config["path"]: {
            letter: {quantity: shown(estimate(numbers)) for quantity, numbers in sizes.items()}
            for letter, sizes in record.result.items()
        }
        for record in known.of("depth")
    }
    found["spread"] = _spread(known)
    return found


def _spread(known: Known) -> list[dict[str, Any]]:
    """Loss, gradient norm, tr G, λ_max and tr H on parts of the data."""
    found = []
    for record in known.of("spread"):
        part = _plain_estimates(record.result)
        sharp = known.last("sharp-part", part=record.config["part"], of=record.config["of"])
        if sharp is not None:
            part["sharpness"] = enclosed(sharp.result["top"], sharp.result["residual"])
            part["trace_H"] = shown(estimate(sharp.result["trace"]))
        found.append(part)
    return found


def _attention(known: Known, found: Mapping[str, Any]) -> dict[str, Any]:
    """Heads beside their curvature, and the last attention layer in closed form."""
    rows = heads.by_head(found.get("attention", {}).get("calls", ()), found["heads"])
    parts: dict[str, Any] = {"attention_heads": rows, "attention_ranks": heads.ranks(rows)} if rows else {}
    theory = known.last("attention-theory")
    if theory is not None:
        parts["attention_theory"] = heads.beside(theory.result, found["cells"].get("G", {}).get("trace", {}))
    return parts


def cells(known: Known) -> dict[str, dict[str, dict[str, Any]]]:
    """By letter (H, G, F) and quantity (trace, norm, top, bottom, mean), a number for each block."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for letter in "HGF":
        for quantity in ("trace", "norm"):
            of = known.cells(letter, quantity)
            if of:
                found.setdefault(letter, {})[quantity] = {name: shown(each) for name, each in of.items()}
        traces = known.cells(letter, "trace")
        if traces:
            found[letter]["mean"] = {name: _scaled(each, 1 / known.blocks[name]) for name, each in traces.items()}
        for record in known.of("ends", operator=letter):
            place, name = found.setdefault(letter, {}), record.config["block"]
            for end in ("top",) if letter == "G" else ("top", "bottom"):
                cell = end_of_spectrum(record.result, known.blocks[name], top=end == "top")
                place.setdefault(end, {})[name] = cell
    return found


def whole(known: Known) -> dict[str, dict[str, Any]]:
    """Trace, norm, ends of the spectrum and what follows from them, for H, G and F."""
    found: dict[str, dict[str, Any]] = {}
    for letter in "HGF":
        estimates = _whole_estimates(known, letter)
        found[letter] = {name: shown(each) for name, each in estimates.items()}
        pairs = known.last("eigs", operator=letter)
        if pairs is not None:
            for end in ("top",) if letter == "G" else ("top", "bottom"):
                found[letter][end] = end_of_spectrum(pairs.result, sum(known.blocks.values()), top=end == "top")
            between = gap(pairs)
            if between is not None:
                found[letter]["gap"] = between
        density = _density_of(known.last("density", operator=letter, role="", block=""))
        if density is not None:
            found[letter] |= _from_density(density)
            on_part = condition(density, found[letter].get("top"))
            if on_part is not None:
                found[letter]["condition"] = on_part
        if "norm" in estimates and "top" in found[letter]:
            top = max(abs(found[letter][end]["value"]) for end in ("top", "bottom") if end in found[letter])
            found[letter]["stable_rank"] = _scaled_square(estimates["norm"], 1 / top**2) if top else None
    return {letter: numbers for letter, numbers in found.items() if numbers}


def _whole_estimates(known: Known, letter: str) -> dict[str, Estimate]:
    """Trace and norm of the whole, from its own finest probes; the trace may be better known from all blocks."""
    found: dict[str, Estimate] = {}
    for quantity, pool in (("trace", pooled), ("norm", pooled_norm)):
        own = [record for record in known.of("whole", operator=letter) if quantity in record.result]
        if own:
            most = max(record.config["samples"] for record in own)
            finest = [record.result[quantity] for record in own if record.config["samples"] == most]
            found[quantity] = pool([cautious(estimate(numbers)) for numbers in finest])
    parts = _over_blocks(known, letter)
    if parts is not None and ("trace" not in found or _width(parts) < _width(found["trace"])):
        found["trace"] = parts
    return found


def _over_blocks(known: Known, letter: str) -> Estimate | None:
    """The trace as the sum over all blocks, if each was measured; that of F is the difference of those of H and G."""
    if letter == "F":
        both = [_over_blocks(known, each) for each in "HG"]
        return None if both[0] is None or both[1] is None else difference(both[0], both[1])
    parts = list(known.cells(letter, "trace").values())
    if not parts or len(parts) < len(known.blocks):
        return None
    summed = total(parts)
    if letter == "H":
        return summed
    # Blocks of G come from the same passes: their errors add up, at worst linearly. Those of H are independent.
    stderr = torch.stack([each.stderr for each in parts]).sum()
    return replace(summed, stderr=stderr, dof=min(each.dof for each in parts))


def _width(estimate: Estimate) -> float:
    low, high = estimate.interval()
    return float(high - low)


def _from_density(density: Density) -> dict[str, Any]:
    """Negative share of the spectrum and the number of directions that carry half of ‖·‖²."""
    nodes, weights = density.nodes, density.weights
    squares = weights * nodes.square()
    if not float(squares.sum()):
        return {}  # of H = 0 no direction carries anything
    order = nodes.abs().argsort(descending=True)
    share = squares[order].cumsum(0) / squares.sum().clamp(min=1e-300)
    half = int((share < 0.5).sum()) + 1
    negative, sizes = (weights * nodes.abs())[nodes < 0].sum(), (weights * nodes.abs()).sum()
    effective = (weights * nodes.abs()).sum() ** 2 / squares.sum().clamp(min=1e-300) * density.n
    return {
        "directions_half": {"value": max(float(weights[order][:half].sum()) * density.n, 1.0)},
        "negative_share": {"value": float(negative / sizes.clamp(min=1e-300))},
        "effective_rank": {"value": float(effective)},
    }


def _spectrum(known: Known) -> dict[str, Any]:
    found: dict[str, Any] = {"densities": [], "eigenvalues": {}}
    best: dict[tuple[str, str, str], Record] = {}
    for record in known.of("density"):
        key = (record.config["operator"], record.config["role"], record.config["block"])
        best[key] = record
    for (letter, role, block), record in best.items():
        density = _density_of(record)
        assert density is not None
        picture = {"operator": letter, "role": role, "block": block, **curve(density, psd=letter == "G")}
        about = {
            "probes": density.probes,
            "n": density.n,
            "error": density.error,
            "marked": atoms(density),
            "numbers": _from_density(density),
        }
        found["densities"].append(picture | about)
    for letter in "HG":
        pairs = known.last("eigs", operator=letter)
        if pairs is not None:
            result = pairs.result
            triples = zip(result["values"], result["residuals"], result["converged"], strict=True)
            found["eigenvalues"][letter] = [
                {**enclosed(value, residual), "converged": converged} for value, residual, converged in triples
            ]
    return found


def curve(density: Density, *, psd: bool = False) -> dict[str, Any]:
    """A density on a symmetric logarithmic axis: its share between grid points, and a band; none below 0 for G."""
    largest = float(density.nodes.abs().max())
    if not largest:
        return {"x": [0.0], "share": [1.0], "low": [1.0], "high": [1.0], "atoms": [[0.0, 1.0]]}
    floor = largest * 1e-6
    positive = torch.logspace(math.log10(floor), math.log10(largest * 1.02), GRID // 2, dtype=torch.float64)
    x = torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])
    cdf = density.cdf(x)
    low, high = density.band(x)
    share = cdf.diff()
    half = ((high - low) / 2)[1:]
    possible = x[1:] > 0 if psd else torch.ones_like(share, dtype=torch.bool)
    return {
        "x": x.tolist(),
        "share": share.clamp(min=0).where(possible, 0.0).tolist(),
        "low": (share - half).clamp(min=0).where(possible, 0.0).tolist(),
        "high": (share + half).clamp(max=1).where(possible, 0.0).tolist(),
        "atoms": [[value, mass] for value, mass in density.atoms()],
    }


def _density_of(record: Record | None) -> Density | None:
    if record is None:
        return None
    tensors: dict[str, Any] = {name: record.tensors[name] for name in DENSITY}
    result = record.result
    return Density(
        **tensors, n=int(result["n"]), probes=int(result["probes"]), error=result["error"], products=result["products"]
    )


def heterogeneity(known: Known) -> dict[str, Any]:
    """Jensen–Shannon distances between the spectra of blocks, in bits, each spectrum scaled to its largest |λ|.

    Spectra are histograms of 64 bins on [−1, 1], smoothed by a Gaussian of two bins.
    """
    best: dict[str, Density] = {}
    for record in known.of("density", operator="H"):
        if record.config["block"]:
            density = _density_of(record)
            if density is not None:
                best[record.config["block"]] = density
    if len(best) < 2:
        return {}
    names = list(best)
    histograms = torch.stack([_histogram(best[name]) for name in names])
    distances = [[float(_jensen_shannon(p, q)) for q in histograms] for p in histograms]
    return {"blocks": names, "distance": distances, "bins": 64, "smoothing": 2.0}


def _histogram(density: Density) -> torch.Tensor:
    largest = density.nodes.abs().max().clamp(min=1e-300)
    edges = torch.linspace(-1, 1, 65, dtype=torch.float64) * largest
    share = density.cdf(edges[1:]) - density.cdf(edges[:-1] - (edges[1] - edges[0]) * 1e-9)
    width = torch.arange(-8, 9, dtype=torch.float64)
    kernel = (-(width**2) / 8).exp()
    smooth = torch.nn.functional.conv1d(share[None, None], (kernel / kernel.sum())[None, None], padding=8)[0, 0]
    scaled: torch.Tensor = smooth / smooth.sum().clamp(min=1e-300)
    return scaled


def _jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    middle = (p + q) / 2

    def entropy(x: torch.Tensor) -> torch.Tensor:
        bits: torch.Tensor = -torch.special.xlogy(x, x).sum() / math.log(2)
        return bits

    return (entropy(middle) - (entropy(p) + entropy(q)) / 2).clamp(min=0)


def _eigenvectors(known: Known) -> list[dict[str, Any]]:
    pairs = known.pairs
    if pairs is None:
        return []
    first = known.of("eigs", operator="H")[0]
    names = {number: which for which, number in known.extremes().items()}
    found = []
    for number, (value, residual) in enumerate(zip(pairs.result["values"], pairs.result["residuals"], strict=True)):
        vector = {"number": number, **enclosed(value, residual), "mass": _column(pairs.result["mass"], number)}
        if "heads" in pairs.result:
            vector["heads"] = _column(pairs.result["heads"], number)
        found.append(vector)
    # lines and tokens were measured along the vectors of the first search
    for number, which in names.items():
        place = found[-1] if which == "top" else found[0]
        place["which"] = which
        for kind in ("line", "tokens"):
            record = known.last(kind, vector=[first.key, number])
            if record is not None:
                place[kind] = dict(record.result)
    return found


def _column(table: Mapping[str, list[float]], number: int) -> dict[str, float]:
    return {name: values[number] for name, values in table.items()}


def _heads(known: Known) -> dict[str, Any]:
    rounds = known.of("ggn-heads")
    names = list(rounds[0].result["trace"]) if rounds else []
    return {name: shown(pooled([estimate(r.result["trace"][name]) for r in rounds])) for name in names}


def _blocks(problem: Problem) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "layer": block.layer,
            "role": block.role,
            "size": block.size,
            "parameters": list(block.parameters),
            "also": list(block.aliases),
        }
        for name, block in problem.blocks.items()
    ]


def _plain_estimates(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shown(estimate(value)) if isinstance(value, list) else value for name, value in result.items()}


def _scaled(each: Estimate, factor: float) -> dict[str, Any]:
    plain = shown(each)
    for name in ("value", "stderr", "low", "high"):
        if plain[name] is not None:
            plain[name] *= factor
    return plain


def _scaled_square(norm: Estimate, factor: float) -> dict[str, Any]:
    low, high = norm.interval()
    value, stderr = float(norm.value), float(norm.stderr)
    return {
        "value": value**2 * factor, "stderr": 2 * value * stderr * factor, "low": float(low) ** 2 * factor,
        "high": float(high) ** 2 * factor, "samples": norm.samples, "exact": norm.exact,
    }  # fmt: skip
