"""The statements about norms and feed-forward layers as printed, against autodiff and the structured forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import functional as autograd

from curvlens.calculus import attention, bounds, feedforward, norms
from curvlens.calculus.theorems import transformer as theorems
from curvlens.calculus.vec import block_diagonal


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(20))
def test_the_spectral_bound_of_attention(seed: int) -> None:
    """Every term holds and is that of the structured bound; the largest of them, three times, bounds the whole."""
    size = 10.0 ** (seed / 10 - 1)
    X, Y = size * draw(4, 3, seed=seed), draw(4, 2, seed=seed + 100)
    WQ, WK, WV = (draw(3, 2, seed=seed + shift) for shift in (200, 300, 400))
    found = theorems.theorem_1(X, WQ, WK, WV, Y)
    structured = bounds.attention(X, WQ, WK, WV, Y)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = (X @ q @ k.T @ X.T / 2**0.5).softmax(-1) @ X @ v
        return (out - Y).square().mean()

    H = autograd.hessian(loss, (WQ, WK, WV))  # type: ignore[no-untyped-call]
    for name, term in found.items():
        if name != "M":
            i, j = ("QKV".index(letter) for letter in name)
            block = H[i][j].reshape(6, 6)
            assert float(torch.linalg.matrix_norm(block, 2)) <= term * (1 + 1e-9)
            assert term == pytest.approx(structured.block(*name), rel=1e-12)
    whole = float(torch.linalg.matrix_norm(attention.hessian(X, WQ, WK, WV, Y).total.dense(), 2))
    assert whole <= structured.total * (1 + 1e-9) <= found["M"] * (1 + 2e-9)


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (3, 6)])
def test_layer_norm_over_a_matrix(shape: tuple[int, int]) -> None:
    rows, d = shape
    X, G, scale = draw(rows, d), draw(rows, d, seed=1), draw(d, seed=2)

    def layer(x: Tensor) -> Tensor:
        return F.layer_norm(x.view(rows, d), (d,), scale, None, 1e-3)

    jacobian: Tensor = autograd.jacobian(lambda x: layer(x).reshape(-1), X.reshape(-1))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(theorems.theorem_2(X, scale, eps=1e-3), jacobian, rtol=1e-12, atol=1e-13)
    second: Tensor = autograd.hessian(lambda x: (G * layer(x)).sum(), X.reshape(-1))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(theorems.theorem_3(X, G, scale, eps=1e-3), second, rtol=1e-11, atol=1e-12)
    H = norms.hessian(X, scale, grad=G, curvature=0.0, eps=1e-3, wrt="X")
    torch.testing.assert_close(theorems.theorem_3(X, G, scale, eps=1e-3), H.functional["X"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(theorems.theorem_2(X, eps=1e-3), block_diagonal(norms.jacobian(X, eps=1e-3)))


def test_a_jacobian_without_the_derivative_of_the_variance_is_wrong() -> None:
    X = draw(1, 4)
    right = theorems.theorem_2(X)
    wrong = (torch.eye(4, dtype=X.dtype) - 0.25) / norms.normed(X).s
    assert float((wrong - right).norm() / right.norm()) > 0.3


def test_a_feed_forward_layer_with_its_residual() -> None:
    X, up, down = draw(3, 4), draw(4, 5, seed=1), draw(5, 4, seed=2)
    found = theorems.theorem_4(X, up, down)
    for name, at in (("up", up), ("down", down), ("X", X)):

        def layer(t: Tensor, name: str = name) -> Tensor:
            w = {"up": up, "down": down, "X": X, name: t}
            return w["X"] + feedforward.forward(w["X"], w["up"], w["down"], activation="relu")

        jacobian: Tensor = autograd.jacobian(layer, at)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found[name], jacobian.reshape(X.numel(), -1), rtol=1e-12, atol=1e-13)
