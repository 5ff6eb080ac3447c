"""The closed-form Hessian of attention against dense autodiff and finite differences, block by block."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_truth import Case
from curvlens.calculus import attention, term_norms
from curvlens.calculus.attention import AttentionHessian, potential
from curvlens.calculus.form import SplitPart
from curvlens.calculus.terms import Tokens
from curvlens.operators import closed_form

CASES = {
    "plain": Case(),
    "wide key": Case(d_k=6, d_v=3),
    "causal": Case(mask="causal"),
    "boolean mask, an empty row": Case(mask="bool", length=6),
    "mask by sample": Case(mask="bool", batch=(2,)),
    "three heads": Case(heads=3, d_k=2),
    "one named head": Case(heads=1, mask="causal"),
    "low-rank value": Case(rank=3, d_v=5),
    "low-rank heads": Case(heads=2, rank=2, d_v=4, mask="causal"),
    "batch": Case(batch=(2, 3), mask="causal"),
    "sum": Case(batch=(3,), reduction="sum"),
    "cross": Case(keys=3, d_keys=5),
    "cross, heads, mask": Case(keys=7, d_keys=3, heads=2, rank=2, mask="bool", batch=(2,)),
    "cold": Case(temperature=0.5),
    "hot": Case(temperature=7.0, heads=2),
    "cross-entropy": Case(loss="ce", batch=(2,), mask="causal"),
    "cross-entropy, heads": Case(loss="ce", heads=2, rank=2, d_v=4),
    "cross-entropy by a root": Case(loss="ce", root=True, heads=2, rank=2, d_v=4, mask="causal"),
    "few keys": Case(length=3, d=6, heads=2, rank=2, batch=(2,), mask="bool"),
    "few keys, root": Case(length=3, d=6, d_k=4, loss="ce", root=True, rank=2, batch=(2,), mask="causal"),
    "few keys, linear": Case(length=3, d=6, kind="linear", mask="causal", loss="pair", root=True, batch=(2,)),
    "few keys, one matrix": Case(length=3, d=5, single=True, loss="ce", root=True),
    "few keys, crossed": Case(keys=2, d_keys=5, heads=2, loss="ce", root=True),
    "tokens, by a root": Case(wrt="QKVX", length=3, loss="pair", root=True, mask="causal"),
    "something behind": Case(loss="pair", heads=2, batch=(2,), mask="bool"),
    "linear": Case(kind="linear"),
    "linear, causal, heads": Case(kind="linear", mask="causal", heads=2, rank=2, batch=(2,)),
    "linear, cross-entropy, mask": Case(kind="linear", mask="bool", loss="ce"),
    "one matrix": Case(single=True),
    "one matrix, heads": Case(single=True, heads=2, mask="causal", loss="ce"),
    "one matrix, crossed": Case(single=True, keys=3, d_keys=5),
    "tokens": Case(wrt="QKVX", length=4),
    "tokens, heads, batch": Case(wrt="QKVX", heads=2, rank=2, batch=(2,), length=3, mask="causal", loss="pair"),
    "context": Case(wrt="XC", keys=3, d_keys=5),
    "context, linear": Case(wrt="QVXC", keys=3, d_keys=5, kind="linear", heads=2),
    "tokens, one matrix": Case(single=True, wrt="QKVX", length=4),
    "many tokens": Case(length=6, d=3, d_k=3, d_v=3, batch=(7,), mask="causal"),
    "many tokens, heads": Case(length=5, d=3, d_k=4, d_v=2, heads=3, batch=(2,), mask="bool"),
    "many tokens, crossed": Case(length=7, keys=4, d=5, d_k=5, d_keys=3, d_v=4, heads=2),
    "many tokens, by a root": Case(length=6, d=4, d_k=4, d_v=4, loss="ce", root=True, mask="causal"),
    "all of size one": Case(length=1, d=1, d_k=1, d_v=1),
    "a single token": Case(length=1, batch=(2,)),
}
PARTS: tuple[SplitPart, ...] = ("outer", "functional", "total")


def closed(case: Case) -> AttentionHessian:
    positional, keywords = case.arguments()
    return (attention.hessian_single if case.single else attention.hessian)(*positional, **keywords)


def check(case: Case, tolerance: float) -> None:
    """Every block of every part, and all that is read off without building one."""
    H = closed(case)
    assert list(H.total.names) == case.names()
    _, _, slices = case.flat()
    generator = torch.Generator().manual_seed(1)
    for part in PARTS:
        truth = case.truth(part)
        floor = tolerance * float(truth.norm()) * 1e-2
        form = getattr(H, part)
        v = torch.randn(len(truth), 2, generator=generator, dtype=torch.float64)
        dense = form.dense()
        for a, b in combinations_with_replacement(form.names, 2):
            block = truth[slices[a], slices[b]]
            size = float(block.norm())
            assert float((form[a, b] - block).norm()) <= tolerance * size + floor, (part, a, b)
            assert float((form[b, a] - block.T).norm()) <= tolerance * size + floor, (part, b, a)
            assert float((dense[slices[a], slices[b]] - block).norm()) <= tolerance * size + floor, (part, a, b)
            assert float((dense[slices[b], slices[a]] - block.T).norm()) <= tolerance * size + floor, (part, b, a)
            assert abs(H.norm((a, b), part) - size) <= tolerance * size + floor, (part, a, b)
            if a == b:
                diagonal = block.diagonal()
                assert float((H.diagonal(a, part) - diagonal).norm()) <= tolerance * size + floor
                assert abs(H.trace(a, part) - float(diagonal.sum())) <= 10 * (tolerance * size + floor)
        scale = float(truth.norm()) * float(v.norm())
        assert float((dense - truth).norm()) <= tolerance * float(truth.norm()) + 1e-300
        assert float((H.matvec(v, part) - truth @ v).norm()) <= tolerance * scale
        assert float((form.matvec(v[:, 0]) - truth @ v[:, 0]).norm()) <= tolerance * scale
        assert abs(H.norm(part=part) - float(truth.norm())) <= tolerance * float(truth.norm())


@pytest.mark.parametrize("name", CASES)
def test_every_block_against_autodiff(name: str) -> None:
    check(CASES[name], 1e-11)


@pytest.mark.parametrize("name", CASES)
def test_products_against_finite_differences(name: str) -> None:
    case = CASES[name]
    H = closed(case)
    v = torch.randn(H.total.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    v /= v.norm()
    truth = case.by_differences(v)
    product = H.matvec(v)
    for block, part in H.total.slices.items():
        assert float((product[part] - truth[part]).norm()) <= 1e-7 * float(truth[part].norm()) + 1e-9, block


sizes = st.integers(1, 4)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    length=sizes,
    d=sizes,
    d_k=sizes,
    d_v=sizes,
    heads=st.sampled_from([None, 1, 2]),
    rank=st.sampled_from([None, 1, 3]),
    batch=st.sampled_from([(), (1,), (2,), (2, 1)]),
    mask=st.sampled_from([None, "causal", "bool"]),
    loss=st.sampled_from(["square", "ce", "pair"]),
    root=st.booleans(),
    kind=st.sampled_from(["softmax", "linear"]),
    temperature=st.floats(0.5, 3),
    seed=st.integers(0, 1000),
)
def test_any_shape(**settings_: Any) -> None:
    check(Case(**settings_), 1e-11)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    length=sizes,
    keys=sizes,
    d=sizes,
    d_keys=sizes,
    heads=st.sampled_from([None, 2]),
    single=st.booleans(),
    wrt=st.sampled_from(["QKVXC", "X", "C", "QKV", "VX", "QC"]),
    mask=st.sampled_from([None, "bool"]),
    loss=st.sampled_from(["square", "pair"]),
    seed=st.integers(0, 1000),
)
def test_any_shape_of_cross_attention(**settings_: Any) -> None:
    if settings_["single"] and "K" not in settings_["wrt"]:
        settings_["wrt"] = settings_["wrt"].replace("Q", "QK")
    check(Case(d_k=2, **settings_), 1e-11)


LARGE = {
    "addition": Case(length=17, d=16, d_k=16, d_v=16, mask="causal", batch=(2,), loss="ce"),
    "wide": Case(length=17, d=16, d_k=8, d_v=12, loss="pair", mask="bool"),
    "heads": Case(length=12, d=16, d_k=4, d_v=16, heads=4, rank=4, mask="causal", batch=(2,)),
    "cross, heads": Case(length=9, keys=13, d=10, d_keys=12, d_k=5, d_v=8, heads=3, temperature=2.0),
    "tokens": Case(length=8, d=6, d_k=4, d_v=5, wrt="QKVX", mask="causal", batch=(2,), loss="ce"),
    "linear": Case(length=17, d=12, d_k=12, d_v=12, kind="linear", mask="causal"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_larger_layers(name: str) -> None:
    check(LARGE[name], 1e-11)


@pytest.mark.full
@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    length=st.integers(1, 7),
    d=st.integers(1, 6),
    d_k=st.integers(1, 6),
    d_v=st.integers(1, 6),
    heads=st.sampled_from([None, 1, 3]),
    rank=st.sampled_from([None, 1, 4]),
    batch=st.sampled_from([(), (3,), (2, 2)]),
    mask=st.sampled_from([None, "causal", "bool"]),
    loss=st.sampled_from(["square", "ce", "pair"]),
    root=st.booleans(),
    kind=st.sampled_from(["softmax", "linear"]),
    temperature=st.floats(0.4, 5),
    seed=st.integers(0, 10_000),
)
def test_many_shapes(**settings_: Any) -> None:
    check(Case(**settings_), 1e-11)


def test_heads_do_not_meet_in_the_functional_part() -> None:
    H = closed(CASES["three heads"])
    for a in H.functional.names:
        for b in H.functional.names:
            if a[-1] != b[-1]:
                assert H.functional.terms(a, b) == []
                assert not H.functional[a, b].any()
    assert H.outer["Q0", "K2"].any()


def test_the_value_block_of_the_functional_part_is_exactly_zero() -> None:
    assert closed(CASES["plain"]).norm("V", "functional") == 0.0
    low = closed(CASES["low-rank value"])
    assert low.norm("V", "functional") == 0.0
    assert low.norm("O", "functional") == 0.0
    assert low.norm(("V", "O"), "functional") > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, None])
def test_other_dtypes(rank: int | None, dtype: torch.dtype) -> None:
    case = Case(length=5, d=4, d_k=4, d_v=4, heads=2, rank=rank, mask="causal")
    whole = case.weights["V"].to(dtype)
    value = whole if rank is None else (whole, case.weights["O"].to(dtype))
    H = attention.hessian(
        case.X.to(dtype),
        case.weights["Q"].to(dtype),
        case.weights["K"].to(dtype),
        value,
        target=case.target.to(dtype),
        mask="causal",
    )
    truth = case.truth("total")
    dense = H.total.dense()
    assert dense.dtype == dtype
    assert float((dense.double() - truth).norm() / truth.norm()) < (1e-5 if dtype == torch.float32 else 0.1)
    v = torch.ones(len(truth), dtype=dtype)
    assert H.matvec(v).dtype == dtype
    assert abs(H.norm() / float(truth.norm()) - 1) < (1e-5 if dtype == torch.float32 else 0.1)


def test_tokens_that_do_not_count_change_nothing() -> None:
    case = Case(loss="ce", length=6, mask="causal", batch=(2,))
    (x, wq, wk, wv), keywords = case.arguments()
    g, s = keywords["grad"].clone(), keywords["curvature"].clone()
    g[:, [0, 2, 5]], s[:, [0, 2, 5]] = 0, 0
    short = attention.hessian(x, wq, wk, wv, grad=g, curvature=s, mask="causal")
    assert short._state.x.shape[0] == 6  # two samples, three tokens
    full = attention.hessian(x, wq, wk, wv, grad=g, curvature=s, mask="causal", wrt="QKVX")
    for part in PARTS:
        for a, b in combinations_with_replacement("QKV", 2):
            torch.testing.assert_close(getattr(short, part)[a, b], getattr(full, part)[a, b], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("single", [False, True])
def test_few_keys_and_many_keys_are_two_ways_to_one_thing(kind: str, single: bool) -> None:
    case = Case(kind=kind, heads=2, batch=(2,), mask="causal", length=4, d=4, single=single)
    of, g = closed(case).layer, closed(case).loss.gradient.flatten(0, 1)
    many, few = potential.ManyKeys(of, g @ of.WV.mT), potential.FewKeys(of, g)
    R = torch.randn(len(g), of.d_out, 3, dtype=torch.float64)
    pairs = [(many.mean, few.mean), (many.first_order, few.first_order)]
    sides: tuple[potential.Side, ...] = ("X", "K", "V")
    for a in sides:
        pairs.append((many.second_times(a, "V", R), few.second_times(a, "V", R)))
        for b in sides:
            pairs.append((many.second(a, b), few.second(a, b)))
            if kind == "softmax":
                pairs.append((many.third(a, b), few.third(a, b)))
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_norms_where_tokens_are_the_same() -> None:
    """Tokens of equal vectors are gathered; tokens that differ in one bit, or in one of two vectors, are not."""
    case = Case(loss="ce", length=5, batch=(6,), mask="causal", d=3, d_k=3, d_v=3, rank=2)
    case.X = case.X[torch.tensor([0, 1, 0, 1, 1, 0])]
    case.X[3, 2, 0] *= 1 + 2**-52
    x = closed(case)._state.x
    (term,) = term_norms.gathered(closed(case).outer.terms("Q", "Q"))
    assert isinstance(term, Tokens)
    assert len(term.u) == len({tuple(row) for row in x.tolist()}) == 11
    check(case, 1e-11)


def test_norms_of_a_layer_whose_blocks_would_not_fit() -> None:
    """Width 160: a block has 5 GB. Norms against products with random signs, within their error."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 7, 160, dtype=torch.float64)
    weights = [torch.randn(160, 160, dtype=torch.float64) / 160**0.5 for _ in range(3)]
    H = attention.hessian(x, weights[0], weights[1], weights[2], y, mask="causal")
    for letter in "QKV":
        v = torch.zeros(H.total.size, 24, dtype=torch.float64)
        rows = H.total.slices[letter]
        v[rows] = torch.randint(2, (160 * 160, 24)).double() * 2 - 1
        product = H.matvec(v)
        for other in "QKV":
            squares = product[H.total.slices[other]].square().sum(0)  # E‖B z‖² = ‖B‖²
            error = squares.std() / 24**0.5
            assert abs(squares.mean() - H.norm((other, letter)) ** 2) < 4 * error, (other, letter)
            assert error < 0.2 * squares.mean()


def test_a_root_is_never_multiplied_out() -> None:
    """A root of one column at 64 tokens of width 256: products and traces, at a fraction of the matrix."""
    root, g = torch.ones(64, 256, 1), torch.ones(64, 256)
    layer = (torch.eye(64, 4), torch.eye(4), torch.eye(4), torch.ones(4, 256))
    H = attention.hessian(*layer, grad=g, curvature=attention.Root(root))
    assert isinstance(H._state.total, attention.Root)
    assert closed_form(H, "outer").psd
    assert not closed_form(H).psd
    dense = attention.hessian(*layer, grad=g, curvature=root @ root.mT)
    v = torch.randn(H.total.size)
    torch.testing.assert_close(H.matvec(v), dense.matvec(v), rtol=1e-4, atol=1e-2)


# The finer split


@pytest.mark.parametrize("name", ["plain", "causal", "batch", "cross", "cold", "low-rank value", "cross-entropy"])
def test_split_at_the_scores(name: str) -> None:
    H = closed(CASES[name])
    d_k = CASES[name].d_k
    t_outer, t_functional = H.t_outer(), H.t_functional()
    whole = torch.cat([torch.cat([H.total[a, b] for b in "QK"], 1) for a in "QK"])
    torch.testing.assert_close(t_outer.dense() + t_functional.dense(), whole, rtol=1e-12, atol=1e-14)
    v = torch.ones(t_outer.size, dtype=torch.float64)
    torch.testing.assert_close(t_outer @ v + t_functional @ v, whole @ v, rtol=1e-11, atol=1e-13)
    # eigenvalues in pairs ±λ, each d_K times: ± the singular values of the gradient by W_Q W_Kᵀ, and zeros
    found = torch.linalg.eigvalsh(t_functional.dense())
    singular = torch.linalg.svdvals(H._state.tau * H._state.B[0]).repeat_interleave(d_k)
    zeros = torch.zeros(t_functional.size - 2 * len(singular), dtype=torch.float64)
    expected = torch.cat([singular, -singular, zeros]).sort().values
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_rank_bounds() -> None:
    """Never broken, and attained by nearly all generic draws of softmax attention."""
    draws = random.Random(0)
    attained, total = 0, 150
    for seed in range(total):
        case = Case(
            length=draws.randint(1, 6),
            d=draws.randint(1, 4),
            d_k=draws.randint(1, 5),
            d_v=draws.randint(1, 4),
            mask=draws.choice([None, "causal", "bool"]),
            batch=draws.choice([(), (2,)]),
            kind=draws.choice(["softmax", "softmax", "softmax", "linear"]),
            seed=seed,
        )
        H = closed(case)
        values = torch.linalg.svdvals(H.t_outer().dense())
        rank = int((values > 1e-10 * values[0]).sum())
        bound = H.rank_bound()
        assert rank <= bound.sharper <= bound.lemma, case
        if case.kind == "linear":
            total -= 1
        else:
            attained += int(rank == bound.sharper)
    assert attained >= 0.95 * total


@pytest.mark.parametrize("name", ["plain", "causal", "three heads", "low-rank heads", "cross", "batch", "linear"])
def test_gauge_directions_lie_in_the_kernel(name: str) -> None:
    case = CASES[name]
    H = closed(case)
    gauge = H.gauge()
    heads = case.heads or 1
    assert gauge.shape[1] == heads * (case.d_k**2 + (case.rank or 0) ** 2)
    assert float((H.outer.dense() @ gauge).norm()) <= 1e-12 * H.norm(part="outer") * float(gauge.norm())
    if case.heads is None and case.rank is None:
        inside = gauge[: H.t_outer().size]
        assert float((H.t_outer().dense() @ inside).norm()) <= 1e-12 * H.t_outer().norm() * float(gauge.norm())


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_stacks(kind: str, mask: str | None, depth: int) -> None:
    length, d, d_k = 4, 3, 2
    draws = torch.Generator().manual_seed(depth)

    def draw(*shape: int) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(*shape, generator=draws, dtype=torch.float64) / shape[0] ** 0.5
        return drawn

    X, Y = draw(2, length, d) * 2**0.5, draw(2, length, d)
    layers = [(draw(d, d_k), draw(d, d_k), draw(d, d)) for _ in range(depth)]
    H = attention.stack(X, layers, target=Y, kind=kind, mask=mask)  # type: ignore[arg-type]
    theta = torch.cat([w.reshape(-1) for layer in layers for w in layer])
    allowed = torch.ones(length, length, dtype=torch.bool)
    allowed = allowed.tril() if mask else allowed

    def output(t: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = X
        start = 0
        for layer in layers:
            weights = []
            for w in layer:
                weights.append(t[start : start + w.numel()].view(w.shape))
                start += w.numel()
            scores = x @ weights[0] @ weights[1].T @ x.mT / d_k**0.5
            a = scores * allowed if kind == "linear" else scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            x = a @ x @ weights[2]
        return x

    hessian: Any = torch.autograd.functional.hessian
    truth = hessian(lambda t: ((output(t) - Y) ** 2).mean(), theta)
    g = (2 * (output(theta) - Y) / Y.numel()).detach()
    functional = hessian(lambda t: (g * output(t)).sum(), theta)
    torch.testing.assert_close(H.total.dense(), truth, rtol=1e-10, atol=1e-12 * float(truth.norm()))
    torch.testing.assert_close(H.functional.dense(), functional, rtol=1e-10, atol=1e-12 * float(truth.norm()))
    torch.testing.assert_close(H.outer.dense(), truth - functional, rtol=1e-9, atol=1e-12 * float(truth.norm()))
    assert H.total.names[:4] == ("Q1", "K1", "V1", "Q2")[: len(H.total.names)]
