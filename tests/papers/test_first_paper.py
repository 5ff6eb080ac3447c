"""Experiments against automatic differentiation, and the random numbers that they draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers import EXPERIMENTS, Effort, Experiment, setting
from curvlens.papers.draws import Draws, stream
from curvlens.papers.first_paper import entries, heads, value_functional
from curvlens.papers.first_paper.differentiated import flat_hessian, functional_part
from curvlens.papers.full_block import within_block
from curvlens.papers.learners import trained
from curvlens.papers.slides import gauss_newton
from curvlens.papers.slides.scalar_layer import scalar_layer
from networks import gpt, set_weights

# Random numbers


def test_purposes_of_one_seed_are_independent() -> None:
    """Over many seeds, no number of one stream is correlated with the same or another number of the other."""
    seeds, first = range(400), 12
    one, other = (torch.stack([Draws(seed, each)(first) for seed in seeds]) for each in ("", "noise"))
    again = torch.stack([Draws(seed, "noise")(first) for seed in seeds])
    assert torch.equal(other, again)
    crossed = (one - one.mean(0)).T @ (other - other.mean(0)) / len(seeds)
    assert float(crossed.abs().max()) < 5 / len(seeds) ** 0.5
    assert len({stream(seed, each) for seed in range(1000) for each in ("", "noise", "weights")}) == 3000


def test_a_seed_without_a_purpose_is_the_stream_that_stored_points_are_of() -> None:
    plain = torch.randn(3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert torch.equal(Draws(7)(3), plain)


TRAINED = {"depth", "training", "sink-gpt", "feedforward", "within-block", "layer-coupling", "step-sizes"}
"""Draw their networks in one go, by torch's own generator; `published` as the authors do."""


@pytest.mark.parametrize(
    "experiment",
    [e for e in EXPERIMENTS if not e.data and e.name not in TRAINED | {"published", "published-deep"}],
    ids=lambda experiment: experiment.name,
)
def test_no_point_draws_one_stream_twice(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """One point of each kind: two streams of the same seed and purpose would be the same numbers."""
    built: list[tuple[int, str]] = []
    init = Draws.__init__

    def noted(self: Draws, seed: int, purpose: str = "") -> None:
        built.append((seed, purpose))
        init(self, seed, purpose)

    monkeypatch.setattr(Draws, "__init__", noted)
    kinds: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for config in experiment.points(Effort(quick=True, seeds=1)):
        kinds.setdefault(tuple(value for value in config.values() if isinstance(value, str)), config)
    for config in kinds.values():
        built.clear()
        experiment.measure(config)
        assert len(built) == len(set(built)) >= 1, config


@pytest.mark.parametrize("network", gauss_newton.NETWORKS)
def test_the_top_of_hessian_and_gauss_newton_matrix_by_differentiation(network: str) -> None:
    """The largest eigenvalues of every network, with residuals that do not come from its tokens."""
    config = {"network": network, "residual": 10.0, "seed": 3}
    width, draw = 6, Draws(3)
    x = draw(16, 10) if network == "scalar" else draw(16, 10, width)
    if network == "scalar":
        _, q, k, v, _ = scalar_layer(3, width, 1.0)
        weights = [q, k, torch.tensor([v], dtype=x.dtype)]
    else:
        count = {"mlp": 2, "deep mlp": 4, "relu mlp": 2, "gelu mlp": 2}.get(network, 3)
        weights = [draw(width, width, scale=width**-0.5) for _ in range(count)]

    def output(*w: Tensor) -> Tensor:
        out: Tensor = x
        if network == "scalar":
            mixed = ((w[0] @ w[1] / width**0.5) * x[:, :, None] * x[:, None]).softmax(-1) @ x[..., None]
            out = w[2] * mixed.squeeze(-1)
        elif "attention" in network:
            scores = x @ w[0] @ w[1].mT @ x.mT / width**0.5
            out = (scores if network.startswith("linear") else scores.softmax(-1)) @ x @ w[2]
        elif network in gauss_newton.BENT:
            out = getattr(F, gauss_newton.BENT[network])(x @ w[0]) @ w[1]
        else:
            for weight in w:
                out = out @ weight.mT
        return out

    out = output(*weights)
    target = out + 10 * out.std() * Draws(3, "noise")(*out.shape)
    H = flat_hessian(lambda *w: (output(*w) - target).square().mean(), weights)
    ggn = H - functional_part(output, weights, target)
    found = gauss_newton.measure(config)
    for name, matrix in (("hessian", H), ("ggn", ggn)):
        assert found[name] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-9)


@pytest.mark.parametrize(("behind", "norm"), [("relu", "none"), ("pre relu", "pre")])
def test_the_differentiated_value_block_is_that_of_figure_3(behind: str, norm: Any) -> None:
    """Automatic differentiation against the closed form: in total, and in the part that Theorem 3.2 says is zero."""
    found = value_functional.measure({"width": 16, "behind": behind, "sigma": 0.3, "seed": 1})
    H = setting.block_hessian(16, sigma=0.3, seed=1, norm=norm)
    assert found["total"] == pytest.approx(H.norm("V", "total"), rel=1e-10)
    assert found["functional"] == pytest.approx(H.norm("V", "functional"), rel=1e-10)
    assert (found["functional"] == 0) == (norm == "none")


def test_the_value_block_bends_behind_a_gelu() -> None:
    """Against the reference GPT, assembled; about a third of the block, and with σ²."""
    task, width = Addition(), 16
    w = setting.weights(width, sigma=0.1, seed=1, task=task)
    model = gpt(width, 1, activation="gelu")
    set_weights(model, w)
    ids, labels = task.batch(setting.SEQUENCES, seed=1)
    truth = cl.assembly.read(model).hessian(ids, labels=labels, wrt=["h.0.attn.v.weight"])
    found = value_functional.measure({"width": width, "behind": "gelu", "sigma": 0.1, "seed": 1})
    assert found["functional"] == pytest.approx(truth.functional.norm(), rel=1e-9)
    assert found["total"] == pytest.approx(truth.total.norm(), rel=1e-9)
    assert 0.1 < found["functional"] / found["total"] < 1
    wide = {"width": 32, "sigma": 0.1, "seed": 1}
    assert value_functional.measure(wide | {"behind": "relu"})["functional"] == 0
    assert (
        value_functional.measure(wide | {"behind": "gelu"})["functional"] > 0
    )  # so that the zero is no matter of course


@pytest.mark.full
@pytest.mark.parametrize("norm", ["pre", "none"])
def test_norms_inside_a_block_are_those_of_the_differentiated_hessian(norm: str) -> None:
    config = {"norm": norm, "steps": 0, "seed": 0}
    found = within_block.measure(config)
    model = trained(Addition(digits=2), seed=0, steps=0, n_layer=2, norm=norm)
    problem = cl.Problem(model, [Addition(digits=2).batch(16, seed=0)], cl.losses.CrossEntropy())
    H = cl.hessian(problem)
    groups = ("attn", "mlp", "norm")[: 3 if norm == "pre" else 2]
    names = [[n for n, _ in model.named_parameters() if n.startswith(f"h.1.{group}")] for group in groups]
    parts = [H[each].dense() for each in names]
    whole = H[[n for each in names for n in each]].dense()
    for i, part in enumerate(parts):
        assert found["frobenius"][1][i][i] == pytest.approx(float(part.norm()), rel=1e-8)
        assert found["spectral"][1][i][i] == pytest.approx(float(torch.linalg.matrix_norm(part, 2)), rel=1e-8)
    squares = torch.tensor(found["frobenius"][1], dtype=torch.float64).square()
    assert float(squares.sum().sqrt()) == pytest.approx(float(whole.norm()), rel=1e-8)


def test_entries_of_the_query_block_are_the_larger_ones_at_large_embeddings() -> None:
    for sigma, sign in ((0.2, 1), (2.0, -1)):
        medians = [
            entries.measure({"width": 16, "sigma": sigma, "kind": "softmax", "seed": seed})["median"]
            for seed in range(4)
        ]
        assert all(sign * (each["V"] - each["Q"]) > 0 for each in medians)


@pytest.mark.parametrize("value", heads.VALUES)
def test_heads_of_every_scale_are_exact(value: str) -> None:
    found = heads.measure({"heads": 2, "value": value, "seed": 0})
    assert found["apart"] < 1e-12
    assert found["between"] == 0
