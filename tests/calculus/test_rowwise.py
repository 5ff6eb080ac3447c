"""Norms and feed-forward layers in closed form, against dense autodiff, finite differences and extended precision."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import functional as autograd

from curvlens.calculus import activations, feedforward, norms
from curvlens.calculus.curvature import Root
from curvlens.calculus.form import SplitPart
from curvlens.calculus.rowwise import RowwiseHessian
from curvlens.errors import CurvlensError

D = torch.float64
PARTS: tuple[SplitPart, ...] = ("outer", "functional", "total")
Layer = Callable[[dict[str, Tensor]], Tensor]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def dense(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    result: Tensor = autograd.hessian(function, at.detach())  # type: ignore[no-untyped-call]
    return result


class Truth:
    """A layer of named tensors, some of which are variables, and a loss behind it."""

    def __init__(self, layer: Layer, tensors: dict[str, Tensor], names: list[str], loss: str) -> None:
        self.layer, self.tensors, self.names, self.loss = layer, tensors, names, loss
        self.outputs = layer(tensors)
        self.target = draw(*self.outputs.shape, seed=77)
        self.mixer = draw(self.outputs.shape[-1], 5, seed=78)
        self.samples = self.outputs[..., 0, 0].numel()
        self.slices, start = {}, 0
        for name in names:
            self.slices[name] = slice(start, start + tensors[name].numel())
            start += tensors[name].numel()
        self.theta = torch.cat([tensors[name].reshape(-1) for name in names])

    def at(self, theta: Tensor) -> Tensor:
        moved = {name: theta[part].view(self.tensors[name].shape) for name, part in self.slices.items()}
        return self.layer({**self.tensors, **moved})

    def value(self, y: Tensor) -> Tensor:
        if self.loss == "square":
            return (y - self.target).square().sum() / (self.samples * y.shape[-2] * y.shape[-1])
        labels = torch.arange(y[..., 0].numel()) % 5
        return F.cross_entropy((y @ self.mixer).flatten(0, -2), labels, reduction="sum") / self.samples

    def part(self, part: str) -> Tensor:
        if part == "total":
            return dense(lambda t: self.value(self.at(t)), self.theta)
        y = self.outputs.detach()
        if part == "outer":
            jacobian: Tensor = autograd.jacobian(self.at, self.theta).reshape(-1, len(self.theta))  # type: ignore[no-untyped-call]
            middle = dense(lambda t: self.value(t.view(y.shape)), y.reshape(-1))
            return jacobian.T @ middle @ jacobian
        g = torch.autograd.grad(self.value(y.requires_grad_()), y)[0].detach()
        return dense(lambda t: (g * self.at(t)).sum(), self.theta)

    def differences(self, v: Tensor) -> Tensor:
        def gradient(t: Tensor) -> Tensor:
            t = t.detach().requires_grad_()
            return torch.autograd.grad(self.value(self.at(t)), t)[0]

        def central(h: float) -> Tensor:
            return (gradient(self.theta + h * v) - gradient(self.theta - h * v)) / (2 * h)

        return (4 * central(5e-4) - central(1e-3)) / 3

    def keywords(self, root: bool) -> dict[str, Any]:
        if self.loss == "square":
            return {"target": self.target}
        y = self.outputs.detach()
        p = (y @ self.mixer).softmax(-1)
        labels = F.one_hot(torch.arange(y[..., 0].numel()) % 5, 5).to(D).view(p.shape)
        back = p.sqrt()[..., None, :] * (self.mixer - self.mixer @ p[..., None])
        return {"grad": (p - labels) @ self.mixer.T, "curvature": Root(back) if root else back @ back.mT}


def check(H: RowwiseHessian, truth: Truth, tolerance: float = 1e-12) -> None:
    """Every block of every part, and all that is read off without building one."""
    assert list(H.total.names) == truth.names
    for part in PARTS:
        whole = truth.part(part)
        floor = tolerance * float(whole.norm())
        form = getattr(H, part)
        v = draw(len(whole), 2, seed=5)
        for a, b in combinations_with_replacement(truth.names, 2):
            block = whole[truth.slices[a], truth.slices[b]]
            size = tolerance * float(block.norm()) + floor
            assert float((form[a, b] - block).norm()) <= size, (part, a, b)
            assert float((form[b, a] - block.T).norm()) <= size, (part, b, a)
            assert abs(H.norm((a, b), part) - float(block.norm())) <= size, (part, a, b)
            if a == b:
                assert float((H.diagonal(a, part) - block.diagonal()).norm()) <= size, (part, a)
                assert abs(H.trace(a, part) - float(block.diagonal().sum())) <= 10 * size
        assert float((form.dense() - whole).norm()) <= floor + 1e-300
        assert float((H.matvec(v, part) - whole @ v).norm()) <= floor * float(v.norm()) + 1e-300
    v = draw(len(truth.theta), seed=6)
    product, differences = H.matvec(v / v.norm()), truth.differences(v / v.norm())
    for name, part_ in truth.slices.items():
        assert float((product[part_] - differences[part_]).norm()) <= 1e-6 * float(differences.norm()) + 1e-9, name


# Norms


def norm_case(
    batch: tuple[int, ...], length: int, d: int, kind: norms.Kind, eps: float, loss: str, seed: int, affine: bool = True
) -> tuple[RowwiseHessian, Truth]:
    tensors = {"X": draw(*batch, length, d, seed=seed)}
    if affine:
        tensors |= {"scale": 1 + draw(d, seed=seed + 1, scale=0.5), "shift": draw(d, seed=seed + 2)}
    names: list[str] = [name for name in ("scale", "shift", "X") if name in tensors]

    def layer(t: dict[str, Tensor]) -> Tensor:
        x = t["X"]
        c = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        y = c / (c.square().mean(-1, keepdim=True) + eps).sqrt()
        return y * t["scale"] + t["shift"] if affine else y

    truth = Truth(layer, tensors, names, loss)
    H = norms.hessian(
        tensors["X"],
        tensors.get("scale"),
        tensors.get("shift"),
        eps=eps,
        kind=kind,
        wrt="X shift scale",
        **truth.keywords(root=seed % 2 == 0),
    )
    return H, truth


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("loss", ["square", "ce"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 2)])
def test_every_block_of_a_norm(kind: norms.Kind, loss: str, batch: tuple[int, ...]) -> None:
    check(*norm_case(batch, 3, 5, kind, 1e-2, loss, seed=len(batch)))
    check(*norm_case(batch, 2, 4, kind, 1e-5, loss, seed=3, affine=False))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    length=st.integers(1, 3),
    d=st.integers(2, 5),
    kind=st.sampled_from(["layer", "rms"]),
    eps=st.sampled_from([1e-6, 1e-2, 1.0]),
    loss=st.sampled_from(["square", "ce"]),
    seed=st.integers(0, 1000),
)
def test_norms_of_any_shape(length: int, d: int, kind: norms.Kind, eps: float, loss: str, seed: int) -> None:
    H, truth = norm_case((2,), length, d, kind, eps, loss, seed)
    found = norms.normed(truth.tensors["X"], eps=eps, kind=kind)
    # what autodiff itself loses: where a token hardly varies, and at d = 2, where LayerNorm is almost constant
    lost = max(1.0, float(found.s.min()) ** -2) / (float(found.gap.min()) if (d, kind) == (2, "layer") else 1.0)
    check(H, truth, 1e-12 * lost)


def test_a_norm_is_that_of_torch() -> None:
    x, scale, shift = draw(2, 3, 6), draw(6, seed=1), draw(6, seed=2)
    torch.testing.assert_close(norms.forward(x, scale, shift, eps=1e-3), F.layer_norm(x, (6,), scale, shift, 1e-3))
    torch.testing.assert_close(norms.forward(x, scale, eps=1e-3, kind="rms"), F.rms_norm(x, (6,), scale, 1e-3))
    whole: Tensor = autograd.jacobian(lambda t: F.layer_norm(t, (6,), scale, shift, 1e-3), x[0, 0])  # type: ignore[no-untyped-call]
    torch.testing.assert_close(norms.jacobian(x, scale, eps=1e-3)[0, 0], whole, rtol=1e-12, atol=1e-14)
    u, v = draw(2, 3, 6, seed=4), draw(2, 3, 6, seed=5)
    bent = norms.second_derivative(x, u, v, scale, eps=1e-3)
    for b in range(6):
        g = torch.zeros_like(x)
        g[..., b] = 1
        K = norms.contracted(x, g, scale, eps=1e-3)
        torch.testing.assert_close(torch.einsum("...i,...ij,...j->...", u, K, v), bent[..., b])


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8, 33])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_the_spectrum_of_a_norm(kind: norms.Kind, d: int, eps: float) -> None:
    x, g, scale = draw(7, d, seed=d), draw(7, d, seed=d + 1), draw(d, seed=d + 2)
    K = norms.contracted(x, g, scale, eps=eps, kind=kind)
    values = torch.linalg.eigvalsh(K)
    size = values.abs().max()
    torch.testing.assert_close(
        norms.spectrum(x, g, scale, eps=eps, kind=kind), values, rtol=1e-12, atol=float(1e-13 * size) + 1e-300
    )
    trace = norms.trace(x, g, scale, eps=eps, kind=kind)
    torch.testing.assert_close(
        trace, K.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-11, atol=float(1e-13 * size) + 1e-300
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_bounds_of_a_norm_hold_and_are_sharp(kind: norms.Kind) -> None:
    tightest = 0.0
    for draw_ in range(1000):
        d = 2 + draw_ % 12
        x, g, scale = draw(d, seed=3 * draw_), draw(d, seed=3 * draw_ + 1), draw(d, seed=3 * draw_ + 2)
        eps = 10.0 ** -(draw_ % 7)
        K = norms.contracted(x, g, scale, eps=eps, kind=kind)
        bound = float(norms.second_bound(x, g, scale, eps=eps, kind=kind))
        norm = float(torch.linalg.matrix_norm(K, 2))
        assert norm <= bound * (1 + 1e-12)
        tightest = max(tightest, norm / bound)
        jacobian = norms.jacobian(x, scale, eps=eps, kind=kind)
        slope = float(norms.jacobian_bound(x, scale, eps=eps, kind=kind))
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= slope * (1 + 1e-12)
    assert 0.5 < tightest < 1
    # the worst case: ρ = 1, and g at 35.3° (sin α = 1/√3) to what lies across n: ‖K‖ √d s²/‖p‖ = 2/√3
    worst = 0.0
    x = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=D)
    across = torch.tensor([1.0, 1.0, -2.0, 0.0], dtype=D)
    for angle in torch.linspace(0, torch.pi, 2001, dtype=D):
        g = torch.cos(angle) * x / x.norm() + torch.sin(angle) * across / across.norm()
        K = norms.contracted(x, g, eps=0.0, kind=kind)
        bound = float(norms.second_bound(x, g, eps=0.0, kind=kind))
        worst = max(worst, float(torch.linalg.matrix_norm(K, 2)) / bound)
    assert 1 - 1e-6 < worst <= 1 + 1e-12


def test_a_large_offset_does_not_cancel() -> None:
    x = (draw(4, 6) * 2**20).round() / 2**20
    g = draw(4, 6, seed=1)
    torch.testing.assert_close(norms.contracted(x + 2.0**20, g), norms.contracted(x, g), rtol=1e-9, atol=1e-12)


# Feed-forward

SHAPES = {"up": (3, 5), "up_bias": (5,), "gate": (3, 5), "gate_bias": (5,), "down": (5, 2), "down_bias": (2,)}
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "identity": lambda z: z,
}


def feedforward_case(
    activation: str, gated: bool, biased: bool, loss: str, batch: tuple[int, ...] = (2,), length: int = 3, seed: int = 0
) -> tuple[RowwiseHessian, Truth]:
    names = [n for n in ("gate", "gate_bias", "up", "up_bias", "down", "down_bias") if gated or "gate" not in n]
    names = [n for n in names if biased or "bias" not in n]
    tensors = {name: draw(*SHAPES[name], seed=seed + i, scale=0.7) for i, name in enumerate(names)}
    tensors["X"] = draw(*batch, length, 3, seed=seed + 9)

    def layer(t: dict[str, Tensor]) -> Tensor:
        b = t["X"] @ t["up"] + t.get("up_bias", torch.zeros(5, dtype=D))
        if gated:
            a = t["X"] @ t["gate"] + t.get("gate_bias", torch.zeros(5, dtype=D))
            h = ACTS[activation](a) * b
        else:
            h = ACTS[activation](b)
        return h @ t["down"] + t.get("down_bias", torch.zeros(2, dtype=D))

    truth = Truth(layer, tensors, [*names, "X"], loss)
    keywords: dict[str, Any] = {name: t for name, t in tensors.items() if name not in ("X", "up", "down")}
    keywords |= {**truth.keywords(root=gated), "activation": activation, "wrt": " ".join(truth.names)}
    H = feedforward.hessian(tensors["X"], tensors["up"], tensors["down"], **keywords)
    return H, truth


@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_every_block_of_a_feed_forward_layer(activation: str, gated: bool, biased: bool) -> None:
    for loss in ("square", "ce"):
        H, truth = feedforward_case(activation, gated, biased, loss)
        check(H, truth)
    options: dict[str, Any] = {name: t for name, t in truth.tensors.items() if name not in ("X", "up", "down")}
    options["activation"] = activation
    t = truth.tensors
    torch.testing.assert_close(feedforward.forward(t["X"], t["up"], t["down"], **options), truth.outputs)


def test_a_relu_is_not_simple_because_its_second_derivative_is_zero() -> None:
    H, _ = feedforward_case("relu", gated=False, biased=True, loss="square")
    for block in (
        "up",
        "up_bias",
        "X",
        ("up", "up_bias"),
        ("up_bias", "X"),
        "down",
        "down_bias",
        ("down", "down_bias"),
    ):
        assert H.norm(block, "functional") == 0, block
    for block in (("up", "down"), ("up_bias", "down"), ("up", "X"), ("down", "X")):
        assert H.norm(block, "functional") > 1e-2, block


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_activations_far_out_and_their_bounds(name: str) -> None:
    phi = activations.activation(name)
    z = torch.linspace(-12, 12, 4801, dtype=D, requires_grad=True)
    (first,) = torch.autograd.grad(ACTS[name](z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    torch.testing.assert_close(phi.value(z.detach()), ACTS[name](z).detach(), rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(phi.first(z.detach()), first.detach(), rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(phi.second(z.detach()), second, rtol=1e-10, atol=1e-13)
    for bound, values in ((phi.first_bound, first), (phi.second_bound, second)):
        assert bound - 1.1e-4 < float(values.detach().abs().max()) <= bound
    far = torch.tensor([-1e300, -1e20, -50.0, 50.0, 1e20, 1e300], dtype=D)
    for function, limits in ((phi.first, [0, 0, 0, 1, 1, 1]), (phi.second, [0] * 6)):
        torch.testing.assert_close(function(far), torch.tensor(limits, dtype=D), rtol=0, atol=1e-18)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms.hessian(draw(3), target=draw(3), wrt="X"), "expected"),
        (lambda: norms.hessian(draw(3, 4), draw(3), target=draw(3, 4)), "do not fit"),
        (lambda: norms.hessian(draw(3, 4), target=draw(3, 4), wrt="scale"), "wrt='scale', but none of these was given"),
        (lambda: norms.hessian(draw(3, 4), target=draw(3, 4), wrt="gamma"), "scale, shift and X"),
        (lambda: norms.normed(draw(3, 4), eps=-1.0), "0 or more"),
        (lambda: norms.normed(torch.ones(2, 3, dtype=D), eps=0.0), "no variance"),
        (lambda: feedforward.hessian(draw(3, 4), draw(5, 4), draw(5, 4), draw(3, 4)), "Give its transpose"),
        (lambda: feedforward.hessian(draw(3, 4), draw(4, 5), draw(5, 2), draw(3, 2), activation="tanh"), "'gelu_tanh'"),
        (lambda: feedforward.hessian(draw(3, 4), draw(4, 5), draw(5, 2), draw(3, 2), wrt="gate"), "expected words"),
        (
            lambda: feedforward.hessian(draw(3, 4), draw(4, 5), draw(5, 2), draw(3, 2), gate_bias=draw(5)),
            "without gate",
        ),
        (lambda: feedforward.hessian(draw(3, 4), draw(4, 5), draw(5, 2), draw(2, 2)), "target must have the shape"),
        (lambda: feedforward.hessian(draw(3, 4) / 0, draw(4, 5), draw(5, 2), draw(3, 2)), "NaN or infinite"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CurvlensError, match=message):
        call()
