"""One sum over the data: by whatever way, over however many processes, and in one place of the code."""

from __future__ import annotations

import ast
import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import curvlens as cl
import small
from curvlens._evaluation.reducer import Reducer
from curvlens._evaluation.sums import Number, summed
from curvlens.operators.modules import module_part, recordings_of

SOURCE = Path(cl.__file__).parent


class Meeting:
    """Threads in the place of processes: each waits until all have brought their term, and takes the sum."""

    def __init__(self, members: int) -> None:
        self._barrier = threading.Barrier(members, timeout=60)
        self._lock = threading.Lock()
        self._terms: list[Tensor] = []

    def total(self, term: Tensor) -> Tensor:
        with self._lock:
            self._terms.append(term.clone())
        self._barrier.wait()
        total = torch.stack(self._terms).sum(0)
        if self._barrier.wait() == 0:
            self._terms.clear()
        self._barrier.wait()
        return total


class Member:
    """The reducer of one of them."""

    alone = False

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def numbers(self, values: list[float]) -> list[float]:
        return self._meeting.total(torch.tensor(values, dtype=torch.float64)).tolist()

    def tensor(self, value: Tensor) -> Tensor:
        assert value.dtype == torch.float64  # sums are exact to the last digits, whatever the model's dtype
        return self._meeting.total(value)


def together(problems: list[cl.Problem], ask: Callable[[cl.Problem], Tensor]) -> list[Tensor]:
    """What each of several processes would answer, with a part of the data each."""
    meeting, answers, failed = Meeting(len(problems)), dict[int, Tensor](), list[BaseException]()

    def work(number: int) -> None:
        reducer: Reducer = Member(meeting)
        problems[number]._evaluation.reducer = reducer
        try:
            answers[number] = ask(problems[number])
        except BaseException as error:
            failed.append(error)
            meeting._barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [answers[number] for number in range(len(problems))]


def probe(problem: cl.Problem) -> Tensor:
    return small.direction(problem.layout.size, 3)


QUESTIONS: dict[str, Callable[[cl.Problem], Tensor]] = {
    "loss": lambda p: torch.tensor(p.loss(), dtype=torch.float64),
    "tokens": lambda p: torch.tensor(float(p.n_tokens)),
    "gradient": lambda p: p.gradient(),
    "H v": lambda p: cl.hessian(p) @ probe(p),
    "G v": lambda p: cl.ggn(p) @ probe(p),
    "F v": lambda p: cl.functional(p) @ probe(p),
    "vᵀ G v": lambda p: torch.tensor(cl.ggn(p).quadratic(probe(p))),
    "a block": lambda p: cl.hessian(p)["h.0.attn.q"].dense(),
    "a module": lambda p: module_part(p, "h.0.attn") @ probe(p),
    "λ_max": lambda p: cl.eigs(cl.hessian(p), 1).values,
    "profile": lambda p: cl.profile(p, 4, top=False)["h.1.mlp"].total.trace.value,
}


def problem_of(rows: slice, memory: str | None = None) -> cl.Problem:
    tokens, labels = small.tokens_and_labels()
    return cl.Problem(
        copy.deepcopy(small.gpt(n_layer=2)), (tokens[rows], labels[rows]), cl.losses.CrossEntropy(), memory=memory
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_several_processes_answer_as_one(question: str) -> None:
    ask = QUESTIONS[question]
    truth = ask(problem_of(slice(None)))
    for answer in together([problem_of(slice(0, 1)), problem_of(slice(1, None))], ask):
        assert float((answer - truth).abs().max()) < 1e-11 * float(truth.abs().max())
    own = ask(problem_of(slice(0, 1)))
    assert float((own - truth).abs().max()) > 1e-3 * float(truth.abs().max())  # a part alone is something else


def test_several_processes_that_rebuild_their_graphs() -> None:
    ask = QUESTIONS["H v"]
    truth = ask(problem_of(slice(None)))
    for answer in together([problem_of(slice(0, 1), "0"), problem_of(slice(1, None), "0")], ask):
        assert float((answer - truth).abs().max()) < 1e-12 * float(truth.abs().max())


def test_recordings_are_shared_while_somebody_holds_them() -> None:
    problem = problem_of(slice(None))
    held = recordings_of(problem)
    assert recordings_of(problem) is held
    first = [id(recording) for recording in held]
    assert [id(recording) for recording in held] == first  # kept, not rebuilt
    with torch.no_grad():
        next(problem.model.parameters()).mul_(1.01)
    assert [id(recording) for recording in held] != first  # the model has moved


def calls(name: str) -> set[str]:
    """The files in which a function or a method of this name is called."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                if getattr(called, "attr", getattr(called, "id", None)) == name:
                    found.add(str(file.relative_to(SOURCE)))
    return found


def test_there_is_one_sum() -> None:
    """The count of all data is known where terms are added, and nowhere else: who divides by it went through there."""
    assert calls("remember_count") == {"_evaluation/sums.py"}
    assert calls("numbers") == {"_evaluation/sums.py"}


def test_there_is_one_cache() -> None:
    """Graphs and recordings over all the data are built in one package; the doctor builds one of a single piece."""
    assert calls("Graph") == {"_evaluation/cache.py", "checkup/differences.py"}
    assert calls("Cache") == {"_evaluation/evaluation.py"}
    assert calls("Meter") == {"_evaluation/meter.py"}


@pytest.mark.parametrize("make", ["graphs", "recordings"])
def test_an_error_leaves_no_generator_behind(make: str) -> None:
    """A generator of graphs sets states of torch. Freed with a traceback, it would reset them at any later time."""
    evaluation = problem_of(slice(None))._evaluation
    items = evaluation.cache.graphs(evaluation.layout.names) if make == "graphs" else evaluation.cache.recordings()

    def fails(item: object, j: int) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        summed(evaluation, items, fails, [Number()])
    torch._C._set_fwd_grad_enabled(False)
    try:
        del caught, items
        gc.collect()
        assert not torch._C._is_fwd_grad_enabled()
    finally:
        torch._C._set_fwd_grad_enabled(True)
