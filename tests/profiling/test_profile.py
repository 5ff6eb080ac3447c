"""The profiler: every module's functional part against linearised modules, sums against H, and odd models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional as autograd
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import curvlens as cl
import small
from cases import CASES, Case
from curvlens.data import Addition
from curvlens.linalg.compression import trace_and_norm
from curvlens.models import GPT, GPTConfig
from curvlens.operators import activation_hessian, as_operator, module_part
from curvlens.operators.modules import recordings_of
from curvlens.profiling import Forecast, propagation
from curvlens.profiling.statistics import Forms, portion
from families import MORE


def of(model: nn.Module, n: int = 5, width: int = 3, seed: int = 0) -> cl.Problem:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return cl.Problem(model.double(), (x, y), cl.losses.MSE())


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=repr)
def test_the_rows_add_up(case: Case) -> None:
    """GGN + Σ_m M_m = H in every pair of probes, on models as they are."""
    problem = cl.Problem(case.model(), case.batches, case.loss)
    profile = cl.profile(problem, samples=4, top=False)
    assert profile.mismatch < 1e-12
    assert abs(float(profile.ggn.share) + float(profile.rows[""].total.share) - 1) < 1e-10


# An independent truth: H of the model less H of the model in which one module is replaced by its tangent


class Linearised(nn.Module):
    """f(x₀, θ₀) + J (x − x₀, θ − θ₀), around the first call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._around: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._calls = 0

    def start(self) -> None:
        self._calls = 0

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        theta = dict(self.inner.named_parameters())
        if self._calls == len(self._around):
            self._around.append((x.detach().clone(), {k: p.detach().clone() for k, p in theta.items()}))
        x0, theta0 = self._around[self._calls]
        self._calls += 1
        leaves = [x0.clone().requires_grad_(), *(p.clone().requires_grad_() for p in theta0.values())]
        with cl.second_order():
            y0 = functional_call(self.inner, dict(zip(theta0, leaves[1:], strict=True)), (leaves[0],))
        w = torch.zeros_like(y0).requires_grad_()
        pulled = torch.autograd.grad(y0, leaves, w, create_graph=True, allow_unused=True)
        steps = [x - x0, *(theta[k] - theta0[k] for k in theta0)]
        pairs = [(p, step) for p, step in zip(pulled, steps, strict=True) if p is not None]
        (moved,) = torch.autograd.grad([p for p, _ in pairs], w, [step for _, step in pairs], create_graph=True)
        y: Tensor = y0.detach() + moved
        return y


def dense(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """H by reverse over reverse."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    shapes = [p.shape for p in named.values()]

    def loss(theta: Tensor) -> Tensor:
        parts = torch.split(theta, [s.numel() for s in shapes])
        given = {k: part.view(s) for k, part, s in zip(named, parts, shapes, strict=True)}
        for module in model.modules():
            if isinstance(module, Linearised):
                module.start()
        with cl.second_order():
            logits = functional_call(model, given, (tokens,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    theta = torch.cat([p.reshape(-1) for p in named.values()])
    loss(theta)
    found: Tensor = autograd.hessian(loss, theta)  # type: ignore[no-untyped-call]
    return found


def replaced(model: nn.Module, path: str) -> nn.Module:
    above, _, name = path.rpartition(".")
    parent = model.get_submodule(above)
    if name.isdigit():
        assert isinstance(parent, nn.ModuleList)
        parent[int(name)] = Linearised(parent[int(name)])
    else:
        setattr(parent, name, Linearised(getattr(parent, name)))
    return model


PATHS = [("h.0", 1), ("h.0.attn", 1), ("h.0.mlp", 1), ("h.0.norm1", 1), ("unembed", 1)]
MORE_PATHS = [("h.0", 2), ("h.0.attn", 2), ("h.0.attn.v", 2), ("h.0.mlp", 2), ("h.1.norm2", 2), ("unembed", 2)]


@pytest.mark.parametrize(
    ("path", "layers", "norm"),
    [
        *((path, layers, "pre") for path, layers in PATHS),
        *(
            pytest.param(path, layers, norm, marks=pytest.mark.full)
            for path, layers in MORE_PATHS
            for norm in ("pre", "post", "none")
            if norm != "none" or "norm" not in path
        ),
    ],
)
def test_a_module_is_what_its_tangent_leaves_out(path: str, layers: int, norm: str) -> None:
    """M_m = H − H with f_m linearised, to 1e-10, and symmetric."""
    options: dict[str, Any] = {"n_layer": layers, "d_model": 4, "n_head": 2, "d_mlp": 5, "vocab": 4, "norm": norm}
    tokens, labels = torch.randint(4, (2, 2, 3), generator=torch.Generator().manual_seed(1))
    model = small.gpt(**options)
    part = module_part(cl.Problem(model, (tokens, labels), cl.losses.CrossEntropy()), path).dense()
    whole = dense(small.gpt(**options), tokens, labels)
    truth = whole - dense(replaced(small.gpt(**options), path), tokens, labels)
    assert float((part - truth).norm()) <= 1e-10 * float(truth.norm()) + 1e-13 * float(whole.norm())
    torch.testing.assert_close(part, part.T, rtol=0, atol=1e-14 * float(whole.norm()))


def test_all_modules_together_are_the_functional_part() -> None:
    problem = small.problem()
    v = small.direction(problem.layout.size)
    assert small.relative(module_part(problem, "") @ v, cl.functional(problem) @ v) < 1e-13
    inside = sum(module_part(problem, path, own=True) @ v for path in cl.profile(problem, samples=4, top=False).rows)
    assert isinstance(inside, Tensor)
    assert small.relative(inside, cl.functional(problem) @ v) < 1e-13


def test_blocks_of_a_part() -> None:
    problem = small.problem()
    part = module_part(problem, "h.0.attn.softmax")
    whole = part.dense()
    q, k = (problem.layout.select(name) for name in ("h.0.attn.q", "h.0.attn.k"))
    block = part["h.0.attn.q", "h.0.attn.k"].dense()
    rows = torch.cat([torch.arange(p.stop)[p] for name, p in problem.layout.slices.items() if name in q.shapes])
    columns = torch.cat([torch.arange(p.stop)[p] for name, p in problem.layout.slices.items() if name in k.shapes])
    torch.testing.assert_close(block, whole[rows][:, columns], rtol=1e-12, atol=1e-15)


# What the estimates say


@pytest.fixture(scope="module")
def exact() -> dict[str, tuple[float, float, float]]:
    """(trace, Frobenius norm, share) of the total of some rows, from dense matrices."""
    problem = small.problem()
    H = cl.hessian(problem).dense()
    found = {}
    for path in ("", "h.0.attn.softmax", "h.0.mlp"):
        part = module_part(problem, path).dense()
        found[path] = (float(part.trace()), float(part.norm()), float((part * H).sum() / H.square().sum()))
    return found


@pytest.mark.full
def test_intervals_cover(exact: dict[str, tuple[float, float, float]]) -> None:
    """95 % intervals of 32 probes hold the truth in about 95 % of 60 profiles; for norms, a little less often."""
    problem, runs = small.problem(), 60
    hits = {(path, i): 0 for path in exact for i in range(3)}
    for seed in range(runs):
        profile = cl.profile(problem, samples=32, seed=seed, top=False)
        for path, values in exact.items():
            portion = profile[path].total
            for i, estimate in enumerate((portion.trace, portion.frobenius, portion.share)):
                low, high = estimate.interval(0.95)
                hits[path, i] += bool(low <= values[i] <= high)
    for i, least in enumerate((0.88, 0.85, 0.85)):
        shares = [hits[path, i] / runs for path in exact]
        assert min(shares) >= least, shares


def test_intervals_of_norms_cover_with_few_probes() -> None:
    """95 % intervals hold the norm in 86 % of draws or more, from 4 probes on, where few eigenvalues rule."""
    size, runs, torn = 60, 300, torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(size, size, generator=torn, dtype=torch.float64)).Q
    for decay in (0.6, 0.9):
        M = Q * (-decay) ** torch.arange(size) @ Q.T
        for samples in (4, 8, 16):
            z = 2.0 * torch.randint(2, (runs, samples, size), generator=torn).double() - 1
            found = [portion(Forms(pairs, pairs[0]), pairs[0].abs()).frobenius for pairs in z @ M @ z.mT]
            hits = sum(low <= float(M.norm()) <= high for low, high in (norm.interval(0.95) for norm in found))
            assert hits >= 0.86 * runs, (decay, samples, hits / runs)


def test_a_norm_that_one_probe_makes_has_an_error() -> None:
    pairs = torch.zeros(4, 4, dtype=torch.float64)
    pairs[0, 1:] = pairs[1:, 0] = 1.0
    norm = portion(Forms(pairs, torch.zeros(4)), torch.ones(4)).frobenius
    assert 0.3 < float(norm.stderr) < 1.0
    low, high = norm.interval()
    assert 0 < low < float(norm) < high < 100


def test_estimates_are_near_the_truth(exact: dict[str, tuple[float, float, float]]) -> None:
    profile = cl.profile(small.problem(), samples=64, top=False)
    for path, values in exact.items():
        portion = profile[path].total
        for value, estimate in zip(values, (portion.trace, portion.frobenius, portion.share), strict=True):
            assert abs(float(estimate) - value) < 5 * float(estimate.stderr)


def test_contributions_to_the_largest_eigenvalue_add_up() -> None:
    problem = small.problem()
    profile = cl.profile(problem, samples=4)
    largest = float(cl.eigs(cl.hessian(problem)).values[-1])
    assert profile.hessian.top is not None
    assert profile.ggn.top is not None
    assert profile[""].total.top is not None
    assert abs(float(profile.hessian.top) - largest) < 1e-8 * largest
    assert abs(float(profile.ggn.top) + float(profile[""].total.top) - largest) < 1e-8 * largest
    own = sum(float(row.own.top) for row in profile if row.own.top is not None)
    assert abs(own - float(profile[""].total.top)) < 1e-10 * largest


def test_the_largest_eigenvalue_may_be_known() -> None:
    """With the eigenvalues of `eigs` nothing is searched, and the numbers are those of the search."""
    problem = small.problem()
    H = cl.hessian(problem)
    searched = cl.profile(problem, samples=4)
    for found in (cl.eigs(H, 2), cl.eigs(H, 2, "both")):
        given = cl.profile(problem, samples=4, top=found)
        for row in searched:
            own, expected = given[row.path].own.top, row.own.top
            assert own is not None
            assert expected is not None
            assert float(own) == pytest.approx(float(expected), abs=1e-8 * float(found.values[-1]))
        assert given.hessian.top is not None
        assert float(given.hessian.top.stderr) <= 1e-6 * float(found.values[-1])


def test_eigenvalues_that_are_not_those_of_the_profile() -> None:
    problem = small.problem()
    H = cl.hessian(problem)
    for wrong, message in (
        (cl.eigs(H, 1), r"top= has 1 eigenvalues at ends='largest'. Their errors need the two largest"),
        (cl.eigs(H, 1, "both"), r"top= has 2 eigenvalues at ends='both'"),
        (cl.eigs(H, 2, "smallest"), "ends='smallest'"),
        (cl.eigs(H["h.0.attn.q"], 2), r"top= has eigenvectors of \d+ numbers, and the problem has"),
        (cl.eigs(2 * H, 2), "Were the eigenvalues computed at other weights"),
    ):
        with pytest.raises(cl.CurvlensError, match=message):
            cl.profile(problem, samples=4, top=wrong)


def test_the_spectral_norm_on_request(exact: dict[str, tuple[float, float, float]]) -> None:
    problem = small.problem()
    profile = cl.profile(problem, samples=4, top=False, spectral=["h.0.attn"])
    norm = profile["h.0.attn"].total.spectral
    truth = torch.linalg.eigvalsh(module_part(problem, "h.0.attn").dense()).abs().max()
    assert norm is not None
    assert abs(float(norm) - float(truth)) < 1e-8 * float(truth)
    assert profile["h.0.mlp"].total.spectral is None


def test_cutting_the_data_changes_nothing() -> None:
    """Micro-batches, and graphs that are rebuilt because they do not fit, give the same numbers."""
    one = cl.profile(small.problem(), samples=4, top=False)
    for options in ({"micro_batch": 2}, {"memory": "40 kB"}):
        other = cl.profile(small.problem(**options), samples=4, top=False)
        for row in one:
            a, b = row.total.trace, other[row.path].total.trace
            assert abs(float(a) - float(b)) < 1e-11 * float(one.hessian.frobenius)


# Odd models


class Writes(nn.Module):
    """Writes into what its layers gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        y += self.b(x).tanh()
        y *= 2
        z: Tensor = self.n(y)
        return z


class Forgets(nn.Module):
    """Relies on a layer that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 3), nn.SiLU(inplace=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.act(h)
        y: Tensor = self.b(h) + h * h
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.n = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.n(checkpoint(self.f, self.n(x), use_reentrant=False))
        return y


class Twice(nn.Module):
    """One module under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.g = self.f

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.f(self.f(x) * self.g(x))
        return y


class Nested(nn.Module):
    """Tensors deep in arguments and results, and one that a layer keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.f = nn.Linear(3, 3), Inner()

    def forward(self, x: Tensor) -> Tensor:
        found = self.f(y={"a": [self.o(x)], "b": None}, z=(self.o(x), 2))
        y: Tensor = found["r"][0] * found["r"][1] + self.f.kept
        return y


class Inner(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)

    def forward(self, y: dict[str, list[Tensor]], z: tuple[Tensor, int]) -> dict[str, tuple[Tensor, Tensor]]:
        self.kept = y["a"][0].sin()
        return {"r": (self.l(y["a"][0]).exp(), z[0] * z[1])}


ODD: list[Callable[[], nn.Module]] = [
    Writes,
    Forgets,
    Checkpointed,
    Twice,
    Nested,
    lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
    lambda: nn.Linear(3, 3),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
]


@pytest.mark.parametrize("make", ODD)
def test_odd_models(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    profile = cl.profile(of(make()), samples=6)
    assert profile.mismatch < 1e-12


class Once(torch.autograd.Function):
    """x², differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Once.apply(x)  # type: ignore[no-untyped-call]
        return y


def test_a_module_that_cannot_be_differentiated_twice_is_named_and_the_rest_is_given() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), Square(), nn.Linear(3, 3), nn.Tanh()]
    with pytest.warns(cl.CurvlensWarning, match="'3': a function in it is marked once_differentiable"):
        profile = cl.profile(of(nn.Sequential(*layers)), samples=6)
    assert "'3'" in profile.note
    assert math.isnan(profile.mismatch)
    known = {row.path for row in profile if not math.isnan(float(row.own.trace))}
    assert known == {"0", "1", "2"}
    with pytest.raises(cl.CurvlensError, match="'3': a function in it is marked once_differentiable"):
        module_part(of(nn.Sequential(*layers)), "5") @ torch.ones(36, dtype=torch.float64)
    plain = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)]
    assert not cl.profile(of(nn.Sequential(*plain)), samples=4).note


class WritesTooEarly(nn.Module):
    """Writes into a tensor whose first value the derivative needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        y += self.b(y).tanh()
        return y


def test_values_that_are_lost_are_an_error() -> None:
    problem = of(WritesTooEarly())
    with pytest.raises(cl.CurvlensError, match="was written into after it was used"):
        problem.gradient()
    with pytest.raises(cl.CurvlensError, match="was written into after it was used"):
        cl.hessian(problem) @ torch.ones(problem.layout.size, dtype=torch.float64)
    with pytest.raises(cl.CurvlensError, match="was written into after it was used"):
        cl.profile(problem)


# The result


def test_a_profile_is_a_tree() -> None:
    profile = cl.profile(small.problem(), samples=4)
    assert [row.path for row in profile.children()] == ["embed", "h", "final_norm", "unembed"]
    assert [row.name for row in profile.children("h.0.attn")] == ["q", "k", "v", "o", "scores", "softmax", "mix"]
    assert profile["h.0.attn.softmax"].kind == "softmax"
    assert profile["h.0.attn"].kind == "CausalAttention"
    assert profile.depth("h.0.attn") == 3
    assert profile["embed"].total.trace.exact
    lines = str(profile).splitlines()
    own = [row.path for row in profile if profile.children(row.path) and not row.own.is_zero]
    assert own == ["h.0.mlp"]  # the GELU is no module
    assert len(lines) == len(profile) + len(own) + 5  # and three lines around it, Hessian and GGN
    assert "softmax" in str(profile)
    assert repr(profile).startswith(f"Profile({len(profile)} rows, 4 probes")
    paths = [row.path for row in profile]
    for row in profile:
        below = [r for r in profile if r.path.startswith(f"{row.path}." if row.path else "") and r.path != row.path]
        assert all(paths.index(r.path) > paths.index(row.path) for r in below)
        total = float(row.own.trace) + sum(float(r.own.trace) for r in below)
        assert abs(total - float(row.total.trace)) < 1e-10 * float(profile.hessian.frobenius)


def test_a_profile_is_saved_and_read(tmp_path: Any) -> None:
    profile = cl.profile(small.problem(), samples=4)
    again = cl.load(profile.save(tmp_path / "profile"))
    assert str(again) == str(profile)
    assert float(again["h.0.mlp"].own.frobenius) == float(profile["h.0.mlp"].own.frobenius)
    assert again.provenance["seed"] == 0


def test_bad_requests() -> None:
    problem = small.problem()
    with pytest.raises(cl.CurvlensError, match="samples=3"):
        cl.profile(problem, samples=3)
    with pytest.raises(cl.CurvlensError, match=r"no module 'h\.0\.atn'.*h\.0\.attn"):
        cl.profile(problem, samples=4, top=False)["h.0.atn"]
    with pytest.raises(cl.CurvlensError, match=r"no module 'h\.7'"):
        module_part(problem, "h.7")
    with pytest.raises(cl.CurvlensError, match="hides the outputs"):
        cl.profile(
            cl.Problem(
                nn.Linear(2, 1), (torch.ones(1, 2), torch.ones(1, 1)), lambda model, batch: 0 * model(batch[0]).sum()
            )
        )
    with pytest.raises(cl.CurvlensError, match="expected a Problem"):
        cl.profile(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_progress_and_interruption() -> None:
    seen: list[tuple[int, int | None]] = []
    cl.profile(small.problem(), samples=6, top=False, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    problem = small.problem(memory="40 kB")  # probes go through in groups

    def stop(done: int, total: int | None) -> None:
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.warns(cl.CurvlensWarning, match=r"interrupted after \d+ of 64 probes"):
        part = cl.profile(problem, samples=64, progress=stop)
    assert 6 <= part.samples < 64
    assert "interrupted" in part.note
    assert all(row.total.top is None for row in part)  # who stops it does not want to wait for eigenvalues
    with pytest.warns(cl.CurvlensWarning, match=r"interrupted after 64 of 6400 probes"):
        cl.profile(small.problem(), samples=6400, progress=stop)  # no group is so long that all is lost


def test_hooks_are_gone_and_the_model_is_as_it_was() -> None:
    model = small.gpt()
    tokens, labels = small.tokens_and_labels()
    before = {name: p.clone() for name, p in model.named_parameters()}
    cl.profile(cl.Problem(model, (tokens, labels), cl.losses.CrossEntropy()), samples=4, top=False)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


# Along depth


@pytest.mark.parametrize("path", ["embed", "h.0", "h.0.attn", "final_norm"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_hessian_by_activations(path: str, norm: str) -> None:
    """∂²ℓ/∂z² by what a module gives, against the Hessian by a shift of it; H = G + F there, too."""
    model = small.gpt(norm=norm, n_layer=2)
    tokens, labels = small.tokens_and_labels(2, 3)
    problem = cl.Problem(model, (tokens, labels), cl.losses.CrossEntropy())
    module, shape = model.get_submodule(path), (2, 3, 4)

    def loss(shift: Tensor) -> Tensor:
        hook = module.register_forward_hook(lambda _, args, z: z + shift)
        try:
            with cl.second_order():
                logits = model(tokens)
        finally:
            hook.remove()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    zero = torch.zeros(shape, dtype=torch.float64)
    if path == "final_norm" and norm == "post":  # which is no module there: it gives what the last layer gave
        path = "h.1"
    truth = autograd.hessian(loss, zero).reshape(24, 24)  # type: ignore[no-untyped-call]
    H, G, F = (activation_hessian(problem, path, of=of) for of in ("hessian", "ggn", "functional"))
    assert small.relative(H.dense(), truth) < 1e-12
    assert small.relative(G.dense() + F.dense(), truth) < 1e-12
    assert float(torch.linalg.eigvalsh(G.dense())[0]) > -1e-14


def test_the_hessian_by_activations_of_many_batches_and_calls() -> None:
    one, two = small.tokens_and_labels(2, 3), small.tokens_and_labels(3, 4, seed=1)
    model = small.gpt()
    both = activation_hessian(cl.Problem(model, [one, two], cl.losses.CrossEntropy()), "h.0")
    problems = [cl.Problem(model, batch, cl.losses.CrossEntropy()) for batch in (one, two)]
    counts = [problem.n_tokens for problem in problems]
    alone = [
        activation_hessian(problem, "h.0").dense() * n / sum(counts)
        for problem, n in zip(problems, counts, strict=True)
    ]
    assert small.relative(both.dense(), torch.block_diag(*alone)) < 1e-13  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    twice = of(Twice())
    calls = [activation_hessian(twice, "f", call=call).dense() for call in range(3)]
    torch.testing.assert_close(calls[0], calls[1])  # both factors are f(x)
    assert small.relative(calls[2], calls[0]) > 0.1
    second = both["h.0[1]"]
    assert small.relative(second.dense(), alone[1]) < 1e-13
    assert float(both["h.0[0]", "h.0[1]"].dense().abs().max()) == 0.0
    assert both["h.0"].shape == both.shape
    with pytest.raises(cl.CurvlensError, match=r"no block 'h\.0\[2\]'\. Its blocks: 'h\.0\[0\]', 'h\.0\[1\]'"):
        both["h.0[2]"]
    one_batch = activation_hessian(problems[0], "h.0")
    assert one_batch["h.0"] is one_batch
    assert "activations of the model(" in repr(activation_hessian(problems[0], ""))
    with pytest.raises(cl.CurvlensError, match=r"is a step of attention.*Use 'h\.0\.attn'"):
        activation_hessian(problems[0], "h.0.attn.softmax")
    with pytest.raises(cl.CurvlensError, match="called once: call=0"):
        activation_hessian(problems[0], "h.0", call=1)
    with pytest.raises(cl.CurvlensError, match="called 3 times"):
        activation_hessian(twice, "f", call=3)
    with pytest.raises(cl.CurvlensError, match=r"call=1; '0' is called once: call=0\."):
        activation_hessian(of(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), "0", call=1)
    with pytest.raises(cl.CurvlensError, match="No module 'g'"):
        activation_hessian(twice, "g")
    with pytest.raises(cl.CurvlensError, match="of='fisher'"):
        activation_hessian(twice, "f", of="fisher")  # type: ignore[arg-type]


def test_propagation_by_layer_and_by_role(tmp_path: Any) -> None:
    problem = small.problem()
    seen: list[tuple[int, int | None]] = []
    found = propagation(problem, samples=4, progress=lambda done, total: seen.append((done, total)))
    assert list(found.levels) == ["h.0"]
    assert seen[-1] == (6, 6)
    level = found["h.0"]
    block = cl.hessian(problem)["h.0"].dense()
    arrived = activation_hessian(problem, "h.0").dense()
    for amount, matrix in ((level.parameters["hessian"], block), (level.activations["hessian"], arrived)):
        ends = torch.linalg.eigvalsh(matrix)[[0, -1]]
        size = float(ends.abs().max())
        assert amount.bottom is not None
        assert abs(float(amount.bottom) - float(ends[0])) < 1e-3 * size
        assert abs(float(amount.top) - float(ends[1])) < 1e-3 * size
        assert abs(float(amount.spectral) - size) < 1e-3 * size
        assert abs(float(amount.frobenius) - float(matrix.norm())) < 5 * float(amount.frobenius.stderr)
        assert abs(float(amount.trace) - float(matrix.trace())) < 5 * float(amount.trace.stderr)
    assert level.parameters["ggn"].bottom is None  # no products for what is known to be ≥ 0
    assert float(level.parameters["ggn"].spectral) == float(level.parameters["ggn"].top)
    again = cl.load(found.save(tmp_path / "propagation"))
    assert str(again) == str(found)
    assert "by activations" in str(found)
    roles = propagation(problem, samples=4, by="role")
    assert "attn.q" in roles.levels
    assert not roles["attn.q"].activations
    with pytest.raises(cl.CurvlensError, match=r"no layer 'h\.9'"):
        found["h.9"]
    for each in (found, again):
        with pytest.raises(cl.CurvlensError, match=r"no part 'hesian'\. Did you mean 'hessian'"):
            each["h.0"].parameters["hesian"]
    with pytest.raises(cl.CurvlensError, match="a role has parameters only"):
        roles["attn.q"].activations["hessian"]
    with pytest.raises(cl.CurvlensError, match="by='head'"):
        propagation(problem, by="head")  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="No parameter is in a known layer"):
        propagation(of(nn.Linear(3, 3)))
    with pytest.raises(cl.CurvlensError, match=r"^propagation was given a GPT"):
        propagation(problem.model)  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match=r"^activation_hessian was given a GPT"):
        activation_hessian(problem.model, "h.0")  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match=r"^module_part was given a GPT"):
        module_part(problem.model, "h.0")  # type: ignore[arg-type]


def test_propagation_through_an_unknown_architecture_with_own_names() -> None:
    with pytest.raises(cl.CurvlensError, match=r"Name its layers: Problem\(\.\.\., blocks=") as error:
        propagation(small.cells())
    fix = str(error.value).partition("Problem(..., blocks=")[2].removesuffix(").")
    for own in (eval(fix), {"h.0": "cells.0.*", "h.1": "cells.1.*"}):
        found = propagation(small.cells(blocks=own), samples=2)
        assert list(found.levels) == ["h.0", "h.1"]
        assert len(found.table()) == 12


def test_a_norm_is_never_below_the_spectral_norm() -> None:
    """From the fewest samples, where samples alone put a norm below the largest eigenvalue; printed with ±."""
    torch.manual_seed(0)
    task = Addition(digits=2)
    model = GPT(GPTConfig(vocab=12, context=task.context, n_layer=2, n_head=2, d_model=8, d_mlp=16)).double().eval()
    problem = cl.Problem(model, task.batch(4, seed=0), cl.losses.CrossEntropy())
    sampled = cl.frobenius(cl.ggn(problem)["h.0"], 4)
    found = propagation(problem, samples=4)
    amount = found["h.0"].parameters["ggn"]
    assert float(sampled) < float(amount.top) <= float(amount.frobenius)
    for level in found.levels.values():
        for each in (*level.parameters.values(), *level.activations.values()):
            assert float(each.frobenius) >= float(each.spectral)
    assert " ± ".join(amount.frobenius.short()) in str(found)
    assert " ± ".join(amount.trace.short()) in str(found)


def test_known_eigenpairs_are_taken_out_exactly() -> None:
    """Of a full matrix and rough eigenpairs, trace and norm are exact once the rest is not sampled."""
    A = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = A + A.T
    with pytest.warns(cl.CurvlensWarning, match="did not converge"):
        rough = cl.eigs(A, k=1, ends="both", max_products=6)
    assert float(rough.residuals.max()) > 0.1
    trace, norm = trace_and_norm(as_operator(A), rough, samples=12, seed=0)
    assert abs(float(trace) - float(A.trace())) < 1e-12 * float(A.norm())
    assert abs(float(norm) - float(A.norm())) < 1e-12 * float(A.norm())
    assert trace.exact
    assert norm.exact


def test_what_is_left_beside_known_eigenpairs_has_the_right_error() -> None:
    """Over many seeds, estimates of trace and norm are as far from the truth as they say."""
    A = torch.randn(60, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = A + A.T + 40 * torch.diag(torch.tensor([1.0, -1.0] + 58 * [0.0], dtype=torch.float64))
    known = cl.eigs(A, k=1, ends="both")
    truths = (float(A.trace()), float(A.norm()))
    off: list[list[float]] = [[], []]
    for seed in range(80):
        for truth, estimate, errors in zip(truths, trace_and_norm(as_operator(A), known, 16, seed), off, strict=True):
            errors.append((float(estimate) - truth) / float(estimate.stderr))
    for errors in off:
        scores = torch.tensor(errors)
        assert abs(float(scores.mean())) < 0.35
        assert 0.8 < float(scores.std()) < 1.6


# Against the assembly of closed forms, which shares no code with the profiler


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_profiler_equals_the_closed_forms(norm: str, activation: str) -> None:
    """zᵀ M z' of every row and every probe, from the cut model and from matrices in closed form, to 1e-10."""
    model = small.gpt(n_layer=2, norm=norm, activation=activation)
    tokens, labels = small.tokens_and_labels()
    problem = cl.Problem(model, (tokens, labels), cl.losses.CrossEntropy())
    closed = cl.assembly.read(model).hessian(tokens, labels=labels)
    parts = {name: part.dense() for name, part in closed.parts.items()}
    z = torch.stack([small.direction(problem.layout.size, seed) for seed in range(3)])
    (recording,) = recordings_of(problem)
    table, outer = recording.forms([problem.layout.unflatten(v) for v in z], 3)
    whole = float(z[0] @ closed.total.dense() @ z[0])
    size = sum(float((z @ part @ z.T).abs().max()) for part in parts.values()) + abs(whole)
    assert float((outer / recording.count - z @ closed.ggn.dense() @ z.T).abs().max()) < 1e-10 * size
    own = {path: forms / recording.count for path, forms in table.items()}
    seen = set()
    for path, forms in own.items():
        inner = [name for name in parts if name == path or name in (f"{path}.activation", f"{path}.gating")]
        truth = sum((z @ parts[name] @ z.T for name in inner), torch.zeros(3, 3, dtype=torch.float64))
        assert float((forms - truth).abs().max()) < 1e-10 * size, path
        seen |= set(inner)
    assert seen == set(parts)


def test_matrices_of_rows_equal_the_closed_forms() -> None:
    """Traces and norms by dense evaluation: the operator of a row against the part of the assembly, to 1e-10."""
    problem = small.problem()
    tokens, labels = small.tokens_and_labels()
    closed = cl.assembly.read(problem.model).hessian(tokens, labels=labels)
    for path in ("h.0.attn.scores", "h.0.attn.softmax", "h.0.norm1", "unembed"):
        found, truth = module_part(problem, path).dense(), closed.parts[path]
        assert small.relative(found, truth.dense()) < 1e-10
        assert abs(float(found.norm()) - truth.norm()) < 1e-10 * truth.norm()
        assert abs(float(found.trace()) - truth.trace()) < 1e-10 * truth.norm()


# What models do to tensors and to each other


class WritesLater(nn.Module):
    """Writes into a tensor after a module has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.act, self.o = nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) * 1.5
        g = self.act(h)
        h.masked_fill_(x > 0, 0.0)
        y: Tensor = self.o(torch.tanh(h) + g)
        return y


@dataclasses.dataclass(frozen=True)
class Boxed:
    h: Tensor


class Pair(tuple):  # type: ignore[type-arg]
    pass


class Gives(nn.Module):
    """tanh(x W), wrapped in something."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.l, self.wrap = nn.Linear(3, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.tanh(self.l(x)))


class Takes(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.c, self.o, self.take = Gives(wrap), nn.Linear(3, 3), take

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(self.take(self.c(x)))
        return y


def test_writing_after_a_module_has_seen_it() -> None:
    torch.manual_seed(0)
    problem = of(WritesLater())
    v = small.direction(problem.layout.size)
    assert small.relative(module_part(problem, "") @ v, cl.functional(problem) @ v) < 1e-12
    assert cl.profile(problem, samples=4, top=False).adds_up


@pytest.mark.parametrize(
    ("wrap", "take"),
    [
        (Boxed, lambda boxed: boxed.h),
        (lambda h: Pair([h, 1]), lambda pair: pair[0]),
        (lambda h: torch.stack([h, h - 1]).max(0), lambda found: found.values),
        (lambda h: {"a": [h]}, lambda tree: tree["a"][0]),
    ],
)
def test_what_a_module_gives_may_be_wrapped(wrap: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
    torch.manual_seed(0)
    plain = module_part(of(Takes(lambda h: h, lambda h: h)), "c").dense()
    torch.manual_seed(0)
    assert small.relative(module_part(of(Takes(wrap, take)), "c").dense(), plain) < 1e-13


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.7, 1.1]))

    def forward(self) -> Tensor:
        return self.w


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class Scored(nn.Module):
    """A learned vector, a module that fails, and a child that is called like a step of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.bad, self.scores, self.o = Learned(), Fails(), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.scores(torch.tanh(x * self.p()))
        try:
            h = self.bad(h)
        except ValueError:
            h = h.sin()
        mixed = nn.functional.scaled_dot_product_attention(h[None], h[None], h[None])[0]
        y: Tensor = self.o(mixed)
        return y


def test_parameters_as_results_failures_and_names_that_collide() -> None:
    torch.manual_seed(0)
    problem = of(Scored())
    profile = cl.profile(problem, samples=4, top=False)
    assert profile.adds_up
    assert profile["scores"].kind == "Linear"
    assert profile["scores()"].kind == "scores"
    assert "bad" not in profile.rows
    assert float(profile[""].own.frobenius) > 0
    block = cl.hessian(problem)["p.w"].dense()
    assert small.relative(activation_hessian(problem, "p").dense(), block) < 1e-12


def test_calls_are_counted_whether_or_not_they_depend_on_parameters() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t, self.l = nn.Tanh(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.t(self.l(self.t(x)))
            return y

    problem = of(Calls())
    assert activation_hessian(problem, "t", call=1).shape == (15, 15)
    with pytest.raises(cl.CurvlensError, match="does not depend on any parameter"):
        activation_hessian(problem, "t", call=0)


def test_an_interruption_while_eigenvalues_are_sought_keeps_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("curvlens.profiling.profiler.eigs", stop)
    with pytest.warns(cl.CurvlensWarning, match="interrupted while eigenvalues were sought"):
        profile = cl.profile(small.problem(), samples=4)
    assert profile.samples == 4
    assert profile.hessian.top is None


def wide(memory: str | None = None) -> cl.Problem:
    """A GPT whose vectors are large beside everything else, in float32."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=50, context=16, n_layer=2, n_head=2, d_model=128)).eval()
    tokens = torch.randint(50, (4, 16))
    return cl.Problem(model, (tokens, tokens.roll(-1, 1)), cl.losses.CrossEntropy(), memory=memory)


def peak_bytes(act: Callable[[], object]) -> int:
    """The most that torch's allocator held above what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")
@pytest.mark.parametrize("memory", [None, "18MB"])
def test_memory_is_announced_and_kept(memory: str | None) -> None:
    """The announced peak is within 20 % of the real one, and within what is allowed."""
    problem, told = wide(), list[Forecast]()
    real = peak_bytes(lambda: cl.profile(problem, samples=4, top=False, memory=memory, announce=told.append))
    assert len(told) == 1
    assert abs(told[0].memory - real) < 0.2 * real
    if memory is not None:
        assert real <= 18e6


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")
def test_a_budget_cuts_the_data_and_changes_no_row() -> None:
    problem, told = of(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), n=64), list[Forecast]()
    free = cl.profile(problem, samples=4, top=False)
    tight = cl.profile(problem, samples=4, top=False, memory="20kB", announce=told.append)
    assert told[0].pieces > 1
    for row in free:
        assert float(tight[row.path].total.trace) == pytest.approx(float(row.total.trace), rel=1e-10, abs=1e-12)


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")  # float32
def test_a_budget_that_cannot_be_kept_is_told_before_the_first_probe() -> None:
    problem, seen = small.problem(), list[int]()
    with pytest.raises(cl.CurvlensError, match=r"needs .* for probes alone .* 1.953 KiB are allowed.*Raise memory="):
        cl.profile(problem, samples=4, memory=2000, progress=lambda done, total: seen.append(done))
    with pytest.raises(cl.CurvlensError, match=r"for the largest eigenvalue.*Leave it out: top=False"):
        cl.profile(wide(), samples=4, memory="18MB", progress=lambda done, total: seen.append(done))
    assert not seen


@pytest.mark.parametrize("size", [60, 80, 100, 120, 200, 400])
def test_what_is_enough_stays_enough(size: int) -> None:
    """Once refused with 80 KB, which 60 KB was enough for, or after all probes, by the search for eigenvalues."""
    problem = small.problem()
    seen = list[int]()
    found = cl.profile(problem, samples=4, memory=f"{size}KB", progress=lambda done, total: seen.append(done))
    assert found.adds_up
    assert found.hessian.top is not None
    assert seen


def test_the_forecast_is_logged_before_the_first_probe(caplog: pytest.LogCaptureFixture) -> None:
    events = list[str]()
    with caplog.at_level("INFO", logger="curvlens"):
        cl.profile(
            small.problem(),
            samples=4,
            top=False,
            announce=lambda forecast: events.append(str(forecast)),
            progress=lambda done, total: events.append("probe"),
        )
    assert "4 probes" in events[0]
    assert events[0] in caplog.text
    assert set(events[1:]) == {"probe"}
    assert len(events) > 4  # also inside a group
