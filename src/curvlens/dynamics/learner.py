"""Small GPTs that learn to add on a limited number of samples: what `scaling` trains unless told otherwise."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlens.data import Addition
from curvlens.errors import CurvlensError, nearest
from curvlens.linalg.counted import whole
from curvlens.losses import CrossEntropy
from curvlens.models import GPT, GPTConfig
from curvlens.problem import Problem
from curvlens.study import Config

DEFAULTS: dict[str, Any] = {
    "d_model": 8,
    "n_layer": 1,
    "n_head": 2,
    "mlp_ratio": 4,
    "digits": 2,
    "samples": 256,
    "steps": 200,
    "batch": 64,
    "lr": 1e-2,
    "check": 0,
}
"""Settings of a GPT, its data and its training by Adam. ``samples`` are the distinct training samples. With ``check``
the loss on other pairs is taken after every so many steps, and the weights of the lowest are kept."""
HELD_OUT = 512
"""Pairs of numbers for the test, and as many for ``check``; but a quarter of all pairs at most."""
DIGITS = 3
"""The most digits: all pairs of numbers are shuffled."""


def completed(setting: Config) -> dict[str, Any]:
    """A setting with the defaults of what it leaves out. Raise for one that cannot be trained."""
    for name in setting:
        if name not in DEFAULTS:
            raise CurvlensError(
                f"{name!r} is no setting of the GPT that adds. {nearest(name, DEFAULTS)} For a model of your own give "
                "train=, a function that returns its Problem."
            )
    full = DEFAULTS | dict(setting)
    for name, value in full.items():
        least = 0 if name in ("steps", "check") else 1
        if name == "lr":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 10:
                raise CurvlensError(f"lr={value!r}, expected a learning rate of Adam, such as 0.01.")
        elif not whole(value) or value < least:
            raise CurvlensError(f"{name}={value!r}, expected a whole number, {least} or more.")
    if full["digits"] > DIGITS:
        raise CurvlensError(f"digits={full['digits']}, expected 1 to {DIGITS}.")
    pairs = 100 ** full["digits"]
    most = pairs - 2 * _held_out(pairs)
    if full["samples"] > most:
        raise CurvlensError(
            f"samples={full['samples']}, but {full['digits']}-digit numbers have {pairs} pairs, of which "
            f"{pairs - most} are held out. Give at most samples={most}, or more digits."
        )
    GPTConfig(vocab=12, context=8, d_model=full["d_model"], n_head=full["n_head"])  # raises if they do not fit
    return full


def data(config: Config) -> tuple[tuple[Tensor, Tensor], ...]:
    """(tokens, labels) to train on, to check and to test with, from the seed. They share no pair of numbers.

    More samples of one seed contain the fewer ones, and the test is the same.
    """
    task = Addition(digits=config["digits"])
    base, pairs = 10 ** config["digits"], 100 ** config["digits"]
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(config["seed"]))
    held = _held_out(pairs)
    terms = torch.stack([order // base, order % base], 1)
    return task.of(terms[2 * held :][: config["samples"]]), task.of(terms[held : 2 * held]), task.of(terms[:held])


def learn(config: Config) -> tuple[Problem, Problem]:
    """The problem of a trained GPT on its training samples and on the test, in float64."""
    (x, y), check, test = data(config)
    task = Addition(digits=config["digits"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        model = GPT(
            GPTConfig(
                vocab=task.vocab,
                context=task.context,
                n_layer=config["n_layer"],
                n_head=config["n_head"],
                d_model=config["d_model"],
                d_mlp=config["mlp_ratio"] * config["d_model"],
            )
        ).double()
    adam = torch.optim.Adam(model.parameters(), lr=config["lr"])
    draws = torch.Generator().manual_seed(1_000_000 + config["seed"])
    lowest, best = math.inf, dict[str, Tensor]()
    for step in range(config["steps"] + 1):
        if config["check"] and step % config["check"] == 0:
            with torch.no_grad():
                loss = float(F.cross_entropy(model(check[0]).flatten(0, 1), check[1].flatten()))
            if loss < lowest:
                lowest, best = loss, {name: p.detach().clone() for name, p in model.state_dict().items()}
        if step == config["steps"]:
            break
        rows = torch.randperm(len(x), generator=draws)[: config["batch"]]
        adam.zero_grad()
        F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten()).backward()  # type: ignore[no-untyped-call]
        adam.step()
    if best:
        model.load_state_dict(best)
    model.eval()
    return Problem(model, (x, y), CrossEntropy()), Problem(model, test, CrossEntropy())


def _held_out(pairs: int) -> int:
    return min(HELD_OUT, pairs // 4)
