"""The losses: equal to torch's, with output Hessians equal to autodiff and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlens import CurvlensError, losses
from curvlens.calculus import losses as closed_form
from curvlens.losses import Loss


def logits_and_labels(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    return logits, labels


WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
CROSS_ENTROPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "weighted": {"weight": WEIGHT},
    "weighted and smoothed": {"weight": WEIGHT, "label_smoothing": 0.3},
    "other ignore_index": {"ignore_index": 1},
}


def finite_difference(loss: Loss, outputs: Tensor, batch: Any, t: Tensor, eps: float = 1e-5) -> Tensor:
    def gradient(at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(loss.sum_and_count(at, batch)[0], at)[0]

    return (gradient(outputs + eps * t) - gradient(outputs - eps * t)) / (2 * eps)


def check_curvature(loss: Loss, outputs: Tensor, batch: Any) -> None:
    """Closed form against autodiff and against differences of the gradient."""
    t = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got = loss.curvature(outputs, batch, t)
    assert got.shape == outputs.shape
    torch.testing.assert_close(got, Loss.curvature(loss, outputs, batch, t), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got, finite_difference(loss, outputs, batch, t), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES.keys())
def test_cross_entropy_is_torchs(options: dict[str, Any]) -> None:
    logits, labels = logits_and_labels(0, 4, 6, 5)
    labels[1, 2:] = options.get("ignore_index", -100)
    loss = losses.CrossEntropy(**options)
    total, count = loss.sum_and_count(logits, (None, labels))
    torch.testing.assert_close(total / count, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options))
    check_curvature(loss, logits, (None, labels))


def test_soft_targets() -> None:
    logits, _ = logits_and_labels(1, 7, 5)
    target = logits_and_labels(2, 7, 5)[0].softmax(-1)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": WEIGHT}):
        loss = losses.CrossEntropy(**options)
        total, count = loss.sum_and_count(logits, (None, target))
        torch.testing.assert_close(total / count, F.cross_entropy(logits, target, **options))
        check_curvature(loss, logits, (None, target))


def test_class_axis_of_images() -> None:
    logits, labels = logits_and_labels(4, 2, 3, 3, 5)
    loss = losses.CrossEntropy(class_dim=1)
    images = logits.movedim(-1, 1).contiguous()
    total, count = loss.sum_and_count(images, (None, labels))
    torch.testing.assert_close(total / count, F.cross_entropy(images, labels))
    check_curvature(loss, images, (None, labels))
    with pytest.raises(CurvlensError, match="class_dim=1"):
        losses.CrossEntropy().sum_and_count(images, (None, labels))


@given(
    rows=st.integers(1, 9),
    classes=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 9),
    chunk=st.integers(1, 40),
)
def test_closed_forms(rows: int, classes: int, scale: float, seed: int, chunk: int) -> None:
    """Λ = B Bᵀ, in chunks of any size, equal to the dense matrix s (diag p − p pᵀ)."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, classes, generator=generator, dtype=torch.float64) * scale
    mass = torch.rand(rows, generator=generator, dtype=torch.float64)
    p = z.softmax(-1)
    dense = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) * mass[:, None, None]
    before = closed_form.CHUNK
    closed_form.CHUNK = chunk
    try:
        eye = torch.eye(classes, dtype=torch.float64)
        columns = [closed_form.cross_entropy_curvature(z, mass, e.expand(rows, -1)) for e in eye]
        roots = [closed_form.cross_entropy_sqrt_curvature(z, mass, e.expand(rows, -1)) for e in eye]
    finally:
        closed_form.CHUNK = before
    root = torch.stack(roots, -1)
    torch.testing.assert_close(torch.stack(columns, -1), dense, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(root @ root.mT, dense, rtol=1e-12, atol=1e-15)


def test_sampled_gradients_have_the_curvature_as_covariance() -> None:
    logits, labels = logits_and_labels(5, 1, 5)
    logits = logits.expand(200_000, 5)
    for loss, batch in (
        (losses.CrossEntropy(weight=WEIGHT + 1), (None, labels.expand(200_000))),
        (losses.MSE(), (None, logits)),
    ):
        e = loss.sample(logits, batch, torch.Generator().manual_seed(0))
        eye = torch.eye(5, dtype=torch.float64)
        expected = torch.stack([loss.curvature(logits[:1], (None, batch[1][:1]), row[None])[0] for row in eye])
        covariance = e.T @ e / len(e)
        # Entries have a standard deviation below 5/√200000 ≈ 0.011.
        torch.testing.assert_close(covariance, expected, rtol=0, atol=0.05)
        assert e.mean(0).abs().max() < 0.03


def test_sampling_never_draws_an_impossible_class() -> None:
    logits = torch.tensor([[0.0, -1e4, 0.0, -1e4]], dtype=torch.float64).expand(1000, 4)
    e = losses.CrossEntropy().sample(
        logits, (None, torch.zeros(1000, dtype=torch.long)), torch.Generator().manual_seed(0)
    )
    assert (e[:, [1, 3]] == 0).all()
    assert (e[:, 0] < 0).any()
    assert (e[:, 2] < 0).any()


def test_mse_is_torchs() -> None:
    outputs, target = logits_and_labels(6, 3, 4, 2)[0], logits_and_labels(7, 3, 4, 2)[0]
    loss = losses.MSE()
    total, count = loss.sum_and_count(outputs, (None, target))
    torch.testing.assert_close(total / count, F.mse_loss(outputs, target))
    check_curvature(loss, outputs, (None, target))
    torch.testing.assert_close(
        loss.sqrt_curvature(outputs, None, loss.sqrt_curvature(outputs, None, target)),
        loss.curvature(outputs, None, target),
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_contrastive(symmetric: bool) -> None:
    similarity, _ = logits_and_labels(8, 6, 6)
    loss = losses.Contrastive(symmetric=symmetric)
    own = torch.arange(6)
    expected = F.cross_entropy(similarity, own)
    if symmetric:
        expected = (expected + F.cross_entropy(similarity.T, own)) / 2
    total, count = loss.sum_and_count(similarity, None)
    torch.testing.assert_close(total / count, expected)
    check_curvature(loss, similarity, None)


def test_causal_lm_shifts_once() -> None:
    logits, tokens = logits_and_labels(9, 2, 6, 5)
    loss = losses.CausalLM()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    for batch in (tokens, {"input_ids": tokens}, {"input_ids": tokens, "labels": tokens}, (tokens, tokens)):
        total, count = loss.sum_and_count(logits, batch)
        torch.testing.assert_close(total / count, expected)
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    masked = tokens.where(mask == 1, -100)
    total, count = loss.sum_and_count(logits, {"input_ids": tokens, "attention_mask": mask})
    assert float(count) == 5 + 3
    torch.testing.assert_close(total / count, F.cross_entropy(logits[:, :-1].flatten(0, 1), masked[:, 1:].flatten()))
    shifted = (tokens[:, :-1], tokens[:, 1:])
    total, count = losses.CausalLM(shift=False).sum_and_count(logits[:, :-1], shifted)
    torch.testing.assert_close(total / count, expected)
    with pytest.raises(CurvlensError, match=r"CausalLM\(shift=False\)"):
        loss.sum_and_count(logits[:, :-1], shifted)
    check_curvature(loss, logits, tokens)


def test_user_losses_are_recognised() -> None:
    def by_outputs(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.square().sum(), outputs.numel()

    def by_model(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch).square().mean()
        return value

    class ByProtocol:
        convex = True

        def outputs(self, model: nn.Module, batch: Any) -> Tensor:
            outputs: Tensor = model(batch)
            return outputs

        def sum_and_count(self, outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
            return outputs.square().sum(), outputs.numel()

    assert isinstance(losses.as_loss(by_outputs), losses.FromOutputs)
    assert isinstance(losses.as_loss(lambda o, b: (o.sum(), 1)), losses.FromOutputs)
    assert isinstance(losses.as_loss(by_model), losses.FromModel)
    adapted = losses.as_loss(ByProtocol())
    assert isinstance(adapted, losses.FromOutputs)
    assert adapted.convex
    outputs = logits_and_labels(10, 3, 2)[0]
    torch.testing.assert_close(adapted.curvature(outputs, None, outputs), 2 * outputs)


def test_default_curvature_takes_trees_and_ignores_what_is_linear() -> None:
    def loss(outputs: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
        return outputs["a"].pow(3).sum() + outputs["b"].sum(), 1

    a, b = logits_and_labels(11, 3, 2)[0], logits_and_labels(12, 2, 2)[0]
    tree = {"a": a, "b": b, "n": torch.tensor([1, 2])}
    product = losses.as_loss(loss).curvature(tree, None, {"a": torch.ones_like(a), "b": b, "n": tree["n"]})
    torch.testing.assert_close(product["a"], 6 * a)
    assert (product["b"] == 0).all()
