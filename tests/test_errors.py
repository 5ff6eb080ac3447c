"""Bad input gets an error of our own, with the fix, before any long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import curvlens as cl
from curvlens.errors import a_kind, nearest
from small import direction, gpt, problem, tokens_and_labels

CE = cl.losses.CrossEntropy
TOKENS, LABELS = tokens_and_labels()
DATA = (TOKENS, LABELS)


def make(model: nn.Module | None = None, data: Any = DATA, loss: Any = None, **options: Any) -> cl.Problem:
    return cl.Problem(gpt() if model is None else model, data, CE() if loss is None else loss, **options)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.5), nn.Linear(4, 7)).double()


def functional_dropout() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.inner(x), 0.1)

    return Model()


def with_nan(where: str) -> nn.Module:
    model = gpt()
    with torch.no_grad():
        dict(model.named_parameters())[where][0] = float("nan")
    return model


def sequence_first() -> cl.Problem:
    layer = nn.TransformerEncoderLayer(4, 2, 8).double().eval()
    x = direction(6 * 5 * 4).view(6, 5, 4)
    return cl.Problem(layer, (x, x), cl.losses.MSE(), micro_batch=2)


class Shuffled:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(5, generator=self.generator)
        yield TOKENS[order], LABELS[order]


class Growing:
    """The same first batch, but more and more of them."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from [(TOKENS, LABELS)] * self.passes


def ragged_labels() -> tuple[Tensor, Tensor]:
    return TOKENS, LABELS[:, :-1]


def big_labels() -> tuple[Tensor, Tensor]:
    return TOKENS, LABELS.where(LABELS < 0, 7)


def nan_in_second_batch() -> None:
    layer = nn.Linear(2, 1).double()
    x = torch.ones(3, 2).double()
    good, bad = (x, x[:, :1]), (x * float("nan"), x[:, :1])
    cl.hessian(cl.Problem(layer, [good, bad], cl.losses.MSE())) @ torch.ones(3).double()


def lone_numbers() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch[0]).mean()
        return value

    cl.Problem(gpt(), [DATA, DATA], loss).loss()


def cannot_twice() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.clone()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Once.apply(self.inner(x))  # type: ignore[no-untyped-call]
            return result

    found = make(Model())
    cl.hessian(found) @ direction(found.layout.size)


def gpt_with_frozen_head() -> nn.Module:
    model = gpt()
    model.unembed.requires_grad_(False)
    return model


def checkpointed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4).double(), nn.Linear(4, 7).double()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = checkpoint(self.head, self.embed(x).tanh(), use_reentrant=True)
            return logits

    found = make(Model())
    cl.hessian(found) @ direction(found.layout.size)


def partly_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def detached() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x)
            return logits.detach()

    make(Model()).gradient()


def too_large() -> None:
    big = nn.Linear(10**5, 4, bias=False)
    cl.hessian(cl.Problem(big, (torch.ones(1, 10**5), torch.ones(1, 4)), cl.losses.MSE())).dense()


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "vector too long": (lambda: cl.hessian(problem()) @ direction(243), r"242 numbers.*got shape \(243,\)"),
    "matrix transposed": (
        lambda: cl.hessian(problem()) @ torch.ones(3, 242),
        r"\(242, k\) matrix.*got shape \(3, 242\)",
    ),
    "vector of another kind": (lambda: cl.hessian(problem()) @ "v", "got a str"),
    "complex vector": (lambda: cl.hessian(problem()) @ torch.ones(242, dtype=torch.complex64), "complex"),
    "list @ operator": (lambda: [1.0] @ cl.hessian(problem()), "a list @ .*expected a tensor or an array"),
    "number @ operator": (lambda: 1 @ cl.hessian(problem()), "an int @ "),
    "operator / 0": (lambda: cl.hessian(problem()) / 0, "divided by 0"),
    "damping as a text": (lambda: cl.ggn(problem()).inverse(damping="a"), "damping='a', expected a finite number"),  # type: ignore[arg-type]
    "complex array": (lambda: cl.hessian(problem()) @ np.full(242, 1j), "complex.*both parts"),
    "complex rows": (lambda: np.full(242, 1j) @ cl.hessian(problem()), "complex.*both parts"),
    "complex array to scipy": (lambda: cl.hessian(problem()).to_scipy() @ np.full(242, 1j), "complex.*both parts"),
    "complex dict": (
        lambda: cl.hessian(problem()) @ problem().layout.unflatten(torch.full((242,), 1j)),
        "complex.*both parts",
    ),
    "complex right-hand side": (lambda: cl.ggn(problem()).solve(np.full(242, 1j), damping=0.1), "complex.*both parts"),
    "complex parameters": (lambda: problem().with_params(torch.full((242,), 1j)), "complex"),
    "complex parameter": (
        lambda: problem().with_params({"pos.weight": torch.full(problem().layout.shapes["pos.weight"], 1j)}),
        "complex",
    ),
    "complex start": (lambda: cl.eigs(cl.hessian(problem()), 1, start=torch.full((242,), 1j)), "complex"),
    "complex diagonal": (lambda: cl.operators.diagonal({"a": torch.full((3,), 1j)}), "complex"),
    "dict with a wrong name": (
        lambda: cl.hessian(problem()) @ {"embed.wight": torch.ones(7, 4)},
        "'embed.wight'.*Did you mean 'embed.weight'",
    ),
    "dict with a name missing": (
        lambda: cl.hessian(problem()) @ {"embed.weight": torch.ones(7, 4)},
        "lacks 'pos.weight'",
    ),
    "dict with a wrong shape": (
        lambda: cl.hessian(problem()) @ {n: torch.ones(s[::-1]) for n, s in problem().layout.shapes.items()},
        r"'embed.weight' has shape \(4, 7\)",
    ),
    "block with a wrong name": (
        lambda: cl.hessian(problem())["h.0.attn.qq.weight"],
        "'h.0.attn.qq.weight' here.*Did you mean 'h.0.attn.q.weight'",
    ),
    "block by number": (lambda: cl.hessian(problem())[0], "got an int"),
    "three names": (lambda: cl.hessian(problem())["a", "b", "c"], "3 names given"),
    "quadratic form of a matrix": (lambda: cl.hessian(problem()).quadratic(torch.ones(242, 2)), "vector of 242"),
    "quadratic form of an off-diagonal block": (
        lambda: cl.hessian(problem())["embed.weight", "pos.weight"].quadratic(torch.ones(24)),
        "equal rows and columns",
    ),
    "sum of different shapes": (lambda: cl.hessian(problem()) + torch.eye(3), "Shapes must match"),
    "operator of a model": (lambda: cl.ggn(gpt()), "expected a Problem"),  # type: ignore[arg-type]
    "identity of a rectangle": (
        lambda: cl.hessian(problem())["embed.weight", "pos.weight"].identity(),
        "An identity needs",
    ),
    "frozen block": (
        lambda: cl.hessian(make(gpt_with_frozen_head()))["unembed.weight"],
        "'unembed.weight' here .frozen parameters",
    ),
    "frozen pattern": (
        lambda: make(gpt_with_frozen_head(), params="unembed.*"),
        "No trainable parameter: requires_grad is False for all of 'unembed.weight'",
    ),
    "target of another shape": (
        lambda: cl.Problem(nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(3)), cl.losses.MSE()),
        r"target.reshape\(\(3, 1\)\)",
    ),
    "loss without its method": (lambda: make(loss=type("Bare", (cl.losses.Loss,), {})()), "lacks sum_and_count"),
    "gradient checkpointing": (checkpointed, "Gradient checkpointing is active"),
    "sum with a number": (lambda: cl.hessian(problem()) + 1, r"H \+ c \* H.identity"),
    "product with a vector": (lambda: cl.hessian(problem()) * direction(242), "scaled by a real number"),
    "dense, but too large": (too_large, "Take a block"),
    "parameter with a wrong name": (lambda: make(params=["h.0.atn.q.weight"]), "Did you mean 'h.0.attn.q.weight'"),
    "no parameter named": (lambda: make(params=[]), "No block was named"),
    "frozen parameter named": (
        lambda: make(gpt().requires_grad_(False), params="pos.weight"),
        "'pos.weight' is frozen",
    ),
    "no trainable parameters": (lambda: make(gpt().requires_grad_(False)), r"requires_grad_\(True\)"),
    "no parameters": (lambda: make(nn.Identity()), "no parameters"),
    "model is no module": (
        lambda: cl.Problem("gpt", DATA, CE()),  # type: ignore[arg-type]
        "expected a torch.nn.Module",
    ),
    "generator": (lambda: make(data=(b for b in [DATA])), r"generator.*data=list\(batches\)"),
    "iterator": (lambda: make(data=iter([DATA])), "only once"),
    "no data": (lambda: make(data=[]), "holds no batch"),
    "data is a number": (lambda: make(data=3), "is an int"),
    "batch without tensors": (lambda: make(data=["text"]), "without a tensor"),
    "shuffling loader": (
        lambda: make(data=DataLoader(TensorDataset(TOKENS, LABELS), shuffle=True)),
        "shuffle=False",
    ),
    "shuffled otherwise": (lambda: make(data=Shuffled()), "shuffled or randomly augmented"),
    "data that grows": (lambda: (p := make(data=Growing()), p.loss(), p.loss()), "the data has changed"),
    "no token counts": (
        lambda: make(data=(TOKENS, torch.full_like(LABELS, -100))).loss(),
        "No token of the data counts",
    ),
    "labels of another shape": (lambda: make(data=ragged_labels()), r"\(5, 6, 7\) and labels of shape \(5, 5\)"),
    "labels out of range": (lambda: make(data=big_labels()), "7 classes"),
    "no labels": (lambda: make(data=TOKENS), "found no labels"),
    "loss class, not object": (lambda: make(loss=CE), r"CrossEntropy\(\)"),
    "loss module": (lambda: make(loss=nn.CrossEntropyLoss()), "reduction hides"),
    "loss of torch": (lambda: make(loss=nn.functional.cross_entropy), "F.cross_entropy is a function of"),
    "loss that calls the model": (lambda: make(loss=lambda m, b: m(b[0]).mean()), "losses.FromModel"),
    "a list as one batch": (lambda: make(data=[TOKENS, LABELS]), "a tuple is one batch"),
    "batch of another precision": (
        lambda: cl.Problem(nn.Linear(2, 1), (torch.ones(1, 2).double(), torch.ones(1, 1)), cl.losses.MSE()),
        "model is in torch.float32, the batch has tensors in 'torch.float64'",
    ),
    "a lone number, cut": (
        lambda: cl.Problem(gpt(), DATA, cl.losses.FromModel(lambda m, b: m(b[0]).square().mean()), micro_batch=1),
        "how to weigh them is unknown",
    ),
    "loss is a text": (lambda: make(loss="ce"), "expected one of curvlens.losses"),
    "loss returns a mean": (lambda: make(loss=lambda o, b: o.mean()), "without dividing"),
    "loss returns no scalar": (lambda: make(loss=lambda o, b: (o.sum(-1), 1)), "expected a scalar"),
    "negative count": (lambda: make(loss=lambda o, b: (o.sum(), -1)), "counted -1"),
    "lone numbers for several batches": (lone_numbers, "how to weigh them is unknown"),
    "shape of the square loss": (lambda: make(data=(TOKENS, LABELS.double()), loss=cl.losses.MSE()), "of one shape"),
    "nan in the parameters": (lambda: make(with_nan("pos.weight")), "batch 0.*is nan"),
    "nan in the second batch": (nan_in_second_batch, "batch 1.*is nan"),
    "several devices": (lambda: make(partly_on_meta()), "several devices"),
    "dropout": (lambda: make(dropping()), r"model.eval\(\).*Active dropout: '1'"),
    "dropout by function": (lambda: make(functional_dropout()), "The loss is random"),
    "batch-norm in training": (lambda: make(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), "Batch-norm.*'1'"),
    "cutting sequence-first data": (sequence_first, "sequence-first"),
    "cutting tensors of different lengths": (
        lambda: make(data=(TOKENS, LABELS[:3]), loss=lambda o, b: (o.sum(), 1), micro_batch=1),
        "samples as their first axis",
    ),
    "micro_batch of zero": (lambda: make(micro_batch=0), "1 or more"),
    "memory without sense": (lambda: make(memory="much"), "'much' is not a size"),
    "contrastive in two batches": (
        lambda: cl.Problem(nn.Linear(3, 3), [torch.ones(3, 3), torch.zeros(3, 3)], cl.losses.Contrastive()).loss(),
        "per_batch=True",
    ),
    "contrastive in micro-batches": (
        lambda: cl.Problem(nn.Linear(3, 3), torch.ones(3, 3), cl.losses.Contrastive(), micro_batch=1),
        "cannot be cut",
    ),
    "contrastive without a square": (
        lambda: cl.Problem(nn.Linear(3, 2), torch.ones(3, 3), cl.losses.Contrastive()),
        r"\(n, n\)",
    ),
    "Fisher of a coupling loss": (
        lambda: cl.fisher(cl.Problem(nn.Linear(3, 3), torch.ones(3, 3), cl.losses.Contrastive(symmetric=True))),
        "couples them",
    ),
    "Fisher of an unknown distribution": (
        lambda: cl.fisher(make(loss=lambda o, b: (o.square().sum(), 1))) @ direction(242),
        "Define sample",
    ),
    "Fisher without samples": (lambda: cl.fisher(problem(), samples=0), "1 or more"),
    "a kernel that goes once only": (cannot_twice, "cannot be differentiated twice"),
    "a loss without parameters": (detached, "does not depend on any"),
    "smoothing out of range": (lambda: CE(label_smoothing=2), "between 0 and 1"),
    "weights of another number": (lambda: make(loss=CE(weight=torch.ones(3))), "3 class weights given for 7"),
    "negative weights": (lambda: CE(weight=-torch.ones(7)), "non-negative"),
    "point of another size": (lambda: problem().with_params(direction(3)), r"242 numbers.*shape \(3,\)"),
    "too long a context": (lambda: gpt()(torch.zeros(1, 9, dtype=torch.long)), "context is 6"),
    "unknown variant": (lambda: gpt(norm="sandwich"), "expected one of"),
    "heads that do not divide": (lambda: gpt(n_head=3), "not divisible"),
}


@pytest.mark.parametrize(("act", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=f"(?s){message}"):
        act()


def test_unused_parameters_are_zero_rows_and_said_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()
            self.idle = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x)
            return logits

    found = make(Model().double())
    H, v = cl.hessian(found), direction(found.layout.size)
    with pytest.warns(cl.CurvlensWarning, match=r"does not depend on 'idle.weight', 'idle.bias'") as said:
        product = H @ v
    assert len(said) == 1
    assert (product[found.layout.slices["idle.weight"]] == 0).all()
    H @ v  # a second time would be an error: warnings are errors in these tests
    found.gradient()


def test_words_of_messages() -> None:
    class Enc: ...

    class Unit: ...

    things: list[Any] = [3, [], None, Enc(), Unit()]
    assert [a_kind(x) for x in things] == ["an int", "a list", "a NoneType", "an Enc", "a Unit"]
    assert nearest("Q", ["up", "q", "k"]) == "Did you mean 'q'?"
    assert nearest("Attn.Sofmax", ["attn.softmax", "up"]) == "Did you mean 'attn.softmax'?"
    assert nearest("q", ["Q", "q"]) == "Did you mean 'Q', 'q'?"
    assert nearest("zz", ["up", "q"]) == "Known names: 'up', 'q'."
