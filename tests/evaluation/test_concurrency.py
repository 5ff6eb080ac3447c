"""Threads that share a model, a problem and the random numbers, and interrupts from outside."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from small import direction, gpt, problem, relative, tokens_and_labels


def in_threads(*actions: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_problems_on_one_model_in_two_threads() -> None:
    model, v = gpt(), direction(242)
    here = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy(), memory=0)
    there = here.with_params(2 * here.theta)
    expected = [cl.hessian(p) @ v for p in (here, there)]

    def repeat(p: cl.Problem, truth: Tensor) -> None:
        for _ in range(10):
            assert relative(cl.hessian(p) @ v, truth) < 1e-12

    in_threads(lambda: repeat(here, expected[0]), lambda: repeat(there, expected[1]))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_two_operators_of_one_problem_in_two_threads() -> None:
    held, v = problem(), direction(242)
    H, F_ = cl.hessian(held), cl.functional(held)
    expected = [H @ v, F_ @ v]

    def repeat(operator: cl.Operator, truth: Tensor) -> None:
        for _ in range(40):
            assert relative(operator @ v, truth) < 1e-12

    in_threads(lambda: repeat(H, expected[0]), lambda: repeat(F_, expected[1]))


@pytest.mark.parametrize("memory", [None, 0])
def test_another_thread_draws_no_number_twice(memory: int | None) -> None:
    """All threads share one generator: putting it back after a product would rewind what another one has drawn."""
    held, v = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), memory=memory), direction(242)
    drawn: list[float] = []
    stop: list[bool] = []

    def products() -> None:
        while not stop:
            cl.hessian(held) @ v

    def draws() -> None:
        for _ in range(200):
            drawn.append(float(torch.rand((), dtype=torch.float64)))
            time.sleep(0.001)
        stop.append(True)

    in_threads(products, draws)
    assert len(set(drawn)) == len(drawn)


def test_passes_that_draw_leave_random_numbers_alone() -> None:
    class Seeded(nn.Module):
        """Random, and the same in every pass."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return self.inner(x) * (1 + 0.1 * torch.rand(()))  # type: ignore[no-any-return]

    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tokens_and_labels()), batch_size=2)
    for held in (
        cl.Problem(Seeded(), tokens_and_labels(), cl.losses.CrossEntropy()),
        cl.Problem(gpt(), loader, cl.losses.CrossEntropy(), memory=0),
    ):
        before = torch.get_rng_state()
        cl.hessian(held) @ direction(242)
        held.loss()
        assert torch.equal(before, torch.get_rng_state())


INTERRUPTED = """
import os, signal, sys, time
import torch
from small import gpt, tokens_and_labels, direction
import curvlens as cl
torch.set_num_threads(1)
model = gpt()
before = [(name, id(p)) for name, p in model.named_parameters()]
H = cl.hessian(cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy(), memory=0, micro_batch=1))
v = direction(242)
truth = H @ v
interrupts, end = 0, time.time() + float(sys.argv[1])
inside = False
def interrupt(*_):  # at any moment inside curvlens, and never in the lines of this script
    if inside:
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
print("ready", flush=True)
while time.time() < end:
    try:
        inside = True
        while time.time() < end:
            H @ v
        inside = False
    except KeyboardInterrupt:
        inside = False
        interrupts += 1
    assert [(name, id(p)) for name, p in model.named_parameters()] == before, f"after {interrupts}"
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert torch.allclose(H @ v, truth, rtol=1e-12)
print("interrupts", interrupts, flush=True)
"""


@pytest.mark.parametrize("seconds", [3.0, pytest.param(40.0, marks=pytest.mark.full)])
def test_interrupts_from_outside(seconds: float) -> None:
    """Ctrl-C at random moments, again and again: the model always has its own parameters back."""
    arguments = [sys.executable, "-c", INTERRUPTED, str(seconds)]
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    generator, end = random.Random(0), time.monotonic() + seconds - 0.5
    while time.monotonic() < end:
        time.sleep(generator.uniform(0.002, 0.03))
        child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert int(out.split()[-1]) >= 5 * seconds
