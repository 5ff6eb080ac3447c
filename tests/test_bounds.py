"""Bounds of the closed forms: never violated, and how tight they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvlens.calculus import attention, bounds
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
        for moments in (False, True):
            bound = bounds.attention(x, wq, wk, wv, y, moments=moments)
            room = 1 + 1e-10
            assert norms["total"] <= bound.total * room
            for part in ("outer", "functional"):
                assert norms[part] <= torch.linalg.matrix_norm(getattr(bound, part), 2) * room, (seed, part)
            for i, a in enumerate("QKV"):
                for b in "QKV"[i:]:
                    block = torch.linalg.matrix_norm(H.total[a, b], 2)
                    assert block <= bound.block(a, b) * room + 1e-300, (seed, a, b, moments)
            tightest[moments] = max(tightest[moments], bound.tightness(float(norms["total"])))
    assert tightest[True] > 0.9
    assert tightest[False] > 0.3


def test_the_moments_make_it_tighter() -> None:
    shares = []
    for seed in range(100):
        x, wq, wk, wv, y = case(seed)
        prior, moments = (bounds.attention(x, wq, wk, wv, y, moments=m).total for m in (False, True))
        assert moments <= prior * (1 + 1e-10)
        shares.append(float(attention_norm(x, wq, wk, wv, y)) / moments)
    assert 0.2 < float(torch.tensor(shares).median()) <= 1


def attention_norm(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, y: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(attention.hessian(x, wq, wk, wv, y).total.dense(), 2)
    return norm


def test_bad_questions() -> None:
    x, wq, wk, wv, y = case(0)
    with pytest.raises(CurvlensError, match="There is no block 'O'"):
        bounds.attention(x, wq, wk, wv, y).block("Q", "O")
