"""The authors' networks, drawn again: random numbers by their definition, and norms against independent truths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
from curvlens.data import Addition
from curvlens.papers import Effort, authors, cuda_draws, named, setting
from curvlens.papers.first_paper import published, published_deep
from curvlens.papers.reference import compared
from curvlens.papers.sweeps import Sweep
from curvlens.study import Record

WIDTH = 4


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_by_its_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Those of the generator's reference implementation, Random123."""
    found = cuda_draws.philox(tuple(np.array([word], dtype=np.uint64) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in found) == words


def test_normal_numbers_of_a_gpu() -> None:
    """torch.manual_seed(0); torch.randn(10, device="cuda"), as it is printed all over the web."""
    known = [-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284, -1.0745, -0.3631]
    assert cuda_draws.normal(10, seed=0, call=0).round(4).tolist() == pytest.approx(known, abs=1e-6)
    later = """  0.1940  2.1614 -0.1721  0.8491  0.1391 -0.1082 -0.7174  0.7566 -0.5187  1.2268  0.6255 -0.9117
                -0.6974 -1.8688 -0.8832 -1.6627 -1.2682 -0.0383 -0.1029  1.4400  1.4640 -0.3238  0.7740  1.5892"""
    six = np.concatenate([cuda_draws.normal(4, seed=42, call=call) for call in range(6)])  # six tensors after seed 42
    assert six.round(4).tolist() == pytest.approx([float(number) for number in later.split()], abs=1e-6)
    high, low = (cuda_draws.normal(4, seed=seed, call=0) for seed in (7 << 32, 7))
    assert not np.allclose(high, low)
    many = np.concatenate([cuda_draws.normal(4000, seed=7, call=call) for call in range(10)])
    assert abs(many.mean()) < 4 / len(many) ** 0.5
    assert many.std() == pytest.approx(1, abs=4 / (2 * len(many)) ** 0.5)
    assert len(np.unique(many)) > 0.999 * len(many)


@pytest.fixture
def global_seed() -> Iterator[Callable[[int], Any]]:
    state = torch.get_rng_state()
    yield torch.manual_seed
    torch.set_rng_state(state)


def test_the_batch_is_drawn_digit_by_digit(global_seed: Callable[[int], Any]) -> None:
    ids, labels = authors.batch()
    global_seed(1234)
    first, second = torch.randint(0, 10, (64, 5)), torch.randint(0, 10, (64, 5))
    assert torch.equal(ids[:, :5], first)
    assert torch.equal(ids[:, 6:11], second)
    for row in range(64):
        text = Addition().text(torch.cat([ids[row], labels[row, -1:]]))
        left, answer = text.split("=")
        assert sum(map(int, left.split("+"))) == int(answer)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (torch.tensor([[100, 1]]), "run from 1 to 100, expected 0 to 99 .2 digits."),
        (torch.tensor([[-1, 1]]), "run from -1 to 1"),
        (torch.tensor([[1.0, 2.0]]), "torch.float32"),
        (torch.tensor([1, 2]), r"\(2,\)"),
        (torch.tensor([[1, 2, 3]]), r"\(1, 3\)"),
    ],
)
def test_terms_that_are_no_pairs_of_such_numbers(terms: Tensor, said: str) -> None:
    with pytest.raises(cl.CurvlensError, match=said):
        Addition(digits=2).of(terms)


def test_weights_come_in_the_order_of_the_parameters(global_seed: Callable[[int], Any]) -> None:
    """As `nn.init.normal_` fills them after a global seed; no global state is touched by drawing them here."""
    state = torch.get_rng_state()
    found = authors.network(3, depth=2, width=16)
    assert torch.equal(torch.get_rng_state(), state)
    global_seed(1237)
    shapes = [(12, 16), (18, 16), *2 * [*4 * [(1, 16, 16)], (16, 64), (64, 16)], (16, 12)]
    drawn = [nn.init.normal_(torch.empty(shape), std=0.2).squeeze(0).double() for shape in shapes]
    names = ("q", "o", "k", "v", "up", "down")
    for number, layer in enumerate(found.layers):
        for place, name in enumerate(names):
            assert torch.equal(getattr(layer, name), drawn[2 + 6 * number + place]), name
    assert torch.equal(found.unembed, drawn[-1])
    global_seed(1237)
    shapes = [(12, 16), (18, 16), *4 * [(1, 16, 16)], (16, 12)]
    drawn = [nn.init.normal_(torch.empty(shape), std=0.2).squeeze(0).double() for shape in shapes]
    alone = authors.network(3, width=16, mlp=False)
    assert torch.equal(alone.layers[0].v, drawn[5])
    assert torch.equal(alone.unembed, drawn[-1])


def test_embeddings_are_new_at_every_place() -> None:
    first, again = authors.embeddings(0, 0, 0.1), authors.embeddings(0, 0, 0.1)
    other = authors.embeddings(0, 1, 0.1)
    assert torch.equal(first[0], again[0])
    assert not torch.allclose(first[0], other[0])
    assert [tuple(table.shape) for table in first] == [(12, 128), (17, 128)]
    assert all(float(table.std()) == pytest.approx(0.1, rel=0.1) for table in first)
    assert torch.allclose(authors.embeddings(0, 0, 0.2)[1], 2 * first[1], rtol=1e-6)
    assert (len(authors.SHORT), authors.SHORT[0], authors.SHORT[-1]) == (20, 0.1, 1.0)
    third = cuda_draws.normal(12 * 128, seed=1237, call=8)
    assert torch.allclose(authors.embeddings(3, 4, 1.0)[0].flatten().float(), torch.from_numpy(third))
    calls = [cuda_draws.normal(2304, seed=1234, call=call)[:2] for call in (1, 3)]
    assert first[1].flatten()[:2].tolist() == pytest.approx((0.1 * calls[0]).tolist(), rel=1e-6)
    assert other[1].flatten()[:2].tolist() == pytest.approx((0.1 * calls[1]).tolist(), rel=1e-6)


def small(depth: int, *, linear: bool = False) -> tuple[Any, Any, Tensor, Tensor]:
    network = authors.network(1, depth, WIDTH, mlp=not linear)
    tables = authors.embeddings(1, 2, 0.7, WIDTH)
    ids, labels = (each[:3] for each in authors.batch())
    return network, authors.gpt(network, tables, linear=linear), ids, labels


@pytest.mark.parametrize("norm", ["none", "pre"])
def test_norms_of_a_block_are_those_of_its_dense_hessian(norm: Any) -> None:
    network, model, ids, labels = small(1)
    if norm == "pre":
        config = model.reference_config
        pre = cl.models.GPT(type(config)(**{**vars(config), "norm": "pre"})).double()
        pre.load_state_dict(model.state_dict(), strict=False)
        model = pre
    weights = setting.Weights(
        model.embed.weight.detach(), model.pos.weight.detach(), network.layers[0], network.unembed
    )
    H = setting.hessian_at(weights, ids, labels, norm=norm)
    problem = cl.Problem(model, (ids, labels), cl.losses.CrossEntropy())
    for part, operator in (
        ("outer", cl.ggn(problem)),
        ("functional", cl.functional(problem)),
        ("total", cl.hessian(problem)),
    ):
        for block in "QV":
            truth = float(operator[f"h.0.attn.{block.lower()}"].dense().norm())
            assert H.norm(block, part) == pytest.approx(truth, rel=1e-10, abs=1e-14)  # type: ignore[arg-type]


def test_the_square_loss_of_linear_attention() -> None:
    """Without MLPs and skips, against a plain forward pass; targets are the tokens themselves."""
    network, model, ids, labels = small(2, linear=True)
    x = model.embed.weight[ids] + model.pos.weight
    for layer in network.layers:
        scores = ((x @ layer.q) @ (x @ layer.k).mT / math.sqrt(WIDTH)).tril()
        x = scores @ (x @ layer.v @ layer.o)
    truth = (x @ network.unembed)[:, 11:] - nn.functional.one_hot(ids[:, 11:], 12)
    assert torch.allclose(model(ids), x @ network.unembed, atol=1e-12)
    total, count = published_deep._square(model(ids), (ids, labels))
    assert torch.allclose(total, truth.square().sum())
    assert count == 18


def test_norms_by_products_and_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a small width every product is made, and norms are exact."""
    monkeypatch.setattr(published_deep, "SAMPLES", None)
    monkeypatch.setattr(published_deep, "FEW", None)
    cases = {kind: small(2, linear=kind == "linear") for kind in ("softmax", "linear")}  # before anything is replaced
    for kind, (network, model, ids, labels) in cases.items():
        monkeypatch.setattr(authors, "batch", lambda ids=ids, labels=labels: (ids, labels))
        monkeypatch.setattr(authors, "network", lambda *_, network=network, **__: network)
        monkeypatch.setattr(authors, "gpt", lambda *_, model=model, **__: model)
        found = published_deep.measure({"kind": kind, "depth": 2, "sigma": 0.7, "place": 2, "seed": 1})
        loss = published_deep._square if kind == "linear" else cl.losses.CrossEntropy()
        problem = cl.Problem(model, (ids, labels), loss)
        truth = cl.hessian(problem) if kind == "linear" else cl.functional(problem)
        assert set(found["norms"]) == (set("QV") if kind == "linear" else {"V"})
        for letter, ((value, error),) in found["norms"].items():
            dense = truth[f"h.0.attn.{letter.lower()}"].dense()
            assert value == pytest.approx(float(dense.norm()), rel=1e-10)
            assert error == 0


def records(experiment: str, result: Callable[[Mapping[str, Any]], dict[str, Any]], seeds: int) -> list[Record]:
    points = named(experiment).points(Effort(seeds=seeds))
    return [Record(experiment, 1, config, result(config)) for config in points]


@pytest.mark.parametrize(("seeds", "count"), [(20, 6), (19, 0), (2, 0), (21, 0)])
def test_only_the_published_repeats_are_compared(seeds: int, count: int) -> None:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        powers = {"Q": (6.003, 5.001, 5.011), "V": (1.994, 0.0, 1.994)}
        if config["norm"] == "pre":
            powers = {"Q": (-0.641,) * 3, "V": (-1.222,) * 3}
        scale = 1.0 + config["seed"]
        return {"norms": {block: [scale * config["sigma"] ** power for power in of] for block, of in powers.items()}}

    report = named("published").report(records("published", result, seeds))
    comparisons = compared(report.numbers)
    assert len(report.numbers) == len(comparisons) == count
    assert all(each.outcome == "agrees" and each.apart < 1e-3 for each in comparisons)
    assert all(number.error == 0 for number in report.numbers)
    windows = {number.name[:5]: number.window for number in report.numbers}
    assert not count or windows == {"fig3a": (0.01, authors.SIGMAS[12]), "fig3b": (0.01, 10.0)}
    assert ("further ones" in report.charts[0].caption) == (seeds > 20)


@pytest.mark.parametrize("experiment", ["published", "published-deep"])
def test_all_repeats_at_some_sigma_are_not_the_published_fit(experiment: str) -> None:
    few = [
        Record(experiment, 1, config, {"norms": {letter: [[1.0, 1.0, 1.0]] * 3 for letter in "QV"}})
        for config in named(experiment).points(Effort(quick=True, seeds=20))
    ]
    if experiment == "published":
        few = [Record(experiment, 1, each.config, {"norms": {key: [1.0] * 3 for key in "QV"}}) for each in few]
    report = named(experiment).report(few)
    assert not report.numbers
    assert any("all 20 repeats at all σ" in note for note in report.notes)


@pytest.mark.parametrize("experiment", [published, published_deep])
def test_a_point_is_of_its_repeat_and_its_place(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks that are measured are those of the configuration."""
    seen: list[Any] = []
    network, embeddings, ids, labels = authors.network, authors.embeddings, *(each[:2] for each in authors.batch())

    def drawn(repeat: int, depth: int = 1, **options: Any) -> Any:
        seen.append((repeat, depth, options.get("mlp", True)))
        return network(repeat, depth, 4, **options)

    def tables(repeat: int, place: int, sigma: float) -> Any:
        seen.append((repeat, place, sigma))
        return embeddings(repeat, place, sigma, 4)

    monkeypatch.setattr(authors, "network", drawn)
    monkeypatch.setattr(authors, "embeddings", tables)
    monkeypatch.setattr(authors, "batch", lambda: (ids, labels))
    config = {"norm": "none", "sigma": 0.3, "place": 5, "seed": 7, "depth": 2}
    for kind in ("softmax", "linear"):
        experiment.measure(config | {"kind": kind})
        alone = experiment is published_deep and kind == "linear"
        assert seen == [(7, 2 if experiment is published_deep else 1, not alone), (7, 5, 0.3)]
        seen.clear()


def test_slopes_of_deep_networks_carry_the_error_of_their_products() -> None:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        if config["kind"] == "softmax":
            norm = config["sigma"] ** 2.99
            return {"norms": {"V": [[norm, 0.1 * norm]] * (config["depth"] - 1)}}
        return {"norms": {letter: [[config["sigma"] ** 12.5, 0.0]] for letter in "QV"}}

    report = named("published-deep").report(records("published-deep", result, 20))
    comparisons = {each.reference.name: each for each in compared(report.numbers)}
    assert len(comparisons) == len(report.numbers) == 3
    assert {each.outcome for each in comparisons.values()} == {"agrees"}
    deep = comparisons["fig6 V functional small below the top, published networks"].measured
    x = np.log([sigma for sigma in authors.SIGMAS if sigma <= 0.1])
    draws = 1 + 0.1 * np.random.default_rng(0).standard_normal((2000, 20, len(x)))
    slopes = np.polyfit(x, np.log(draws * np.exp(2.99 * x)).reshape(-1, len(x)).T, 1)[0].reshape(2000, 20).mean(1)
    assert deep.value == pytest.approx(2.99)
    assert deep.error == pytest.approx(1.96 * slopes.std(), rel=0.06)
    assert not named("published-deep").report(records("published-deep", result, 3)).numbers


@pytest.mark.full
def test_the_published_fits_of_figure_3a() -> None:
    """Measured anew, not read from the committed results."""
    below = [(place, sigma) for place, sigma in enumerate(authors.SIGMAS) if sigma < 1]
    found = [
        [published.measure({"norm": "none", "sigma": sigma, "place": place, "seed": seed}) for place, sigma in below]
        for seed in range(authors.REPEATS)
    ]
    for block, part, known in (("V", 2, 1.994), ("Q", 2, 5.011), ("Q", 0, 6.003), ("Q", 1, 5.001)):
        norms = torch.tensor([[each["norms"][block][part] for each in row] for row in found], dtype=torch.float64)
        line = Sweep(tuple(sigma for _, sigma in below), norms)
        assert float(line.powers((0.01, 1.0)).mean()) == pytest.approx(known, abs=0.004)
