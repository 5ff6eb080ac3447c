"""The Hessian while a GPT learns: how uneven its blocks are, what lies off the diagonal, and when it changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvlens.data import Addition
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import matrices, rows
from curvlens.papers.learners import trained
from curvlens.papers.sizes import marked
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import Sweep, mean, sweep, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Heat, Panel
from curvlens.study import Config, Record

ROLES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", "norm1", "norm2")
GROUPS = ("layer 1", "layer 2", "tokens", "positions", "norm", "unembed")
SETTLED = 1.25
"""The factor within which a norm that has settled stays over the last span."""
MANY = 0.1
"""The share of all blocks that counts as many."""


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
    last = where(records, steps=x[-1])
    heat = torch.tensor([record.result["groups"] for record in last], dtype=torch.float64).log10().mean(0)
    axes: dict[str, Any] = {"x_label": "training steps (not to scale)", "y_scale": "log", "ticks": _stages(x)}

    def staged(line: Sweep, label: str, colour: int = 0) -> Curve:
        """A curve whose stages are equally far apart: much happens in the first of them."""
        return replace(line.curve(label, colour=colour), x=axes["ticks"][0])

    panels: list[Panel | Heat] = [
        Panel(
            [replace(staged(lines[role], role, i), low=None, high=None) for i, role in enumerate(weights)],
            title="diagonal blocks by role",
            y_label=r"$\|H\|_F$",
            **axes,
        ),
        Panel([staged(spread, "")], title="largest over smallest role", y_label="ratio", **axes),
        Panel(
            [staged(norm, r"$\|H\|_F$"), staged(top, r"$\lambda_{\max}$", 1)],
            title="whole Hessian",
            y_label="norm, eigenvalue",
            **axes,
        ),
        Heat(heat.tolist(), "after training", r"$\log_{10}\|H\|_F$ of the block", GROUPS),
    ]
    chart = Chart(
        "training",
        "The Hessian while a GPT learns to add",
        "A GPT of two layers with Pre-LN. First: the diagonal blocks of each role in both layers together (without "
        "bands, which would hide each other), and the largest of them over the smallest. Below: norm and largest "
        "eigenvalue of the whole, and Frobenius norms of the blocks between layers, embeddings, the last norm and the "
        "unembedding after training.",
        panels,
    )
    uneven = [float(v) for v in spread.middle()]
    note = (
        f"The largest of the six roles' blocks is {uneven[0]:.2g} times the smallest at initialisation, "
        f"{uneven[len(uneven) // 2]:.2g} times after {x[len(x) // 2]:g} steps and {uneven[-1]:.2g} times after "
        f"{x[-1]:g}."
    )
    return Report(
        (chart,), (_dominance(last), _zero(records), _phases(norm)), notes=(note, *marked(records, "steps", "steps"))
    )


def _stages(steps: Sequence[float]) -> tuple[list[float], list[str]]:
    return [float(place) for place in range(len(steps))], [f"{step:g}" for step in steps]


def _dominance(records: Sequence[Record]) -> Finding:
    """Of every group: its diagonal block over the others of its row together, in spectral norm, over the seeds."""
    sizes = torch.tensor([record.result["spectral"] for record in records], dtype=torch.float64)
    squares = torch.tensor([record.result["groups"] for record in records], dtype=torch.float64).square()
    own = sizes.diagonal(dim1=1, dim2=2)
    found = {name: ratio(own[:, i], sizes[:, i].sum(1) - own[:, i]) for i, name in enumerate(GROUPS)}
    share = mean("", (squares.diagonal(dim1=1, dim2=2).sum(1) / squares.sum((1, 2))).tolist())
    texts = "; ".join(f"{name} {each}" for name, each in found.items())
    return judged_parts(
        "diagonal-network",
        "After training, a group's diagonal block over the others of its row together (spectral norms, geometric "
        f"means over the seeds with their 95 % intervals): {texts}. "
        f"The diagonal blocks hold {share.value:.0%} of ‖H‖². A block dominates if the ratio is above 1.",
        {f"the row of {name}": each.above() for name, each in found.items()},
    )


def _zero(records: Sequence[Record]) -> Finding:
    """At every stage of the training, whether all models have many zero blocks."""
    pairs = records[0].result["pairs"]
    steps = sorted({record.config["steps"] for record in records})
    fewest = {n: min(r.result["zero beside key biases"] for r in where(records, steps=n)) for n in steps}
    zero, most = (max(record.result[name] for record in records) for name in ("zero", "zero beside key biases"))
    return judged_parts(
        "zero-blocks",
        f"Of the {pairs} pairs of parameters at most {zero} have a zero block. The biases of the keys do nothing "
        f"before a softmax, for any residual connections: without them it is at most {most} pairs, and at least "
        f"{min(fewest.values())}. Many means {MANY:.0%} of all pairs, without those biases.",
        {f"after {n:g} steps": few >= MANY * pairs for n, few in fewest.items()},
    )


def _phases(norm: Sweep) -> Finding:
    """Changes of log ‖H‖ in the first and the last spans of the grid, whose spans are longer later; and the last one.

    A random walk changes with the square root of the steps, so it is the change over that root that has to fall. If
    even the net change falls, though later spans are longer, no process that is alike at all times looks like it.
    """
    steps = torch.tensor(norm.x, dtype=torch.float64)
    moved, half = norm.values.log().diff(dim=1), (len(norm.x) - 1) // 2

    def falls(changes: Tensor) -> Ratio:
        early, late = (part.square().mean(1).sqrt() for part in (changes[:, :half], changes[:, -half:]))
        return ratio(early, late)

    rooted, net = falls(moved / steps.diff().sqrt()), falls(moved)
    end, begin = norm.x[half], norm.x[-half - 1]
    late = ratio(norm.values[:, -1], norm.values[:, -2])
    text = (
        f"Root mean square of the changes of log ‖H‖ between stored steps, up to step {end:g} over from step {begin:g} "
        f"to {norm.x[-1]:g}, geometric means over the seeds with their 95 % intervals: for changes over the root of "
        f"their steps, where a random walk has 1: {rooted}; for net changes, over spans that are longer later: {net}. "
        f"‖H‖ after {norm.x[-1]:g} steps over that after {norm.x[-2]:g}: {late}; settled is within a factor of "
        f"{SETTLED:g}."
    )
    settled = True if late.above(1 / SETTLED) and late.below(SETTLED) else None
    if late.above(SETTLED) or late.below(1 / SETTLED):
        settled = False
    faster = "faster at first: per root of the steps, compared with a random walk"
    if rooted.above() and net.above() is not True:
        faster += ", while net changes are not seen to fall"
    return judged_parts("training-phases", text, {faster: rooted.above(), "settled at the end": settled})


TRAINING = Experiment(
    "training",
    "The Hessian while a GPT learns",
    f"{ARTICLE}, Sections 5 and 7",
    points,
    measure,
    report,
)
