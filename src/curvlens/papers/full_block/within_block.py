"""Inside one Transformer block: how much of its Hessian lies between attention, norms and feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.data import Addition
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.depth import NORMS
from curvlens.papers.full_block.matrices import matrices, rows
from curvlens.papers.learners import trained
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import bars, mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Panel
from curvlens.study import Config, Record

LAYERS = 2
GROUPS = {"attention": ("attn",), "feed-forward": ("mlp",), "norms": ("norm1", "norm2")}


def points(effort: Effort) -> list[Config]:
    """GPTs of two blocks at initialisation and after training, with norms before, behind or none."""
    return [
        {"norm": norm, "steps": steps, "seed": seed}
        for norm in NORMS
        for seed in effort.repeats(2, 5)
        for steps in ((100, 0) if effort.quick else (400, 0))
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Of each block: spectral and Frobenius norms of its Hessian's parts, rows and columns in the order of GROUPS."""
    model = trained(Addition(digits=2), seed=config["seed"], steps=config["steps"], n_layer=LAYERS, norm=config["norm"])
    H, _, places = matrices(model, 16)
    found: dict[str, list[list[list[float]]]] = {"spectral": [], "frobenius": []}
    for layer in range(LAYERS):
        own = [
            torch.cat([rows(places, f"h.{layer}.{name}.") for name in names])
            for group, names in GROUPS.items()
            if group != "norms" or config["norm"] != "none"
        ]
        found["spectral"].append([[float(torch.linalg.matrix_norm(H[a][:, b], 2)) for b in own] for a in own])
        found["frobenius"].append([[float(H[a][:, b].norm()) for b in own] for a in own])
    return found


def _sizes(records: Sequence[Record], name: str) -> Tensor:
    """(seeds, layers, groups, groups)."""
    return torch.tensor([record.result[name] for record in records], dtype=torch.float64)


def _share(records: Sequence[Record]) -> Tensor:
    """The part of ‖H‖² of a block that its diagonal blocks hold, mean over the layers, one a seed."""
    squares = _sizes(records, "frobenius").square()
    return (squares.diagonal(dim1=2, dim2=3).sum(-1) / squares.sum((2, 3))).mean(1)


def _coupling(records: Sequence[Record]) -> Tensor:
    """‖H_af‖/√(‖H_aa‖ ‖H_ff‖) of attention and feed-forward part: 0 if independent; geometric mean over the layers."""
    sizes = _sizes(records, "frobenius")
    return (sizes[..., 0, 1] / (sizes[..., 0, 0] * sizes[..., 1, 1]).sqrt()).log().mean(1).exp()


def report(records: Sequence[Record]) -> Report:
    """Shares of the diagonal, and how attention and feed-forward part are coupled."""
    stages = sorted({record.config["steps"] for record in records})
    names = [f"after {steps:g} steps" if steps else "at initialisation" for steps in stages]
    axes: dict[str, Any] = {"ticks": ([float(i) for i in range(len(NORMS))], list(NORMS.values()))}
    panels = [
        Panel(
            [
                bars(name, [mean("", measure_(where(records, norm=norm, steps=n)).tolist()) for norm in NORMS], colour)
                for colour, (n, name) in enumerate(zip(stages, names, strict=True))
            ],
            title=title,
            y_label=label,
            legend=measure_ is _share,
            **axes,
        )
        for measure_, title, label in (
            (_share, "in the diagonal blocks", r"share of $\|H\|_F^2$"),
            (_coupling, "attention and feed-forward", r"$\|H_{af}\| / \sqrt{\|H_{aa}\| \|H_{ff}\|}$"),
        )
    ]
    chart = Chart(
        "within-block",
        "Inside a block: attention, norms and feed-forward part",
        f"GPTs of {LAYERS} layers that are to add numbers of two digits. Left: of the Hessian of one block, the share "
        "of the squared norm in the diagonal blocks of attention, feed-forward part and norms, mean over the layers. "
        "Right: the block between attention and feed-forward part beside the two on the diagonal. Means over the seeds "
        "with their 95 % intervals.",
        panels,
    )
    parts: dict[str, bool | None] = {}
    texts = []
    for norm, title in NORMS.items():
        for steps, name in zip(stages, names, strict=True):
            of = where(records, norm=norm, steps=steps)
            found = _rows(of)
            parts |= {f"the row of {group}, {title}, {name}": each.above() for group, each in found.items()}
            coupled = _coupling(of)
            texts.append(
                f"{title}, {name}: {'; '.join(f'{group} {each}' for group, each in found.items())}; diagonal blocks "
                f"hold {mean('', _share(of).tolist()).value:.0%} of ‖H‖²; attention with feed-forward "
                f"{ratio(coupled, torch.ones_like(coupled)).value:.2g}"
            )
    return Report((chart,), (_dominated(parts, texts),))


def _rows(records: Sequence[Record]) -> dict[str, Ratio]:
    """Of every group: its diagonal block over the others of its row together, geometric mean over the layers."""
    sizes = _sizes(records, "spectral")
    own = sizes.diagonal(dim1=2, dim2=3)
    over = (own / (sizes.sum(3) - own)).log().mean(1).exp()
    groups = list(GROUPS)[: over.shape[1]]  # without norms there are two
    return {group: ratio(over[:, i], torch.ones(len(over))) for i, group in enumerate(groups)}


def _dominated(parts: Mapping[str, bool | None], texts: Sequence[str]) -> Finding:
    return judged_parts(
        "diagonal",
        "Inside one block, a group's diagonal block over the others of its row together (spectral norms, geometric "
        "means over the layers and seeds with their 95 % intervals over the seeds), then the share of the diagonal in "
        "Frobenius norm, and ‖H_af‖/√(‖H_aa‖ ‖H_ff‖) of attention and feed-forward part, 0 if independent. "
        f"{'. '.join(texts)}. A diagonal block dominates its row if the ratio is above 1.",
        parts,
    )


WITHIN_BLOCK = Experiment(
    "within-block",
    "The Hessian inside a block",
    f"{ARTICLE}, Section 5.2",
    points,
    measure,
    report,
)
