"""The Hessian while a GPT learns: how uneven its blocks are, what lies off the diagonal, and when it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from curvlens.data import Addition
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.full_block.matrices import matrices, rows
from curvlens.experiments.learners import trained
from curvlens.experiments.sources import ARTICLE
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, mean, sweep, where
from curvlens.experiments.verdicts import Finding
from curvlens.figures.charts import Chart, Heat, Panel

ROLES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", "norm1", "norm2")


def points(effort: Effort) -> list[Config]:
    """A GPT of two layers before, in the middle and at the end of its training."""
    steps = (0, 25, 50, 100, 200) if effort.quick else (0, 10, 25, 50, 100, 200, 400, 800)
    return [{"steps": step, "seed": seed} for seed in effort.repeats(2, 5) for step in reversed(steps)]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of the blocks by role, of groups on and off the diagonal, and of what is zero."""
    model = trained(Addition(digits=2), seed=config["seed"], steps=config["steps"])
    H, G, places = matrices(model, 16)
    square = H.square()
    groups = {f"h.{i}.": rows(places, f"h.{i}.") for i in range(2)}
    groups |= {name: rows(places, name) for name in ("embed", "pos", "final_norm", "unembed")}
    pairs = [[float(square[a][:, b].sum().sqrt()) for b in groups.values()] for a in groups.values()]
    spectral = [[float(torch.linalg.matrix_norm(H[a][:, b], 2)) for b in groups.values()] for a in groups.values()]
    roles = {}
    for role in ROLES:
        of = [rows(places, f"h.{layer}.{role}") for layer in range(2)]
        roles[role] = [math.sqrt(sum(float(part[r][:, r].square().sum()) for r in of)) for part in (H, G, H - G)]
    values = torch.linalg.eigvalsh(H)
    names = list(places)
    largest = float(H.abs().max())
    zero = [(a, b) for a in names for b in names if float(H[places[a]][:, places[b]].abs().max()) < 1e-13 * largest]
    return {
        "norm": float(H.norm()),
        "top": float(values[-1]),
        "roles": roles,
        "groups": pairs,
        "spectral": spectral,
        "zero": len(zero),
        "zero beside key biases": sum("k.bias" not in a and "k.bias" not in b for a, b in zero),
        "pairs": len(names) ** 2,
    }


def report(records: Sequence[Record]) -> Report:
    """How uneven the blocks are while the model learns, what lies beside the diagonal, and when it changes."""
    lines = {role: sweep(records, "steps", "roles", role, 0) for role in ROLES}
    x = next(iter(lines.values())).x
    weights = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    stacked = torch.stack([lines[role].values.log() for role in weights])
    spread = Sweep(x, (stacked.max(0).values - stacked.min(0).values).exp())
    norm, top = sweep(records, "steps", "norm"), sweep(records, "steps", "top")
    group_names = ("layer 1", "layer 2", "tokens", "positions", "norm", "unembed")
    last = where(records, steps=x[-1])
    heat = torch.tensor([record.result["groups"] for record in last]).double().log10().mean(0)
    panels: list[Panel | Heat] = [
        Panel(
            [lines[role].curve(role, colour=i) for i, role in enumerate(weights)],
            (),
            "diagonal blocks by role",
            "training steps",
            r"$\|H\|_F$",
            y_scale="log",
        ),
        Panel([spread.curve("")], (), "largest over smallest role", "training steps", "ratio", y_scale="log"),
        Panel(
            [norm.curve(r"$\|H\|_F$"), top.curve(r"$\lambda_{\max}$", colour=1)],
            (),
            "whole Hessian",
            "training steps",
            "",
            y_scale="log",
        ),
        Heat(heat.tolist(), "after training", r"$\log_{10}\|H\|_F$ of the block", group_names),
    ]
    chart = Chart(
        "training",
        "The Hessian while a GPT learns to add",
        "A GPT of two layers with Pre-LN. Heat map: the blocks between layers, embeddings, the last norm and the "
        "unembedding after training.",
        panels,
    )
    uneven = [float(v) for v in spread.middle()]
    note = (
        f"The largest of the six roles' blocks is {uneven[0]:.2g} times the smallest at initialisation, "
        f"{uneven[len(uneven) // 2]:.2g} times after {x[len(x) // 2]:g} steps and {uneven[-1]:.2g} times after "
        f"{x[-1]:g}."
    )
    return Report((chart,), (_dominance(last), _zero(records), _phases(norm)), notes=(note,))


def _dominance(records: Sequence[Record]) -> Finding:
    """Of groups: the share of ‖H‖² on the diagonal, and rows whose diagonal block outweighs the others."""
    shares, dominant, total = [], 0, 0
    for record in records:
        squares = torch.tensor(record.result["groups"]).double().square()
        shares.append(float(squares.diagonal().sum() / squares.sum()))
        sizes = torch.tensor(record.result["spectral"]).double()
        others = sizes.sum(1) - sizes.diagonal()
        dominant += int((sizes.diagonal() > others).sum())
        total += len(sizes)
    share = mean("", shares)
    return Finding(
        "diagonal",
        "holds" if dominant == total else "does not hold" if share.value < 0.9 else "holds when",
        f"After training the diagonal blocks of the six groups hold {share.value:.0%} of ‖H‖²; {dominant} of {total} "
        "diagonal blocks are larger (spectral norm) than the others of their row together.",
    )


def _zero(records: Sequence[Record]) -> Finding:
    zero, beside = (max(record.result[name] for record in records) for name in ("zero", "zero beside key biases"))
    pairs = records[0].result["pairs"]
    return Finding(
        "zero-blocks",
        "does not hold" if beside < 0.1 * pairs else "holds",
        f"At most {zero} of the {pairs} pairs of parameters have a zero block, and without the biases of the keys, "
        f"which do nothing, {beside}.",
    )


def _phases(norm: Sweep) -> Finding:
    """Relative change of ‖H‖ a step, early and late."""
    steps = torch.tensor(norm.x, dtype=torch.float64)
    rates = norm.values.log().diff(dim=1).abs() / steps.diff()
    early, late = float(rates[:, 0].mean()), float(rates[:, -1].mean())
    return Finding(
        "training-phases",
        "holds" if late < early / 3 else "does not hold",
        f"‖H‖ changes by {early:.1%} a step over the first {norm.x[1]:g} steps and by {late:.2%} a step over the last "
        f"{norm.x[-1] - norm.x[-2]:g} of {norm.x[-1]:g}.",
    )


TRAINING = Experiment(
    "training",
    "The Hessian while a GPT learns",
    f"{ARTICLE}, Sections 5 and 7",
    points,
    measure,
    report,
)
