"""Attention written out: the same numbers as torch's, and derivatives of every order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import curvlens as cl
from curvlens.sdpa import scaled_dot_product_attention


def qkv(heads: int, groups: int, lq: int, lk: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, lq, d), (2, groups, lk, d), (2, groups, lk, d + 1))
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes)
    return q, k, v


@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]),
    lq=st.integers(1, 5),
    lk=st.integers(1, 5),
    d=st.integers(1, 4),
    mask=st.sampled_from(["none", "causal", "bool", "additive", "infinite"]),
    scale=st.sampled_from([None, 0.3]),
)
def test_equal_to_torch(heads: tuple[int, int], lq: int, lk: int, d: int, mask: str, scale: float | None) -> None:
    """Values and gradients; a mask may leave a query nothing to look at."""
    q, k, v = qkv(*heads, lq, lk, d)
    generator = torch.Generator().manual_seed(lq * lk)
    keep = torch.rand(2, 1, lq, lk, generator=generator) > 0.4
    options: dict[str, Any] = {"scale": scale, "enable_gqa": heads[0] != heads[1]}
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "bool":
        options["attn_mask"] = keep
    elif mask == "additive":
        options["attn_mask"] = torch.randn(2, 1, lq, lk, generator=generator, dtype=torch.float64)
    elif mask == "infinite":
        options["attn_mask"] = torch.zeros(2, 1, lq, lk, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    ours, theirs = scaled_dot_product_attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    g = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(theirs, (q, k, v), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.eye(3, dtype=torch.bool).roll(1, 0)}])
def test_second_derivatives(options: dict[str, Any]) -> None:
    inputs = qkv(2, 2, 3, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: scaled_dot_product_attention(*x, **options), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: scaled_dot_product_attention(*x, **options), inputs)


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


def test_dropout_is_refused() -> None:
    q = torch.randn(1, 1, 2, 2)
    with pytest.raises(cl.CurvlensError, match=r"model.eval\(\)"):
        scaled_dot_product_attention(q, q, q, dropout_p=0.1)
