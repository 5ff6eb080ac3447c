"""Bad input to the closed forms: what was given, what was expected, the fix."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import curvlens as cl
from curvlens.calculus import attention, exponents, linear_mlp, scalar_attention
from curvlens.calculus.tensor_checks import alike

D = torch.float64
X, WQ, WK, WV, Y = torch.ones(5, 4, dtype=D), *(torch.ones(4, n, dtype=D) for n in (3, 3, 2)), torch.ones(5, 2, dtype=D)
G, S = torch.ones(5, 2, dtype=D), torch.eye(2, dtype=D).expand(5, 2, 2)


def nan(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    result.view(-1)[0] = float("nan")
    return result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WQ": torch.ones(3, 3, dtype=D)}, r"X of shape \(5, 4\) and WQ of shape \(3, 3\) do not fit: 4 against 3"),
        ({"WK": torch.ones(4, 2, dtype=D)}, r"WQ of shape \(4, 3\) and WK of shape \(4, 2\) do not fit: 3 against 2"),
        ({"WV": torch.ones(5, 2, dtype=D)}, r"X of shape \(5, 4\) and WV of shape \(5, 2\) do not fit"),
        (
            {"WV": (torch.ones(4, 3, dtype=D), torch.ones(2, 2, dtype=D))},
            r"WV \(down\) of shape \(4, 3\) and WO \(up\)",
        ),
        ({"WQ": WQ[None]}, "matrices, or all of them have one leading head axis; got WQ \\(1, 4, 3\\)"),
        (
            {"WQ": WQ.expand(2, 4, 3), "WK": WK.expand(3, 4, 3), "WV": WV.expand(2, 4, 2)},
            "WQ has 2 heads, WK has 3",
        ),
        ({"X": torch.ones(4, dtype=D)}, r"X has shape \(4,\), expected \(…, tokens, features\)"),
        ({"X": X.float()}, "X is torch.float32 on cpu, WQ is torch.float64 on cpu"),
        ({"X": X.long()}, "X is torch.int64, expected a tensor of real floating-point"),
        ({"X": X[:0]}, r"X of shape \(0, 4\) is empty"),
        ({"wrt": "QO"}, "there is no O, as the value is one matrix"),
        ({"WK": nan(WK)}, r"WK has NaN or infinite entries \(1 of them, the first at \[0, 0\]\)"),
        ({"target": nan(Y)}, "target has NaN or infinite"),
        (
            {"target": torch.ones(5, 3, dtype=D)},
            r"target must have the shape \(5, 2\), that of the output; got shape \(5, 3\)",
        ),
        ({"target": None}, "neither target nor grad"),
        ({"grad": G}, "both target and grad"),
        ({"curvature": S}, "square loss has its own curvature"),
        ({"target": None, "grad": G}, "grad= needs curvature="),
        ({"target": None, "grad": G[:4], "curvature": S}, r"grad must have the shape \(5, 2\)"),
        ({"target": None, "grad": G, "curvature": S[:, :1]}, r"curvature must have the shape \(5, 2, 2\)"),
        (
            {"target": None, "grad": G, "curvature": attention.Root(S[:, :1])},
            r"root of curvature must have the shape",
        ),
        (
            {"target": None, "grad": G, "curvature": attention.Root(S[0, 0, 0])},
            r"root of curvature must have the shape",
        ),
        ({"target": None, "grad": G, "curvature": attention.Root(S * torch.nan)}, "root of curvature has NaN"),
        ({"target": None, "grad": G, "curvature": S.triu() + torch.ones(2, 2).triu()}, "curvature is not symmetric"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"mask": "triangular"}, "mask='triangular'"),
        ({"mask": torch.ones(5, 5)}, "mask is of torch.float32; expected None, 'causal' or a boolean.*mask.bool"),
        ({"mask": torch.eye(5).long()}, "mask is of torch.int64; .*For ones where attended, use mask.bool"),
        ({"mask": torch.zeros(5, 5)}, "For numbers that are added to the scores, use mask == 0"),
        ({"mask": torch.eye(5).log()}, "For numbers that are added to the scores, use mask == 0"),
        ({"mask": 2.0 * torch.eye(5)}, "numbers are not supported"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, r"mask has shape \(4, 5\), expected \(5, 5\)"),
        ({"mask": "causal", "context": torch.ones(3, 4, dtype=D)}, "mask='causal' with 5 queries and 3 keys"),
        ({"context": torch.ones(2, 5, 4, dtype=D)}, r"X has the batch shape \(\), context \(2,\)"),
        ({"wrt": "QZ"}, "wrt='QZ', expected letters among Q, K, V, X"),
        ({"wrt": "C"}, "C only with a context"),
        ({"wrt": ""}, "wrt=''"),
        ({"reduction": "median"}, "reduction='median'"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    given = {"X": X, "WQ": WQ, "WK": WK, "WV": WV, "target": Y, **changes}
    with pytest.raises(cl.CurvlensError, match=message):
        attention.hessian(**given)


def test_bad_questions() -> None:
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    for question, message in (
        (lambda: H.total["Q", "k"], "There is no block 'k'"),
        (lambda: H.matvec(torch.ones(3, dtype=D)), "takes a vector of 32 numbers"),
        (lambda: attention.hessian_single(X, WQ @ WK.T, WV, target=Y).t_outer(), "needs W_Q and W_K"),
        (lambda: attention.hessian_single(X, WQ @ WK.T, WV, target=Y).gauge(), "No gauge directions"),
        (
            lambda: attention.hessian(X, WQ, WK, WV, target=Y, wrt="QV").t_outer(),
            "the blocks are Q, V",
        ),
        (lambda: attention.hessian(X, WQ, WK, WV, target=Y, kind="linear").moments, "no moments"),
        (lambda: attention.stack(X, [], target=Y), "at least one layer"),
        (lambda: linear_mlp.hessian(X, [WV], Y), r"W1 has shape \(4, 2\), expected \(out, 4\)"),
        (lambda: linear_mlp.hessian(X, [WV.T], X), "target has shape"),
        (lambda: linear_mlp.hessian(X, [], X), "at least one weight"),
        (lambda: exponents.predicted("outer", "QX"), "no growth rate of 'outer' 'QX'"),
        (lambda: exponents.predicted_depth(2, 3), "layer=3 of depth=2"),
        (lambda: exponents.fit(torch.ones(3), torch.ones(3)), "positive and ascending"),
        (lambda: exponents.fit(torch.arange(1.0, 4), torch.zeros(3)), "exactly zero has no slope"),
        (lambda: exponents.fit(torch.arange(1.0, 3), torch.ones(2)), "three at least"),
        (lambda: exponents.fit(torch.arange(1.0, 9), torch.ones(8), window=(20.0, 30.0)), "holds 0 of the points"),
        (lambda: exponents.fit(torch.arange(1.0, 9), torch.ones(8), level=1.5), "level=1.5"),
        (lambda: scalar_attention.spectrum(X[0], WQ[0], WQ[0], 1.0, X[0], mask="all"), "mask='all'"),
    ):
        with pytest.raises(cl.CurvlensError, match=message):
            question()


def test_heads_have_to_be_named() -> None:
    many = attention.hessian(X, WQ.expand(2, 4, 3), WK.expand(2, 4, 3), WV.expand(2, 4, 2), target=Y)
    for ask in (many.t_outer, many.rank_bound):
        with pytest.raises(cl.CurvlensError, match="There are 2 heads: say which, as in head=0"):
            ask()
    with pytest.raises(cl.CurvlensError, match="head=5; there are heads 0 to 1"):
        many.t_functional(head=5)
    with pytest.raises(cl.CurvlensError, match="head=-1; there is one head, 0"):
        attention.hessian(X, WQ, WK, WV, target=Y).t_outer(head=-1)
    with pytest.raises(cl.CurvlensError, match=r"Outputs of heads add up.*WV=\(down, up\)"):
        attention.hessian(X, WQ.expand(2, 4, 3), WK.expand(2, 4, 3), WV.expand(2, 4, 2), target=torch.cat([Y, Y], 1))
    assert many.t_outer(head=1).names == ("Q1", "K1")


def test_what_does_not_fit_memory_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    assert H.norm() > 0
    monkeypatch.setattr("curvlens.calculus.room.available_bytes", lambda device: 1000)
    monkeypatch.setattr("curvlens.calculus.room.SMALL", 0)
    with pytest.raises(cl.CurvlensError, match=r"1312 entries, 10.25 KiB; 1000 B are free.*`matvec`, `norm`"):
        H.total.dense()
    with pytest.raises(cl.CurvlensError, match=r"The block \(Q, Q\), with as much to work in, has 288 entries"):
        H.outer["Q"]
    assert H.norm() > 0
    assert H.matvec(torch.ones(32, dtype=D)).shape == (32,)
    with pytest.raises(cl.CurvlensError, match="moments of all tokens has 480 entries"):
        attention.hessian(X, WQ, WK, WV, target=Y).norm()
    with pytest.raises(cl.CurvlensError, match=r"M3, with what it is summed from, has .*`curvlens.calculus.moments"):
        _ = H.moments
    with pytest.raises(cl.CurvlensError, match="All gauge directions, with as much to work in, has 576 entries"):
        H.gauge()
    monkeypatch.setattr("curvlens.calculus.room.available_bytes", lambda device: 4000)
    with pytest.raises(cl.CurvlensError, match="The Hessian of a stack, with the directions of all its weights"):
        attention.stack(X, [(WQ, WK, WV)], target=Y)


def test_every_hessian_says_of_itself_what_its_parts_say() -> None:
    deep, linear = attention.stack(X, [(WQ, WK, WV)], target=Y), linear_mlp.hessian(X, [WV.T], Y)
    for H, name in ((deep, "Q1"), (linear, "W1")):
        v = torch.ones(H.total.size, dtype=D)
        assert H.norm(name, "outer") == H.outer.norm(name)
        assert H.trace() == H.total.trace()
        torch.testing.assert_close(H @ v, H.total.dense() @ v)
        torch.testing.assert_close(H.diagonal(name, "functional"), H.functional[name].diagonal())
        with pytest.raises(cl.CurvlensError, match="A block belongs to a part of the Hessian"):
            H[name]


def test_a_curve_without_a_window_is_warned_of() -> None:
    sigma = torch.logspace(-1, 1, 25, dtype=D)
    noise = torch.randn(25, dtype=D, generator=torch.Generator().manual_seed(0))
    with pytest.warns(cl.CurvlensWarning, match="In no window of 4 points"):
        exponents.fit(sigma, sigma**2 * (1 + 0.2 * noise).abs())
    assert abs(exponents.fit(sigma, sigma**2 * (1 + 0.2 * noise).abs(), tolerance=5.0).slope - 2) < 0.2


def test_results_are_short_in_a_terminal() -> None:
    assert len(repr(attention.hessian(X, WQ, WK, WV, target=Y).moments)) < 80
    assert len(repr(scalar_attention.spectrum(X[:, 0], WQ[0], WQ[0], 1.0, Y[:, 0]))) < 120


def test_a_module_in_the_place_of_its_weight() -> None:
    with pytest.raises(cl.CurvlensError, match=r"WK is a Linear, expected a tensor .*Give its .weight"):
        alike({"X": X, "WK": torch.nn.Linear(4, 3)})
    assert attention.hessian(X, WQ, WK, WV, target=Y, wrt=["V", "Q"]).total.names == ("Q", "V")


def test_parameters_of_a_model_are_taken_as_numbers() -> None:
    """No graph is built, so nothing keeps memory and nothing can be differentiated by mistake."""
    q, k, v = (torch.nn.Parameter(w) for w in (WQ, WK, WV))
    H = attention.hessian(X.clone().requires_grad_(), q, k, v, target=Y)
    assert not H.total.dense().requires_grad
    assert not H.matvec(torch.ones(32, dtype=D)).requires_grad
    assert not attention.forward(X, q, k, v).requires_grad


def test_few_keys_are_gone_through_token_by_token() -> None:
    """The cheaper way of a product is taken, and both give the same."""
    wide = torch.randn(3, 12, dtype=D, generator=torch.Generator().manual_seed(0))
    W = torch.eye(12, dtype=D)
    H = attention.hessian(wide, W, W, W, target=wide.flip(0))
    assert H._products._few_keys
    v = torch.ones(H.total.size, dtype=D)
    for part in ("outer", "functional", "total"):
        torch.testing.assert_close(H.matvec(v, part), H._products._by_moments(v, part), rtol=1e-11, atol=1e-13)


def test_a_query_without_keys_has_output_zero_and_no_curvature() -> None:
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    H = attention.hessian(X, WQ, WK, WV, target=Y, mask=nothing, wrt="QKVX")
    assert not H.layer.output.any()
    assert H.norm() == 0
    assert H.matvec(torch.ones(H.total.size, dtype=D)).isfinite().all()


def test_results_print() -> None:
    H = attention.hessian(X.expand(2, 5, 4), WQ, WK, WV, target=Y.expand(2, 5, 2))
    assert repr(H).startswith("AttentionHessian(softmax self-attention, 1 head, 2 samples of 5 tokens; blocks Q 4×3")
    assert "Outer part" in repr(H.outer)
    assert "StackHessian" in repr(attention.stack(X, [(WQ, WK, WV)], target=Y))
    assert "LinearMLPHessian" in repr(linear_mlp.hessian(X, [WV.T], Y))
    law = scalar_attention.spectrum(X[0], WQ[0], WK[0], 1.0, X[0])
    assert set(law.to_dict()) == {"bulk", "outliers", "ggn", "condition", "loss"}


def test_wrong_types_are_said_in_our_words() -> None:
    """In a process of its own: here every call of the closed forms is checked against its annotations first."""
    script = """
import torch, curvlens as cl
from curvlens.calculus import attention, exponents, feedforward, norms
X, W, Y = torch.ones(5, 4), torch.ones(4, 3), torch.ones(5, 3)
H = attention.hessian(X, W, W, W, target=Y)
for question in (
    lambda: attention.hessian(X, W, W, W, grad=Y, curvature=(0.0, "no")),
    lambda: attention.hessian(X, W, W, W, target=Y, kind="cosine"),
    lambda: attention.hessian(X, W, W, [[1.0]], target=Y),
    lambda: attention.hessian(X, W, W, W, target=3.0),
    lambda: H.trace(("Q", "K")),
    lambda: H.norm("Q", "whole"),
    lambda: H.matvec([1.0]),
    lambda: H.total["Q", "K", "V"],
    lambda: H.total[3],
    lambda: exponents.predicted("outer", "QQ", kind="cubic"),
    lambda: norms.normed(X, kind="batch"),
    lambda: feedforward.hessian(X, W, W.T, torch.ones(5, 4)).norm("up", "all"),
):
    try:
        question()
    except cl.CurvlensError as error:
        print(error)
    else:
        raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = (
        "curvature[1] must have the shape",
        "kind='cosine', expected 'softmax' or 'linear'",
        "WV is one matrix, or a pair (down, up); 1 given",
        "target must have the shape (5, 3), that of the output; got a float",
        "off the diagonal",
        "part='whole'",
        "got a list",
        "A block has two names",
        "There is no block 3",
        "kind='cubic'",
        "'layer' or 'rms'",
        "part='all'",
    )
    for line, words in zip(done.stdout.splitlines(), expected, strict=True):
        assert words in line
