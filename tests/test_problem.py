"""What a problem is: its batches, parameters and point; and that it leaves everything as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlens as cl
from small import direction, gpt, problem, relative, tokens_and_labels

Pair = namedtuple("Pair", ["input_ids", "labels"])


class Keyword(nn.Module):
    """Called as Hugging Face's models are, and answers as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.gpt(input_ids)}


TOKENS, LABELS = tokens_and_labels()


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (gpt(), (TOKENS, LABELS)),
        (gpt(), [(TOKENS, LABELS)]),
        (gpt(), [[TOKENS, LABELS]]),
        (gpt(), [((TOKENS,), LABELS)]),
        (gpt(), DataLoader(TensorDataset(TOKENS, LABELS), batch_size=2)),
        (Keyword(), {"input_ids": TOKENS, "labels": LABELS}),
        (Keyword(), [OrderedDict(input_ids=TOKENS, labels=LABELS)]),
        (Keyword(), [UserDict(input_ids=TOKENS, labels=LABELS, attention_mask=torch.ones_like(TOKENS))]),
        (Keyword(), Pair(TOKENS, LABELS)),
        (Keyword(), [({"input_ids": TOKENS}, LABELS)]),
        (Keyword(), [{"input_ids": TOKENS, "labels": LABELS, "attention_mask": None}]),
    ],
)
def test_kinds_of_batches(model: nn.Module, data: Any) -> None:
    expected = F.cross_entropy(gpt()(TOKENS).flatten(0, 1), LABELS.flatten()).detach()
    found = cl.Problem(model, data, cl.losses.CrossEntropy(), micro_batch=2)
    assert found.loss() == pytest.approx(float(expected), rel=1e-13)
    assert found.n_tokens == int((LABELS != -100).sum())
    assert relative(cl.hessian(found) @ direction(found.layout.size), cl.hessian(problem()) @ direction(242)) < 1e-12


def test_batches_of_hugging_face() -> None:
    from transformers import BatchEncoding

    found = cl.Problem(Keyword(), BatchEncoding({"input_ids": TOKENS, "labels": LABELS}), cl.losses.CrossEntropy())
    assert found.loss() == pytest.approx(problem().loss(), rel=1e-13)


def test_parameters_by_name_and_pattern() -> None:
    whole = problem()
    part = problem(params=["h.0.mlp.*", "unembed.weight"])
    assert part.layout.names == tuple(n for n in whole.layout.names if n.startswith("h.0.mlp") or n == "unembed.weight")
    names = list(part.layout.names)
    v = direction(part.layout.size)
    for make in (cl.hessian, cl.ggn, cl.functional):
        assert relative(make(part) @ v, make(whole)[names] @ v) < 1e-12
    assert problem(params="*.q.weight").layout.names == ("h.0.attn.q.weight",)


def test_frozen_parameters_are_out() -> None:
    model = gpt()
    model.h[0].attn.requires_grad_(False)
    frozen = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    assert not [name for name in frozen.layout.names if ".attn." in name]
    block = cl.hessian(problem())[list(frozen.layout.names)]
    v = direction(frozen.layout.size)
    assert relative(cl.hessian(frozen) @ v, block @ v) < 1e-12


def test_a_tied_tensor_is_there_once() -> None:
    model = gpt(tied=True)
    tied = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    assert "embed.weight" in tied.layout.names
    assert "unembed.weight" not in tied.layout.names
    theta, v, eps = tied.theta, direction(tied.layout.size), 1e-6
    difference = (tied.with_params(theta + eps * v).gradient() - tied.with_params(theta - eps * v).gradient()) / (
        2 * eps
    )
    assert relative(cl.hessian(tied) @ v, difference) < 1e-8
    alias = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy(), params="unembed.weight")
    assert alias.layout.names == ("embed.weight",)


def test_another_point_without_rebuilding() -> None:
    here = problem()
    theta = here.theta + 0.1 * direction(here.layout.size)
    there = here.with_params(theta)
    by_name = here.with_params(here.layout.unflatten(theta))
    model = gpt()
    nn.utils.vector_to_parameters(theta, model.parameters())
    rebuilt = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    v = direction(here.layout.size)
    assert torch.equal(there.theta, theta)
    for other in (there, by_name):
        assert other.loss() == pytest.approx(rebuilt.loss(), rel=1e-14)
        assert relative(cl.hessian(other) @ v, cl.hessian(rebuilt) @ v) < 1e-13
    assert here.loss() == pytest.approx(problem().loss(), rel=1e-14)
    assert relative(cl.hessian(here) @ v, cl.hessian(there) @ v) > 1e-3


def changed_hessian(change: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The dense Hessian after a change of the model, from an operator with kept graphs and from a new problem."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    data = (direction(10).view(5, 2), direction(5, 2).view(5, 1))
    kept = cl.Problem(net, data, cl.losses.MSE(), **options)
    at_theta = kept.with_params(kept.theta) if options else kept
    H = cl.hessian(at_theta)
    before = H.dense()
    with torch.no_grad():
        change(net)
    after = H.dense()
    fresh = cl.hessian(cl.Problem(net, data, cl.losses.MSE(), **options)).dense()
    assert relative(before, fresh) > 1e-3
    return after, fresh


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda net: net[0].weight.copy_(net[0].weight.flip(1)), {}),
        (lambda net: net[0].weight.data.copy_(net[0].weight.flip(0)), {}),
        (lambda net: net[0].weight.data.view(-1)[3].mul_(1.5), {}),
        (lambda net: net[1].running_var.mul_(2), {}),
        (lambda net: net[3].weight.mul_(3), {"params": "0.*"}),
    ],
    ids=["columns swapped", "rows swapped through data", "one entry", "a buffer", "a parameter not chosen"],
)
def test_every_change_of_the_model_is_noticed(change: Any, options: dict[str, Any]) -> None:
    after, fresh = changed_hessian(change, **options)
    assert relative(after, fresh) < 1e-13


def test_changed_data_is_refused() -> None:
    x, y = direction(10).view(5, 2).clone(), direction(5, 2).view(5, 1)
    data = [(x, y)]
    held = cl.Problem(nn.Linear(2, 1).double(), data, cl.losses.MSE())
    H, v = cl.hessian(held), torch.ones(3).double()
    before = H @ v
    x.mul_(2)
    with pytest.raises(cl.CurvlensError, match="the data has changed"):
        H @ v
    x.div_(2)
    assert relative(H @ v, before) < 1e-15
    data.append((x, y))
    with pytest.raises(cl.CurvlensError, match="the data has changed"):
        H @ v


@pytest.mark.parametrize("how", ["optimiser", "data", "assigned"])
def test_the_problem_follows_the_model(how: str) -> None:
    """After a training step, however it is written, products are those at the new parameters."""
    model = gpt()
    followed = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    H, v = cl.hessian(followed), direction(followed.layout.size)
    before = H @ v
    step = followed.layout.unflatten(0.1 * followed.gradient())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if how == "optimiser":
                p.sub_(step[name])
            elif how == "data":
                p.data -= step[name]
            else:
                p.data = p.data - step[name]
    fresh = cl.hessian(cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())) @ v
    assert relative(H @ v, fresh) < 1e-13
    assert relative(before, fresh) > 1e-6


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    return (
        [p.detach().clone() for p in model.parameters()],
        [p.grad for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        [id(p) for p in model.parameters()],
        [m.training for m in model.modules()],
        torch.random.get_rng_state(),
    )


def assert_same_snapshot(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    assert a[1:5] == b[1:5]
    assert torch.equal(a[5], b[5])


def test_everything_is_left_as_it_was() -> None:
    model = gpt()
    model.get_submodule("h.0.mlp").train()
    before = snapshot(model)
    loader = DataLoader(TensorDataset(TOKENS, LABELS), batch_size=2)
    used = cl.Problem(model, loader, cl.losses.CrossEntropy(), memory=0)
    used.loss()
    for make in (cl.hessian, cl.ggn, cl.functional, cl.fisher, cl.empirical_fisher):
        make(used) @ used.gradient()
    assert_same_snapshot(before, snapshot(model))


@pytest.mark.parametrize("memory", ["1GiB", 0])
@pytest.mark.parametrize("after", [1, 3, 6])
def test_an_interrupt_leaves_everything_as_it_was(after: int, memory: int | str) -> None:
    """Ctrl-C somewhere in the forward passes of a product; the next product is right."""
    model = gpt()
    interrupted = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy(), memory=memory, micro_batch=1)
    before, v, calls = snapshot(model), direction(interrupted.layout.size), 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt

    handle = model.get_submodule("h.0.mlp").register_forward_hook(interrupt)
    H = cl.hessian(interrupted)
    try:
        for _ in range(2):
            H @ v
    except KeyboardInterrupt:
        pass
    handle.remove()
    assert calls == after or memory == "1GiB"
    assert_same_snapshot(before, snapshot(model))
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    fused = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="derivative for"):
        torch.autograd.grad(fused.sum(), q)
    assert relative(H @ v, cl.hessian(problem()) @ v) < 1e-12


def test_an_interrupt_in_the_progress_callback() -> None:
    held = problem(micro_batch=1)
    H, v = cl.hessian(held), direction(held.layout.size)

    def stop(done: int, total: int | None) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        H.apply(v, progress=stop)
    assert held._evaluation.cache.kept_bytes == 0
    assert relative(H @ v, cl.hessian(problem()) @ v) < 1e-12


def test_inside_no_grad_and_inference_mode() -> None:
    model, outside = gpt(), problem()
    expected, slope = cl.hessian(outside) @ direction(242), outside.gradient()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            inside = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
            assert relative(cl.hessian(inside) @ direction(242), expected) < 1e-14
            assert relative(inside.gradient(), slope) < 1e-14
    with torch.inference_mode():
        unfit = gpt()
    with pytest.raises(cl.CurvlensError, match="inference_mode"):
        cl.Problem(unfit, tokens_and_labels(), cl.losses.CrossEntropy())


def test_float32_agrees_with_float64() -> None:
    model = gpt().float()
    low = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy())
    v = direction(low.layout.size)
    product = cl.hessian(low) @ v
    assert product.dtype == torch.float32
    assert relative(product.double(), cl.hessian(problem()) @ v) < 1e-5


def test_low_precision_is_announced() -> None:
    with pytest.warns(cl.CurvlensWarning, match="bfloat16"):
        low = cl.Problem(gpt().bfloat16(), tokens_and_labels(), cl.losses.CrossEntropy())
    v = direction(low.layout.size)
    assert relative((cl.ggn(low) @ v).double(), cl.ggn(problem()) @ v) < 0.1


def test_contrastive_problem() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4).double(), nn.Linear(5, 4).double()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            similarity: Tensor = F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).T / 0.1
            return similarity

    torch.manual_seed(0)
    model, x, y = Towers(), direction(12).view(4, 3), direction(20, 2).view(4, 5)
    pair = cl.Problem(model, (x, y), cl.losses.Contrastive(symmetric=True))
    similarity = model(x, y).detach()
    own = torch.arange(4)
    expected = (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own)) / 2
    assert pair.loss() == pytest.approx(float(expected), rel=1e-13)
    v, eps = direction(pair.layout.size), 1e-5
    above, below = pair.with_params(pair.theta + eps * v), pair.with_params(pair.theta - eps * v)
    H, G, P = cl.hessian(pair), cl.ggn(pair), cl.functional(pair)
    assert relative(H @ v, (above.gradient() - below.gradient()) / (2 * eps)) < 1e-7
    assert relative(G @ v + P @ v, H @ v) < 1e-12
    two = [(x, y), (x.flip(1), y.flip(1))]
    mean = cl.Problem(model, two, cl.losses.Contrastive(per_batch=True))
    each = [cl.Problem(model, batch, cl.losses.Contrastive()) for batch in two]
    assert mean.loss() == pytest.approx((each[0].loss() + each[1].loss()) / 2, rel=1e-13)
    tight = cl.Problem(model, (x, y), cl.losses.Contrastive(symmetric=True), memory=0)  # over budget, yet never cut
    assert relative(cl.hessian(tight) @ v, H @ v) < 1e-13


def test_every_batch_that_is_cut_can_be_cut() -> None:
    """A first batch of one sample shows nothing; the second has its samples elsewhere."""
    layer = nn.TransformerEncoderLayer(4, 2, 8).double().eval()  # sequence first
    first, second = (direction(n * 4).view(*shape, 4) for n, shape in ((5, (1, 5)), (30, (6, 5))))
    late = cl.Problem(layer, [(first, first), (second, second)], cl.losses.MSE(), micro_batch=1)
    with pytest.raises(cl.CurvlensError, match="sequence-first"):
        late.loss()


def test_weight_norm_is_differentiated_twice() -> None:
    """torch's kernel takes ‖v‖ for a constant in its second derivatives."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4).double())
    normed = cl.Problem(layer, (direction(15).view(5, 3), torch.tensor([0, 1, 2, 3, 0])), cl.losses.CrossEntropy())
    H = cl.hessian(normed).dense()
    torch.testing.assert_close(H, H.T, rtol=1e-12, atol=1e-14)
    v, eps = direction(normed.layout.size), 1e-6
    above, below = normed.with_params(normed.theta + eps * v), normed.with_params(normed.theta - eps * v)
    difference = (above.gradient() - below.gradient()) / (2 * eps)
    for name, place in normed.layout.slices.items():
        assert relative((H @ v)[place], difference[place]) < 1e-8, name


@pytest.mark.parametrize("how", ["parameter", "module", "activation", "state"])
def test_replaced_parts_of_the_model_are_followed(how: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    data = (direction(10).view(5, 2), direction(5, 2).view(5, 1))
    followed = cl.Problem(net, data, cl.losses.MSE())
    H = cl.hessian(followed)
    before = H.dense()
    new = nn.Linear(3, 1).double()
    if how == "parameter":
        net[2].weight = new.weight
    elif how == "module":
        net[2] = new
    elif how == "activation":
        net[1] = nn.Sigmoid()
    else:
        net.load_state_dict({**net.state_dict(), "2.weight": new.weight.detach()}, assign=True)
    fresh = cl.Problem(net, data, cl.losses.MSE())
    assert followed.loss() == pytest.approx(fresh.loss(), rel=1e-14)
    assert relative(followed.gradient(), fresh.gradient()) < 1e-14
    assert relative(H.dense(), cl.hessian(fresh).dense()) < 1e-14
    assert relative(before, H.dense()) > 1e-3


@pytest.mark.parametrize(
    "change", [lambda m: m.float(), lambda m: m.set_submodule("2", nn.Linear(3, 2).double())], ids=["dtype", "shape"]
)
def test_another_kind_of_model_needs_another_problem(change: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    held = cl.Problem(net, (direction(10).view(5, 2), direction(5, 2).view(5, 1)), cl.losses.MSE())
    H = cl.hessian(held)
    H @ direction(13)
    change(net)
    with pytest.raises(cl.CurvlensError, match="Build a new Problem"):
        H @ direction(13)


def test_a_loss_of_the_model_may_look_at_requires_grad() -> None:
    """As code for weight decay does: value, gradient and Hessian belong together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, y = direction(10).view(5, 2), direction(5, 2).view(5, 1)

    def decayed(model: nn.Module, batch: Any) -> Tensor:
        decay = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
        return F.mse_loss(model(batch[0]), batch[1]) + 0.1 * decay

    expected = float(decayed(net, (x, y)).detach())
    for params in (None, "0.*"):
        found = cl.Problem(net, (x, y), decayed, params=params)
        assert found.loss() == pytest.approx(expected, rel=1e-14)
        v, eps = direction(found.layout.size), 1e-6
        above, below = found.with_params(found.theta + eps * v), found.with_params(found.theta - eps * v)
        assert (above.loss() - below.loss()) / (2 * eps) == pytest.approx(float(found.gradient() @ v), rel=1e-7)
        assert relative(cl.hessian(found) @ v, (above.gradient() - below.gradient()) / (2 * eps)) < 1e-7


def test_a_dict_of_what_differs() -> None:
    here = problem()
    moved = here.with_params({"pos.weight": torch.zeros(6, 4)})
    theta = here.theta
    theta[here.layout.slices["pos.weight"]] = 0
    assert torch.equal(moved.theta, theta)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_kind(dtype: torch.dtype) -> None:
    labels = LABELS.clamp(min=0)
    of_kind = cl.Problem(gpt(), (TOKENS, labels.to(dtype)), cl.losses.CrossEntropy())
    assert of_kind.loss() == cl.Problem(gpt(), (TOKENS, labels), cl.losses.CrossEntropy()).loss()


def test_checkpointed_layers_are_computed_at_the_right_point() -> None:
    """A checkpointed layer runs again in the backward pass: with the exchanged parameters, not with the model's."""
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
            self.checkpointed = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
            y: Tensor = self.b(h)
            return y

        def layer(self, x: Tensor) -> Tensor:
            h: Tensor = self.a(x).tanh().square()
            return h

    data = (direction(10).view(5, 2), direction(5, 2).view(5, 1))
    plain, saved = (cl.Problem(Model(c), data, cl.losses.MSE()) for c in (False, True))
    v = direction(plain.layout.size)
    for a, b in ((plain, saved), (plain.with_params(v), saved.with_params(v))):
        assert relative(b.gradient(), a.gradient()) < 1e-14
        for make in (cl.hessian, cl.ggn, cl.functional):
            for _ in range(2):
                assert relative(make(b) @ v, make(a) @ v) < 1e-14


class Passes:
    """How often a model runs."""

    def __init__(self, model: nn.Module) -> None:
        self._count = 0
        model.register_forward_hook(self._ran)

    def _ran(self, *_: Any) -> None:
        self._count += 1

    def since(self) -> int:
        """Passes since it was last asked."""
        found, self._count = self._count, 0
        return found


def test_checks_share_the_passes_that_are_made_anyway() -> None:
    model = gpt().eval()
    passes = Passes(model)
    held = cl.Problem(model, [(TOKENS, LABELS), (TOKENS, LABELS)], cl.losses.CrossEntropy())
    assert passes.since() == 2  # the loss twice; that it depends on the outputs alone is seen in one of them
    held.gradient()
    assert passes.since() == 2  # one a batch
    H, v = cl.hessian(held), direction(held.layout.size)
    H @ v
    assert passes.since() == 2  # attention is compared with the loss that is known
    H @ v
    assert passes.since() == 0
    model.train()
    held.loss()
    assert passes.since() == 2 + 2  # checked in its new mode
    model.eval()
    held.loss()
    assert passes.since() == 2  # it was checked in this mode before


def test_attention_is_compared_at_the_point_where_the_model_is() -> None:
    """The loss from when the problem was built is not that of a model that was trained since."""
    model = gpt().eval()
    passes = Passes(model)
    held = cl.Problem(model, (TOKENS, LABELS), cl.losses.CrossEntropy())
    with torch.no_grad():
        next(model.parameters()).mul_(3.0)
    passes.since()
    cl.hessian(held) @ direction(held.layout.size)
    assert passes.since() == 2


def test_gradient_of_weighted_tokens_in_float32_is_rounded_once() -> None:
    model = nn.Linear(3, 7)
    x, y, weight = torch.randn(5, 3), torch.randint(0, 7, (5,)), torch.rand(7)
    found = cl.Problem(model, (x, y), cl.losses.CrossEntropy(weight=weight)).gradient()
    summed = F.cross_entropy(model(x), y, weight=weight, reduction="sum").double()
    parts = torch.autograd.grad(summed, list(model.parameters()))
    flat = torch.cat([part.reshape(-1) for part in parts]).double()
    assert torch.equal(found, (flat / float(weight[y].double().sum())).float())


@pytest.mark.parametrize("memory", [0, "1GiB"])
@pytest.mark.parametrize("make", [cl.hessian, cl.ggn, cl.functional])
def test_blocks_at_another_point(make: Callable[[cl.Problem], Any], memory: int | str) -> None:
    """Graphs that are rebuilt for one block take all other parameters from that point, not from the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    data = (torch.randn(6, 3).double(), torch.randint(2, (6,)))
    problem = cl.Problem(model, data, cl.losses.CrossEntropy(), memory=memory)
    theta = 3 * problem.theta
    there = copy.deepcopy(model)
    nn.utils.vector_to_parameters(theta, there.parameters())
    truth = make(cl.Problem(there, data, cl.losses.CrossEntropy())).dense()
    moved = make(problem.with_params(theta))
    for name in problem.layout.names:
        place = problem.layout.slices[name]
        for _ in range(2):  # the first product builds the graphs, the second rebuilds those that were not kept
            error = (moved[name].dense() - truth[place, place]).norm()
            assert error <= 1e-12 * truth.norm()
