"""Models that, cut at their modules, could be another function, or have parts booked on the wrong module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.operators import activation_hessian, module_part
from test_profile import Linearised, of

D = torch.float64


def functional(problem: cl.Problem) -> Tensor:
    return (cl.hessian(problem) - cl.ggn(problem)).dense()


def assert_same_function(problem: cl.Problem) -> None:
    """The parts of all modules are H − G."""
    truth = functional(problem)
    torch.testing.assert_close(module_part(problem, "").dense(), truth, rtol=1e-11, atol=1e-13)
    assert cl.profile(problem, samples=4, top=False).mismatch < 1e-12


class Around(nn.Module):
    """A layer of its own, and one that it shares with others."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(3, 3), shared

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(self.own(x))
        return y


def test_a_module_in_two_parents_is_booked_on_the_one_that_calls_it() -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model = nn.Sequential(Around(shared), Around(shared), nn.Linear(3, 3)).double()
    problem = of(model)
    H = cl.hessian(problem).dense()
    assert {"0.shared.1", "1.shared.1"} <= cl.profile(problem, samples=4, top=False).rows.keys()
    for i in range(2):
        part = module_part(problem, str(i)).dense()
        inner = model[i]
        model[i] = Linearised(inner)
        model[i].register_forward_pre_hook(lambda module, _: module.start())
        tangent = of(model)
        assert [name.replace(".inner", "") for name in tangent.layout.names] == list(problem.layout.names)
        torch.testing.assert_close(part, H - cl.hessian(tangent).dense(), rtol=1e-9, atol=1e-12)
        model[i] = inner


class Collects(nn.Module):
    """Puts a term of the loss into a list that it was given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.o, self.kind = Puts(), nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        store: Any = {"list": [], "dict": {}, "state": State()}[self.kind]
        h = self.a(x, store)
        found = {"list": lambda: sum(store), "dict": lambda: store["extra"], "state": lambda: store.extra}
        y: Tensor = self.o(h) * (1 + found[self.kind]())
        return y


@dataclass
class State:
    extra: Tensor | None = None


class Puts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)

    def forward(self, x: Tensor, store: Any) -> Tensor:
        h = torch.tanh(self.l(x))
        extra = h.square().mean()
        if isinstance(store, list):
            store.append(extra)
        elif isinstance(store, dict):
            store["extra"], store["self"] = extra, store
        else:
            store.extra = extra
        return h


@pytest.mark.parametrize("kind", ["list", "dict", "state"])
def test_what_a_module_puts_into_its_arguments_is_its_own(kind: str) -> None:
    torch.manual_seed(0)
    problem = of(Collects(kind))
    assert_same_function(problem)
    own = module_part(problem, "", own=True).dense()  # the product of two results: nothing between parameters of `a`
    weights = slice(0, 12)
    truth = functional(problem) - module_part(problem, "a").dense() - module_part(problem, "o").dense()
    torch.testing.assert_close(own, truth, rtol=1e-10, atol=1e-13)
    assert module_part(problem, "a").dense()[weights, weights].norm() > 0.1


class Shares(nn.Module):
    """Writes into a tensor that a module returned as it was given it."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.i, self.o = nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) * 1.0
        v = self.i(h)
        v.add_(3.0)
        y: Tensor = self.o(h**2)
        return y


class Without(nn.Module):
    """Hands a tensor through a module where no graph is made, and writes into another."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.i, self.r, self.o = nn.Linear(3, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.l(x))
        with torch.no_grad():
            h = self.i(h)
        y: Tensor = self.o(self.r(h**2 + 1))
        return y


def test_a_tensor_handed_through_without_a_graph() -> None:
    torch.manual_seed(0)
    assert_same_function(of(Without()))


class Differentiates(nn.Module):
    """A force: the derivative of an energy, within the forward pass."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.l, self.t, self.unused = nn.Linear(3, 3), nn.Tanh(), unused

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.t(self.l(x)).sum()
            (force,) = torch.autograd.grad(
                energy, x, create_graph=True, allow_unused=self.unused, materialize_grads=self.unused
            )
        y: Tensor = force + 0.1 * self.l(x)
        return y


def test_another_function_is_refused() -> None:
    """The profile says by how much it is off; a part alone would say nothing."""
    torch.manual_seed(0)
    problem = of(Shares().eval())
    with pytest.warns(cl.CurvlensWarning, match="do not add up"):
        assert cl.profile(problem, samples=4, top=False).mismatch > 0.01
    for refused in (lambda: module_part(problem, "l"), lambda: activation_hessian(problem, "l")):
        with pytest.raises(cl.CurvlensError, match="cannot be split by module"):
            refused()
    with pytest.raises(cl.CurvlensError, match="differentiates inside its forward pass"):
        cl.profile(of(Differentiates(unused=False)), samples=4)
    with pytest.raises(cl.CurvlensError, match="cannot be split by module"):
        module_part(of(Differentiates(unused=True)), "t")


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.t, self.o = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(torch.vmap(lambda row: self.t(self.l(row)))(x))
        return y


def test_modules_inside_vmap_are_named() -> None:
    torch.manual_seed(0)
    problem = of(Mapped())
    assert_same_function(problem)
    assert "'t' in 'the model'" in cl.profile(problem, samples=4, top=False).note
    with pytest.raises(cl.CurvlensError, match="'t' runs inside a transformation"):
        module_part(problem, "t")


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = torch.fft.rfft(x) * self.w
        return z


class Back(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        x: Tensor = torch.fft.irfft(z, n=3)
        return x


def test_complex_numbers_between_modules() -> None:
    """The product of tensor and weight bends, the transformation back does not."""
    torch.manual_seed(0)
    problem = of(nn.Sequential(nn.Linear(3, 3), Spectrum(), Back(), nn.Linear(3, 3)))
    assert_same_function(problem)
    assert module_part(problem, "1").dense().norm() > 0.01
    assert module_part(problem, "2").dense().norm() < 1e-14


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.l(x)
        return torch.tanh(self.o(h)) * 2, h


def test_the_activations_of_the_model_are_its_first_output() -> None:
    torch.manual_seed(0)
    model = Two().double()
    x, y = torch.randn(5, 3, dtype=D), torch.randn(5, 3, dtype=D)
    problem = cl.Problem(model, (x, y), lambda out, batch: (((out[0] - batch[1]) ** 2).sum(), 5))
    found = activation_hessian(problem, "").dense()
    torch.testing.assert_close(found, torch.eye(15, dtype=D) * 2 / 5)


def test_constants_in_front_of_the_parameters() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, dtype=D, requires_grad=True), torch.randn(5, 3, dtype=D)
    problem = cl.Problem(nn.Sequential(nn.Tanh(), nn.Linear(3, 3)).double(), (x, y), cl.losses.MSE())
    assert_same_function(problem)


class Raises(nn.Module):
    """Goes on when something before a module raised."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.t = nn.Linear(3, 3), nn.Tanh()
        self.t.register_forward_pre_hook(self._refuse)

    def _refuse(self, module: nn.Module, args: Any) -> None:
        raise ValueError("not today")

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.l(x)
        try:
            h = self.t(h)
        except ValueError:
            h = torch.sin(h)
        return h


def test_errors_that_a_model_handles_itself() -> None:
    torch.manual_seed(0)
    assert_same_function(of(Raises()))


class Chain(nn.Module):
    """A residual stream in one module's own code."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.c, self.o, self.steps = nn.Linear(3, 3), nn.Linear(3, 3), steps
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for step in range(self.steps):
            h = h + 0.1 * torch.tanh(self.c(h))
            if step == 3:
                h = h * self.w  # comes back later
        y: Tensor = self.o(h) * self.w
        return y


def test_a_long_chain_costs_what_it_is_long() -> None:
    """Segments end where the stream was cut before, and the numbers are the same."""
    torch.manual_seed(0)
    problem = of(Chain(6))
    assert_same_function(problem)
    long = of(Chain(60))
    for recording in cl.operators.modules.recordings_of(long):
        assert sum(len(pulled.leaves) for pulled in recording.pulled) < 6 * 60


@pytest.mark.parametrize("given", [None, 3, ("a",)])
def test_paths_are_texts(given: Any) -> None:
    problem = of(nn.Sequential(nn.Linear(3, 3)))
    for call in (
        lambda: module_part(problem, given),
        lambda: activation_hessian(problem, given),
        lambda: cl.profile(problem, samples=4, spectral=[given]),
    ):
        with pytest.raises(cl.CurvlensError, match="path of a module is a text"):
            call()
    with pytest.raises(cl.CurvlensError, match="spectral=3, expected"):
        cl.profile(problem, samples=4, spectral=3)  # type: ignore[arg-type]
    with pytest.raises(cl.CurvlensError, match="call='0'; expected"):
        activation_hessian(problem, "0", call="0")  # type: ignore[arg-type]


def test_the_last_call_of_a_module() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    problem = of(nn.Sequential(layer, nn.Tanh(), layer))
    last = activation_hessian(problem, "0", call=-1).dense()
    assert torch.equal(last, activation_hessian(problem, "0", call=1).dense())


def test_models_that_are_refused() -> None:
    scripted = nn.Sequential(torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(cl.CurvlensError, match="'0' is a ScriptModule"):
        cl.Problem(scripted, (torch.ones(1, 3), torch.ones(1, 3)), cl.losses.MSE())
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    with pytest.raises(cl.CurvlensError, match=r"'0' has sparse gradients.*0\.sparse = False"):
        cl.Problem(sparse, (torch.tensor([1]), torch.ones(1, 3)), cl.losses.MSE())


def test_compiled_modules_run_as_they_are_written() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    compiled: Any = torch.compile(inner, backend="eager", fullgraph=True)
    model = nn.Sequential(compiled, nn.Linear(3, 3))
    assert_same_function(of(model))


def test_a_default_device_elsewhere() -> None:
    problem = of(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    plain = cl.profile(problem, samples=4, top=False)
    with torch.device("meta"):
        other = cl.profile(problem, samples=4, top=False)
    assert torch.equal(other.hessian.trace.value, plain.hessian.trace.value)
