"""The losses: equal to torch's, with output Hessians equal to autodiff and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import curvlens as cl
from cases import hugging_face
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


# Encoder-decoders whose rule for the decoder's inputs is a function beside the model

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    **dict.fromkeys(("encoder_layers", "decoder_layers", "pad_token_id"), 1),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "decoder_start_token_id", "eos_token_id"), 2
    ),
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8),
    "bos_token_id": 0,
    "max_position_embeddings": 16,
}
MEL: dict[str, Any] = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}
SPEECH: dict[str, Any] = {
    "max_source_positions": 32,
    "max_target_positions": 16,
    "input_feat_per_channel": 4,
    "num_conv_layers": 1,
    "conv_kernel_sizes": [3],
    "conv_channels": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 64}
SHIFTING: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Whisper": ({**MEL, "suppress_tokens": None, "begin_suppress_tokens": None}, (3, 4, 16)),
    "M2M100": ({}, ()),
    "Blenderbot": ({}, ()),
    "BlenderbotSmall": ({}, ()),
    "NllbMoe": (EXPERTS, ()),
    "Speech2Text": (SPEECH, (3, 12, 4)),
    "FSMT": ({"src_vocab_size": 20, "tgt_vocab_size": 20, "langs": ["a", "b"]}, ()),  # writes into the labels
}


@pytest.mark.parametrize("name", SHIFTING)
def test_decoder_inputs_are_made_as_the_model_makes_them(name: str) -> None:
    more, features = SHIFTING[name]
    sizes = {key: value for key, value in SIZES.items() if name != "FSMT" or key != "vocab_size"}
    model: Any = hugging_face(f"{name}ForConditionalGeneration", f"{name}Config", **{**sizes, **more})().double().eval()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, 20, (3, 5), generator=generator)
    labels[0, 3:] = -100
    if features:
        inputs = {"input_features": torch.randn(features, generator=generator, dtype=torch.float64)}
    else:
        inputs = {"input_ids": torch.randint(3, 20, (3, 6), generator=generator)}
    problem = cl.Problem(model, {**inputs, "labels": labels}, losses.CausalLM())
    if name == "FSMT":  # its own loss takes the inputs of the encoder; trainers make these of the labels
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels.clone())
    with torch.no_grad(), cl.keep_dtype(model):
        own = model(**inputs, labels=labels).loss
    assert own.dtype == torch.float64
    assert problem.loss() == pytest.approx(float(own), rel=1e-12)


def test_an_encoder_decoder_without_a_rule_says_what_to_give() -> None:
    model: Any = nn.Linear(1, 1)
    with pytest.raises(CurvlensError, match="'decoder_input_ids' and 'labels'"):
        losses.language.decoder_inputs(model, {}, torch.zeros(1, 1).long())


# What a loss is given


class Two(nn.Module):
    """Two outputs, of which the second is not the second row of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).tanh(), self.other(x).tanh()


def second(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return (outputs[1] - batch[1]).pow(4).sum(), batch[1].numel()


class Second(Loss):
    def sum_and_count(self, outputs: Any, batch: Any) -> tuple[Tensor, int]:
        return second(outputs, batch)


def both(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return (outputs[0] * outputs[1] - batch[1]).pow(4).sum(), batch[1].numel()


@pytest.mark.parametrize("loss", [second, Second(), both], ids=["function", "protocol", "both outputs"])
def test_own_losses_are_given_what_the_model_returns(loss: Any) -> None:
    torch.manual_seed(0)
    model = Two().double()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    problem = cl.Problem(model, (x, y), loss)
    value, count = (both if loss is both else second)(model(x), (x, y))
    assert problem.loss() == pytest.approx(float(value) / count, rel=1e-14)
    # G by its definition: the Jacobian of all outputs, and the Hessian of the loss at them
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def f(theta: Tensor) -> Tensor:
        parts = torch.split(theta, [shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return torch.cat([out.flatten() for out in torch.func.functional_call(model, named, (x,))])

    def at_outputs(z: Tensor) -> Tensor:
        outputs = z[:15].view(5, 3), z[15:].view(5, 3)
        return (both if loss is both else second)(outputs, (x, y))[0] / count

    dense: Any = torch.autograd.functional
    J = dense.jacobian(f, problem.theta)
    truth = J.T @ dense.hessian(at_outputs, f(problem.theta)) @ J
    G = cl.ggn(problem).dense()
    torch.testing.assert_close(G, truth, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(cl.hessian(problem).dense(), G + cl.functional(problem).dense(), rtol=1e-10, atol=1e-13)


def test_losses_of_the_library_take_the_first_output() -> None:
    model = Two().double()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    assert cl.Problem(model, (x, y), losses.MSE(), "one.*").loss() == pytest.approx(float(F.mse_loss(model(x)[0], y)))
    labels = y.argmax(-1)
    loss = cl.Problem(model, (x, labels), losses.CrossEntropy(), "one.*").loss()
    assert loss == pytest.approx(float(F.cross_entropy(model(x)[0], labels)))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda outputs, batch: (outputs.square().sum(), 1), "here a tuple of 2"),
        (lambda outputs, batch: (F.huber_loss(outputs, batch[1], reduction="sum"), 1), "here a tuple of 2"),
        (lambda outputs, batch: (outputs[0].logits.sum(), 1), "no attribute 'logits'"),
    ],
)
def test_a_loss_that_expects_another_output_is_told_what_it_gets(loss: Any, said: str) -> None:
    with pytest.raises((CurvlensError, AttributeError), match=said):
        cl.Problem(Two(), (torch.randn(5, 4), torch.randn(5, 3)), loss)


# Labels that are no probabilities


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"weight": WEIGHT[[0, 1, 3]]}], ids=repr)
def test_soft_labels_with_a_negative_sum_are_not_convex(options: dict[str, Any]) -> None:
    """Λ = s (diag p − p pᵀ) with the sum s of the labels: an advantage below zero turns its sign."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(5, 4).double()
    y = torch.rand(5, 3).double()
    loss = losses.CrossEntropy(**options)
    assert cl.ggn(cl.Problem(model, [(x, y), (x, y)], loss)).psd
    mixed = y.clone()
    mixed[:, 0] -= 0.01  # an entry below zero, and sums above
    assert cl.ggn(cl.Problem(model, (x, mixed), loss)).psd
    y[3] = -y[3]
    problem = cl.Problem(model, [(x, mixed), (x, y)], loss)
    G = cl.ggn(problem)
    assert not G.psd
    assert not G["weight"].psd
    assert float(torch.linalg.eigvalsh(cl.ggn(cl.Problem(model, (x[3:4], y[3:4]), loss)).dense())[0]) < -1e-3
    torch.testing.assert_close(G.dense(), cl.hessian(problem).dense(), rtol=1e-12, atol=1e-14)  # of a linear model
    assert cl.trace(G, samples=4).value
    with pytest.raises(CurvlensError, match="With a negative sum"):
        cl.fisher(problem) @ torch.ones(problem.layout.size).double()
