"""What `assembly` refuses, and how it says so; small facts about what it returns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from assembly_truth import Case
from curvlens import CurvlensError, assembly
from curvlens.calculus.attention import Root

D = torch.float64
CASE = Case(heads=2)
STACK = Case(layers=2, heads=2)


def changed(**weights: Any) -> dict[str, Any]:
    """The weights of the case, some exchanged, those given as None left out."""
    names = {name.replace("__", "."): weight for name, weight in weights.items()}
    return {name: weight for name, weight in {**CASE.weights, **names}.items() if weight is not None}


WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "upper case": (changed(Q=torch.eye(4, dtype=D)), {}, r"no weight 'Q'\. Did you mean 'q'"),
    "unknown": (changed(query=torch.eye(4, dtype=D)), {}, r"no weight 'query'"),
    "missing": (changed(k=None, k_bias=None), {}, r"'k' is missing"),
    "half a feed-forward": (changed(down=None, down_bias=None), {}, r"'down' is missing"),
    "no gate": (changed(), {"activation": "swiglu"}, r"'gate' is missing"),
    "transposed": (changed(up=CASE.weights["up"].T), {}, r"'down' has shape|'up' has shape"),
    "turned": (changed(down=CASE.weights["down"].T), {}, r"expected \(6, 4\).*weight\.T"),
    "vector": (changed(q=torch.ones(4, dtype=D)), {}, r"'q' has shape \(4,\), expected a matrix"),
    "dtype": (changed(q=torch.eye(4)), {}, r"bring them to one dtype"),
    "nan": (changed(q=torch.full((4, 4), torch.nan, dtype=D)), {}, r"NaN"),
    "heads": (changed(), {"heads": 3}, r"'q' has 4 columns, which 3 heads"),
    "norm": (changed(), {"norm": "both"}, r"norm='both'"),
    "norm kind": (changed(), {"norm_kind": "batch"}, r"norm_kind='batch'"),
    "no norm": (changed(), {"norm": "none"}, r"there are weights of a norm"),
    "activation": (changed(), {"activation": "tanh"}, r"activation='tanh'"),
    "mask": (changed(), {"mask": "both"}, r"mask is 'both'"),
    "float mask": (changed(), {"mask": torch.zeros(3, 3)}, r"mask is torch\.float32"),
    "mask as numbers": (changed(), {"mask": 3}, r"mask is 3"),
    "eps as text": (changed(), {"eps": "a"}, r"eps='a'; expected a number"),
    "negative eps": (changed(), {"eps": -1.0}, r"eps=-1\.0; expected a number"),
}


@pytest.mark.parametrize(("weights", "options", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights(weights: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(CurvlensError, match=message):
        assembly.block(weights, **{"heads": 2, **options})


def test_stacks() -> None:
    table = torch.ones(5, 4, dtype=D)
    with pytest.raises(CurvlensError, match="at least one layer"):
        assembly.stack([], heads=2)
    with pytest.raises(CurvlensError, match=r"'h\.1\.k' is missing"):
        assembly.stack([CASE.weights, changed(k=None)], heads=2)
    with pytest.raises(CurvlensError, match="widths"):
        assembly.stack([CASE.weights, Case(d=6).weights], heads=2)
    with pytest.raises(CurvlensError, match="unembedding has shape"):
        assembly.stack([CASE.weights], heads=2, unembedding=table)
    with pytest.raises(CurvlensError, match="positions has shape"):
        assembly.stack([CASE.weights], heads=2, embedding=(table, table.T))
    with pytest.raises(CurvlensError, match="final_norm has 'gain'"):
        assembly.stack([CASE.weights], heads=2, final_norm={"gain": torch.ones(4, dtype=D)})
    for given, message in (
        ({"embedding": [table]}, "embedding is a list"),
        ({"embedding": (table, table, table)}, "embedding has 3 tables"),
        ({"unembedding": 5}, "unembedding is an int"),
        ({"final_norm": table}, "final_norm is a Tensor"),
    ):
        with pytest.raises(CurvlensError, match=message):
            assembly.stack([CASE.weights], heads=2, **given)


def test_inputs() -> None:
    network, X = CASE.network(), CASE.X
    table, places = torch.ones(5, 4, dtype=D), torch.ones(3, 4, dtype=D)
    embedded = assembly.stack([CASE.weights], heads=2, embedding=(table, places))
    for given, message in (
        ([1, 2], "X is a list"),
        (X[..., :3], r"expected \(…, tokens, 4\)"),
        (X.float(), "X is torch.float32"),
        (torch.zeros(2, 3).long(), "has no embedding"),
    ):
        with pytest.raises(CurvlensError, match=message):
            network.forward(given)  # type: ignore[arg-type]
    masked = assembly.block(CASE.weights, heads=2, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(CurvlensError, match=r"The mask has shape \(4, 4\), expected \(3, 3\) or \(2, 3, 3\)"):
        masked.forward(X)
    for tokens, message in ((torch.tensor([5]), "tokens from 5 to 5"), (torch.zeros(4).long(), "4 tokens given")):
        with pytest.raises(CurvlensError, match=message):
            embedded.forward(tokens)


LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "Got no loss"),
    "two": ({"target": CASE.target, "labels": CASE.labels}, "Got target and labels"),
    "shape": ({"target": CASE.target[..., :2]}, "target must have the shape"),
    "labels": ({"labels": CASE.labels[:, :2]}, r"labels has shape \(2, 2\), expected \(2, 3\)"),
    "float labels": ({"labels": CASE.labels.double()}, r"labels is torch\.float64"),
    "label": ({"labels": CASE.labels.clamp(min=9)}, "There is a label 9"),
    "ignored": ({"labels": torch.full_like(CASE.labels, -100)}, "Every label is -100"),
    "no curvature": ({"grad": CASE.target}, "needs curvature="),
    "pair": ({"grad": CASE.target, "curvature": (1.0, 1.0)}, "curvature is a pair"),
    "wrt": ({"target": CASE.target, "wrt": ["q", "W"]}, "wrt names 'W'"),
    "wrt as a number": ({"target": CASE.target, "wrt": 5}, "wrt is an int"),
    "empty": ({"target": CASE.target, "wrt": []}, "wrt is empty"),
}


@pytest.mark.parametrize(("given", "message"), LOSSES.values(), ids=LOSSES)
def test_losses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CurvlensError, match=message):
        CASE.network().hessian(CASE.X, **given)


def test_parts_and_products() -> None:
    H = CASE.hessian()
    with pytest.raises(CurvlensError, match=r"no part 'attn\.sofmax'. Did you mean 'attn\.softmax'"):
        H.parts["attn.sofmax"]
    with pytest.raises(CurvlensError, match="no part 'all'"):
        H.matvec(torch.zeros(H.size, dtype=D), "all")
    with pytest.raises(CurvlensError, match=f"a vector of {H.size} numbers"):
        H.matvec(torch.zeros(3, dtype=D))
    assert "attn.softmax" in H.parts
    assert "attn.sofmax" not in H.parts
    assert len(H.parts) == len(list(H.parts)) == len(H.part_names)
    assert H.parts["attn.mix"] is H.parts["attn.mix"]
    assert "12 parts" in repr(H)


def test_a_network_has_the_faces_of_the_other_closed_forms() -> None:
    H = CASE.hessian()
    assert H.norm() == H.total.norm()
    assert H.norm(("q", "k"), "ggn") == H.ggn.norm(("q", "k"))
    assert H.norm("q", "attn.softmax") == H.parts["attn.softmax"].norm("q")
    assert H.trace(part="functional") == H.functional.trace()
    assert torch.equal(H.diagonal("up"), H.total.diagonal("up"))
    assert repr(H.parts) == f"ModuleForms({', '.join(H.part_names)})"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: H["q"], r"H\.total\['q'\], H\.ggn\['q'\] or H\.functional\['q'\]"),
        (lambda: H["q", "k"], r"H\.total\['q', 'k'\]"),
        (lambda: H.norm("q", "outer"), "no part 'outer'.*'ggn'"),
        (lambda: H.norm("q", "k"), "no part 'k'. It is a parameter: a block is one argument"),
        (lambda: H.total.norm("q", "k"), r"norm takes one block.*norm\(\('q', 'k'\)\)"),
        (lambda: H.total.norm("qk"), r"no block 'qk'. Two names are a pair: \('q', 'k'\)"),
    ]
    for call, message in calls:
        with pytest.raises(CurvlensError, match=message):
            call()


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvlens.calculus.room.SMALL", 0)
    monkeypatch.setattr("curvlens.calculus.room.available_bytes", lambda device: 1000)
    H = CASE.hessian()
    with pytest.raises(CurvlensError, match=r"Hessian of a network.*1000 B are free.*`matvec`"):
        _ = H.total
    assert H.matvec(torch.ones(H.size, dtype=D)).norm() > 0


def test_forms_read_off_what_the_matrix_has() -> None:
    H = STACK.hessian().total
    dense = H.dense()
    assert H.norm() == pytest.approx(float(dense.norm()), rel=1e-12)
    assert H.trace() == pytest.approx(float(dense.trace()), rel=1e-12)
    assert torch.allclose(H.diagonal(), dense.diagonal(), rtol=1e-12)
    q, k = H.slices["h.0.q"], H.slices["h.1.k"]
    assert torch.equal(H["h.0.q", "h.1.k"], dense[q, k])
    assert torch.equal(H["h.1.k", "h.0.q"], dense[k, q])


@pytest.mark.parametrize("kind", ["matrix", "root", "number"])
def test_any_loss_of_the_tokens(kind: str) -> None:
    network, samples = CASE.network(), len(CASE.X)
    right = network.hessian(CASE.X, target=CASE.target)
    c = 2 / CASE.target[0].numel()  # of one sample: the mean over the samples is taken
    eye = torch.eye(4, dtype=D).expand(samples, 3, 4, 4)
    curvature = {"matrix": c * eye, "root": Root(c**0.5 * eye), "number": c}[kind]
    got = network.hessian(CASE.X, grad=c * (network.forward(CASE.X) - CASE.target), curvature=curvature)
    v = torch.ones(right.size, dtype=D)
    assert torch.allclose(got.total.dense(), right.total.dense(), rtol=1e-11, atol=1e-14)
    assert torch.allclose(got.matvec(v), right.matvec(v), rtol=1e-11, atol=1e-14)


def test_samples_are_averaged_and_leading_axes_are_samples() -> None:
    network = CASE.network()
    single = [network.hessian(x, target=y).total.dense() for x, y in zip(CASE.X, CASE.target, strict=True)]
    whole = network.hessian(CASE.X, target=CASE.target).total.dense()
    assert torch.allclose(sum(single) / len(single), whole, rtol=1e-11, atol=1e-13)  # type: ignore[arg-type]
    deep = network.hessian(CASE.X[:, None], target=CASE.target[:, None])
    assert torch.equal(deep.total.dense(), whole)
    assert network.forward(CASE.X[:, None]).shape == (2, 1, 3, 4)


def test_gradients_are_not_tracked() -> None:
    weights = {name: weight.clone().requires_grad_() for name, weight in CASE.weights.items()}
    H = assembly.block(weights, heads=2, mask="causal").hessian(CASE.X.clone().requires_grad_(), target=CASE.target)
    assert not H.total.dense().requires_grad
    assert not H.matvec(torch.ones(H.size, dtype=D)).requires_grad


def test_a_point_that_moved_is_noticed() -> None:
    weights = {name: weight.clone() for name, weight in CASE.weights.items()}
    network = assembly.block(weights, heads=2, mask="causal")
    H = network.hessian(CASE.X, target=CASE.target)
    before = H.total.dense().clone()
    weights["down"].mul_(2)
    with pytest.raises(CurvlensError, match="changed in place"):
        _ = H.ggn
    with pytest.raises(CurvlensError, match="changed in place"):
        H.matvec(torch.ones(H.size, dtype=D))
    assert torch.equal(H.total.dense(), before)
    now = network.hessian(CASE.X, target=CASE.target)
    assert not torch.allclose(now.total.dense(), before)


def test_few_parameters_go_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    few = STACK.hessian(["h.0.norm1.scale", "h.1.up_bias"])
    assert few.size <= max(few._forward.size(state) for state in few._forward.states)
    monkeypatch.setattr("curvlens.assembly.result.CHUNK", 1)  # one column at a time
    some, everything = few.parts["h.1.attn.softmax"], STACK.hessian().parts["h.1.attn.softmax"]
    for a, b in (("h.0.norm1.scale", "h.1.up_bias"), ("h.0.norm1.scale", "h.0.norm1.scale")):
        assert torch.allclose(some[a, b], everything[a, b], rtol=1e-11, atol=1e-15)


def test_a_shift_without_a_scale_is_a_shift() -> None:
    weights = {name: torch.randn(3, 3, dtype=torch.float64) for name in "qkvo"}
    weights |= {"norm1.shift": torch.randn(3, dtype=torch.float64)}
    X = torch.randn(2, 3, dtype=torch.float64)
    z = torch.nn.functional.layer_norm(X, (3,)) + weights["norm1.shift"]
    mixed = torch.nn.functional.scaled_dot_product_attention(z @ weights["q"], z @ weights["k"], z @ weights["v"])
    found = assembly.block(weights, heads=1, norm="pre").forward(X)
    torch.testing.assert_close(found, X + mixed @ weights["o"])


def test_weights_that_belong_to_nothing_are_refused() -> None:
    weights = {name: torch.eye(3, dtype=torch.float64) for name in "qkv"}
    for name in ("o_bias", "norm2.scale"):
        with pytest.raises(CurvlensError, match="without"):
            assembly.block({**weights, name: torch.ones(3, dtype=torch.float64)}, heads=1, norm="pre")


def test_modules_that_compute_something_else_are_refused() -> None:
    class Doubled(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    def layer(**options: bool) -> torch.nn.TransformerEncoderLayer:
        made = torch.nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True).double().eval()
        if options:
            made.self_attn = torch.nn.MultiheadAttention(4, 2, batch_first=True, **options).double().eval()
        return made

    assembly.read(layer())
    assembly.read(layer(), mask="causal")
    assembly.read(layer(), mask=torch.ones(3, 3, dtype=torch.bool).tril())
    other = layer()
    other.norm1 = Doubled(4).double()
    with pytest.raises(CurvlensError, match="expected a LayerNorm"):
        assembly.read(other)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(CurvlensError, match="a key of its own"):
            assembly.read(layer(**{option: True}))
    hooked = layer()
    hooked.linear1.register_forward_hook(lambda _, args, z: z + 1)
    with pytest.raises(CurvlensError, match="does not compute what was read"):
        assembly.read(hooked)
    with pytest.raises(CurvlensError, match="no layers"):
        assembly.read(torch.nn.TransformerEncoder(layer(), 0).eval())


def test_a_copy_of_a_hessian_works() -> None:
    """Before use and after it; what was changed since is counted from the copy on."""
    fresh, used = CASE.hessian(), CASE.hessian()
    matrix, v = used.total.dense(), torch.ones(used.size, dtype=D)
    assert used.parts["attn.mix"].dense().isfinite().all()
    for other in (copy.deepcopy(fresh), copy.deepcopy(used)):
        torch.testing.assert_close(other.total.dense(), matrix, rtol=1e-14, atol=1e-16)
        torch.testing.assert_close(other.matvec(v), matrix @ v, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(pickle.loads(pickle.dumps(used.total)).dense(), matrix, rtol=0, atol=0)
    assert used.total.norm() > 0  # it has read every block
    kept = pickle.dumps(used.total)
    assert len(kept) < 1.1 * matrix.numel() * 8 + 10_000
    form = pickle.loads(kept)
    form.dense().zero_()
    assert not form[form.names[0]].any()
    with pytest.raises(CurvlensError, match="no part"):
        used.parts[["attn.mix"]]  # type: ignore[index]
