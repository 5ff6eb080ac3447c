"""Spectral densities: within their own error of the truth, atoms as atoms, functions of the operator."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

import curvlens as cl
import small
from curvlens.results.measure import Measure, wasserstein
from spectra import matrix, spectra, tiny

CASES = {name: matrix(values) for name, values in spectra().items()}


def hits(A: Any, truth: Tensor, runs: int, **options: Any) -> float:
    inside = 0
    for seed in range(runs):
        density = cl.density(A, seed=seed, exact=False, **options)
        assert bool((density.weights >= 0).all())
        assert bool((density.mass >= 0).all())
        assert abs(float(density.weights.sum()) - 1) < 1e-12
        assert abs(float(density.mass.sum()) - 1) < 1e-12
        inside += density.distance(truth) <= density.error
    return inside / runs


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("zero", "identity")])
def test_coverage(name: str) -> None:
    share = hits(CASES[name], torch.linalg.eigvalsh(CASES[name]), 100, probes=4, steps=60)
    print(f"density of {name}: {share:.2f} within its error")
    assert 0.90 <= share <= 0.99


@pytest.mark.full
@pytest.mark.parametrize("of", [cl.hessian, cl.ggn, cl.functional])
def test_coverage_of_a_real_hessian(of: Any) -> None:
    A = of(small.problem()).dense()
    A = (A + A.T) / 2
    share = hits(A, torch.linalg.eigvalsh(A), 100, probes=4, steps=60)
    print(f"density of {of.__name__}: {share:.2f} within its error")
    assert 0.90 <= share <= 0.99


@pytest.mark.parametrize("name", CASES)
def test_coverage_in_short(name: str) -> None:
    assert hits(CASES[name], torch.linalg.eigvalsh(CASES[name]), 10, probes=4, steps=40) >= 0.7


EVERY = {**spectra(), **tiny()}


@pytest.mark.parametrize("name", EVERY)
def test_exact_for_small_operators(name: str) -> None:
    A = matrix(EVERY[name])
    density = cl.density(A)
    assert density.exact
    assert density.error == 0
    assert density.distance(torch.linalg.eigvalsh(A)) < 1e-12
    assert density.products == len(A)


def test_atoms() -> None:
    density = cl.density(CASES["triples over zeros"], exact=False)
    atoms = density.atoms()
    assert [round(value, 6) for value, _ in atoms] == [0, 2, 3]
    assert abs(atoms[0][1] - 0.98) < 0.02
    assert sum(mass for _, mass in atoms) == pytest.approx(1)
    outlier = cl.density(matrix(torch.cat([torch.linspace(0, 1, 399), torch.tensor([5.0])])), exact=False)
    assert [round(value, 6) for value, _ in outlier.atoms() if value > 1.01] == [5]


def test_distance_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 30):
        u, v = (torch.randn(n + i, generator=generator, dtype=torch.float64) for i in range(2))
        a = Measure(u, u, torch.full_like(u, 1 / len(u)))
        b = Measure(v, v, torch.full_like(v, 1 / len(v)))
        assert wasserstein(a, b) == pytest.approx(scipy.stats.wasserstein_distance(u, v), abs=1e-13)
    flat = Measure(torch.zeros(1).double(), torch.ones(1).double(), torch.ones(1).double())
    atom = Measure(torch.full((1,), 0.5).double(), torch.full((1,), 0.5).double(), torch.ones(1).double())
    assert wasserstein(flat, atom) == pytest.approx(0.25)
    assert float(flat.cdf(torch.tensor([0.25]).double())) == pytest.approx(0.25)


def test_distance_of_blocks() -> None:
    H = cl.hessian(small.problem())
    one, other = (cl.density(H[name]) for name in ("h.0.attn.q.weight", "h.0.mlp.up.weight"))
    truth = scipy.stats.wasserstein_distance(one.nodes, other.nodes)
    assert one.distance(other) == pytest.approx(truth)
    assert one.distance(one) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_functions(exact: bool) -> None:
    A = CASES["triples at both ends"]
    values = torch.linalg.eigvalsh(A)
    density = cl.density(A, probes=30, steps=60, exact=exact)
    n = len(values)
    wanted = {
        "moment 1": (density.moment(1), values.mean()),
        "moment 2": (density.moment(2), values.square().mean()),
        "negative mass": (density.negative_mass(), torch.tensor(3.0).double() / n),
        "logdet": (density.logdet(2.5), (values + 2.5).log().sum()),
        "effective rank": (density.effective_rank(), values.sum() ** 2 / values.square().sum()),
        "exponential": (density.function(torch.exp), values.exp().mean()),
    }
    for name, (estimate, truth) in wanted.items():
        assert abs(float(estimate) - float(truth)) <= 3.5 * float(estimate.stderr) + 1e-10, name
        assert estimate.exact == exact


def test_quadrature_has_the_moments_of_its_probes() -> None:
    """Σ w λ^p is vᵀ A^p v for every probe, up to twice the steps: Gauss quadrature."""
    A = CASES["cluster"]
    from curvlens.linalg.counted import CountedOperator

    density = cl.density(A, probes=3, steps=10, exact=False)
    probes = CountedOperator(A, symmetric=True).probes(0)
    for i in range(3):
        v = probes.direction(i)
        own = density.probe == i
        for power in range(20):
            sum_ = float((density.weights[own] * density.nodes[own] ** power).sum()) * 3
            assert sum_ == pytest.approx(float(v @ torch.linalg.matrix_power(A, power) @ v), rel=1e-9)


def test_curve_and_drawing() -> None:
    density = cl.density(CASES["triples at both ends"], exact=False)
    x, y = density.curve(2000)
    assert float(torch.trapezoid(y, x)) == pytest.approx(1, abs=1e-3)
    assert bool((y >= 0).all())
    low, high = density.band(x)
    F = density.cdf(x)
    assert bool(((low <= F) & (high >= F)).all())
    drawing = density.text(width=60, height=8)
    assert len(drawing.splitlines()) == 11
    assert max(map(len, drawing.splitlines())) <= 60
    assert "-2" in drawing
    for name in ("zero", "identity"):
        assert cl.density(CASES[name]).text()
        assert cl.density(CASES[name], exact=False).error < 1e-12


def test_fewer_probes_on_interrupt() -> None:
    A = CASES["cluster"]
    calls = 0

    class Slow:
        shape = A.shape

        def __matmul__(self, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 50:
                signal.raise_signal(signal.SIGINT)
            return A @ v

    with pytest.warns(cl.CurvlensWarning, match="after 2 of 4 probes"):
        density = cl.density(Slow(), probes=4, steps=20, exact=False)
    assert density.probes == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    A = CASES["triples over a bulk"].to(dtype)
    with pytest.warns(cl.CurvlensWarning, match="relative error"):
        density = cl.density(A, exact=False, steps=40)
    assert density.nodes.dtype == torch.float64
    assert density.distance(torch.linalg.eigvalsh(A.double())) < density.error + 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 0}, "probes=0"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 5, "exact": False}, "steps=5"),
        ({"memory": "1kB", "exact": False}, "do not fit"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        cl.density(CASES["cluster"], **options)


def test_bad_functions() -> None:
    density = cl.density(CASES["cluster"])
    with pytest.raises(cl.CurvlensError, match="same shape"):
        density.function(lambda x: x.sum())
    with pytest.raises(cl.CurvlensError, match="not finite"):
        density.function(lambda x: (x - 2).log())
    with pytest.raises(cl.CurvlensError, match="not positive"):
        density.logdet(-1.0)
    with pytest.raises(cl.CurvlensError, match="power"):
        density.moment(-1)
    with pytest.raises(cl.CurvlensError, match="width"):
        density.curve(width=0)
    with pytest.raises(cl.CurvlensError, match="empty"):
        density.distance(torch.zeros(0))


def test_the_cost_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    A = torch.diag(torch.arange(100.0, dtype=torch.float64))
    with caplog.at_level("INFO", logger="curvlens"):
        cl.density(A, probes=2, steps=25)
        cl.density(A)
    assert "2 probes of 25 steps, 50 products" in caplog.text
    assert "all 100 eigenvalues, 100 products" in caplog.text
