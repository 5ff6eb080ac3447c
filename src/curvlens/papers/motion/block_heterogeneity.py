"""How different the spectra of the blocks are, in a Transformer and in a convolutional network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers.comparisons import ratio
from curvlens.papers.draws import Draws, stream
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.learners import trained
from curvlens.papers.sources import HETEROGENEITY
from curvlens.papers.sweeps import bars, mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

NETWORKS = {"gpt": "Transformer", "cnn": "convolutional network"}
STAGES = {"start": "at initialisation", "half": "at half of the loss"}
WAYS = {"scales": "with their scales", "shapes": "each over its largest |λ|"}
SAMPLES, BATCH, MOST = 32, 64, 2000
"""Samples of the Hessian and of a training step; the largest number of steps."""
CLASSES, SIDE, CHANNELS = 10, 8, 6
NEAR_ZERO = {"scales": 1e-6, "shapes": 1e-4}
"""Of the largest |λ| of all blocks, or of its own: eigenvalues below count as nearly zero."""
WIDTH = 0.5
"""Of the kernel of the densities, in decades."""


class Convolutions(nn.Module):
    """Six convolutions with ReLU, pooled after every second, and a linear layer: no norms, no biases."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [1, *([CHANNELS] * 6)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(sizes))
        self.out = nn.Linear(4 * CHANNELS, CLASSES, bias=False)
        for weight in self.convs.parameters():
            nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 8, 8) to (batch, classes)."""
        for number, conv in enumerate(self.convs):
            x = conv(x).relu()
            if number % 2:
                x = F.avg_pool2d(x, 2) if x.shape[-1] > 2 else x
        found: Tensor = self.out(x.flatten(1))
        return found


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Fixed patterns, one for each class, moved by up to one pixel, under noise of the same size; and the classes."""
    patterns = Draws(0, "patterns")(CLASSES, SIDE, SIDE)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    moves = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    found = torch.stack([patterns[label].roll(move, (0, 1)) for label, move in zip(labels, moves, strict=True)])
    return (found + Draws(seed, "noise")(count, SIDE, SIDE))[:, None], labels


def points(effort: Effort) -> list[Config]:
    """Both networks at initialisation and where the loss has halved."""
    stages = ("start",) if effort.quick else tuple(STAGES)
    return [
        {"network": network, "stage": stage, "seed": seed}
        for seed in effort.repeats(2, 10)
        for network in NETWORKS
        for stage in stages
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Mean Jensen–Shannon distance of the spectra of all pairs of weight matrices; and the loss."""
    model, batch, steps = network(config)
    problem = cl.Problem(model, [batch], cl.losses.CrossEntropy())
    H = cl.hessian(problem)
    names = [name for name, p in model.named_parameters() if p.ndim > 1]
    spectra = [torch.linalg.eigvalsh(H[name].dense()) for name in names]
    return {
        "steps": steps,
        "loss": problem.loss(),
        "blocks": len(names),
        "top": [float(each.abs().max()) for each in spectra],
        **{way: distances(spectra, way) for way in WAYS},
    }


def network(config: Config) -> tuple[nn.Module, tuple[Tensor, Tensor], int]:
    """A network, samples of its task, and the steps of Adam that it has learned."""
    seed, task = config["seed"], Addition(digits=2)
    model: nn.Module
    if config["network"] == "gpt":
        model = trained(task, seed=seed, steps=0)
    else:
        torch.manual_seed(seed)
        model = Convolutions().double()

    def drawn(count: int, purpose: str) -> tuple[Tensor, Tensor]:
        own = stream(seed, purpose)
        return task.batch(count, seed=own) if config["network"] == "gpt" else images(count, own)

    steps = halved(model, lambda step: drawn(BATCH, f"step {step}")) if config["stage"] == "half" else 0
    return model.eval(), drawn(SAMPLES, "Hessian"), steps


def halved(model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]]) -> int:
    """Train until the loss, as a moving average, is half of the first one; the number of steps."""
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = recent = 0.0
    for step in range(MOST):
        x, y = batch(step)
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        value = float(loss.detach())
        first, recent = first or value, 0.9 * recent + 0.1 * value if step else value
        if recent < first / 2:
            return step
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    return MOST


def distances(spectra: Sequence[Tensor], way: str) -> float:
    """The mean of the Jensen–Shannon distances of all pairs, between 0 and 1."""
    sizes = [float(each.abs().max()) for each in spectra]
    zeros = [NEAR_ZERO[way] * (max(sizes) if way == "scales" else size) for size in sizes]
    placed = [torch.asinh(each / (2 * zero)) for each, zero in zip(spectra, zeros, strict=True)]
    end = max(float(each.abs().max()) for each in placed) + 4 * WIDTH * math.log(10)
    densities = [density(each, end) for each in placed]
    found = [distance(one, other) for one, other in combinations(densities, 2)]
    return sum(found) / len(found)


def density(places: Tensor, end: float) -> Tensor:
    """The shares of a grid from −end to end, with a Gaussian kernel; places are logarithms away from 0."""
    grid = torch.linspace(-end, end, 801, dtype=places.dtype)
    found = torch.exp(-0.5 * ((grid[:, None] - places) / (WIDTH * math.log(10))).square()).sum(1)
    return found / found.sum()


def distance(one: Tensor, other: Tensor) -> float:
    """The root of the Jensen–Shannon divergence in bits: 0 for equal shares, 1 for shares without a common place."""
    middle = (one + other) / 2
    parts = (torch.xlogy(each, each / middle.clamp(min=1e-300)).sum() for each in (one, other))
    return math.sqrt(max(0.0, float(sum(parts))) / (2 * math.log(2)))


def report(records: Sequence[Record]) -> Report:
    """The mean distance in both networks, and its ratio."""
    stages = [stage for stage in STAGES if where(records, stage=stage)]
    panels = []
    for way, title in WAYS.items():
        curves: list[Curve] = []
        for colour, (kind, name) in enumerate(NETWORKS.items()):
            curves.append(
                bars(name, [mean("", _values(records, kind, stage, way).tolist()) for stage in stages], colour)
            )
        ticks = ([float(i) for i in range(len(stages))], [STAGES[stage] for stage in stages])
        panels.append(Panel(curves, title=title, y_label="mean Jensen–Shannon distance", ticks=ticks))
    chart = Chart(
        "block-heterogeneity",
        "How different the spectra of the blocks are",
        "A GPT of two layers that learns to add, and six convolutions with a linear layer that learn to tell ten "
        "patterns apart: the distance between the spectra of two weight matrices' blocks of the Hessian, mean over "
        "all pairs, on a logarithmic axis of both signs; with the scales of the blocks, and with each spectrum over "
        "its largest |λ|. Means over the seeds with their 95 % intervals.",
        panels,
    )
    return Report((chart,), (_more(records, stages),))


def _values(records: Sequence[Record], network: str, stage: str, way: str) -> Tensor:
    of = sorted(where(records, network=network, stage=stage), key=lambda record: record.config["seed"])
    return torch.tensor([float(record.result[way]) for record in of], dtype=torch.float64)


def _more(records: Sequence[Record], stages: Sequence[str]) -> Finding:
    parts: dict[str, bool | None] = {}
    texts = []
    for way, title in WAYS.items():
        for stage in stages:
            gpt, cnn = (_values(records, kind, stage, way) for kind in NETWORKS)
            found = ratio(gpt, cnn)
            parts[f"{title}, {STAGES[stage]}"] = found.above()
            texts.append(f"{title}, {STAGES[stage]} {gpt.mean():.2f} and {cnn.mean():.2f}, ratio {found}")
    return judged_parts(
        "block-heterogeneity",
        "Mean Jensen–Shannon distance between the spectra of two blocks, Transformer and convolutional network: "
        f"{'; '.join(texts)}. Geometric means over pairs of the same seed with their 95 % intervals.",
        parts,
    )


BLOCK_HETEROGENEITY = Experiment(
    "block-heterogeneity",
    "How different the spectra of the blocks are",
    HETEROGENEITY,
    points,
    measure,
    report,
)
