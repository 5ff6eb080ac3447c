"""Bounds of the closed forms: never violated, and how tight they are."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from assembly_truth import Case
from block_truth import Dice, Draw, a_block, a_feedforward, a_norm, an_attention
from curvlens import assembly
from curvlens.calculus import activations, attention, bounds, norms
from curvlens.calculus.attention.inputs import attention_inputs
from curvlens.calculus.bounds import heads
from curvlens.calculus.bounds.sizes import matrix, sizes
from curvlens.errors import CurvlensError


def case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length, d, d_k, d_v = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(4))
    scale = 10.0 ** float(torch.rand((), generator=generator) * 3 - 1.5)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, y = draw(length, d, size=scale), draw(length, d_v)
    return x, draw(d, d_k) / d**0.5, draw(d, d_k) / d**0.5, draw(d, d_v) / d**0.5, y


PARTS = ("outer", "functional", "total")


@pytest.mark.parametrize("draws", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.full)])
def test_the_bounds_of_attention_hold(draws: range) -> None:
    """1000 draws over shapes from 1 up and three decades of token sizes; every block, every part and the whole."""
    tightest = {False: 0.0, True: 0.0}
    for seed in draws:
        x, wq, wk, wv, y = case(seed)
        H = attention.hessian(x, wq, wk, wv, y)
        norms = {
            part: torch.linalg.matrix_norm(getattr(H, part).dense(), 2) for part in ("outer", "functional", "total")
        }
        for data in (False, True):
            bound = bounds.attention(x, wq, wk, wv, y, data=data)
            room = 1 + 1e-10
            assert norms["total"] <= bound.total * room
            for part in ("outer", "functional"):
                assert norms[part] <= torch.linalg.matrix_norm(getattr(bound, part), 2) * room, (seed, part)
            for i, a in enumerate("QKV"):
                for b in "QKV"[i:]:
                    block = torch.linalg.matrix_norm(H.total[a, b], 2)
                    assert block <= bound.block(a, b) * room + 1e-300, (seed, a, b, data)
            tightest[data] = max(tightest[data], bound.tightness(spectral_norm=float(norms["total"])))
    assert tightest[True] > 0.9
    assert tightest[False] > 0.3


def test_the_moments_make_it_tighter() -> None:
    shares = []
    for seed in range(100):
        x, wq, wk, wv, y = case(seed)
        prior, moments = (bounds.attention(x, wq, wk, wv, y, data=m).total for m in (False, True))
        assert moments <= prior * (1 + 1e-10)
        shares.append(float(attention_norm(x, wq, wk, wv, y)) / moments)
    assert 0.2 < float(torch.tensor(shares).median()) <= 1


def attention_norm(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, y: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(attention.hessian(x, wq, wk, wv, y).total.dense(), 2)
    return norm


# Norms, feed-forward layers, heads and blocks: every block and the whole, against dense autodiff


def of_norm(draw: Draw, data: bool) -> bounds.Bound:
    w = dict(draw.variables)
    words = " ".join(w)
    return bounds.norm(w["X"], w.get("scale"), w.get("shift"), **draw.options, **draw.behind, wrt=words, data=data)


def of_feedforward(draw: Draw, data: bool) -> bounds.Bound:
    w: dict[str, Any] = {**draw.variables, **draw.options, **draw.behind}
    return bounds.feedforward(**w, wrt=" ".join(draw.variables), data=data)


def of_block(draw: Draw, data: bool) -> bounds.Bound:
    w = dict(draw.variables)
    return bounds.block(w.pop("X"), w, **draw.options, **draw.behind, wrt=" ".join(draw.variables), data=data)


def of_heads(draw: Draw, data: bool) -> bounds.Bound:
    """The layer inside a block by itself, with its tokens as a variable."""
    w, x, grad = draw.variables, draw.variables["X"], draw.grad
    assert grad is not None
    value = (w["V"], w["O"]) if "O" in w else w["V"]
    of = attention_inputs(x, w["Q"], w["K"], value, **draw.options, temperature=1.0, kind="softmax", context=None)
    pairs = heads.known(of).bend(grad) if data else heads.prior(sizes(x), len(x), of).bend(sizes(grad))
    functional = matrix(list(w), pairs)
    return bounds.Bound(tuple(w), torch.zeros_like(functional), functional)


LAYERS: dict[str, tuple[Callable[[int], Draw], Callable[[Draw, bool], bounds.Bound]]] = {
    "norm": (a_norm, of_norm),
    "feed-forward": (a_feedforward, of_feedforward),
    "heads": (an_attention, of_heads),
    "block": (a_block, of_block),
}
QUICK, ALL = range(100), range(1000)


@cache
def measured(name: str, draws: range) -> dict[str, list[tuple[float, float]]]:
    """True norm/bound, a-priori and from the data, after every block was compared; blocks by their weights alone."""
    found: dict[str, list[tuple[float, float]]] = {}
    make, ask = LAYERS[name]
    for seed in draws:
        draw = make(seed)
        prior, data = (ask(draw, known) for known in (False, True))
        assert data.total <= prior.total * (1 + 1e-9), seed
        # what autodiff may round: of a layer at the size of what cancels in it, which the a-priori bound knows
        slack = 1e-11 * draw.norm if name == "block" else 1e-13 * prior.total
        for bound in (prior, data):
            assert draw.norm <= bound.total * (1 + 1e-9) + slack, seed
            for (first, second), norm in draw.truth.items():
                assert norm <= bound.block(first, second) * (1 + 1e-9) + slack, (seed, first, second)
        row, norm = name, draw.norm
        if name == "block":
            row, norm = f"block, {draw.options['norm']}", draw.of_weights
            prior, data = (weights_of(bound) for bound in (prior, data))
        if norm > 0:
            found.setdefault(row, []).append((prior.tightness(spectral_norm=norm), data.tightness(spectral_norm=norm)))
    return found


def test_the_fast_truth_is_the_plain_one() -> None:
    """All rows of a Hessian at once, as everywhere here, or one after the other."""
    for make in (a_norm, a_feedforward, an_attention, a_block):
        for seed in range(5):
            fast, plain = (make(seed).solve(at_once=at_once) for at_once in (True, False))
            assert fast.norm == pytest.approx(plain.norm, rel=1e-12)


def weights_of(bound: bounds.Bound) -> bounds.Bound:
    assert bound.names[-1] == "X"
    return bounds.Bound(bound.names[:-1], bound.outer[:-1, :-1], bound.functional[:-1, :-1])


EVERY = [QUICK, pytest.param(ALL, marks=pytest.mark.full)]


@pytest.mark.parametrize("draws", EVERY, ids=len)
@pytest.mark.parametrize("name", LAYERS)
def test_the_bounds_hold(name: str, draws: range) -> None:
    """Also for tokens that hardly vary, saturated attention, one token, one feature, large weights and equal tokens."""
    for pairs in measured(name, draws).values():
        for prior, data in pairs:
            assert 0 < prior <= 1 + 1e-6
            assert prior <= data * (1 + 1e-9)
            assert data <= 1 + 1e-6


PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "math.md"


@pytest.mark.parametrize("draws", EVERY, ids=len)
def test_the_table_of_the_page_is_what_is_measured(draws: range) -> None:
    rows = re.findall(r"^\| (norm|feed-forward|block, \w+) \|(.+)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    table = {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}
    found = {row: pairs for name in ("norm", "feed-forward", "block") for row, pairs in measured(name, draws).items()}
    assert table.keys() == found.keys()
    factor = 1.1 if len(draws) == len(ALL) else 10  # a tenth of the draws, and medians over many decades
    for row, pairs in found.items():
        for (typical, largest), shares in zip((table[row][:2], table[row][2:]), zip(*pairs, strict=True), strict=True):
            assert 1 / factor <= typical / median(shares) <= factor, row
            assert max(shares) <= largest * factor


def test_the_constant_of_a_norm_is_attained() -> None:
    """‖K‖ = (2/√3) ‖p‖/(√d s²) at ε = 0 for a gradient at α to the plane across n, sin α = 1/√3."""
    x = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    n = norms.normed(x, eps=0.0).n[0]
    along, across = n / n.norm(), torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64) / 6**0.5
    grad = (along / 3**0.5 + across * (2 / 3) ** 0.5)[None]
    prior, data = (bounds.norm(x, grad=grad, curvature=0.0, eps=0.0, data=known).total for known in (False, True))
    torch.testing.assert_close(prior, data, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_no_activation_is_larger_than_its_argument(name: str) -> None:
    z = torch.linspace(-50, 50, 10001, dtype=torch.float64)
    assert bool((activations.activation(name).value(z).abs() <= z.abs()).all())


def small(**change: Any) -> dict[str, Tensor]:
    dice = Dice(0)
    w = {"Q": dice(3, 2), "K": dice(3, 2), "V": dice(3, 3), "up": dice(3, 4), "down": dice(4, 3)}
    return {name: t for name, t in (w | change).items() if t is not None}


def test_the_size_of_a_gradient_is_enough_a_priori() -> None:
    x, grad = Dice(1)(4, 3), Dice(2)(4, 3)
    w = small()
    asks: list[Callable[[Tensor | float], bounds.Bound]] = [
        lambda g: bounds.norm(x, grad=g, curvature=0.5),
        lambda g: bounds.feedforward(x, w["up"], w["down"], grad=g, curvature=0.5),
        lambda g: bounds.block(x, w, grad=g, curvature=0.5),
    ]
    for ask in asks:
        assert ask(grad).total <= ask(float(grad.norm())).total <= ask(2 * float(grad.norm())).total


def test_the_rest_of_a_curvature_belongs_to_the_functional_part() -> None:
    x = Dice(1)(4, 3)
    whole, split = (bounds.block(x, small(), grad=x, curvature=c, data=True) for c in (3.0, (1.0, -2.0)))
    torch.testing.assert_close(split.outer, whole.outer / 3)
    torch.testing.assert_close(split.outer + split.functional, whole.outer + whole.functional)


def test_bounds_are_in_float64_whatever_is_given() -> None:
    x, y = Dice(1)(4, 3), Dice(2)(4, 3)
    low = bounds.block(x.float(), {name: t.float() for name, t in small().items()}, y.float(), data=True)
    assert low.outer.dtype == torch.float64
    assert low.total == pytest.approx(bounds.block(x, small(), y, data=True).total, rel=1e-5)


def test_bad_questions() -> None:
    x, wq, wk, wv, y = case(0)
    with pytest.raises(CurvlensError, match="There is no block 'O'"):
        bounds.attention(x, wq, wk, wv, y).block("Q", "O")


def test_a_norm_is_differentiated_by_the_same_in_bound_and_closed_form() -> None:
    x, one = Dice(0)(4, 3), torch.ones(3, dtype=torch.float64)
    every: list[dict[str, Any]] = [{}, {"scale": one}, {"shift": one}, {"scale": one, "shift": one}]
    for given in every:
        H, bound = norms.hessian(x, target=x, **given), bounds.norm(x, target=x, **given)
        assert H.total.names == bound.names == (tuple(given) or ("X",))
        assert 0 < bound.tightness(H) <= 1


# The true norm beside the bound


def test_tightness_takes_what_has_a_spectral_norm() -> None:
    x, wq, wk, wv, y = case(3)
    H, bound = attention.hessian(x, wq, wk, wv, y), bounds.attention(x, wq, wk, wv, y, data=True)
    norm = float(torch.linalg.matrix_norm(H.total.dense(), 2))
    for given in (H, H.total, H.total.dense(), H.total.dense().float()):
        assert bound.tightness(given) == pytest.approx(norm / bound.total, rel=1e-5)
    assert bound.tightness(spectral_norm=norm) == norm / bound.total <= 1
    assert bounds.Bound(("Q",), torch.zeros(1, 1), torch.zeros(1, 1)).tightness(torch.zeros(2, 2)) == 1


def test_what_has_no_spectral_norm_is_refused() -> None:
    bound = bounds.Bound(("Q",), torch.ones(1, 1), torch.zeros(1, 1))
    calls: list[tuple[Callable[[], float], str]] = [
        (lambda: bound.tightness(0.5), r"given a float, expected a closed form.*tightness\(spectral_norm="),
        (lambda: bound.tightness("H"), "given a str"),
        (lambda: bound.tightness(torch.ones(3)), r"a tensor of shape \(3,\)"),
        (lambda: bound.tightness(torch.full((2, 2), torch.nan)), "finite symmetric matrix"),
        (lambda: bound.tightness(), "one of the two"),
        (lambda: bound.tightness(torch.eye(1), spectral_norm=0.5), "one of the two"),
        (lambda: bound.tightness(spectral_norm=-1.0), "not negative"),
        (lambda: bound.tightness(spectral_norm=math.nan), "finite"),
        (lambda: bound.tightness(spectral_norm=1.1), "1.1 is larger than the bound 1.*Frobenius norm"),
        (lambda: bound.tightness(2 * torch.eye(1)), "larger than the bound"),
    ]
    for call, message in calls:
        with pytest.raises(CurvlensError, match=message):
            call()


def test_a_bound_prints_its_total_and_its_blocks() -> None:
    x, wq, wk, wv, y = case(0)
    bound = bounds.attention(x, wq, wk, wv, y)
    assert re.fullmatch(r"Bound\(total \S+; Q \S+, K \S+, V \S+\)", repr(bound))


BLOCKS: list[dict[str, Any]] = [
    {"heads": 2},
    {"heads": 2, "norm": "post", "norm_kind": "rms", "activation": "swiglu", "mask": None},
    {"heads": 1, "norm": "none", "activation": "relu"},
    {"heads": 2, "norm": "none", "leave": "o"},
]


@pytest.mark.parametrize("options", BLOCKS)
def test_a_block_of_the_assembly_is_within_its_bounds(options: dict[str, Any]) -> None:
    """The same weights and options for both, and the same names in what they return."""
    given = dict(options)
    left_out = given.pop("leave", None)
    truth = Case(**given, samples=1, seed=7)
    attention_biases = [f"{name}_bias" for name in "qkvo"]
    weights = {name: w for name, w in truth.weights.items() if name not in (*attention_biases, left_out)}
    same: dict[str, Any] = {
        "heads": truth.heads,
        "norm": truth.norm,
        "norm_kind": truth.norm_kind,
        "activation": truth.activation,
    }
    same |= {"mask": truth.mask, "eps": 1e-2}
    X, Y = truth.X[0], truth.target[0]
    H = assembly.block(weights, **same).hessian(X, target=Y)
    for data in (False, True):
        bound = bounds.block(X, weights, Y, **same, data=data)
        assert set(bound.names) == set(H.names)
        assert 0 < bound.tightness(H) <= 1
        for a in H.names:
            for b in H.names:
                block = float(torch.linalg.matrix_norm(H.total[a, b], 2))
                assert block <= bound.block(a, b) * (1 + 1e-9) + 1e-13, (a, b, data)


def test_heads_side_by_side_are_heads_with_an_axis() -> None:
    x, w = Dice(1)(4, 6), {"up": Dice(2)(6, 5), "down": Dice(3)(5, 6)}
    plain = {name: Dice(4 + i)(6, 6) for i, name in enumerate("qkvo")}
    axis = {name.upper(): plain[name].view(6, 2, 3).movedim(1, 0) for name in "qkv"}
    axis["O"] = plain["o"].view(2, 3, 6)
    one = bounds.block(x, plain | w, x, heads=2, data=True, wrt="q o up")
    other = bounds.block(x, axis | w, x, data=True, wrt="Q O up")
    assert one.names == ("q", "o", "up")
    torch.testing.assert_close(one.functional, other.functional)


def lower(**change: Any) -> dict[str, Tensor]:
    w = {name.lower() if len(name) == 1 else name: t for name, t in small().items()} | change
    return {name: t for name, t in w.items() if t is not None}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: bounds.block(x, small(W=x), x), "does not know 'W'; its weights are norm1.scale"),
        (lambda x: bounds.block(x, small(K=None), x), "needs K"),
        (lambda x: bounds.block(x, lower(), x), "'q' is a weight as assembly.block takes it: give heads="),
        (lambda x: bounds.block(x, small(), x, heads=1), "heads=1 and 'Q', which has an axis of heads"),
        (lambda x: bounds.block(x, lower(k=None), x, heads=1), "with heads=1 needs k"),
        (lambda x: bounds.block(x, lower(), x, heads=2), "'v' has shape .3, 3., expected a matrix of which 2 heads"),
        (lambda x: bounds.block(x, lower(), x, heads=0), "heads=0; expected"),
        (lambda x: bounds.block(x, lower(q_bias=x[0]), x, heads=1), "no bound with 'q_bias'"),
        (lambda x: bounds.block(x, small(**{"norm1.scale": x[0]}), x, norm="none"), "does not know 'norm1.scale'"),
        (
            lambda x: bounds.block(x, small(**{"norm1.scale": x[:, 0]}), x),
            r"norm1.scale has shape \(4,\), expected \(3,\)",
        ),
        (lambda x: bounds.block(x, small(V=small()["Q"]), x), "attention puts out 2 features and X has 3"),
        (lambda x: bounds.block(x, small(down=small()["down"][:, :2]), x), "down puts out 2 features and X has 3"),
        (lambda x: bounds.block(x, small(), x, wrt="Q Z"), "expected words among Q, K, V, up, down, X"),
        (lambda x: bounds.block(x, small(), x, wrt=""), "names no variable"),
        (lambda x: bounds.block(x, small(), x, norm="post", eps=0.0), "Give eps > 0, or data=True"),
        (lambda x: bounds.block(x[None], small(), x[None]), "one sample. Of several samples, average the bounds"),
        (lambda x: bounds.block(x, small()), "neither target nor grad"),
        (lambda x: bounds.block(x, small(), grad=1.0, curvature=1.0, data=True), "Give the gradient itself"),
        (lambda x: bounds.block(x, small(), grad=-1.0, curvature=1.0), "0 or more"),
        (lambda x: bounds.block(x, small(), grad=1.0, curvature=math.nan), "two finite numbers"),
        (lambda x: bounds.block(x, small(), grad=1e200, curvature=1e308), "over- or underflow"),
        (lambda x: bounds.norm(1e200 * x, target=x), "over- or underflow"),
        (lambda x: bounds.norm(1e200 * x, target=x, data=True), "over- or underflow"),
        (lambda x: bounds.feedforward(1e200 * x, small()["up"], small()["down"], x), "over- or underflow"),
        (lambda x: bounds.feedforward(x, 1e200 * small()["up"], small()["down"], x, data=True), "over- or underflow"),
        (lambda x: bounds.norm(x, x[:, 0], target=x), r"scale has shape \(4,\), expected \(3,\)"),
        (lambda x: bounds.norm(x[0], target=x[0]), r"expected \(tokens, features\)"),
        (lambda x: bounds.feedforward(x, x, x, x), "expected"),
        (lambda x: bounds.feedforward(x, small()["up"], small()["down"], x, activation="tanh"), "'gelu_tanh'"),
    ],
)
def test_bad_shapes_and_kinds(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(CurvlensError, match=message):
        call(Dice(0)(4, 3))


def test_tokens_too_small_to_be_squared() -> None:
    """They have a direction all the same, and ε keeps the bound finite."""
    x = Dice(0)(4, 3)
    tiny, zero = (bounds.norm(size * x, target=x, data=True).total for size in (1e-200, 0.0))
    assert tiny == pytest.approx(zero, rel=1e-12)


def test_bad_words() -> None:
    """Without the hook that checks types in tests, which would be first."""
    script = """
import torch
from curvlens.calculus import bounds
x, w = torch.ones(2, 3), torch.eye(3)
weights = dict.fromkeys(("Q", "K", "V", "up", "down"), w)
for change in ({"norm": "sandwich"}, {"norm_kind": "batch"}):
    try:
        bounds.block(x, weights, x, **change)
    except bounds.bound.CurvlensError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "norm='sandwich', expected 'pre', 'post' or 'none'.",
        "norm_kind='batch', expected 'layer' or 'rms'.",
    ]
