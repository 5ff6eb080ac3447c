"""The sweep that three experiments share: GPTs of several sizes that learn to add from few and from many samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens.dynamics.learner import completed
from curvlens.dynamics.scaling import work
from curvlens.papers.experiment import Effort, Number
from curvlens.papers.sweeps import Sweep, mean, sweep, where
from curvlens.study import Config, Record

CHECK = 20
"""Steps between checks of the loss on other pairs."""


def points(effort: Effort) -> list[Config]:
    """The whole grid at the lowest loss and after the last step; before training one line along each axis."""
    widths, samples = ((2, 4, 6), (8, 32, 128)) if effort.quick else ((4, 6, 8, 12), (16, 64, 256, 1024))
    steps, seeds = (60, effort.repeats(2, 2)) if effort.quick else (400, effort.repeats(5, 5))
    grid = [(width, count) for width in widths for count in samples]
    middle = widths[len(widths) // 2], samples[len(samples) // 2]
    lines = [pair for pair in grid if pair[0] == middle[0] or pair[1] == middle[1]]
    stages = {"best": grid, "start": lines, "end": lines if effort.quick else grid}
    how = {"products": 8, "dense": 0} if effort.quick else {"products": 32, "dense": 320}
    return [
        {"width": width, "samples": count, "steps": 0 if stage == "start" else steps, "stage": stage, "seed": seed}
        | how
        for seed in seeds
        for stage, pairs in stages.items()
        for width, count in pairs
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """Losses and curvature of a GPT on its training samples."""
    setting = completed(
        {
            "d_model": config["width"],
            "mlp_ratio": 2,
            "samples": config["samples"],
            "steps": config["steps"],
            "check": CHECK if config["stage"] == "best" else 0,
        }
    )
    how = {"top": 10, "floor": 1e-6, "probes": 2, "lanczos": 10}  # nothing here asks for the negative mass
    how |= {name: config[name] for name in ("products", "dense")}
    found: Mapping[str, Any] = work(None, {"setting": setting, "seed": config["seed"], "measured": how})
    return found


def table(records: Sequence[Record], **entries: Any) -> list[dict[str, Any]]:
    """The values of some records with their settings, as fits read them."""
    return [{**record.config, **record.result["values"]} for record in where(records, **entries)]


def middle(records: Sequence[Record], over: str) -> Any:
    """The setting in the middle of the sweep, where the lines cross."""
    values = sorted({record.config[over] for record in records})
    return values[len(values) // 2]


def line(records: Sequence[Record], stage: str, over: str, quantity: str) -> Sweep:
    """A quantity along one axis, at the middle of the other."""
    other = "width" if over == "samples" else "samples"
    found = where(records, stage=stage, **{other: middle(records, other)})
    if over == "samples":
        return sweep(found, "samples", "values", quantity)
    along = sweep(found, "width", "values", quantity)
    sizes = {record.config["width"]: record.result["values"]["parameters"] for record in found}
    return Sweep(tuple(sizes[width] for width in along.x), along.values)


def everywhere(records: Sequence[Record], stage: str, over: str, quantity: str) -> dict[Any, Sweep]:
    """A quantity at one stage along one axis, at every place of the other that was measured."""
    other = "width" if over == "samples" else "samples"
    best = where(records, stage=stage)
    places = sorted({record.config[other] for record in best})
    sizes = {record.config["width"]: record.result["values"]["parameters"] for record in best}
    found = {}
    for place in places:
        along = sweep(where(best, **{other: place}), over, "values", quantity)
        if len(along.x) > 1:
            found[place] = Sweep(tuple(sizes[x] if over == "width" else x for x in along.x), along.values)
    return found


def power(lines: Sequence[Sweep]) -> Number:
    """The exponent of |y| over all of x: the mean of the lines of each seed, with its interval over the seeds."""
    slopes: list[Tensor] = [Sweep(each.x, each.values.abs()).powers((min(each.x), max(each.x))) for each in lines]
    return mean("", torch.stack(slopes).mean(0).tolist())


def above(number: Number, bound: float = 0.0) -> bool | None:
    """Whether an exponent is above a bound; None if its interval does not tell."""
    if number.value - number.error > bound:
        return True
    return False if number.value + number.error <= bound else None


def below(number: Number, bound: float = 0.0) -> bool | None:
    """Whether an exponent is below a bound; None if its interval does not tell."""
    more = above(number, bound)
    return None if more is None else not more


def said(number: Number) -> str:
    """An exponent with its interval.

    >>> said(Number("", -0.5, 0.02))
    '-0.500 ± 0.020'
    """
    return f"{number.value:.3f} ± {number.error:.3f}"
