"""Documents of analyses, made by hand: what the page and the figures are drawn from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch

from curvlens.results import Estimate, Profile
from curvlens.results.base import to_plain
from curvlens.results.profile import Portion, Row

ROLES = ("norm1", "attn.q", "attn.k", "attn.v", "attn.o", "norm2", "mlp.up", "mlp.down")


def estimate(value: float, error: float = 0.1) -> dict[str, Any]:
    stderr = abs(value) * error
    ends = {"low": value - 2 * stderr, "high": value + 2 * stderr}
    return {"value": value, "stderr": stderr, **ends, "samples": 8, "exact": error == 0}


def eigenvalue(value: float, bound: float = 1e-3) -> dict[str, Any]:
    return {"value": value, "bound": bound, "low": value - bound, "high": value + bound, "exact": False}


def density(operator: str, role: str = "", block: str = "") -> dict[str, Any]:
    sizes = [10.0**power for power in range(-5, 2)]
    x = [*(-size for size in reversed(sizes)), 0.0, *sizes]
    share = [0.0 if x[i + 1] <= 0 and operator == "G" else 1 / (i + 3) ** 2 for i in range(len(x) - 1)]
    band = {"low": [each / 2 for each in share], "high": [min(1, 2 * each) for each in share]}
    about = {
        "operator": operator,
        "role": role,
        "block": block,
        "atoms": [],
        "marked": [],
        "probes": 2,
        "n": 1000,
        "error": 0.01,
    }
    return {**about, "x": x, "share": share, **band}


def spectrum_of(block: str, bins: int = 64) -> dict[str, Any]:
    """The density of a block, on as many bins as an analysis has."""
    x = [10 ** (-5 + 7 * i / (bins // 2)) for i in range(bins // 2)]
    share = [1 / (2 + abs(i - 40)) ** 2 for i in range(bins)]
    band = {"low": [each / 3 for each in share], "high": [min(1, 3 * each) for each in share]}
    numbers = {"effective_rank": {"value": 17.25}, "negative_share": {"value": 0.125}}
    axis = {"x": [*(-each for each in reversed(x)), 0.0, *x], "share": share}
    return {**density("H", "", block), **axis, **band, "numbers": numbers}


def profile_of(paths: Iterable[str]) -> dict[str, Any]:
    """A profile with a functional part for each module: 8 ± 2, which is 4 ± 1 % of the Hessian."""

    def guess(value: float, stderr: float) -> Estimate:
        return Estimate(torch.tensor(value).double(), torch.tensor(stderr).double(), 8, 7.0)

    part = Portion(guess(8.0, 2.0), guess(3.0, 0.5), guess(0.04, 0.01))
    rows = {path: Row(path, "Attention" if path.endswith("attn") else "Linear", part, part) for path in ("", *paths)}
    return {"profile": json.dumps(to_plain(Profile(part, part, rows, 1e-15, 8))[0])}


def document(
    n_layer: int = 2, name: str = "GPT", block: str = "embed", token: str = "the", *, spectra: bool = False
) -> dict[str, Any]:
    """An analysis with every panel. ``block`` is the name of its first block, ``token`` a text of its tokens.

    With ``spectra`` all blocks have a density and heads, else only the first block and "h.0.attn.q".
    """
    places: list[tuple[str, str | None, str]] = [(block, None, block)]
    places += [(f"h.{i}.{role}", f"h.{i}", role) for i in range(n_layer) for role in ROLES]
    places += [("final_norm", None, "final_norm"), ("unembed", None, "unembed")]
    names = [place[0] for place in places]
    sizes = {each: 3.0 * math.exp(-0.05 * i) for i, each in enumerate(names)}
    errors = (0.0, 0.1, 0.3, 0.8)
    by_block = {each: estimate(size, errors[i % 4]) for i, (each, size) in enumerate(sizes.items())}
    measured = dict(list(by_block.items())[:-1])  # the last cell of H is missing
    signed = {each: estimate((-1) ** i * size / 5, 0.4) for i, (each, size) in enumerate(sizes.items())}
    tops = {each: eigenvalue(size) for each, size in sizes.items()}
    bottoms = {each: eigenvalue(-size / 10) for each, size in sizes.items()}
    total = sum(sizes.values())
    line = {
        "radii": [-0.1, 0.0, 0.1], "losses": [2.0, 1.7, 2.1], "model": [2.1, 1.7, 2.2], "slope": 0.5,
        "curvature": 90.0, "forward": 0.05, "forward_open": False, "backward": 0.1, "backward_open": True,
    }  # fmt: skip
    moved = {"sample": 0, "position": 3, "text": [token, " ", token], "label_text": token, "loss": 1.0, "bend": 0.1}
    vectors = [
        {
            "number": i, **eigenvalue(value), "which": which, "line": line,
            "tokens": {"tokens": [{**moved, "slope": 0.2}]},
            "mass": {each: size / total for each, size in sizes.items()},
            "heads": {"h.0.attn.q.0": 0.1, "h.0.attn.q.1": 0.2},
        }
        for i, (value, which) in enumerate(((-0.5, "bottom"), (12.5, "top")))
    ]  # fmt: skip
    heads = {
        f"{each}.{i}": estimate(0.3 / (i + 1)) for each in names if spectra and ".attn." in each for i in range(12)
    }
    modules = [path for each in names for path in ((f"{each.rpartition('.')[0]}", each) if "." in each else (each,))]
    seen = names if spectra else [names[0], "h.0.attn.q"]
    call = {name: [0.2, 0.4] for name in ("entropy", "evenness", "sink", "largest", "m1", "m2", "m3")}
    trace = {"trace": estimate(0.2)}
    sharp = {"sharpness": eigenvalue(11.0), "trace_H": estimate(70.0, 0.05)}
    step = {"critical": 3.4, "sharpness": 2.0, "climbs": False, "certain": True, "searched": 6.8, "fall": 0.1}
    return {
        "schema": 1, "name": name, "model": name, "parameters": 6192, "dtype": "float64", "device": "cpu",
        "loss_name": "CausalLM()", "family": "reference GPT", "budget": "60s", "seed": 0, "minimal": False,
        "ended": "complete", "left": [{"stage": "blocks", "seconds": 90.0}],
        "failed": [{"kind": "noise", "why": token}],
        "cost": [{"stage": "start", "planned": 1.0, "seconds": 2.0, "gradients": 23.5}],
        "provenance": {"curvlens": "0.1.0", "command": f"curvlens analyze {token}"},
        "blocks": [
            {"name": each, "layer": layer, "role": role, "size": 100, "parameters": [f"{each}.weight"]}
            for each, layer, role in places
        ],
        "point": {
            "loss": 1.72, "tokens": 192, "gradient_norm": 1.0, "gradient_by_block": sizes, "weights_by_block": sizes,
        },
        "sanity": {"accuracy": 0.32, "shuffled_loss": 2.7},
        "doctor": [{"name": "a note", "severity": "note", "what": token, "effect": "none", "fix": "nothing to do"}],
        "cells": {
            "H": {"trace": measured, "norm": by_block, "mean": by_block, "top": tops, "bottom": bottoms},
            "G": {"trace": by_block, "norm": by_block, "mean": by_block, "top": tops},
            "F": {"trace": signed, "mean": signed},
        },
        "heads": heads or {"h.0.attn.q.0": estimate(0.3), "h.0.attn.q.1": estimate(0.2)},
        "profile": profile_of(dict.fromkeys(modules)),
        "whole": {
            "H": {
                "trace": estimate(80.0), "norm": estimate(40.0), "top": eigenvalue(12.5), "bottom": eigenvalue(-0.5),
                "gap": eigenvalue(8.25),
                "condition": {"value": 40.0, "low": 30.0, "high": 60.0, "share": 0.02, "directions": 20},
            },
            "G": {"trace": estimate(100.0), "top": eigenvalue(12.0), "negative_share": {"value": 0.0}},
        },
        "spectrum": {
            "densities": [
                density("H"),
                density("G") | {"marked": [{"at": 0.0, "value": 0.83, "stderr": 0.01, "exact": False}]},
                density("H", "attn.q"), density("H", "mlp.up"), *map(spectrum_of, seen),
            ],
            "eigenvalues": {
                "H": [{**eigenvalue(value), "converged": True} for value in (-0.5, 12.5)],
                "G": [{**eigenvalue(12.0), "converged": True}],
            },
        },
        "eigenvectors": vectors,
        "heterogeneity": {
            "blocks": names[:2], "distance": [[0.0, 0.1], [0.1, 0.0]], "bins": 64, "smoothing": 2.0,
        },
        "stability": {
            "rule": "AdamW", "ratio": 0.19, "residual": 0.01, "convention": "λ_max(P⁻¹H) below 38/lr",
            "groups": [{"lr": 1e-3}], "mass": {each: size / total for each, size in sizes.items()},
            "preconditioned": eigenvalue(7220.0), "threshold": 38000.0, "headroom": 5.2,
            "note": "second moments taken as g² at this point: the optimiser has none yet",
            "step": {**step, "measured": eigenvalue(3.1, 0.1)},
        },
        "descent": {**step, "critical": 0.1, "measured": eigenvalue(0.2, 0.01)},
        "attention": {"calls": [call] * min(n_layer, 40), "skipped": 0, "samples": 8},
        "noise": {
            "trace": estimate(11.0), "gradient": estimate(0.5), "scale": estimate(23.0, 0.6), "scales": by_block,
            "samples": 32, "unit": "sample", "note": "",
        },
        "depth": {f"h.{i}": {"H": trace, "G": trace} for i in range(n_layer)},
        "spread": [{"loss": 1.7, "gradient_norm": 1.0, **trace, **sharp}, {"loss": 1.8, "gradient_norm": 1.1, **trace}],
        "sentences": [
            {"text": f"{block} holds 64 ± 1 % of the trace.", "panel": "heat", "tone": ""},
            {"text": "The largest eigenvalue is 12.5.", "panel": "spectrum", "tone": ""},
            {"text": f"Not told in this budget: {token}.", "panel": "cost", "tone": "warn"},
        ],
    }  # fmt: skip
