"""What the smaller closed forms say to bad input, and where they were once silently wrong."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.autograd import functional as autograd
from torch.nn.functional import cross_entropy

from curvlens.calculus import attention, exponents, losses, scalar_attention, theorems

D = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# Scalar attention


@pytest.mark.parametrize("sink", [1.3, -0.7])
def test_a_sink_is_a_bias_in_float64(sink: float) -> None:
    x, y, w_q, w_k = draw(2, 6), draw(2, 6, seed=1), draw(3, seed=2), draw(3, seed=3)
    bias = torch.zeros(6, 6, dtype=D)
    bias[:, 0] = sink
    by_sink = scalar_attention.spectrum(x, w_q, w_k, 0.7, y, sink=sink)
    by_bias = scalar_attention.spectrum(x, w_q, w_k, 0.7, y, bias=bias)
    torch.testing.assert_close(by_sink.eigenvalues, by_bias.eigenvalues, rtol=1e-15, atol=1e-15)
    assert by_sink.loss == pytest.approx(by_bias.loss, rel=1e-15)


def test_a_bias_of_minus_infinity_is_a_mask() -> None:
    x, y, w = draw(5), draw(5, seed=1), draw(3, seed=2)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first token attends to nothing
    bias = torch.zeros(5, 5, dtype=D).masked_fill(~allowed, -torch.inf)
    by_bias = scalar_attention.spectrum(x, w, w.flip(0), 0.7, y, bias=bias).eigenvalues
    by_mask = scalar_attention.spectrum(x, w, w.flip(0), 0.7, y, mask=allowed).eigenvalues
    torch.testing.assert_close(by_bias, by_mask, rtol=0, atol=0)


# Exponents


def test_a_fit_takes_lists_and_arrays() -> None:
    sigma = [0.1, 0.2, 0.4, 0.8]
    values = [3 * x**2 for x in sigma]
    law = exponents.fit(sigma, values)
    assert law.slope == pytest.approx(2, abs=1e-12)
    assert exponents.fit(np.array(sigma), np.array([values, values])).slope == pytest.approx(2, abs=1e-12)
    assert exponents.fit(torch.tensor(sigma, dtype=D), torch.tensor(values, dtype=D)).slope == law.slope


# Theorems


@pytest.mark.parametrize(("length", "d", "d_k", "d_v"), [(4, 3, 2, 2), (3, 2, 4, 5), (2, 2, 1, 1), (3, 3, 2, 3)])
def test_theorems_with_values_of_another_width(length: int, d: int, d_k: int, d_v: int) -> None:
    X, Y = draw(length, d), draw(length, d_v, seed=1)
    WQ, WK, WV = draw(d, d_k, seed=2) / d**0.5, draw(d, d_k, seed=3) / d**0.5, draw(d, d_v, seed=4) / d**0.5
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    linear = attention.hessian(X, WQ, WK, WV, target=Y, kind="linear")
    pairs = [
        (H.outer, theorems.theorem_3_1(X, WQ, WK, WV)),
        (H.functional, theorems.theorem_3_2(X, WQ, WK, WV, Y)),
        *zip((linear.outer, linear.functional), theorems.remark_4_1(X, WQ, WK, WV, Y), strict=True),
    ]
    for form, blocks in pairs:
        assert len(blocks) == 6
        for name, matrix in blocks.items():
            torch.testing.assert_close(form[name], matrix, rtol=1e-10, atol=1e-12)
    WQK = draw(d, d, seed=5) / d
    single = attention.hessian_single(X, WQK, WV, target=Y)
    torch.testing.assert_close(single.total["QK"], theorems.lemma_4_1(X, WQK, WV, Y), rtol=1e-10, atol=1e-12)
    for form, matrix in zip((H.t_outer(), H.t_functional()), theorems.remark_d_1(X, WQ, WK, WV, Y), strict=True):
        torch.testing.assert_close(form.dense(), matrix, rtol=1e-10, atol=1e-12)


# Losses


def test_padded_batches_over_all_tokens() -> None:
    """With unequal numbers of counted tokens: the mean over all of them, against dense autodiff."""
    X, E = draw(3, 5, 4), draw(4, 7, seed=1)
    weights = [draw(*shape, seed=s) / 2 for s, shape in enumerate(((4, 3), (4, 3), (4, 4)), start=2)]
    labels = torch.tensor([[1, 5, 2, 0, 6], [3, 3, -100, -100, -100], [-100, 2, 4, -100, 0]])

    def loss(flat: torch.Tensor, over: str = "all") -> torch.Tensor:
        q, k, v = (w.view(s) for w, s in zip(torch.split(flat, [12, 12, 16]), ((4, 3), (4, 3), (4, 4)), strict=True))
        logits = (X @ q @ k.T @ X.mT / 3**0.5).softmax(-1) @ X @ v @ E
        if over == "all":
            return cross_entropy(logits.flatten(0, 1), labels.flatten())
        return torch.stack([cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)]).mean()

    theta = torch.cat([w.flatten() for w in weights])
    f = attention.forward(X, *weights)
    for over in ("all", "sample"):
        truth: torch.Tensor = autograd.hessian(lambda t, o=over: loss(t, o), theta)  # type: ignore[no-untyped-call]
        g, s = losses.unembedded_cross_entropy(f, E, labels, over=over)
        same, root = losses.unembedded_cross_entropy_root(f, E, labels, over=over)
        for grad, curvature in ((g, s), (same, attention.Root(root))):
            H = attention.hessian(X, *weights, grad=grad, curvature=curvature)
            torch.testing.assert_close(H.total.dense(), truth, rtol=1e-10, atol=1e-13)


def test_any_label_can_be_ignored() -> None:
    f, E = draw(2, 3, 4), draw(4, 7, seed=1)
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    truth = losses.unembedded_cross_entropy(f, E, labels)
    for ignored in (6, 7, 99):
        found = losses.unembedded_cross_entropy(f, E, labels.where(labels >= 0, ignored), ignore_index=ignored)
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    half = losses.unembedded_cross_entropy(f.bfloat16(), E.bfloat16(), labels)
    assert all(part.dtype == torch.bfloat16 for part in half)


# Messages

SETUP = """
import torch, curvlens as cl
from curvlens.calculus import attention, exponents, linear_mlp, losses, norms, softmax, theorems, vec
from curvlens.calculus.exponents import fit, predicted, predicted_depth
from curvlens.calculus.scalar_attention import spectrum
x, w = torch.ones(4), torch.ones(3)
X, Q, V, Y = torch.ones(5, 4), torch.ones(4, 3), torch.ones(4, 2), torch.ones(5, 2)
U, labels, entropy = torch.ones(4, 7), torch.arange(5), losses.unembedded_cross_entropy
"""
CALLS = {
    "attention.hessian(X, Q, Q, V, Y, mask=torch.eye(5).numpy())": "torch.as_tensor(mask, dtype=torch.bool)",
    "attention.stack(X, [(Q, Q)], Y)": "Layer 1 of the stack is three weights (WQ, WK, WV), got 2 of them",
    "attention.hessian(X, Q, Q, V, Y).norm(['Q'])": "There is no block ['Q']",
    "attention.hessian(X, Q, Q, V, Y).total[['Q']]": "There is no block ['Q']",
    "spectrum(x, w, w, 1.0, x, mask=torch.ones(4, 4))": "A float mask that is added to the scores goes into bias=",
    "spectrum(x, w, w, 1.0, x, mask=torch.ones(3, 4, dtype=torch.bool))": "expected a boolean tensor of shape (4, 4)",
    "spectrum(x, w, w, 1.0, x, mask='all')": "mask='all'",
    "spectrum(x, w, w, 1.0, x, mask=3)": "mask=3",
    "spectrum(x.double(), w, w, 1.0, x.double())": "bring them to one dtype",
    "spectrum(x, w, w, 1.0, x, bias=torch.ones(4, 4).double())": "bias is torch.float64",
    "spectrum(x, w, w, 1.0, x, bias=torch.ones(4))": "bias has shape (4,), expected a tensor of shape (4, 4)",
    "spectrum(x, w, w, 1.0, x, bias=1.0)": "bias has type float",
    "spectrum(x, w[:, None], w[:, None], 1.0, x)": "Give w_Q.flatten()",
    "spectrum(x, w, w[:2], 1.0, x)": "w_Q has 3 entries, w_K has 2",
    "spectrum(x, w, w, 1.0, x[:3])": "y has shape (3,), x has (4,)",
    "spectrum(x[0], w, w, 1.0, x[0])": "give x[None]",
    "spectrum(x, w, w, w, x)": "w_V=",
    "spectrum(x, w, w, 1.0, x, sink='first')": "sink='first', expected one finite number",
    "predicted('total', 'QQ')": "part='total', expected 'outer' or 'functional'",
    "predicted('Outer', 'QQ')": "part='Outer', expected 'outer' or 'functional'",
    "predicted('outer', 'QX')": "'QQ'",
    "predicted('outer', 'ZZ')": "Known names: 'QQ', 'KK', 'QK', 'VQ', 'VK', 'VV'",
    "predicted('outer', 3)": "There is no growth rate of 'outer' 3",
    "predicted_depth(2, 1, 'total')": "part='total'",
    "predicted_depth(2, 1, network='cnn')": "network='cnn'",
    "predicted_depth(2, 1, residual='none')": "residual='none'",
    "predicted_depth(2.5, 1)": "layer=1 of depth=2.5",
    "fit(['a', 'b', 'c'], [1.0, 2.0, 3.0])": "sigma is a list that cannot be converted to real numbers",
    "fit([1.0, 2.0, 3.0], None)": "values is a NoneType",
    "fit([1.0, 2.0, 3.0], 3.0)": "one value a σ, three at least",
    "fit([1.0, 2.0, 3.0], torch.ones(3, dtype=torch.complex64))": "complex",
    "theorems.theorem_3_1(X, Q, Q, V.T)": "X has shape (5, 4), WV has (2, 4), expected (4, …)",
    "theorems.theorem_3_1(X, Q.T, Q.T, V)": "give its weight.T",
    "theorems.theorem_3_1(X[None], Q, Q, V)": "X has shape (1, 5, 4), expected a matrix",
    "theorems.theorem_3_1(X, Q[None], Q[None], V[None])": "one sample and one head",
    "theorems.theorem_3_1(X, Q, Q, (V, V.T))": "WV is a tuple, expected one matrix: multiply a pair, down @ up",
    "theorems.theorem_3_1(X.double(), Q, Q, V)": "bring them to one dtype",
    "theorems.theorem_3_2(X, Q, Q, V, X)": "Y has shape (5, 4), the output X W_V has (5, 2)",
    "theorems.theorem_3_2(X, Q, Q[:, :1], V, Y)": "WQ has shape (4, 3), WK has (4, 1)",
    "theorems.lemma_4_1(X, Q, V, Y)": "WQK has shape (4, 3), expected (4, 4)",
    "theorems.lemma_b_1(X, Q, Q, V.T)": "WV has (2, 4)",
    "theorems.remark_3_1(X, Q.T, Q.T)": "WQ has (3, 4)",
    "theorems.remark_4_1(X, Q, Q, V, X)": "Y has shape (5, 4)",
    "theorems.remark_d_1(X, Q, Q, V, X)": "Y has shape (5, 4)",
    "theorems.theorem_1(X, Q.T, Q.T, V, Y)": "X has shape (5, 4), WQ has (3, 4), expected (4, …)",
    "theorems.theorem_2(X[0])": "X has shape (4,), expected (tokens, features). One token is x[None].",
    "theorems.theorem_2(X[None])": "X has shape (1, 5, 4), expected (tokens, features)",
    "theorems.theorem_2(X, X[0, :3])": "scale has shape (3,), expected (4,)",
    "theorems.theorem_3(X, X[:2])": "grad has shape (2, 4), expected (5, 4)",
    "theorems.theorem_4(X, Q.T, Q)": "up has shape (3, 4), expected (4, 4) beside X",
    "theorems.theorem_4(X, Q, Q)": "down has shape (4, 3), expected (3, 3) beside X",
    "theorems.theorem_4(X, Q, torch.ones(3, 2))": "down has shape (3, 2), expected (3, 4): the residual adds X",
    "theorems.theorem_4(X[0], Q, Q.T)": "X has shape (4,), expected (tokens, features)",
    "norms.jacobian(X, torch.ones(3))": "scale has shape (3,), expected (4,), one number a feature of x",
    "norms.forward(X, shift=torch.ones(1))": "shift has shape (1,), expected (4,)",
    "norms.spectrum(torch.arange(4), X)": "x is torch.int64, expected a tensor of real floating-point numbers",
    "norms.spectrum([1.0, 2.0], X)": "x is a list, expected a tensor",
    "norms.spectrum(X, 1.0)": "grad is a float, expected a tensor",
    "norms.contracted(X, X[0])": "grad has shape (4,), expected (5, 4), that of x",
    "norms.trace(X, X.double())": "bring them to one dtype",
    "norms.second_bound(X, X[:, :1])": "grad has shape (5, 1)",
    "norms.second_derivative(X, X, X[0])": "v has shape (4,)",
    "norms.jacobian_bound(X, 1.0)": "scale is a float",
    "norms.hessian(X, target=X)['X']": "H.total['X'], H.outer['X'] or H.functional['X']",
    "norms.hessian(X, X[0], target=X, wrt='scale X').norm('scale', 'X')": "A block is one argument",
    "cl.calculus.attention.hessian(X, Q, Q, V, Y)['Q', 'K']": "H.total['Q', 'K'], H.outer['Q', 'K'] or",
    "norms.normed(torch.tensor(1.0))": "x has shape (), expected (…, features)",
    "entropy(X, torch.ones(3, 2), labels)": "unembedding has shape (3, 2), expected (4, classes)",
    "entropy(X, U.T, labels)": "nn.Linear stores (classes, d): give its weight.T",
    "entropy(X, V, labels)": "There is a label 2, expected 0 to 1 or ignore_index=-100",
    "entropy(X, U, labels - 1)": "There is a label -1",
    "entropy(X, U, labels.float())": "labels is torch.float32, expected a tensor of integers",
    "entropy(X, U, [0, 1, 2, 3, 4])": "labels is a list",
    "entropy(X, U, labels[None])": "labels has shape (1, 5), expected (5,)",
    "entropy(X[None], U, labels)": "labels has shape (5,), expected (1, 5)",
    "entropy(X[0], U, labels[0])": "One token is outputs[None]",
    "entropy(X.double(), U, labels)": "bring them to one dtype",
    "entropy(X, U, torch.full((5,), -100))": "no token counts",
    "entropy(X, U, labels, over='tokens')": "over='tokens', expected 'sample' or 'all'",
    "losses.unembedded_cross_entropy_root(X, U.T, labels)": "give its weight.T",
    "linear_mlp.hessian(X, V.T, Y)": "weights is a tensor of shape (2, 4), expected a list of matrices",
    "linear_mlp.hessian(X, 3, Y)": "weights is an int, expected a list",
    "softmax.softmax(X, torch.ones(5, 4))": "softmax(scores + mask)",
    "vec.kron(X, torch.ones(2, 2, 2))": "got shapes [(5, 4), (2, 2, 2)]",
    "vec.kron()": "one matrix or more",
    "vec.unvec(torch.ones(7), 2, 3)": "its last axis must have 6 entries",
}


def test_bad_input_is_said_in_our_words() -> None:
    """In a process of its own: here every call is checked against its annotations first."""
    script = f"{SETUP}\nfor call in {list(CALLS)!r}:\n    try:\n        print('no error:', str(eval(call))[:40])\n"
    script += "    except cl.CurvlensError as error:\n        print(' '.join(str(error).split()))\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, (call, words) in zip(done.stdout.splitlines(), CALLS.items(), strict=True):
        assert words in line, (call, line)
