"""The critical batch size of a GPT: measured by branches of SGD, and predicted by noise scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from curvlens.data import Addition
from curvlens.dynamics import noise
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Number, Report
from curvlens.papers.learners import trained
from curvlens.papers.sizes import marked, number
from curvlens.papers.sources import ARTICLE, NOISE_SCALE
from curvlens.papers.sweeps import mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

LONG = 8
"""Steps of the long branches."""
FACTOR = 2.0
"""How far a prediction may be off."""
NEAR, FAR = 2.0**-16, 2.0**8
"""Learning rates that are searched."""


def points(effort: Effort) -> list[Config]:
    """GPTs of two widths, early and later in their training."""
    settings = ((8, 50), (8, 200)) if effort.quick else ((8, 50), (8, 200), (16, 50))
    samples, draws = (32, 4) if effort.quick else (128, 32)
    return [
        {"width": width, "steps": steps, "samples": samples, "draws": draws, "seed": seed}
        for width, steps in settings
        for seed in effort.repeats(2, 5)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The gain of the best step, and of the best eight steps, for each batch size; and the noise scales.

    The samples are all the data there is: batches are drawn from them with replacement, and their mean loss falls.
    """
    task, seed, n = Addition(digits=2), config["seed"], config["samples"]
    model = trained(task, seed=seed, steps=config["steps"], d_model=config["width"], d_mlp=2 * config["width"])
    data = task.batch(n, seed=stream(seed, "sequences"))
    problem = cl.Problem(model, data, cl.losses.CrossEntropy())
    found = noise(problem, curvature=True)
    assert found.curvature_trace is not None
    assert found.curvature_gradient is not None
    # Estimates are for a population that the samples are from. Here they are all of it: what was taken off comes back.
    share = (n - 1) / n
    trace, bent = float(found.trace), float(found.curvature_trace)
    square, slope = float(found.gradient) + trace / n, float(found.curvature_gradient) + bent / n
    ends = cl.eigs(cl.hessian(problem), 1, ends="both", tol=1e-3).values
    branches = Branches(model, data, cross_entropy, stream(seed, "batches"))
    few = max(config["draws"] // 3, 2)
    return {
        "simple": share * trace / square,
        "curved": share * bent / slope if slope > 0 else math.nan,
        "spectrum": float(ends[-1] - ends[0]),
        "loss": branches.start,
        "one": gains(branches, 1, [2.0**k for k in range(1, 9)], config["draws"]),
        "many": gains(branches, LONG, [2.0**k for k in range(2, 10, 2)], few),
    }


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens that count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Branches:
    """SGD from one point, with batches of its own in each branch. The loss is a mean over samples of equal weight."""

    def __init__(
        self, model: nn.Module, data: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor], seed: int
    ) -> None:
        self.model, self.loss, (self.x, self.y) = model, loss, data
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        self.generator = torch.Generator().manual_seed(seed)
        self.slopes = vmap(grad(self._loss), (0, 0, 0))
        self.start = float(self._loss(self.weights, self.x, self.y))
        rows = vmap(grad(lambda w, a, b: self._loss(w, a[None], b[None])), (None, 0, 0))(self.weights, self.x, self.y)
        self.rows = {name: part.detach().flatten(1) for name, part in rows.items()}

    def _loss(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # vmap knows no other attention
            return self.loss(functional_call(self.model, weights, (x,)), y)

    @torch.no_grad()
    def fallen(self, weights: Mapping[str, Tensor]) -> Tensor:
        """How far the loss has fallen, in each branch."""
        count = len(next(iter(weights.values())))
        ends = [float(self._loss({k: v[i] for k, v in weights.items()}, self.x, self.y)) for i in range(count)]
        return self.start - torch.tensor(ends, dtype=torch.float64)

    def batches(self, size: int, steps: int, draws: int) -> Tensor:
        """(steps, draws, size): places in the data."""
        return torch.randint(len(self.x), (steps, draws, size), generator=self.generator)

    def one(self, batches: Tensor) -> Callable[[float], Tensor]:
        """The fall by one step with a learning rate."""
        g = {k: rows[batches[0]].mean(1).view(-1, *self.weights[k].shape) for k, rows in self.rows.items()}
        return lambda rate: self.fallen({k: w - rate * g[k] for k, w in self.weights.items()})

    def many(self, batches: Tensor, rate: float) -> Tensor:
        """The fall by as many steps as there are batches."""
        draws = batches.shape[1]
        weights = {k: w.expand(draws, *w.shape) for k, w in self.weights.items()}
        for chosen in batches:
            g = self.slopes(weights, self.x[chosen], self.y[chosen])
            weights = {k: w - rate * g[k].detach() for k, w in weights.items()}
        return self.fallen(weights)


def gains(branches: Branches, steps: int, sizes: Sequence[float], draws: int) -> dict[str, Any]:
    """For each batch size the fall with its best learning rate, with its error; and the critical size of the fit."""
    found, rate = [], 2.0**-6
    for size in sizes:
        batches = branches.batches(int(size), steps, draws)
        fall = branches.one(batches) if steps == 1 else partial(branches.many, batches)
        rate, fallen = best(fall, rate)
        found.append((float(fallen.mean()), float(fallen.std() / draws**0.5), rate))
    gain, error, rates = (list(each) for each in zip(*found, strict=True))
    most, critical = fitted(sizes, gain, error)
    return {"sizes": list(sizes), "gain": gain, "error": error, "rates": rates, "most": most, "critical": critical}


def best(fall: Callable[[float], Tensor], rate: float) -> tuple[float, Tensor]:
    """The learning rate whose mean fall is largest, to a factor of 2^¼, and the falls of all draws.

    The same batches at all rates. Rates fit the draws that they are chosen on, so each half of the draws falls at the
    rate that is best for the other half. At a rate that is 9 % off, a quadratic falls by 1 % less than it could.
    """
    known: dict[float, Tensor] = {}

    def at(power: float) -> float:
        if power not in known:
            fallen = fall(2.0**power)
            known[power] = torch.where(fallen.isfinite(), fallen, -math.inf)
        return float(known[power].mean())

    power, low, high = float(round(math.log2(rate))), math.log2(NEAR), math.log2(FAR)
    for stride in (1.0, 0.5, 0.25):
        while power + stride <= high and at(power + stride) > at(power):
            power += stride
        while power - stride >= low and at(power - stride) > at(power):
            power -= stride
    tried = list(known)
    falls = torch.stack([known[each] for each in tried])
    half = falls.shape[1] // 2
    first, second = (int(part.mean(1).argmax()) for part in (falls[:, :half], falls[:, half:]))
    return 2.0**power, torch.cat([falls[second, :half], falls[first, half:]])


def fitted(sizes: Sequence[float], gain: Sequence[float], error: Sequence[float]) -> tuple[float, float]:
    """M and C of gain = M/(1 + C/B), by least squares; the errors and 1 % of the gain are the weights.

    NaN where nothing is gained, or where C is at an end of the range that is searched.
    """
    B, y, e = (torch.tensor(each, dtype=torch.float64) for each in (sizes, gain, error))
    weights = 1 / (e.square() + (0.01 * y).square())
    critical = torch.logspace(-1, 5, 3001, dtype=torch.float64)
    shape = 1 / (1 + critical[:, None] / B)
    most = (shape * y * weights).sum(1) / (shape.square() * weights).sum(1)
    misfit = ((y - most[:, None] * shape).square() * weights).sum(1)
    chosen = int(misfit.argmin())
    inside = 0 < chosen < len(critical) - 1 and float(most[chosen]) > 0
    return (float(most[chosen]), float(critical[chosen])) if inside else (math.nan, math.nan)


# What it says


def settings(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Width and steps of training, in their order."""
    return sorted({(record.config["width"], record.config["steps"]) for record in records})


def over(records: Sequence[Record], steps: str, scale: str) -> Ratio:
    """The measured critical size over a noise scale."""
    return ratio(
        torch.tensor([number(record.result[steps]["critical"]) for record in records], dtype=torch.float64),
        torch.tensor([number(record.result[scale]) for record in records], dtype=torch.float64),
    )


def near(found: Ratio, count: int) -> bool | None:
    """Whether the ratio is between 1/2 and 2; None if the interval does not tell, or if a repeat has no number."""
    if found.low > FACTOR or found.high < 1 / FACTOR:
        return False
    return True if found.count == count and found.low > 1 / FACTOR and found.high < FACTOR else None


def steepness(records: Sequence[Record]) -> Number:
    """The power with which the critical size grows with the width of the spectrum, from setting to setting."""
    powers = []
    for seed in sorted({record.config["seed"] for record in records}):
        of = where(records, seed=seed)
        x, y = (
            torch.tensor([number(value) for value in values], dtype=torch.float64).log()
            for values in ([r.result["spectrum"] for r in of], [r.result["one"]["critical"] for r in of])
        )
        kept = x.isfinite() & y.isfinite()
        x, y = x[kept] - x[kept].mean(), y[kept]
        if len(x) > 1 and float(x.square().sum()) > 0:
            powers.append(float((x @ y) / x.square().sum()))
    return mean("power", powers) if powers else Number("power", math.nan, math.inf)


NAMES = {"curved": "tr(HΣ)/gᵀHg", "simple": "tr Σ/‖g‖²"}
BRANCHES = {"one": "one step", "many": f"{LONG} steps"}


def report(records: Sequence[Record]) -> Report:
    """Critical sizes beside both noise scales."""
    return Report((chart(records),), findings(records), notes=marked(records, "steps", "steps"))


def findings(records: Sequence[Record]) -> tuple[Finding, ...]:
    """Of both noise scales, and of the width of the spectrum."""
    texts: dict[str, list[str]] = {scale: [] for scale in NAMES}
    parts: dict[str, dict[str, bool | None]] = {scale: {} for scale in NAMES}
    for width, steps in settings(records):
        of = where(records, width=width, steps=steps)
        for branch, said in BRANCHES.items():
            name = f"{said} from {steps} steps of training at width {width}"
            for scale in NAMES:
                found = over(of, branch, scale)
                texts[scale].append(f"{name}: {found}")
                parts[scale][name] = near(found, len(of))
    power = steepness(records)
    low, high = power.value - power.error, power.value + power.error
    wider = True if low > 0 else False if high < 0 else None
    begin = (
        "The critical size C fits the gain M/(1 + C/B) of branches of SGD, each batch size B with its best learning "
        "rate. C over {}, geometric means over the seeds with their 95 % intervals; to be met to a factor of "
        f"{FACTOR:g}: "
    )
    unknown = sum(math.isnan(number(record.result["curved"])) for record in records)
    missing = f" {unknown} of {len(records)} models have gᵀHg ≤ 0 and no prediction." if unknown else ""
    spread = "" if math.isnan(power.value) else " From model to model C grows like "
    spread += f"the width of the spectrum to the power {power.value:.2f} ± {power.error:.2f}." if spread else ""
    return (
        judged_parts(
            "critical-batch",
            begin.format(NAMES["curved"]) + "; ".join(texts["curved"]) + f".{missing}{spread}",
            parts["curved"] | {"the wider the spectrum, the larger the critical batch": wider},
        ),
        judged_parts(
            "critical-batch-simple",
            begin.format(NAMES["simple"]) + "; ".join(texts["simple"]) + ".",
            parts["simple"],
        ),
    )


def chart(records: Sequence[Record]) -> Chart:
    """Gains of one step beside the fit and both predictions; critical sizes over predictions."""
    width, steps = settings(records)[0]
    of = where(records, width=width, steps=steps)
    one = of[0].result["one"]
    sizes, most = one["sizes"], number(one["most"])
    curves = [
        Curve(
            "measured",
            sizes,
            one["gain"],
            [g - 2 * e for g, e in zip(one["gain"], one["error"], strict=True)],
            [g + 2 * e for g, e in zip(one["gain"], one["error"], strict=True)],
        )
    ]
    known = {"fit": one["critical"], NAMES["curved"]: of[0].result["curved"], NAMES["simple"]: of[0].result["simple"]}
    for colour, (name, value) in enumerate(known.items()):
        if math.isfinite(number(value)):
            gain = [most / (1 + number(value) / size) for size in sizes]
            curves.append(Curve(name, sizes, gain, colour=colour, style="dashed", marker=False))
    panels = [
        Panel(
            curves,
            title=f"one step, width {width}, {steps} steps",
            x_label="batch size B",
            y_label="fall of the loss",
            x_scale="log",
        )
    ]
    places = [(w, s) for w, s in settings(records)]
    ticks = ([float(i) for i in range(len(places))], [f"d={w}, {s}" for w, s in places])
    for branch, said in BRANCHES.items():
        lines = []
        for colour, (scale, name) in enumerate(NAMES.items()):
            found = [over(where(records, width=w, steps=s), branch, scale) for w, s in places]
            kept = [(x, r) for x, r in zip(ticks[0], found, strict=True) if math.isfinite(r.high)]
            if kept:
                lines.append(
                    Curve(
                        name,
                        [x for x, _ in kept],
                        [r.value for _, r in kept],
                        [r.low for _, r in kept],
                        [r.high for _, r in kept],
                        colour=colour,
                    )
                )
        panels.append(
            Panel(
                lines,
                title=f"measured over predicted, {said}",
                x_label="width and steps of training",
                y_label="ratio",
                y_scale="log",
                y_lines=(1.0,),
                ticks=ticks,
                note="" if lines else "one seed has no interval",
            )
        )
    return Chart(
        "critical-batch",
        "The critical batch size, measured and predicted",
        "Left: how far one step of SGD lowers the loss of a GPT, by batch size, each with its best learning rate, "
        "with twice the standard error over draws; the fit M/(1 + C/B), and the same with a noise scale for C. Right: "
        f"C over both noise scales, for branches of one step and of {LONG}; bands are 95 % intervals over the seeds.",
        panels,
    )


CRITICAL_BATCH = Experiment(
    "critical-batch",
    "The critical batch size of a GPT",
    f"{ARTICLE}, Section 7.2; {NOISE_SCALE}, Section 2",
    points,
    measure,
    report,
)
