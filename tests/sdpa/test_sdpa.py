"""Attention: the same numbers as torch's, two derivatives in every mode, by tiles and written out."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacrev, jvp, linearize, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import curvlens as cl
from curvlens.sdpa import attention, kernels, ops, tiles

scaled_dot_product_attention: Any = cl.sdpa.scaled_dot_product_attention
AF: Any = torch.autograd.functional
D = torch.float64
Options = dict[str, Any]


@pytest.fixture(params=["tiles", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, whatever the length; tiles of a few numbers, so that lengths do not divide them."""
    monkeypatch.setattr(attention, "SHORT", -1 if request.param == "tiles" else 10**9)
    monkeypatch.setattr(tiles, "NUMBERS", 6)
    monkeypatch.setattr(tiles, "FEWEST", 2)
    monkeypatch.setattr(tiles, "MOST_THREADS", 1)
    found: str = request.param
    return found


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SHORT", -1)
    monkeypatch.setattr(tiles, "NUMBERS", 40)
    monkeypatch.setattr(tiles, "FEWEST", 3)
    monkeypatch.setattr(tiles, "MOST_THREADS", 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=D)


def naive(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The definition, with every matrix written out and every head of keys repeated."""
    if options.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = options.get("scale")
    scores = torch.einsum("...ld,...md->...lm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    length, keys = scores.shape[-2:]
    seen = torch.ones(scores.shape, dtype=torch.bool)
    own = keys - length if options.get("is_causal") == "bottom-right" else 0
    away = torch.arange(keys) - torch.arange(length)[:, None] - own  # how far behind its own position a key is
    if options.get("is_causal"):
        seen = seen & (away <= 0)
    window = options.get("window")
    if isinstance(window, int):
        seen = seen & (away.abs() < window)
    elif window is not None:
        seen = seen & (away >= -(window[0] if window[0] is not None else 10**6))
        seen = seen & (away <= (window[1] if window[1] is not None else 10**6))
    for extra in (options.get("attn_mask"), options.get("bias")):
        if extra is not None and extra.dtype == torch.bool:
            seen = seen & extra
        elif extra is not None:
            seen = seen & (extra != -math.inf)
            scores = scores + extra.masked_fill(extra == -math.inf, 0.0)
    scores = torch.where(seen, scores, -1e300)
    weights = torch.where(seen, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    mixed: Tensor = (weights / torch.where(total == 0, 1.0, total)) @ v
    return mixed


def shaped(heads: int = 2, groups: int = 2, lq: int = 5, lk: int = 5, d: int = 3, e: int = 2) -> tuple[Tensor, ...]:
    return random(2, heads, lq, d), random(2, groups, lk, d, seed=1), random(2, groups, lk, e, seed=2)


MASK = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) > 0.4
MASK[0, 0, 2] = False  # a query that sees nothing
ADDED = random(1, 2, 5, 5, seed=5).masked_fill(torch.eye(5, dtype=torch.bool).roll(1, 0), -math.inf)

CASES: dict[str, tuple[Options, Options]] = {
    "all": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "scaled": ({}, {"scale": 0.3, "is_causal": "top-left"}),
    "mask": ({}, {"attn_mask": MASK}),
    "mask of keys": ({"heads": 1, "groups": 1}, {"attn_mask": torch.tensor([True, True, True, False, True])}),
    "mask and causal": ({}, {"attn_mask": MASK, "is_causal": True}),
    "added": ({}, {"attn_mask": ADDED}),
    "window": ({}, {"window": 2}),
    "one-sided window": ({}, {"window": (1, None)}),
    "window and causal": ({}, {"window": 2, "is_causal": True}),
    "groups": ({"heads": 4, "groups": 2}, {"enable_gqa": True, "is_causal": True}),
    "one group": ({"heads": 3, "groups": 1}, {"enable_gqa": True, "attn_mask": MASK}),
    "few keys": ({"lk": 3}, {"is_causal": True}),
    "many keys": ({"lq": 3, "lk": 7}, {"is_causal": "bottom-right"}),
    "more queries than keys": ({"lq": 7, "lk": 4}, {"is_causal": "bottom-right", "window": 3}),
    "one of each": ({"heads": 1, "groups": 1, "lq": 1, "lk": 1, "d": 1, "e": 1}, {}),
    "soft cap": ({}, {"softcap": 0.8, "is_causal": True}),
}
BIASES: dict[str, tuple[Options, Options, tuple[int, ...]]] = {
    "bias": ({}, {}, (1, 2, 5, 5)),
    "bias of keys": ({}, {"is_causal": True}, (2, 1, 1, 5)),
    "bias of all": ({"heads": 4, "groups": 2}, {"enable_gqa": True, "attn_mask": MASK}, (2, 4, 5, 5)),
    "bias of heads": ({"heads": 4, "groups": 2}, {"enable_gqa": True}, (4, 1, 1)),
    "bias and cap": ({}, {"softcap": 0.7, "attn_mask": ADDED}, (1, 2, 5, 5)),
}
Attention = Callable[..., Tensor]


def posed(name: str) -> tuple[tuple[Tensor, ...], Callable[[Attention], Attention]]:
    """Inputs, among them a bias, and a way to make a function of them."""
    if name in CASES:
        shape, options = CASES[name]
        return shaped(**shape), lambda of: lambda q, k, v: of(q, k, v, **options)
    shape, options, size = BIASES[name]
    return (*shaped(**shape), random(*size, seed=7)), lambda of: lambda q, k, v, b: of(q, k, v, bias=b, **options)


def close(one: Any, other: Any, rtol: float = 1e-11) -> None:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    size = max([1e-3, *(float(b.abs().max()) for _, b in pairs if b.numel())])
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [*CASES, *BIASES])
def test_gradcheck_in_all_modes(name: str, fast: bool, way: str) -> None:
    """Against finite differences: along one direction if it is to be fast, else every number."""
    inputs, of = posed(name)
    inputs = tuple(x.requires_grad_() for x in inputs)
    function = of(scaled_dot_product_attention)
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=fast)
    few = fast or sum(x.numel() for x in inputs) > 200
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=few)


def loss_of(function: Attention) -> Callable[..., Tensor]:
    def loss(*inputs: Tensor) -> Tensor:
        y = function(*inputs)
        return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=D).view(y.shape)).sin().sum()

    return loss


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...]], Any]] = {
    "value": lambda f, x, u: f(*x),
    "jvp of grad": lambda f, x, u: jvp(grad(f, tuple(range(len(x)))), x, u),
    "vjp of grad": lambda f, x, u: vjp(grad(f, tuple(range(len(x)))), *x)[1](u),
    "grad of jvp": lambda f, x, u: grad(lambda *y: jvp(f, y, u)[1], tuple(range(len(x))))(*x),
    "jvp of jvp": lambda f, x, u: jvp(lambda *y: jvp(f, y, u)[1], x, tuple(y.cos() for y in x))[1],
    "jvp of jvp along what moves": lambda f, x, u: jvp(
        lambda *y: jvp(f, y, tuple(z.sin() for z in y))[1], x, tuple(y.cos() for y in x)
    )[1],
    "hessian": lambda f, x, u: hessian(f, tuple(range(len(x))))(*x),
    "jacrev of jacrev": lambda f, x, u: jacrev(jacrev(f, tuple(range(len(x)))), tuple(range(len(x))))(*x),
    "vmap of jvp of grad": lambda f, x, u: vmap(lambda *w: jvp(grad(f, tuple(range(len(x)))), x, w)[1])(
        *(torch.stack([y, 2 * y, y.sin()]) for y in u)
    ),
    "vmap of vjp of grad": lambda f, x, u: vmap(
        lambda q: vjp(grad(f, tuple(range(len(x)))), q, *x[1:])[1](u), in_dims=1
    )(torch.stack([x[0], x[0].sin()], 1)),
    "linearize": lambda f, x, u: linearize(f, *x)[1](*u),
    "linearize of grad": lambda f, x, u: linearize(grad(f, tuple(range(len(x)))), *x)[1](*u),
}


PAIRS = [
    (name, transform)
    for name in [*CASES, *BIASES]
    for transform in TRANSFORMS
    # these are as large as all inputs squared, and made of the same kernels
    if transform not in ("hessian", "jacrev of jacrev") or name in ("causal", "groups", "bias", "bias and cap")
]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(("name", "transform"), PAIRS)
def test_transformations(name: str, transform: str, way: str) -> None:
    """Every composition of two, against the definition."""
    x, of = posed(name)
    u = tuple(y.flip(-1).cos() for y in x)
    ours, truth = (TRANSFORMS[transform](loss_of(of(f)), x, u) for f in (scaled_dot_product_attention, naive))
    close(ours, truth)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]),
    lq=st.integers(1, 9),
    lk=st.integers(1, 9),
    d=st.sampled_from([1, 2, 3, 8]),
    e=st.integers(1, 3),
    mask=st.sampled_from(["none", "causal", "bool", "additive", "infinite"]),
    scale=st.sampled_from([None, 0.3]),
)
def test_any_shape(
    way: str, heads: tuple[int, int], lq: int, lk: int, d: int, e: int, mask: str, scale: float | None
) -> None:
    """Values and gradients as torch's, products with the Hessian as the definition's; a mask may leave nothing."""
    q, k, v = (x.requires_grad_() for x in shaped(*heads, lq, lk, d, e))
    keep = torch.rand(2, 1, lq, lk, generator=torch.Generator().manual_seed(lq * lk)) > 0.4
    options: Options = {"scale": scale, "enable_gqa": heads[0] != heads[1]}
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "bool":
        options["attn_mask"] = keep
    elif mask == "additive":
        options["attn_mask"] = random(2, 1, lq, lk)
    elif mask == "infinite":
        options["attn_mask"] = torch.zeros(2, 1, lq, lk, dtype=D).masked_fill(~keep, -math.inf)
    ours, theirs = scaled_dot_product_attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
    close(ours, theirs, 1e-12)
    g = random(*ours.shape, seed=9)
    close(torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(theirs, (q, k, v), g))
    close(product(scaled_dot_product_attention, (q, k, v), options), product(naive, (q, k, v), options))


def product(function: Attention, inputs: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    """H u of the sum of squares, by reverse over reverse."""
    gradient = torch.autograd.grad(function(*inputs, **options).square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(gradient, inputs, [x.detach().flip(-1).cos() for x in inputs])


@pytest.mark.parametrize("d", [1, 2, 7, 16, 33, 64, 100, 128])
def test_sizes_of_heads(d: int, tiled: None) -> None:
    inputs = tuple(x.requires_grad_() for x in shaped(4, 2, 13, 17, d, d))
    options = {"is_causal": "bottom-right", "enable_gqa": True}
    close(product(scaled_dot_product_attention, inputs, options), product(naive, inputs, options))


@pytest.mark.parametrize("length", [700, pytest.param(2500, marks=pytest.mark.full)])
def test_lengths_at_which_tiles_are_taken_by_themselves(length: int) -> None:
    q, k, v = (random(1, 2, length, 8, seed=i).requires_grad_() for i in range(3))
    for options in ({"is_causal": True}, {"window": 100}, {"attn_mask": random(1, 1, 1, length) > -1}):
        close(product(scaled_dot_product_attention, (q, k, v), options), product(naive, (q, k, v), options))


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_no_matrix_of_all_scores() -> None:
    length = 1500
    inputs = tuple(torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    with Largest() as seen:  # type: ignore[no-untyped-call]
        product(scaled_dot_product_attention, inputs, {"attn_mask": torch.ones(1, length, dtype=torch.bool)})
    assert seen.numbers < length**2 / 4


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_lower_precision(dtype: torch.dtype, rtol: float, way: str) -> None:
    """Half precision is summed in float32: what is lost is lost in the inputs and in what is handed on."""
    exact = tuple(x.to(dtype).to(D).requires_grad_() for x in shaped(2, 2, 9, 9, 8, 8))
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in exact)
    found = product(scaled_dot_product_attention, inputs, {"is_causal": True})
    assert all(x.dtype == dtype for x in found)
    for a, b in zip(found, product(naive, exact, {"is_causal": True}), strict=True):
        assert (a.to(D) - b).norm() < rtol * b.norm()


# At the borders


def test_a_query_that_sees_nothing(way: str) -> None:
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[3] = True
    for options in ({"attn_mask": mask}, {"attn_mask": torch.zeros(5, 5, dtype=D).masked_fill(~mask, -math.inf)}):
        q, k, v = (x.requires_grad_() for x in shaped())
        y = scaled_dot_product_attention(q, k, v, **options)
        assert y[..., [0, 1, 2, 4], :].eq(0).all()
        gradient = torch.autograd.grad(y.sin().sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(gradient, (q, k, v), [torch.ones_like(x) for x in gradient])
        for x in (gradient[0], second[0]):
            assert x[..., [0, 1, 2, 4], :].eq(0).all()
            assert x[..., 3, :].ne(0).all()
        assert all(x.isfinite().all() for x in second)


def test_axes_of_any_number_and_memory_in_any_order(way: str) -> None:
    q, k, v = random(6, 3), random(6, 3, seed=1), random(6, 2, seed=2)
    close(scaled_dot_product_attention(q, k, v), naive(q, k, v))
    q, k, v = random(2, 1, 3, 6, 3), random(3, 6, 3, seed=1), random(1, 4, 1, 6, 2, seed=2)
    close(scaled_dot_product_attention(q, k, v), naive(q, k, v))
    mask = random(2, 1, 3, 6, 6) > 0
    close(scaled_dot_product_attention(q, k, v, mask), naive(q, k, v, attn_mask=mask))
    turned = random(2, 5, 4, 3).transpose(1, 2)
    close(scaled_dot_product_attention(turned, turned, turned), naive(turned, turned, turned))
    backwards = random(2, 4, 3, 5).mT.flip(2)
    close(scaled_dot_product_attention(backwards, backwards, backwards), naive(backwards, backwards, backwards))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)])
def test_nothing_to_attend(shape: tuple[int, ...], way: str) -> None:
    batch, heads, lq, lk = shape
    q = torch.randn(batch, heads, lq, 3, dtype=D, requires_grad=True)
    k = torch.randn(batch, heads, lk, 3, dtype=D, requires_grad=True)
    y = scaled_dot_product_attention(q, k, k, is_causal=True)
    assert y.shape == (batch, heads, lq, 3)
    assert y.eq(0).all()
    gradient = torch.autograd.grad(y.square().sum(), (q, k), create_graph=True)
    second = torch.autograd.grad(gradient, (q, k), [torch.ones_like(x) for x in gradient], materialize_grads=True)
    assert all(x.eq(0).all() for x in (*gradient, *second))


def test_nan_is_not_hidden(way: str) -> None:
    for which in range(3):
        inputs = list(shaped())
        inputs[which] = inputs[which].clone()
        inputs[which][0, 0, 0, 0] = math.nan
        leaves = tuple(x.requires_grad_() for x in inputs)
        y = scaled_dot_product_attention(*leaves, is_causal=True)
        assert y[0, 0].isnan().any()
        assert not y[0, 1].isnan().any()
        assert any(x.isnan().any() for x in product(scaled_dot_product_attention, leaves, {"is_causal": True}))


def test_scores_that_are_large(way: str) -> None:
    q, k, v = shaped()
    close(scaled_dot_product_attention(1e3 * q, k, v), naive(1e3 * q, k, v))
    inputs = tuple(x.requires_grad_() for x in (300 * q, k, v))
    close(product(scaled_dot_product_attention, inputs, {}), product(naive, inputs, {}), 1e-9)


def test_a_third_derivative_is_an_error(tiled: None) -> None:
    q = random(1, 1, 4, 2).requires_grad_()

    def second(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(scaled_dot_product_attention(x, x, x).sin().sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sin().sum(), x, create_graph=True)
        return h

    with pytest.raises(cl.CurvlensError, match="third derivative"):
        torch.autograd.grad(second(q).sin().sum(), q)
    with pytest.raises(cl.CurvlensError, match="third derivative"):
        jvp(hessian(lambda x: scaled_dot_product_attention(x, x, x).sin().sum()), (q.detach(),), (q.detach(),))


# Large scores, hidden keys


def first_and_second(function: Attention, inputs: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    """Attention, its gradient, and a product with the Hessian."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    y = function(*leaves, **options)
    g = torch.autograd.grad(loss_of(lambda: y)(), leaves, create_graph=True)
    return y, *g, *torch.autograd.grad(g, leaves, [x.detach().flip(-1).cos() for x in leaves])


@pytest.mark.parametrize("causal", [True, "bottom-right"])
@pytest.mark.parametrize("window", [(1, None), (None, None), (1, 0), (None, 3), (0, 9)])
def test_a_window_leaves_causal_attention_causal(window: tuple[int | None, int | None], causal: Any, way: str) -> None:
    q, k, v = shaped(lq=4, lk=6)
    options = {"window": window, "is_causal": causal}
    close(scaled_dot_product_attention(q, k, v, **options), naive(q, k, v, **options))


@pytest.mark.parametrize("offset", [-1e9, 1e9, -1e30, torch.finfo(torch.float32).min])
def test_rows_with_a_large_offset(offset: float, way: str) -> None:
    """Nothing is left of the scores in rows to which a large number is added: these are a mean of all values."""
    mask = torch.zeros(5, 5)
    mask[:3] = offset
    q, k, v = (x.float() for x in shaped())
    found = first_and_second(scaled_dot_product_attention, (q, k, v), {"attn_mask": mask})
    without = q * torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])[:, None]
    truth = first_and_second(naive, tuple(x.to(D) for x in (without, k, v)), {})
    for i in (0, 3):  # the values and dV, which need no derivative of the scores
        torch.testing.assert_close(found[i].to(D), truth[i], rtol=1e-5, atol=1e-5)
    assert all(x.isfinite().all() for x in found)


def test_ties_of_large_scores(way: str) -> None:
    q, k, v = (torch.full((1, 1, 3, 2), x, dtype=torch.float32) for x in (1e5, 1e3, 1.0))
    v = (v + torch.arange(3.0)[:, None]).requires_grad_()
    y = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(y, torch.full_like(y, 2.0))
    (g,) = torch.autograd.grad(y.sum(), v)
    torch.testing.assert_close(g, torch.ones_like(g))


@pytest.mark.parametrize("hidden", ["causal", "mask"])
def test_hidden_keys_stay_hidden_beside_a_mask_of_the_lowest_number(hidden: str, way: str) -> None:
    q, k, v = (x.float() for x in shaped())
    added = torch.zeros(5)
    added[:3] = torch.finfo(torch.float32).min
    options: Options = {"is_causal": True} if hidden == "causal" else {"attn_mask": torch.ones(5, 5).tril().bool()}
    y = scaled_dot_product_attention(q, k, v, **options, bias=added)
    for i in range(3):
        torch.testing.assert_close(y[..., i, :], v[..., : i + 1, :].mean(-2))


def test_a_hidden_key_of_any_size(way: str) -> None:
    """Its score is infinite."""
    q, k, v = (x.float() for x in shaped())
    k[..., 4, :] = 3e38
    mask = torch.tensor([True, True, True, True, False])
    found = first_and_second(scaled_dot_product_attention, (3 * q, k, v), {"attn_mask": mask})
    truth = first_and_second(scaled_dot_product_attention, (3 * q, k[..., :4, :], v[..., :4, :]), {})
    close(found[0], truth[0], 1e-5)
    assert all(x.isfinite().all() for x in found[:4])
    if way == "plain":  # tiles do not look at the derivatives of hidden scores, which are infinite as well
        moved = jvp(lambda x: scaled_dot_product_attention(x, k, v, mask), (q,), (q.cos(),))[1]
        assert moved.isfinite().all()
        assert found[6].isfinite().all()


def test_a_blind_query_of_any_size(way: str) -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False
    q, k, v = (x.float() for x in shaped())
    q[..., 1, :] = 1e38
    function: Attention = lambda *x: scaled_dot_product_attention(*x, mask)  # noqa: E731
    for x in first_and_second(scaled_dot_product_attention, (q, 9 * k, v), {"attn_mask": mask}):
        assert x.isfinite().all()
    moved = jvp(lambda x: jvp(lambda y: function(y, 9 * k, v), (x,), (x.cos(),))[1], (q,), (q.cos(),))
    assert all(x.isfinite().all() and x[..., 1, :].eq(0).all() for x in moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_a_mean(dtype: torch.dtype, way: str) -> None:
    """G∘O and its parts cancel: an O that is rounded would leave nothing of the difference."""
    q, k, v = (x.to(dtype) for x in shaped(2, 2, 9, 9, 8, 8))
    v = v + 30
    g = random(2, 2, 9, 8, seed=4).to(dtype)

    def products(function: Attention, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves = tuple(x.detach().requires_grad_() for x in given)
        y = function(*leaves)
        slope = torch.autograd.grad(y, leaves, g.to(y.dtype), create_graph=True)
        return *slope, *torch.autograd.grad(slope, leaves, [x.detach().cos() for x in leaves])

    truth = products(naive, tuple(x.to(D) for x in (q, k, v)))
    for a, b in zip(products(scaled_dot_product_attention, (q, k, v)), truth, strict=True):
        assert a.dtype == dtype
        assert (a.to(D) - b).norm() < 0.01 * b.norm()


# Other ways of torch to say it


@pytest.mark.parametrize("function", ["ours", "mode"])
def test_causal_biases_of_torch(function: str, way: str) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = shaped(lq=4, lk=6)
    for make, causal in ((causal_upper_left, True), (causal_lower_right, "bottom-right")):
        truth = naive(q, k, v, is_causal=causal)
        if function == "ours":
            close(scaled_dot_product_attention(q, k, v, make(4, 6)), truth)
        else:
            with cl.second_order():
                close(F.scaled_dot_product_attention(q, k, v, attn_mask=make(4, 6)), truth)
    with pytest.raises(cl.CurvlensError, match="CausalBias for 4 queries and 5 keys; expected one for 4 and 6"):
        scaled_dot_product_attention(q, k, v, causal_upper_left(4, 5))
    with pytest.raises(cl.CurvlensError, match="Give only one of them"):
        scaled_dot_product_attention(q, k, v, causal_upper_left(4, 6), is_causal=True)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool, way: str) -> None:
    """As torch's: inputs and results in half precision, whatever they were; sums in float32."""
    q, k, v = (x.float().requires_grad_() for x in shaped(2, 2, 9, 9, 8, 8))

    def second(y: Tensor) -> tuple[Tensor, ...]:
        g = torch.autograd.grad(y.float().square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(g, (q, k, v), [x.detach().flip(-1).cos() for x in (q, k, v)])

    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = scaled_dot_product_attention(q, k, v.bfloat16(), is_causal=True)
        with cl.second_order():
            by_mode = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found = second(y) if inside else None
        moved = jvp(lambda x: scaled_dot_product_attention(x, k, v), (q,), (k,))[1]
        double = scaled_dot_product_attention(q.double(), k.double(), v.double())
    found = second(y) if found is None else found
    assert y.dtype == theirs.dtype == mixed.dtype == by_mode.dtype == moved.dtype == torch.bfloat16
    assert double.dtype == D
    torch.testing.assert_close(y, theirs, rtol=0.02, atol=0.02)
    truth = product(naive, tuple(x.detach().to(D).requires_grad_() for x in (q, k, v)), {"is_causal": True})
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == torch.float32
        assert (a.to(D) - b).norm() < 0.05 * b.norm()


def test_numbers_of_numpy_and_of_tensors(way: str) -> None:
    q, k, v = shaped()
    truth = naive(q, k, v, scale=0.5, window=2, softcap=2.0)
    for number, whole in ((np.float32, np.int64), (torch.tensor, torch.tensor)):
        found = scaled_dot_product_attention(q, k, v, scale=number(0.5), window=whole(2), softcap=number(2.0))
        close(found, truth)
        found = scaled_dot_product_attention(q, k, v, window=(whole(1), None))
        close(found, naive(q, k, v, window=(1, None)))


def test_no_heads_and_a_mask(way: str) -> None:
    q = torch.randn(2, 0, 5, 3)
    for mask in (torch.ones(2, 0, 5, 5, dtype=torch.bool), torch.zeros(1, 1, 5, 5), torch.zeros(0, 5, 5)):
        assert scaled_dot_product_attention(q, q, q, mask).shape == (2, 0, 5, 3)


# Derivatives by what second derivatives are linear in


LINEAR: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Any]] = {
    "functional.hvp": lambda f, x, u: AF.hvp(loss_of(f), x, u),
    "functional.vhp": lambda f, x, u: AF.vhp(loss_of(f), x, u),
    "functional.hessian": lambda f, x, u: AF.hessian(loss_of(f), x),
    "functional.hessian, batched": lambda f, x, u: AF.hessian(loss_of(f), x, vectorize=True),
    "functional.hessian, forward": lambda f, x, u: AF.hessian(
        loss_of(f), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "gradient of functional.jvp": lambda f, x, u: gradient_of_jvp(f, x, u),
    "derivative of u'Hu": lambda f, x, u: by_direction(loss_of(f), x, u),
    "jvp by the direction": lambda f, x, u: jvp(lambda w: jvp(grad(loss_of(f)), (x,), (w,))[1], (u,), (x.sin(),)),
    "grad by the direction": lambda f, x, u: grad(lambda w: (w * jvp(grad(loss_of(f)), (x,), (w,))[1]).sum())(u),
    "jvp by a direction of two": lambda f, x, u: jvp(
        lambda w: jvp(lambda y: jvp(loss_of(f), (y,), (u,))[1], (x,), (w,))[1], (u,), (x.sin(),)
    ),
    "grad by a direction of two": lambda f, x, u: grad(
        lambda w: jvp(lambda y: jvp(loss_of(f), (y,), (w,))[1], (x,), (w,))[1]
    )(u),
    "hessian by the direction": lambda f, x, u: hessian(lambda w: (w * jvp(grad(loss_of(f)), (x,), (w,))[1]).sum())(u),
    "by the cotangent": lambda f, x, u: by_cotangent(f, x, u),
}


def gradient_of_jvp(f: Callable[..., Tensor], x: Tensor, u: Tensor) -> Any:
    x = x.detach().requires_grad_()
    _, moved = AF.jvp(f, x, u, create_graph=True)
    return torch.autograd.grad(moved.sin().sum(), x)


def by_direction(f: Callable[..., Tensor], x: Tensor, u: Tensor) -> Any:
    x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    (h,) = torch.autograd.grad(g, x, u, create_graph=True)
    return torch.autograd.grad((h * u).sum(), u)


def by_cotangent(f: Callable[..., Tensor], x: Tensor, u: Tensor) -> Any:
    """Of ⟨w, D²⟨G, O⟩ u⟩ by G, w and u."""
    x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
    y = f(x)
    g = torch.linspace(0.5, 1.5, y.numel(), dtype=D).view(y.shape).requires_grad_()
    (slope,) = torch.autograd.grad(y, x, g, create_graph=True)
    bent, moved = torch.autograd.grad(slope, (x, g), u, create_graph=True)
    return torch.autograd.grad(bent.sin().sum() + moved.sin().sum(), (g, u))


@pytest.mark.parametrize("name", ["causal", "groups", "bias", "bias and cap"])
@pytest.mark.parametrize("way_of_it", LINEAR)
def test_ways_of_autograd_and_derivatives_by_directions(way_of_it: str, name: str, tiled: None) -> None:
    """Second derivatives are linear in their direction and in G: differentiating by these is no third derivative."""
    x, of = posed(name)
    u = torch.cat([y.flatten() for y in x]).cos()
    sizes = [y.numel() for y in x]

    def flat(f: Attention) -> Callable[..., Tensor]:
        return lambda z: of(f)(*(p.view(y.shape) for p, y in zip(z.split(sizes), x, strict=True)))

    z = torch.cat([y.flatten() for y in x])
    ours, truth = (LINEAR[way_of_it](flat(f), z, u) for f in (scaled_dot_product_attention, naive))
    close(ours, truth)


def test_a_third_derivative_beside_others_is_an_error(tiled: None) -> None:
    q, u = random(1, 1, 4, 2).requires_grad_(), random(1, 1, 4, 2, seed=1).requires_grad_()
    (g,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).sin().sum(), q, create_graph=True)
    (h,) = torch.autograd.grad(g, q, u, create_graph=True)
    for wanted in ((q,), (u, q)):
        with pytest.raises(cl.CurvlensError, match="third derivative"):
            torch.autograd.grad(h.sum(), wanted, retain_graph=True)
    with pytest.raises(cl.CurvlensError, match="third derivative"):
        torch.autograd.backward(h.sum(), retain_graph=True)
    (w,) = torch.autograd.grad((h * u).sum(), u, create_graph=True)
    with pytest.raises(cl.CurvlensError, match="third derivative"):
        torch.autograd.grad(w.sum(), q)


def test_batched_gradients_with_a_graph_are_an_error(tiled: None) -> None:
    """torch would give them without it, and what depends on them a derivative of 0."""
    q = random(1, 1, 4, 2).requires_grad_()
    y = scaled_dot_product_attention(q, q, q)
    every = torch.stack([y.detach(), y.detach().cos()])
    batched = torch.autograd.grad(y, q, every, is_grads_batched=True, retain_graph=True)[0]
    close(batched[1], torch.autograd.grad(y, q, every[1], retain_graph=True)[0])
    with pytest.raises(cl.CurvlensError, match=r"torch\.func\.vmap"):
        torch.autograd.grad(y, q, every, is_grads_batched=True, create_graph=True)
    found = vmap(lambda g: vjp(lambda x: scaled_dot_product_attention(x, x, x), q)[1](g)[0])(every)
    (second,) = torch.autograd.grad(found.sin().sum(), q)
    (first,) = torch.autograd.grad(naive(q, q, q), q, every[0], create_graph=True)
    (other,) = torch.autograd.grad(naive(q, q, q), q, every[1], create_graph=True)
    close(second, torch.autograd.grad(first.sin().sum() + other.sin().sum(), q)[0])


def test_a_mask_without_gradient_gets_none(tiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be as large as the mask, were that expanded to all heads; one that is wanted is still there."""
    collected: list[tuple[int, ...]] = []
    collect = kernels.Kernel.collect

    def watched(self: Any, into: Tensor, *rest: Any) -> None:
        collected.append(tuple(into.shape))
        collect(self, into, *rest)

    monkeypatch.setattr(kernels.Kernel, "collect", watched)
    inputs = tuple(x.requires_grad_() for x in shaped())
    mask = random(5, 5)
    truth = product(naive, inputs, {"attn_mask": mask})
    close(product(scaled_dot_product_attention, inputs, {"attn_mask": mask.expand(2, 2, 5, 5)}), truth)
    q, k, v = inputs
    masked: Callable[[Tensor], Tensor] = lambda x: scaled_dot_product_attention(x, k, v, mask).sin().sum()  # noqa: E731
    jvp(grad(masked), (q.detach(),), (q.detach(),))
    assert not collected
    truth = by_bias(naive, inputs, mask)
    close(by_bias(scaled_dot_product_attention, inputs, mask), truth)
    assert collected


def by_bias(function: Attention, inputs: tuple[Tensor, ...], bias: Tensor) -> tuple[Tensor, ...]:
    """First by the queries, where a bias does not count, then by the bias as well."""
    bias = bias.clone().requires_grad_()
    y = function(*inputs, bias=bias)
    (g,) = torch.autograd.grad(y.sin().sum(), inputs[:1], create_graph=True)
    return torch.autograd.grad(g.sin().sum(), (*inputs, bias))


@pytest.mark.parametrize("biased", [True, False])
def test_operators_are_what_their_fakes_say(biased: bool) -> None:
    q = random(2, 5, 2, 1, 3).permute(0, 2, 3, 1, 4)
    k, v = (random(2, 6, 2, 3, seed=i).transpose(1, 2) for i in (1, 2))
    b = random(1, 6, 1, 5, 2).permute(0, 4, 2, 3, 1) if biased else None
    spec = (0.3, None, 0, None)
    o, lse = ops.attend(q, k, v, b, None, *spec)
    at = (q, k, v, b, None)
    turned = o.transpose(3, 4).contiguous().transpose(3, 4)
    arguments = {
        ops.attend: at,
        ops.pull: (*at, turned, lse, o, biased),
        ops.push: (*at, turned, lse, q, k, v, b),
        ops.bend: (*at, turned, lse, o, q, k, v, b, None, biased),
        ops.push_twice: (*at, turned, lse, q, k, v, b, q, k, v, b),
    }
    for op, tensors in arguments.items():
        torch.library.opcheck(op, (*tensors, *spec), test_utils=("test_schema", "test_faketensor"))


BAD: dict[str, tuple[Options, str]] = {
    "features": ({"key": random(2, 2, 5, 4)}, r"the same number of features; got query \(2, 2, 5, 3\), key"),
    "lengths": ({"value": random(2, 2, 4, 3)}, "key and value need the same length"),
    "heads": ({"key": random(2, 3, 5, 3), "value": random(2, 3, 5, 3)}, "leading axes do not fit.*enable_gqa=True"),
    "groups": (
        {"key": random(2, 3, 5, 3), "value": random(2, 3, 5, 3), "enable_gqa": True},
        "which must divide that of the queries",
    ),
    "groups of values": (
        {"query": random(2, 4, 5, 3), "value": random(2, 4, 5, 3), "enable_gqa": True},
        "keys and values need the same number of heads",
    ),
    "groups of other samples": (
        {"key": random(3, 2, 5, 3), "value": random(3, 2, 5, 3), "enable_gqa": True},
        r"leading axes do not fit: query \(2, 2, 5, 3\)",
    ),
    "dtype": ({"key": random(2, 2, 5, 3).float()}, "key is torch.float32"),
    "integers": ({"query": torch.ones(2, 2, 5, 3).long()}, r"query is \(2, 2, 5, 3\), torch.int64"),
    "no tensor": ({"value": [1.0]}, "value is list"),
    "no heads of values": ({"key": random(2, 1, 5, 3), "value": torch.zeros(2, 0, 5, 3, dtype=D)}, "one has none"),
    "nested": (
        {"query": torch.nested.nested_tensor([torch.ones(2, 5, 3)] * 2, layout=torch.jagged)},
        "query is a nested tensor",
    ),
    "scale with a gradient": ({"scale": torch.tensor(1.0, requires_grad=True)}, "scale=.*expected a number"),
    "one axis": ({"value": random(3)}, r"value is \(3,\)"),
    "mask": ({"attn_mask": torch.ones(4, 5, dtype=torch.bool)}, r"attn_mask has shape \(4, 5\).*\(2, 2, 5, 5\)"),
    "wide mask": ({"attn_mask": torch.ones(3, 1, 1, 5, 5, dtype=torch.bool)}, "expected one that can be broadcast"),
    "mask of integers": ({"attn_mask": torch.ones(5, 5).long()}, "attn_mask is torch.int64"),
    "bias of booleans": ({"bias": torch.ones(5, 5, dtype=torch.bool)}, "bias is torch.bool"),
    "dropout": ({"dropout_p": 0.1}, r"model.eval\(\)"),
    "causal": ({"is_causal": "left"}, "'top-left' or 'bottom-right'"),
    "window": ({"window": 0}, "window=0; expected"),
    "pair": ({"window": (1, 2, 3)}, "expected a number of keys"),
    "scale": ({"scale": "a"}, "scale='a'; expected a number"),
    "cap": ({"softcap": 0.0}, "softcap=0.0; expected a positive"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name: str) -> None:
    given, message = BAD[name]
    plain: dict[str, Any] = dict(zip(("query", "key", "value"), shaped(e=3), strict=True))
    with pytest.raises(cl.CurvlensError, match=message):
        scaled_dot_product_attention(**{**plain, **given})
    with pytest.raises(TypeError, match="unexpected keyword"):
        scaled_dot_product_attention(**plain, softness=1)


# The mode


def differentiates_twice(function: Any) -> bool:
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    (g,) = torch.autograd.grad(function(q, q, q).square().sum(), q, create_graph=True)
    try:
        torch.autograd.grad(g.square().sum(), q)
    except RuntimeError:
        return False
    return True


def test_the_mode_nests_and_ends() -> None:
    attention = F.scaled_dot_product_attention
    assert not differentiates_twice(attention)
    with cl.second_order():
        assert differentiates_twice(attention)
        with cl.second_order():
            assert differentiates_twice(attention)
        assert differentiates_twice(attention)
    assert not differentiates_twice(attention)
    with pytest.raises(ValueError, match="stop"), cl.second_order():
        raise ValueError("stop")
    assert not differentiates_twice(attention)


def test_multi_head_attention_inside_the_mode() -> None:
    """torch hides the attention inside ``multi_head_attention_forward`` from ordinary modes."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def mixed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        result: Tensor = layer(a, b, c, need_weights=False)[0]
        return result

    plain = mixed(x, x, x)
    with cl.second_order():
        inside = mixed(x, x, x)
        (g,) = torch.autograd.grad(inside.square().sum(), x, create_graph=True)
        torch.autograd.grad(g.square().sum(), x)
    torch.testing.assert_close(inside, plain, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("by", ["grad", "backward", "Tensor.backward"])
def test_checkpoints_inside_the_mode(by: str) -> None:
    """What is checkpointed runs again while derivatives are taken, and has to take the same attention."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(a: Tensor) -> Tensor:
        q = layer(a, a, a, need_weights=False)[0][:, None]
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    with cl.second_order():
        truth = torch.autograd.grad(run(x), x)[0]
        y: Any = checkpoint(run, x, use_reentrant=False)
        if by == "grad":
            (found,) = torch.autograd.grad(y, x)
        else:
            torch.autograd.backward(y) if by == "backward" else y.backward()
            assert x.grad is not None
            found = x.grad
    close(found, truth)


def test_a_compiled_tangent_is_not_zero() -> None:
    y = torch.randn(1, 2, 300, 8, dtype=torch.float64)

    def tangent(y: Tensor) -> Tensor:
        found: Tensor = torch.func.jvp(lambda y: cl.sdpa.scaled_dot_product_attention(y, y, y), (y,), (y,))[1]
        return found

    expected = tangent(y)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(torch.compile(tangent, backend="eager")(y), expected)


def test_the_context_as_a_decorator() -> None:
    @cl.second_order()
    def forward(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    assert bool(h.any())


def test_lists_and_none_are_taken_as_torch_and_its_wrappers_give_them() -> None:
    x, ours = torch.randn(1, 1, 6, 4), cl.sdpa.scaled_dot_product_attention
    pair: Any = [1, 1]
    nothing: Any = None
    torch.testing.assert_close(ours(x, x, x, window=pair), ours(x, x, x, window=(1, 1)))
    torch.testing.assert_close(ours(x, x, x, is_causal=nothing), ours(x, x, x))


def test_batches_that_do_not_fit_are_no_matter_of_shared_heads() -> None:
    with pytest.raises(cl.CurvlensError, match="do not fit") as told:
        cl.sdpa.scaled_dot_product_attention(torch.randn(2, 4, 5, 8), torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8))
    assert "enable_gqa" not in str(told.value)


def test_a_first_call_sets_nothing_up() -> None:
    """torch's compiler and sympy take one to two seconds to import; attention by tiles needs neither."""
    code = """
import sys
import torch
import curvlens as cl
q = torch.randn(1, 1, 300, 4, requires_grad=True)
(g,) = torch.autograd.grad(cl.sdpa.scaled_dot_product_attention(q, q, q).square().sum(), q, create_graph=True)
torch.autograd.grad(g.square().sum(), q)
print(sorted(set(sys.modules) & {"torch._dynamo", "torch._inductor", "sympy"}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_a_tile_has_some_queries_for_each_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = list(tiles.tiles(tiles.Spec(1.0, high=0), 4096, 4096, 1))
    assert found[0].height == 128 * min(threads, 4)
    assert [tile.first for tile in found] == list(range(0, 4096, found[0].height))
    assert found[-1].last == 4096
