"""Ctrl-C at any moment: torch, the model and its hooks are as before, and the next call is right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import curvlens as cl
from interrupts import inside, interrupted_at, interrupted_within, moments, surroundings
from small import direction, gpt, relative, tokens_and_labels
from truth import Truth

pytestmark = pytest.mark.usefixtures("uncovered")

CHANGING = ("contextlib.py", "torch/overrides.py", "exchange.py", "surroundings.py", "precision.py", "sdpa/mode.py")
"""Files in which states of torch are changed: where an interrupt once lost a mode, or left one behind."""


def rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, labels = batch
    return model(tokens)[labels != -100], labels[labels != -100]


class Setting:
    """A small model, with all that is asked about it."""

    def __init__(self) -> None:
        self.model, self.data = gpt(), tokens_and_labels(2, 4)
        self.truth = Truth(self.model, [self.data], rows, square=False).hessian
        self.rebuilt, self.kept = self.problem(memory=0), self.problem()
        self.v = direction(self.kept.layout.size)

    def problem(self, memory: int | None = None) -> cl.Problem:
        return cl.Problem(self.model, self.data, cl.losses.CrossEntropy(), memory=memory)

    def actions(self) -> dict[str, Callable[[], object]]:
        return {
            "product": lambda: cl.hessian(self.rebuilt) @ self.v,
            "ggn": lambda: cl.ggn(self.kept) @ self.v,
            "gradient": self.kept.gradient,
            "problem": self.problem,
            "trace": lambda: cl.trace(cl.hessian(self.kept), by="block", samples=4),
            "eigs": lambda: cl.eigs(cl.hessian(self.kept), k=1),
            "profile": lambda: cl.profile(self.problem(), 4, top=False),
            "doctor": lambda: cl.doctor(self.kept),
        }

    def check(self) -> None:
        """Products are those of dense autodiff."""
        for held in (self.rebuilt, self.kept):
            assert relative(cl.hessian(held) @ self.v, self.truth @ self.v) < 1e-12


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


@pytest.mark.parametrize(
    ("name", "often"),
    [("product", 15), ("ggn", 15), ("gradient", 15)]
    + [pytest.param(name, 1000, marks=pytest.mark.full) for name in ("product", "ggn", "profile", "doctor")],
)
def test_where_states_change(setting: Setting, name: str, often: int) -> None:
    """Interrupts at chosen moments, each of which is one at which Python handles signals."""
    action = setting.actions()[name]
    action()
    found = moments(action, *CHANGING)
    chosen = random.Random(0).sample(found, min(len(found), often))
    # while torch takes a mode off its stack and puts it back
    found = moments(action, "contextlib.py", called_from="torch/overrides.py")
    chosen += random.Random(0).sample(found, min(len(found), often))
    before, of_the_model = surroundings(), inside(setting.model)
    for moment in chosen:
        error = interrupted_at(action, moment)
        assert surroundings() == before, moment  # while the traceback is held
        del error
        assert surroundings() == before, moment  # and when it is freed, with all generators in it
        assert inside(setting.model) == of_the_model, moment
    setting.check()


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")  # results that were cut short
@pytest.mark.parametrize("interrupts", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_by_the_clock(setting: Setting, interrupts: int) -> None:
    """Interrupts at random moments of everything that people wait for."""
    generator, came = random.Random(0), 0
    actions, seconds = setting.actions(), dict[str, float]()
    for name, action in actions.items():
        start = time.perf_counter()
        action()
        seconds[name] = time.perf_counter() - start
    before, of_the_model = surroundings(), inside(setting.model)
    while came < interrupts:
        name = generator.choice(list(actions))
        came += interrupted_within(actions[name], min(seconds[name], 1e-4 * interrupts), generator)
        assert surroundings() == before, name
        assert inside(setting.model) == of_the_model, name
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
    setting.check()


class Looking(TorchFunctionMode):
    """A mode of the user's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_stay(setting: Setting) -> None:
    """They are below ours, and torch takes them off its stack too while it handles a call."""
    action = setting.actions()["product"]
    with Looking(), torch.no_grad():
        found = moments(action, "torch/overrides.py", "contextlib.py")
        before = surroundings()
        for moment in random.Random(0).sample(found, 15):
            error = interrupted_at(action, moment)
            assert error is not None
            assert surroundings() == before, moment
            del error
            assert surroundings() == before, moment
    setting.check()
