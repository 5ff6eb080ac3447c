"""Trace, Frobenius norm and diagonal: exact where they can be, and else with errors that mean what they say."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlens as cl
import small
from curvlens.results import Status
from spectra import matrix, sampled

MATRICES = {name: matrix(values) for name, values in sampled().items()}
TRUTH = {name: {"trace": A.trace(), "frobenius": A.norm(), "diagonal": A.diagonal()} for name, A in MATRICES.items()}
FUNCTIONS: dict[str, Any] = {"trace": cl.trace, "frobenius": cl.frobenius, "diagonal": cl.diagonal}


def hits(what: str, name: str, runs: int, samples: int = 64) -> float:
    """How often the 95 % interval holds the truth; for the diagonal, over all entries with an error."""
    inside, total = 0, 0
    truth = TRUTH[name][what]
    for seed in range(runs):
        estimate = FUNCTIONS[what](MATRICES[name], samples, seed=seed)
        assert estimate.samples == samples
        low, high = estimate.interval(0.95)
        counted = estimate.stderr > 0
        inside += int(((low <= truth) & (truth <= high) & counted).sum())
        total += int(counted.sum())
    return inside / total


@pytest.mark.full
@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize("name", MATRICES)
def test_coverage(what: str, name: str) -> None:
    share = hits(what, name, runs=200)
    print(f"coverage of {what}, {name}: {share:.3f}")
    assert 0.90 <= share <= 0.99


@pytest.mark.parametrize("what", FUNCTIONS)
def test_coverage_in_short(what: str) -> None:
    assert hits(what, "one dominant", runs=40) >= 0.85


FEW = {
    "steep": matrix(torch.arange(1, 301, dtype=torch.float64) ** -2.0),
    "three spikes": matrix(torch.cat([torch.tensor([50.0, 40.0, 30.0]), torch.linspace(0.5, 1.5, 297)]).double()),
    "decaying": matrix(torch.arange(1, 301, dtype=torch.float64) ** -1.0),
}


def held(A: Tensor, samples: int, runs: int) -> float:
    """How often the 95 % interval of the Frobenius norm holds it."""
    ends = [cl.frobenius(A, samples, seed=seed).interval(0.95) for seed in range(runs)]
    return sum(bool(low <= float(A.norm()) <= high) for low, high in ends) / runs


def test_norms_from_few_samples() -> None:
    """Skewed squares: with n − 1 degrees of freedom and a symmetric interval 86, 88 and 90 % of 300 hold."""
    assert sum(held(A, 8, 100) for A in FEW.values()) / 3 >= 0.92


@pytest.mark.full
@pytest.mark.parametrize("samples", [8, 16, 32, 64])
@pytest.mark.parametrize("name", FEW)
def test_coverage_of_norms(name: str, samples: int) -> None:
    share = held(FEW[name], samples, 300)
    print(f"coverage of the norm, {name}, {samples} samples: {share:.3f}")
    assert share >= 0.90  # 95 % less three standard errors is 0.912; three spikes at 8 samples are at 0.917


def met(what: str, name: str, rtol: float, runs: int) -> float:
    truth = TRUTH[name][what]
    good = 0
    for seed in range(runs):
        value = FUNCTIONS[what](MATRICES[name], rtol=rtol, seed=seed).value
        good += int((value - truth).norm() <= rtol * truth.norm())
    return good / runs


@pytest.mark.full
@pytest.mark.parametrize(("what", "rtol"), [("trace", 0.01), ("trace", 0.05), ("frobenius", 0.02)])
@pytest.mark.parametrize("name", ["flat", "decaying", "one dominant"])
def test_accuracy_is_met(what: str, name: str, rtol: float) -> None:
    share = met(what, name, rtol, runs=100)
    print(f"rtol={rtol} of {what}, {name}: met in {share:.2f}")
    assert share >= 0.90


def test_accuracy_is_met_in_short() -> None:
    assert met("trace", "decaying", 0.02, runs=20) >= 0.85


def test_accuracy_of_a_trace_near_zero_ends_exactly() -> None:
    A = MATRICES["indefinite"] - 0.001 * torch.eye(500, dtype=torch.float64)
    assert abs(float(A.trace())) < 1e-3
    estimate = cl.trace(A, rtol=0.01)
    assert estimate.exact
    assert abs(float(estimate) - float(A.trace())) < 1e-12


def test_accuracy_that_is_not_reached_is_said() -> None:
    with pytest.warns(cl.CurvlensWarning, match="not reached after 20 products"):
        estimate = cl.trace(MATRICES["flat"], rtol=1e-6, max_samples=20)
    assert "not reached" in estimate.note
    assert estimate.samples == 20


@pytest.mark.parametrize("what", FUNCTIONS)
def test_exact_with_as_many_samples_as_rows(what: str) -> None:
    A = matrix(torch.linspace(-1, 2, 20))
    estimate = FUNCTIONS[what](A)
    assert estimate.exact
    assert estimate.samples == 20
    torch.testing.assert_close(estimate.value, FUNCTIONS[what](A, 500).value)
    truth = {"trace": A.trace(), "frobenius": A.norm(), "diagonal": A.diagonal()}[what]
    torch.testing.assert_close(estimate.value, truth)


def test_low_rank_is_exact() -> None:
    values = torch.zeros(400, dtype=torch.float64)
    values[:5] = torch.tensor([5.0, 4, 3, -2, 1])
    for what, function in FUNCTIONS.items():
        estimate = function(matrix(values), 40)
        truth = {"trace": values.sum(), "frobenius": values.norm(), "diagonal": matrix(values).diagonal()}[what]
        torch.testing.assert_close(estimate.value, truth, atol=1e-8, rtol=0)


@pytest.mark.parametrize("what", FUNCTIONS)
def test_zero_matrix(what: str) -> None:
    estimate = FUNCTIONS[what](torch.zeros(100, 100, dtype=torch.float64))
    assert not bool(estimate.value.any())
    assert not bool(estimate.stderr.any())


def test_no_symmetry_is_needed() -> None:
    A = torch.randn(30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.stack([cl.trace(A, 12, seed=seed).value for seed in range(100)])
    assert abs(float(values.mean() - A.trace())) < 4 * float(values.std()) / 10
    squares = torch.stack([cl.frobenius(A, 12, seed=seed).value.square() for seed in range(100)])
    assert abs(float(squares.mean() - A.square().sum())) < 4 * float(squares.std()) / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_low_precision(what: str, dtype: torch.dtype) -> None:
    A = MATRICES["one dominant"].to(dtype)
    with pytest.warns(cl.CurvlensWarning, match="relative error"):
        estimate = FUNCTIONS[what](A, 64)
    assert estimate.value.dtype == estimate.stderr.dtype == torch.float64
    exact = A.double()
    truth = {"trace": exact.trace(), "frobenius": exact.norm(), "diagonal": exact.diagonal()}[what]
    assert float((estimate.value - truth).norm() / truth.norm()) < 0.2


def test_seeds_mean_the_same_in_every_dtype() -> None:
    A = matrix(torch.linspace(0, 1, 100))
    with pytest.warns(cl.CurvlensWarning):
        low = cl.trace(A.float(), 20, seed=3)
    high = cl.trace(A, 20, seed=3)
    assert abs(float(low) - float(high)) < 1e-4 * float(high)
    assert float(cl.trace(A, 20, seed=4)) != float(high)


# All blocks


@pytest.fixture(scope="module")
def problem() -> cl.Problem:
    return small.problem()


@pytest.mark.parametrize("what", ["trace", "frobenius"])
@pytest.mark.parametrize("of", [cl.hessian, cl.ggn])
def test_by_block(problem: cl.Problem, what: str, of: Any) -> None:
    operator = of(problem)
    blocks = FUNCTIONS[what](operator, 200, by="block")
    assert list(blocks) == list(problem.blocks)
    far = 0
    for name, estimate in blocks.items():
        A = operator[name].dense()
        truth = float(A.trace() if what == "trace" else A.norm())
        far += abs(float(estimate) - truth) > 4 * float(estimate.stderr) + 1e-12
    assert not far


def test_ggn_blocks_come_from_one_backward_pass_a_sample(problem: cl.Problem) -> None:
    calls = []
    blocks = cl.trace(cl.ggn(problem), 16, by="block", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (16, 16)
    assert {estimate.samples for estimate in blocks.values()} == {16}


def test_groups_of_samples_bound_memory(problem: cl.Problem) -> None:
    G = cl.ggn(problem)
    whole = cl.trace(G, 32, by="block")
    cut = cl.trace(G, 32, by="block", memory=5 * 8 * problem.layout.size)
    for name in whole:
        torch.testing.assert_close(whole[name].value, cut[name].value)
    norms = cl.frobenius(G, 33, by="block", memory=5 * 8 * problem.layout.size)
    exact = G["unembed"].dense().norm()
    assert abs(float(norms["unembed"].value - exact)) < 4 * float(norms["unembed"].stderr)


def test_roots_do_not_depend_on_batches() -> None:
    tokens, labels = small.tokens_and_labels()
    model = small.gpt()
    one = cl.ggn(cl.Problem(model, (tokens, labels), cl.losses.CrossEntropy()))
    two = cl.ggn(
        cl.Problem(model, [(tokens[:2], labels[:2]), (tokens[2:], labels[2:])], cl.losses.CrossEntropy(), memory=1)
    )
    for a, b in zip(cl.trace(one, 8, by="block").values(), cl.trace(two, 8, by="block").values(), strict=True):
        torch.testing.assert_close(a.value, b.value, atol=1e-13, rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("what", ["trace", "frobenius"])
def test_coverage_of_blocks(problem: cl.Problem, what: str) -> None:
    G = cl.ggn(problem)
    truths = {}
    for name in problem.blocks:
        A = G[name].dense()
        truths[name] = float(A.trace() if what == "trace" else A.norm())
    floor = 1e-10 * max(truths.values())
    inside, total = 0, 0
    for seed in range(200):
        for name, estimate in FUNCTIONS[what](G, 64, by="block", seed=seed).items():
            if truths[name] > floor:
                low, high = estimate.interval(0.95)
                inside += int(low <= truths[name] <= high)
                total += 1
    print(f"coverage of {what} by block: {inside / total:.3f}")
    assert 0.90 <= inside / total <= 0.99


def test_blocks_from_few_samples() -> None:
    """Traces of blocks of low rank from 8 samples: a symmetric interval with 7 degrees of freedom held 88.6 % of 400
    runs, 85.5 % of the worst block."""
    tokens, labels = small.tokens_and_labels(2)
    G = cl.ggn(cl.Problem(small.gpt(), (tokens, labels), cl.losses.CrossEntropy()))
    truths = {name: float(block.dense().trace()) for name, block in G.blocks().items()}
    inside = dict.fromkeys(truths, 0)
    for seed in range(120):
        for name, estimate in cl.trace(G, 8, by="block", seed=seed).items():
            low, high = estimate.interval(0.95)
            inside[name] += bool(low <= truths[name] * (1 + 1e-9) and truths[name] * (1 - 1e-9) <= high)
    assert sum(inside.values()) >= 0.93 * 120 * len(truths)
    assert min(inside.values()) >= 0.88 * 120


def test_blocks_to_an_accuracy(problem: cl.Problem) -> None:
    G = cl.ggn(problem)
    blocks = cl.trace(G, rtol=0.2, by="block")
    largest = max(float(e) for e in blocks.values())
    for estimate in blocks.values():
        if float(estimate) > 1e-12 * largest:
            assert float(estimate.half_width()) <= 0.2 * float(estimate)


@pytest.mark.parametrize("by", ["block", "head", "parameter"])
def test_every_block_ends_by_itself(problem: cl.Problem, by: Any) -> None:
    """A block that is close enough is left out of the later passes, and keeps what its own samples said."""
    G = cl.ggn(problem)
    blocks = cl.trace(G, rtol=0.3, by=by)
    spent = {estimate.samples for estimate in blocks.values()}
    assert len(spent) > 1
    for samples in spent:
        fixed = cl.trace(G, samples, by=by)
        for name, estimate in blocks.items():
            if estimate.samples == samples:
                torch.testing.assert_close(estimate.value, fixed[name].value, rtol=1e-9, atol=1e-14)


@pytest.mark.full
def test_accuracy_is_met_by_every_block(problem: cl.Problem) -> None:
    G = cl.ggn(problem)
    truths = {name: float(block.dense().trace()) for name, block in G.blocks().items()}
    floor = 1e-10 * max(truths.values())
    good = total = 0
    for seed in range(40):
        for name, estimate in cl.trace(G, rtol=0.2, by="block", seed=seed).items():
            if truths[name] > floor:
                good += int(abs(float(estimate) - truths[name]) <= 0.2 * truths[name])
                total += 1
    print(f"rtol=0.2 of traces by block: met in {good / total:.3f}")
    assert good >= 0.9 * total


@pytest.mark.parametrize("loss", ["mse", "contrastive", "symmetric", "plain"])
def test_blocks_of_other_losses(loss: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    y = torch.randn(5, 5, dtype=torch.float64)

    def plain(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.pow(4).sum(), len(outputs)

    problems = {
        "mse": cl.Problem(model, (x, y), cl.losses.MSE()),
        "contrastive": cl.Problem(model, x, cl.losses.Contrastive()),
        "symmetric": cl.Problem(model, x, cl.losses.Contrastive(symmetric=True)),
        "plain": cl.Problem(model, (x, y), plain),
    }
    G = cl.ggn(problems[loss])
    for name, estimate in cl.trace(G, 300, by="block").items():
        assert abs(float(estimate) - float(G[name].dense().trace())) <= 4.5 * float(estimate.stderr) + 1e-12


# Ctrl-C, bad input


def test_interrupted() -> None:
    A = MATRICES["flat"]
    calls = 0

    class Slow:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 25:
                signal.raise_signal(signal.SIGINT)
            return A @ v

    with pytest.warns(cl.CurvlensWarning, match="interrupted after 24"):
        estimate = cl.trace(Slow(), 64)
    assert estimate.samples == 24
    assert abs(float(estimate) - 500) < 6 * float(estimate.stderr)


def test_interrupted_blocks(problem: cl.Problem) -> None:
    def stop(done: int, total: int | None) -> None:
        if done >= 9:
            raise KeyboardInterrupt

    with pytest.warns(cl.CurvlensWarning, match="interrupted"):
        blocks = cl.trace(cl.ggn(problem), 32, by="block", memory=4 * 8 * problem.layout.size, progress=stop)
    assert next(iter(blocks.values())).samples == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"samples": 1}, "samples=1"),
        ({"samples": 2.5}, "samples=2.5"),
        ({"rtol": 0.0}, "rtol=0.0"),
        ({"rtol": -0.1}, "rtol=-0.1"),
        ({"rtol": float("nan")}, "rtol=nan"),
        ({"samples": 8, "rtol": 0.1}, "not both"),
        ({"rtol": 0.1, "max_samples": 1}, "max_samples=1"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
@pytest.mark.parametrize("what", FUNCTIONS)
def test_bad_input(what: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        FUNCTIONS[what](MATRICES["flat"], **options)


def test_blocks_of_what_has_none() -> None:
    with pytest.raises(cl.CurvlensError, match="by='depth'"):
        cl.trace(MATRICES["flat"], by="depth")  # type: ignore[call-overload]
    with pytest.raises(cl.CurvlensError, match="has named blocks"):
        cl.trace(MATRICES["flat"], by="block")


def test_nan() -> None:
    A = MATRICES["flat"].clone()
    A[3, 5] = A[5, 3] = float("nan")
    with pytest.raises(cl.CurvlensError, match="NaN or infinite, the first at 3"):
        cl.trace(A)


@pytest.mark.parametrize("samples", [2, 3, 5, 8])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_few_samples_have_an_error(what: str, samples: int) -> None:
    estimate = FUNCTIONS[what](MATRICES["flat"], samples)
    assert estimate.samples == samples
    assert estimate.dof >= 1
    assert bool((estimate.stderr > 0).all())


def test_an_interrupt_ends_all_blocks(problem: cl.Problem) -> None:
    seen = []

    def stop(done: int, total: int | None) -> None:
        seen.append(done)
        if len(seen) == 100:
            raise KeyboardInterrupt

    H = cl.hessian(problem)
    with pytest.warns(cl.CurvlensWarning, match="interrupted"):
        blocks = cl.trace(H, 16, by="block", progress=stop)
    assert 100 <= len(seen) <= 103  # the block that was interrupted takes three samples
    assert seen == sorted(seen)  # counted over all blocks
    assert list(blocks) == list(problem.blocks)
    assert 0 < len(blocks.unmeasured) < len(blocks)
    assert f"{len(blocks.unmeasured)} not measured" in repr(blocks)
    assert "Not measured: " in blocks.note
    sizes = {name: block.shape[0] for name, block in H.blocks().items()}
    done = [sizes[name] for name in blocks if blocks[name].measured]
    assert min(done) >= max(sizes[name] for name in blocks.unmeasured)  # the largest came first
    for record in blocks.table():
        name = record["block"]
        assert (record["value"] is None) == (record["note"] == "not measured") == (name in blocks.unmeasured)
        assert (blocks.to_dict()[name]["value"] is None) == (name in blocks.unmeasured)
    left_out = blocks[blocks.unmeasured[0]]
    assert not left_out.exact
    assert "not measured" in repr(left_out)
    total = sum(blocks.values(), start=left_out)
    assert str(total) == "not known"
    assert total.status is Status.HAS_GAPS
    assert (left_out + left_out).status is Status.NOT_MEASURED
    assert blocks.status is Status.INTERRUPTED
    assert "not measured" in total.note


# Budgets


@pytest.mark.parametrize("what", ["trace", "frobenius"])
@pytest.mark.parametrize("of", [cl.hessian, cl.ggn, lambda p: 2 * (cl.hessian(p) - cl.ggn(p))])
def test_a_budget_of_gradients(problem: cl.Problem, what: str, of: Any) -> None:
    operator = of(problem)
    told: list[int] = []
    options: dict[str, Any] = {"by": "block", "budget": "100 gradients"}
    blocks = FUNCTIONS[what](operator, 200, progress=lambda done, total: told.append(done), **options)
    again = FUNCTIONS[what](operator, 200, **options)
    assert list(blocks) == list(problem.blocks)
    assert "of 100 gradients spent" in blocks.note
    spent = float(blocks.note.split()[0])
    assert 60 < spent <= 100
    assert told == sorted(told)
    fewer = [name for name, e in blocks.items() if e.note.startswith("budget")]
    assert fewer
    for name, estimate in blocks.items():
        if estimate.measured:
            A = operator[name].dense()
            truth = float(A.trace() if what == "trace" else A.norm())
            assert float(estimate) == float(again[name])
            assert abs(float(estimate) - truth) <= 8 * float(estimate.stderr) + 1e-12
    if what == "trace":
        assert not blocks.unmeasured


def test_a_budget_that_is_enough_changes_nothing(problem: cl.Problem) -> None:
    H = cl.hessian(problem)
    free, bound = (cl.trace(H, 8, by="layer", budget=budget) for budget in (None, "1e6 gradients"))
    for name, estimate in free.items():
        assert float(estimate) == float(bound[name])
        assert estimate.note == bound[name].note == ""


@pytest.mark.parametrize("of", [cl.hessian, cl.ggn])
def test_a_budget_of_time(problem: cl.Problem, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def tick(done: int, total: int | None) -> None:
        nonlocal clock
        clock += 1.0  # a product a second

    monkeypatch.setattr("curvlens.linalg.limits.time.monotonic", lambda: clock)
    blocks = cl.trace(of(problem), 100, by="block", budget="1m", progress=tick)
    assert list(blocks) == list(problem.blocks)
    assert not blocks.unmeasured
    assert "of 1m spent" in blocks.note
    assert 20 < clock <= 66


@pytest.mark.parametrize("budget", ["soon", "0s", "-3m", "", 0, True, "5 minutes of peace", "1 gradients", None])
def test_bad_budgets(problem: cl.Problem, budget: Any) -> None:
    if budget is not None:
        with pytest.raises(cl.CurvlensError, match="budget="):
            cl.trace(cl.hessian(problem), 8, by="block", budget=budget)
    with pytest.raises(cl.CurvlensError, match="needs by='block'"):
        cl.trace(MATRICES["flat"], 8, budget="2m")


def test_progress_counts_over_all_blocks(problem: cl.Problem) -> None:
    told: list[tuple[int, int | None]] = []
    blocks = cl.frobenius(cl.hessian(problem), 8, by="block", progress=lambda *call: told.append(call))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {len(told)}
    assert len(told) == sum(estimate.samples for estimate in blocks.values())


def test_intervals() -> None:
    estimate = cl.trace(MATRICES["flat"], 40)
    low, high = estimate.interval(0.9)
    wide = estimate.interval(0.99)
    assert isinstance(low, float)
    assert isinstance(cl.diagonal(MATRICES["flat"], 8).interval()[0], Tensor)
    assert wide[0] < low < estimate.value < high < wide[1]
    with pytest.raises(cl.CurvlensError, match="level=95"):
        estimate.interval(95)
    with pytest.raises(cl.CurvlensError, match="only a single one"):
        float(cl.diagonal(MATRICES["flat"], 8))
