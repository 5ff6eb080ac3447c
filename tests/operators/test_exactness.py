"""H, G and F against two independent truths, parameter group by parameter group, on every architecture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlens
from cases import CASES, Batch, Case, causal_labels, gpt, inputs_of
from curvlens import Operator, Problem, second_order
from truth import AUTODIFF, DIFFERENCES, STEP, Truth, check_groups, relu_patterns

OPERATORS = ("hessian", "ggn", "functional")

SMALL = [
    gpt("small", d_model=4, d_mlp=3),
    gpt("small-square", d_model=4, d_mlp=3, square=True),
]
"""Small enough for whole matrices in the default tier."""

every_case = pytest.mark.parametrize("case", CASES, ids=repr)
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def some_cases(**wanted: bool) -> pytest.MarkDecorator:
    """The cases with these properties."""
    found = [c for c in CASES if all(getattr(c, key) == value for key, value in wanted.items())]
    assert found
    return pytest.mark.parametrize("case", found, ids=repr)


@dataclass(frozen=True)
class Setting:
    """A case at work: its problem, its truth and two directions."""

    problem: Problem
    truth: Truth
    directions: Tensor

    def operator(self, name: str) -> Operator:
        made: Operator = getattr(curvlens, name)(self.problem)
        return made


@cache
def setting(case: Case) -> Setting:
    model = case.model()
    truth = Truth(model, case.batches, case.rows, square=case.square)
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(len(truth.theta), 2, generator=generator, dtype=torch.float64)
    return Setting(Problem(model, case.batches, case.loss), truth, directions)


@cache
def products(case: Case, operator: str) -> Tensor:
    """The operator times the two directions, by curvlens."""
    s = setting(case)
    result: Tensor = s.operator(operator) @ s.directions
    return result


# Against the truths


@every_case
def test_loss_and_gradient(case: Case) -> None:
    s = setting(case)
    assert s.problem.layout.slices == s.truth.slices
    assert s.problem.loss() == pytest.approx(float(s.truth.loss(s.truth.theta)), rel=1e-13)
    check_groups(s.problem.gradient(), s.truth.gradient(s.truth.theta), s.truth.slices, *AUTODIFF)


@every_operator
@every_case
def test_against_dense_autodiff(case: Case, operator: str) -> None:
    s = setting(case)
    for got, v in zip(products(case, operator).T, s.directions.T, strict=True):
        check_groups(got, s.truth.dense(operator) @ v, s.truth.slices, *AUTODIFF)


@every_operator
@every_case
def test_against_finite_differences(case: Case, operator: str) -> None:
    s = setting(case)
    for got, v in zip(products(case, operator).T, s.directions.T, strict=True):
        check_groups(got, s.truth.by_differences(operator, v), s.truth.slices, *DIFFERENCES)


@some_cases(relu=True)
def test_no_relu_switches_within_the_differences(case: Case) -> None:
    s = setting(case)
    here = relu_patterns(s.truth, s.truth.theta)
    assert here
    assert all(0 < int(on.sum()) < on.numel() for on in here)
    for v in s.directions.T:
        for theta in s.truth.steps(v):
            there = relu_patterns(s.truth, theta)
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    far = relu_patterns(s.truth, s.truth.theta + 1000 * STEP * v / v.norm())
    assert not all(torch.equal(a, b) for a, b in zip(here, far, strict=True)), "the look at ReLUs sees nothing"


@pytest.mark.parametrize("case", SMALL, ids=repr)
def test_dense_truths_agree(case: Case) -> None:
    """F as a difference of matrices and F as a Hessian of its own."""
    truth = setting(case).truth
    error = (truth.functional - truth.functional_directly).norm()
    assert error <= 1e-13 * truth.hessian.norm()


@pytest.mark.full
@every_case
def test_dense_truths_agree_everywhere(case: Case) -> None:
    test_dense_truths_agree(case)


@pytest.mark.full
@every_operator
@every_case
def test_a_column_of_every_group(case: Case, operator: str) -> None:
    s = setting(case)
    columns = [(part.start + part.stop) // 2 for part in s.truth.slices.values()]
    units = torch.eye(len(s.truth.theta), dtype=torch.float64)[:, columns]
    for got, column in zip((s.operator(operator) @ units).T, columns, strict=True):
        truth = s.truth.dense(operator)
        # A column may be zero by theory: the floor is relative to the largest column.
        scale = truth.norm(dim=0).max()
        for name, part in s.truth.slices.items():
            error, size = (got[part] - truth[part, column]).norm(), truth[part, column].norm()
            assert error <= AUTODIFF[0] * size + AUTODIFF[1] * scale, f"{name}, column {column}"


# What H, G and F are to each other


@every_case
def test_hessian_is_ggn_plus_functional(case: Case) -> None:
    H, G, F_ = (products(case, operator) for operator in OPERATORS)
    assert bool(((H - G - F_).norm(dim=0) <= 1e-12 * H.norm(dim=0)).all())


@every_operator
@every_case
def test_symmetric(case: Case, operator: str) -> None:
    u, v = setting(case).directions.T
    Au, Av = products(case, operator).T
    assert setting(case).operator(operator).symmetric
    assert abs(float(u @ Av - v @ Au)) <= 1e-13 * float(u.norm() * Av.norm())


def check_psd(matrix: Tensor) -> None:
    assert float((matrix - matrix.T).norm()) <= 1e-13 * float(matrix.norm())
    eigenvalues = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    assert float(eigenvalues[0]) >= -1e-12 * float(eigenvalues[-1])


def check_ggn(case: Case) -> None:
    """The whole matrix: its columns, its rows, its eigenvalues."""
    s = setting(case)
    operator = s.operator("ggn")
    assert operator.psd
    got = operator.dense()
    check_psd(got)
    check_groups(got, s.truth.ggn, s.truth.slices, *AUTODIFF)
    check_groups(got.T, s.truth.ggn, s.truth.slices, *AUTODIFF)


@pytest.mark.parametrize("case", SMALL, ids=repr)
def test_ggn_is_psd(case: Case) -> None:
    check_ggn(case)
    assert float(torch.linalg.eigvalsh(setting(case).truth.hessian)[0]) < 0, "H is psd too: nothing is tested"


@pytest.mark.full
@every_case
def test_ggn_is_psd_everywhere(case: Case) -> None:
    check_ggn(case)


# Losses


@some_cases(hugging_face=True)
def test_loss_is_that_of_hugging_face(case: Case) -> None:
    """Without labels they are the tokens, with −100 where the mask is 0; the loss itself is float32 over there."""
    model, total, count = setting(case).problem.model, 0.0, 0
    for batch in case.batches:
        labels = causal_labels(batch)
        with torch.no_grad():
            theirs = float(model(**inputs_of(batch), labels=labels).loss)
        assert Problem(model, [batch], case.loss).loss() == pytest.approx(theirs, rel=1e-6)
        n = valid_tokens(case, batch)
        total, count = total + theirs * n, count + n
    problem = setting(case).problem
    assert problem.n_tokens == count
    assert problem.loss() == pytest.approx(total / count, rel=1e-6)


def valid_tokens(case: Case, batch: Batch) -> int:
    with torch.no_grad():
        _, targets = case.rows(setting(case).problem.model, batch)
    return int((targets != -100).sum())


# Precision


@some_cases(float32=True)
def test_float32_steps_would_be_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `keep_dtype` is for: without it the same model misses the tolerance."""
    monkeypatch.setattr("curvlens._evaluation.evaluation.is_float64", lambda model: False)
    s = setting(case)
    problem = Problem(s.problem.model, case.batches, case.loss)
    v = s.directions[:, 0]
    with pytest.raises(AssertionError, match="groups differ"):
        check_groups(curvlens.hessian(problem) @ v, s.truth.hessian @ v, s.truth.slices, *AUTODIFF)


# The model afterwards


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: x.clone() for name, x in model.state_dict().items()},
        "places": [p.data_ptr() for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "wanted": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": torch.random.get_rng_state(),
    }


@every_case
def test_model_is_left_as_it_was(case: Case) -> None:
    model = case.model()
    first = next(model.parameters())
    first.requires_grad_(False)
    state = state_of(model)
    problem = Problem(model, case.batches, case.loss)
    assert problem.loss() > 0
    assert problem.gradient().norm() > 0
    for operator in OPERATORS:
        assert (getattr(curvlens, operator)(problem) @ torch.ones_like(problem.theta)).norm() > 0
    after = state_of(model)
    for name, x in state.pop("tensors").items():
        assert torch.equal(x, after["tensors"][name]), name
    assert torch.equal(state.pop("random"), after["random"])
    assert state == {key: after[key] for key in state}
    assert all(gradient is None for gradient in after["gradients"])


# Fused attention


def second_derivative(case: Case) -> Tensor:
    """A product with the Hessian of the first batch, by torch alone."""
    model = case.model()
    outputs, _ = case.rows(model, case.batches[0])
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(outputs.square().sum(), parameters, create_graph=True, allow_unused=True)
    total = torch.stack([g.square().sum() for g in gradient if g is not None]).sum()
    parts = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


@some_cases(fused=True)
def test_fused_attention_works_unchanged(case: Case) -> None:
    """These models raise by themselves, so the tests above are about curvlens."""
    config = getattr(case.model(), "config", None)
    assert config is None or config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="attention"):
        second_derivative(case)
    with second_order():
        assert second_derivative(case).norm() > 0
    with pytest.raises(RuntimeError, match="attention"):
        second_derivative(case)


def attention_twice() -> Tensor:
    q = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 2, 3, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(
        F.scaled_dot_product_attention(q, q + 1, q * q).square().sum(), q, create_graph=True
    )
    (second,) = torch.autograd.grad(gradient.sum(), q)
    return second


def raises_twice() -> bool:
    try:
        attention_twice()
    except RuntimeError as error:
        return "attention" in str(error)
    return False


def test_second_order_nests_and_ends() -> None:
    assert raises_twice()
    with second_order():
        once = attention_twice()
        with second_order():
            assert torch.equal(attention_twice(), once)
        assert torch.equal(attention_twice(), once)
    assert raises_twice()
    with pytest.raises(ZeroDivisionError), second_order():
        raise ZeroDivisionError
    assert raises_twice()


# Blocks that are zero by theory


@pytest.mark.parametrize("square", [False, True], ids=["cross-entropy", "square"])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_value_and_output_weights_have_no_functional_part(attention: str, square: bool) -> None:
    """One layer, nothing behind it: the outputs are linear in each of the two, but not in both together."""
    case = gpt("bare", norm="none", d_mlp=0, attention=attention, square=square, d_model=4)
    s = setting(case)
    part = s.operator("functional")
    value, output = "h.0.attn.v.*", "h.0.attn.o.*"
    assert float(part[value].dense().abs().max()) == 0
    assert float(part[output].dense().abs().max()) == 0
    layout = s.problem.layout
    rows, columns = (
        torch.cat([torch.arange(len(s.truth.theta))[s.truth.slices[n]] for n in layout.select(block).names])
        for block in (value, output)
    )
    truth = s.truth.functional_directly[rows][:, columns]
    assert float(truth.norm()) > 1e-3
    assert float((part[value, output].dense() - truth).norm()) <= 1e-12 * float(truth.norm())


def test_only_the_last_value_weights_have_no_functional_part() -> None:
    """In front of another softmax the values act in a curved way."""
    part = setting(gpt("bare-2", norm="none", d_mlp=0, d_model=4, n_layer=2)).operator("functional")
    assert float(part["h.1.attn.v.*"].dense().abs().max()) == 0
    assert float(part["h.0.attn.v.*"].dense().abs().max()) > 1e-3


# The comparison itself


def test_a_wrong_group_is_seen_however_small() -> None:
    truth = torch.cat([torch.full((100,), 10.0), torch.full((4,), 1e-3)]).double()
    got = truth.clone()
    got[100:] *= 1 + 1e-4
    slices = {"large": slice(0, 100), "small": slice(100, 104)}
    assert float((got - truth).norm()) < 1e-8 * float(truth.norm())
    with pytest.raises(AssertionError, match=r"1 of 2 groups differ[^/]*small: .*relative 1\.000e-04"):
        check_groups(got, truth, slices, *DIFFERENCES)
    got[100:] = float("nan")
    with pytest.raises(AssertionError, match="small"):
        check_groups(got, truth, slices, *DIFFERENCES)
