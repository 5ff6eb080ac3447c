"""One step size for a block, for a parameter or for all: what the Hessian at initialisation says.

A rate is one over the root mean square of the rows' norms of its parameters in H: a row for itself with one rate a
parameter, the rows of a matrix (or of one head of it) together, or all of them. With P those roots, the steps see
P^-½ H P^-½. Whether training is as fast with fewer rates is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens import assembly
from curvlens.data import Addition
from curvlens.papers.comparisons import DOMINATES, ratio
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.learners import trained
from curvlens.papers.sources import PAPER
from curvlens.papers.sweeps import mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

NORMS = {"pre": "Pre-LN", "none": "no norm"}
RATES = {"one": "one for all", "matrix": "one per matrix", "head": "one per head", "parameter": "one per parameter"}
ROLES = ("q", "k", "v", "o", "up", "down")
LAYERS, HEADS, WIDTH, SAMPLES = 2, 2, 8, 16
HALF = 0.5
"""Rates of matrices tell more than half of how rows differ if this share of the variance is between matrices."""


def points(effort: Effort) -> list[Config]:
    """GPTs of two layers at initialisation, without biases: key biases have no curvature at all."""
    return [{"norm": norm, "seed": seed} for norm in NORMS for seed in effort.repeats(3, 10)]


def measure(config: Config) -> Mapping[str, Any]:
    """Conditions with all kinds of rates, the largest eigenvalue of every block, and the variance of rows' norms."""
    H, places = network(config)
    sizes = H.norm(dim=1)
    groups = {rate: grouped(places, len(H), rate) for rate in RATES}
    logs = sizes.log10()
    within = logs - _means(logs, groups["matrix"])
    return {
        "condition": {rate: condition(preconditioned(H, groups[rate])) for rate in RATES},
        "blocks": {rate: _own_conditions(H, places, rate) for rate in ("matrix", "head", "parameter")},
        "top": {name: float(torch.linalg.matrix_norm(H[of][:, of], 2)) for name, of in places.items()},
        "heads": [_heads_apart(H, places[name]) for name in places if name[-1] in "qk"],
        "between": float(1 - within.square().mean() / (logs - logs.mean()).square().mean()),
    }


def network(config: Config) -> tuple[Tensor, dict[str, slice]]:
    """The Hessian by the weights of attention and feed-forward parts, and where they are: ``0q``, ``1down``."""
    task = Addition(digits=2)
    model = trained(
        task,
        seed=stream(config["seed"], "weights"),
        steps=0,
        n_layer=LAYERS,
        n_head=HEADS,
        d_model=WIDTH,
        norm=config["norm"],
        bias=False,
    )
    tokens, labels = task.batch(SAMPLES, seed=stream(config["seed"], "sequences"))
    names = {
        f"h.{layer}.{'attn' if len(role) == 1 else 'mlp'}.{role}.weight": f"{layer}{role}"
        for layer in range(LAYERS)
        for role in ROLES
    }
    found = assembly.read(model).hessian(tokens, labels=labels, wrt=list(names)).total
    return found.dense(), {names[name]: place for name, place in found.slices.items()}


def grouped(places: Mapping[str, slice], size: int, rate: str) -> Tensor:
    """The number of its group for every parameter; heads are rows of W_Q, W_K and W_V, and columns of W_O."""
    if rate == "one":
        return torch.zeros(size, dtype=torch.long)
    if rate == "parameter":
        return torch.arange(size)
    found = torch.empty(size, dtype=torch.long)
    for number, (name, of) in enumerate(places.items()):
        head = torch.zeros(of.stop - of.start, dtype=torch.long)
        if rate == "head" and name[1:] in ("q", "k", "v", "o"):
            square = torch.arange(WIDTH).div(WIDTH // HEADS, rounding_mode="floor").expand(WIDTH, WIDTH)
            head = (square if name[1:] == "o" else square.mT).reshape(-1)
        found[of] = HEADS * number + head
    return found


def _means(values: Tensor, groups: Tensor) -> Tensor:
    """The mean of its group for every entry."""
    sums = torch.zeros(int(groups.max()) + 1, dtype=values.dtype)
    counts = torch.zeros_like(sums).index_add(0, groups, torch.ones_like(values))
    return (sums.index_add(0, groups, values) / counts)[groups]


def preconditioned(H: Tensor, groups: Tensor) -> Tensor:
    """P^-½ H P^-½ with the root mean square of the rows' norms of a group."""
    root = _means(H.square().sum(1), groups).pow(-0.25)
    return root[:, None] * H * root


def condition(matrix: Tensor) -> float:
    """The largest |λ| over the median |λ|: how much slower than the fastest half of all directions are."""
    values = torch.linalg.eigvalsh(matrix).abs()
    return float(values.max() / values.median())


def _own_conditions(H: Tensor, places: Mapping[str, slice], rate: str) -> list[float]:
    """Of every diagonal block by itself."""
    found = []
    for name, of in places.items():
        groups = grouped({name: slice(0, of.stop - of.start)}, of.stop - of.start, rate)
        found.append(condition(preconditioned(H[of, of], groups)))
    return found


def _heads_apart(H: Tensor, of: slice) -> float:
    """The largest of the spectral norms of the heads' blocks of a query or key matrix over the smallest."""
    tops = [float(torch.linalg.matrix_norm(block, 2)) for block in _diagonal(H[of, of], HEADS)]
    return max(tops) / min(tops)


def _diagonal(block: Tensor, count: int) -> list[Tensor]:
    size = len(block) // count
    return [block[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)]


def report(records: Sequence[Record]) -> Report:
    """Conditions with every kind of rates, and how the blocks differ."""
    chart = Chart(
        "step-sizes",
        "One step size for all, for a matrix, for a head or for a parameter",
        f"GPTs of {LAYERS} layers at initialisation. Left: the largest over the median absolute eigenvalue of the "
        "Hessian as steps see it that have a rate for all, for every matrix, head or parameter, from the norms of "
        "the rows of H. Right: the largest absolute eigenvalue of every matrix's block: layer, and q, k, v, o, up "
        "or down. Geometric means over the seeds "
        "with their 95 % intervals.",
        [
            Panel(
                [
                    _bars(NORMS[norm], [_conditions(records, norm, rate) for rate in RATES], i)
                    for i, norm in enumerate(NORMS)
                ],
                title="condition",
                y_label=r"$\max|\lambda|\ /\ \mathrm{median}|\lambda|$",
                y_scale="log",
                ticks=([float(i) for i in range(len(RATES))], ["all", *list(RATES)[1:]]),
            ),
            Panel(
                [_bars(NORMS[norm], list(_tops(records, norm).T), i) for i, norm in enumerate(NORMS)],
                title="blocks",
                y_label=r"$\|H_{bb}\|_2$",
                y_scale="log",
                ticks=([float(i) for i in range(LAYERS * len(ROLES))], [name[:2] for name in records[0].result["top"]]),
            ),
        ],
    )
    return Report((chart,), (_suffices(records),))


def _conditions(records: Sequence[Record], norm: str, rate: str) -> Tensor:
    found = [record.result["condition"][rate] for record in where(records, norm=norm)]
    return torch.tensor(found, dtype=torch.float64)


def _tops(records: Sequence[Record], norm: str) -> Tensor:
    """(seeds, matrices)."""
    found = [list(record.result["top"].values()) for record in where(records, norm=norm)]
    return torch.tensor(found, dtype=torch.float64)


def _bars(label: str, values: Sequence[Tensor], colour: int) -> Curve:
    found = [ratio(column, torch.ones_like(column)) for column in values]
    x, y = list(range(len(found))), [each.value for each in found]
    if len(values[0]) < 2:
        return Curve(label, x, y, colour=colour, style="bars")
    return Curve(label, x, y, [r.low for r in found], [r.high for r in found], colour=colour, style="bars")


def _suffices(records: Sequence[Record]) -> Finding:
    """Rates of matrices beside one for all, and beside one a parameter; and whether the blocks are homogeneous."""
    parts: dict[str, bool | None] = {}
    texts = []
    for norm, name in NORMS.items():
        of = where(records, norm=norm)
        held = {rate: _conditions(records, norm, rate) for rate in RATES}
        helps, enough = ratio(held["matrix"], held["one"]), ratio(held["matrix"], held["parameter"])
        own = {
            rate: torch.tensor([r.result["blocks"][rate] for r in of], dtype=torch.float64).log().mean(1).exp()
            for rate in ("matrix", "parameter")
        }
        inside = ratio(own["matrix"], own["parameter"])
        between = mean("", [record.result["between"] for record in of])
        tops = _tops(records, norm)
        apart = ratio(tops.max(1).values, tops.min(1).values)
        heads = torch.tensor([r.result["heads"] for r in of], dtype=torch.float64).log().mean(1).exp()
        tell = True if between.value - between.error > HALF else None
        parts |= {
            f"better than one for all with {name}": helps.below(),
            f"as good as one per parameter with {name}": enough.below(DOMINATES),
            f"matrices homogeneous with {name}": False if between.value + between.error < HALF else tell,
        }
        texts.append(
            f"{name}: "
            + ", ".join(f"{float(each.log().mean().exp()):.3g} ({RATES[rate]})" for rate, each in held.items())
            + f"; one per matrix over one for all {helps}, over one per parameter {enough}, in the diagonal blocks by "
            f"themselves {inside}; {between.value:.0%} ± {between.error:.0%} of the variance of the logarithms of "
            f"rows' norms is between matrices; ‖H_bb‖₂ of the largest matrix's block over the smallest's {apart}, of "
            f"a query's or key's heads {ratio(heads, torch.ones_like(heads))}"
        )
    return judged_parts(
        "one-rate",
        "At initialisation, the largest over the median absolute eigenvalue of P^-½ H P^-½ with rates 1/P from the "
        f"norms of the rows of H: {'. '.join(texts)}. As good is less than {DOMINATES:g} times as ill conditioned, "
        f"homogeneous that more than {HALF:.0%} of that variance is between matrices. Whether training needs no more "
        "rates is not measured.",
        parts,
    )


STEP_SIZES = Experiment("step-sizes", "One step size a block", f"{PAPER}, Section 5", points, measure, report)
