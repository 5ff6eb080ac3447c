"""What people do to models and data besides computing curvatures: each of these once gave a wrong number."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import curvlens as cl
from curvlens.checksum import checksum
from small import direction, gpt, problem, relative, tokens_and_labels
from truth import Truth

X, Y = direction(10).view(5, 2), direction(5, 2).view(5, 1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def differences(at: cl.Problem, v: Tensor, eps: float = 1e-6) -> Tensor:
    above, below = at.with_params(at.theta + eps * v), at.with_params(at.theta - eps * v)
    return (above.gradient() - below.gradient()) / (2 * eps)


# Threads and interrupts


def in_threads(*actions: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_problems_on_one_model_in_two_threads() -> None:
    model, v = gpt(), direction(242)
    here = cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy(), memory=0)
    there = here.with_params(2 * here.theta)
    expected = [cl.hessian(p) @ v for p in (here, there)]

    def repeat(p: cl.Problem, truth: Tensor) -> None:
        for _ in range(10):
            assert relative(cl.hessian(p) @ v, truth) < 1e-12

    in_threads(lambda: repeat(here, expected[0]), lambda: repeat(there, expected[1]))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_two_operators_of_one_problem_in_two_threads() -> None:
    held, v = problem(), direction(242)
    H, F_ = cl.hessian(held), cl.functional(held)
    expected = [H @ v, F_ @ v]

    def repeat(operator: cl.Operator, truth: Tensor) -> None:
        for _ in range(40):
            assert relative(operator @ v, truth) < 1e-12

    in_threads(lambda: repeat(H, expected[0]), lambda: repeat(F_, expected[1]))


@pytest.mark.parametrize("memory", [None, 0])
def test_another_thread_draws_no_number_twice(memory: int | None) -> None:
    """All threads share one generator: putting it back after a product would rewind what another one has drawn."""
    held, v = cl.Problem(gpt(), tokens_and_labels(), cl.losses.CrossEntropy(), memory=memory), direction(242)
    drawn: list[float] = []
    stop: list[bool] = []

    def products() -> None:
        while not stop:
            cl.hessian(held) @ v

    def draws() -> None:
        for _ in range(200):
            drawn.append(float(torch.rand((), dtype=torch.float64)))
            time.sleep(0.001)
        stop.append(True)

    in_threads(products, draws)
    assert len(set(drawn)) == len(drawn)


def test_passes_that_draw_leave_random_numbers_alone() -> None:
    class Seeded(nn.Module):
        """Random, and the same in every pass."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return self.inner(x) * (1 + 0.1 * torch.rand(()))  # type: ignore[no-any-return]

    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tokens_and_labels()), batch_size=2)
    for held in (
        cl.Problem(Seeded(), tokens_and_labels(), cl.losses.CrossEntropy()),
        cl.Problem(gpt(), loader, cl.losses.CrossEntropy(), memory=0),
    ):
        before = torch.get_rng_state()
        cl.hessian(held) @ direction(242)
        held.loss()
        assert torch.equal(before, torch.get_rng_state())


INTERRUPTED = """
import os, signal, sys, time
import torch
from small import gpt, tokens_and_labels, direction
import curvlens as cl
torch.set_num_threads(1)
model = gpt()
before = [(name, id(p)) for name, p in model.named_parameters()]
H = cl.hessian(cl.Problem(model, tokens_and_labels(), cl.losses.CrossEntropy(), memory=0, micro_batch=1))
v = direction(242)
truth = H @ v
interrupts, end = 0, time.time() + float(sys.argv[1])
inside = False
def interrupt(*_):  # at any moment inside curvlens, and never in the lines of this script
    if inside:
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
print("ready", flush=True)
while time.time() < end:
    try:
        inside = True
        while time.time() < end:
            H @ v
        inside = False
    except KeyboardInterrupt:
        inside = False
        interrupts += 1
    assert [(name, id(p)) for name, p in model.named_parameters()] == before, f"after {interrupts}"
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert torch.allclose(H @ v, truth, rtol=1e-12)
print("interrupts", interrupts, flush=True)
"""


@pytest.mark.parametrize("seconds", [3.0, pytest.param(40.0, marks=pytest.mark.full)])
def test_interrupts_from_outside(seconds: float) -> None:
    """Ctrl-C at random moments, again and again: the model always has its own parameters back."""
    arguments = [sys.executable, "-c", INTERRUPTED, str(seconds)]
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    generator, end = random.Random(0), time.monotonic() + seconds - 0.5
    while time.monotonic() < end:
        time.sleep(generator.uniform(0.002, 0.03))
        child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert int(out.split()[-1]) >= 5 * seconds


# Changes that have to be noticed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [(3,), (64, 64), (300, 1024)])
def test_checksums_see_changes(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(size) * 8).to(dtype)
    seen = {checksum([x])}

    def one_entry(t: Tensor) -> None:
        t.view(-1)[2] = not t.view(-1)[2] if dtype == torch.bool else 3 - t.view(-1)[2]

    changes: list[Callable[[Tensor], Any]] = [one_entry]
    if dtype.is_floating_point:
        changes += [Tensor.neg_, lambda t: t.mul_(2), lambda t: t.view(-1)[1].neg_(), lambda t: t.view(-1)[:2].neg_()]
        changes += [lambda t: t.add_(1), lambda t: t[..., ::2].neg_()]
    if len(size) > 1 and dtype != torch.bool:
        changes += [lambda t: t.copy_(t.flip(0)), lambda t: t.copy_(t.flip(1)), lambda t: t.copy_(t.roll(1, 0))]
        changes += [lambda t: t[0].copy_(t[1].clone())]
    for change in changes:
        changed = x.clone()
        change(changed)
        assert checksum([changed]) not in seen
    assert checksum([x.clone()]) in seen


def test_a_moved_entry_is_seen() -> None:
    sums = set()
    for place in range(0, 4096, 7):
        x = torch.zeros(4096, dtype=torch.float64)
        x[place] = 1
        sums.add(checksum([x]))
    assert len(sums) == len(range(0, 4096, 7))
    assert checksum([torch.zeros(2)]) != checksum([-torch.zeros(2)])


def test_signs_written_through_data_are_followed() -> None:
    model = net()
    held = cl.Problem(model, (X, Y), cl.losses.MSE())
    H = cl.hessian(held)
    H.dense()
    model.get_parameter("0.weight").data.neg_()
    assert relative(H.dense(), cl.hessian(cl.Problem(model, (X, Y), cl.losses.MSE())).dense()) < 1e-14


@pytest.mark.parametrize("way", ["step", "load", "clamp", "data"])
@pytest.mark.parametrize("memory", [None, 0])
def test_equal_values_written_again_change_nothing(way: str, memory: int | None) -> None:
    """The first step of a warm-up has a rate of 0: tensors that graphs have saved are written, and no bit changes."""
    model = net()
    truth = Truth(model, [(X, Y)], lambda m, batch: (m(batch[0]), batch[1]), square=True).hessian
    H = cl.hessian(cl.Problem(model, (X, Y), cl.losses.MSE(), memory=memory))
    assert relative(H.dense(), truth) < 1e-12
    if way == "step":
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    elif way == "load":
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    else:
        for p in model.parameters():
            (p.data if way == "data" else p.detach()).clamp_(-100, 100)
    assert relative(H.dense(), truth) < 1e-12


def test_switching_to_training_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double().eval()
    held = cl.Problem(model, (X, Y), cl.losses.MSE())
    H, v = cl.hessian(held), direction(13)
    truth = H @ v
    model.train()
    for act in (held.loss, held.gradient, lambda: H @ v):
        with pytest.raises(cl.CurvlensError, match=r"model.eval\(\)"):
            act()
    model.eval()
    assert relative(H @ v, truth) < 1e-14


def test_a_loss_is_taken_as_it_is() -> None:
    weight = torch.ones(7, dtype=torch.float64)
    loss = cl.losses.CrossEntropy(weight=weight)
    held = cl.Problem(gpt(), tokens_and_labels(), loss)
    H, v = cl.hessian(held), direction(242)
    truth = H @ v
    loss.label_smoothing = 0.5
    weight[2] = 9
    assert relative(H @ v, truth) < 1e-14


def test_autocast_is_noticed() -> None:
    held = cl.Problem(gpt().float(), tokens_and_labels(), cl.losses.CrossEntropy())
    H, v = cl.hessian(held), direction(242)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = H @ v
    assert relative((H @ v).double(), cl.hessian(problem()) @ v) < 1e-5
    assert relative(low.double(), cl.hessian(problem()) @ v) > 1e-4


# Data


@pytest.mark.parametrize("memory", ["1GiB", 0])
def test_a_batch_without_samples(memory: Any) -> None:
    data = [(X[:2], Y[:2]), (X[:0], Y[:0]), (X[2:], Y[2:])]
    truth = cl.hessian(cl.Problem(net(), (X, Y), cl.losses.MSE())) @ direction(13)
    H = cl.hessian(cl.Problem(net(), data, cl.losses.MSE(), memory=memory))
    for _ in range(3):
        assert relative(H @ direction(13), truth) < 1e-13
    first_empty = cl.Problem(net(), data[1:], cl.losses.MSE(), micro_batch=1)
    assert first_empty.n_tokens == 3


def test_a_mask_without_samples_is_not_cut() -> None:
    """As many tokens as sequences: the mask could be taken for samples, and the model does not take half of it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.layer(x, src_mask=mask)
            return y

    x, model = direction(64).view(4, 4, 4), Masked().double().eval()
    data = ((x, torch.zeros(4, 4, dtype=torch.float64)), x)
    kept, tight = (cl.Problem(model, data, cl.losses.MSE(), memory=m) for m in ("1GiB", 0))
    v = direction(kept.layout.size)
    assert relative(cl.hessian(tight) @ v, cl.hessian(kept) @ v) < 1e-13


# Losses


def test_a_subclass_with_another_loss() -> None:
    """It inherits a closed form of the old one, which must not be used."""

    class WithZ(cl.losses.CrossEntropy):
        def sum_and_count(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
            total, count = super().sum_and_count(outputs, batch)
            valid = (batch[1] != -100).unsqueeze(-1)
            return total + 0.1 * (outputs.logsumexp(-1, keepdim=True).square() * valid).sum(), count

    class Renamed(cl.losses.CrossEntropy):
        pass

    odd = cl.Problem(gpt(), tokens_and_labels(), WithZ())
    v = direction(242)
    assert relative(cl.hessian(odd) @ v, differences(odd, v)) < 1e-7
    assert relative(cl.ggn(odd) @ v + cl.functional(odd) @ v, cl.hessian(odd) @ v) < 1e-12
    assert not cl.ggn(odd).psd
    with pytest.raises(cl.CurvlensError, match="Define sample"):
        cl.fisher(odd) @ v
    assert cl.ggn(cl.Problem(gpt(), tokens_and_labels(), Renamed())).psd


def test_a_subclass_stays_itself_on_an_encoder_decoder() -> None:
    class Tenfold(cl.losses.CausalLM):
        pass

    model = net()
    model.config = type("Config", (), {"is_encoder_decoder": True})()
    loss = Tenfold(label_smoothing=0.1).for_model(model)
    assert isinstance(loss, Tenfold)
    assert not loss.shift
    assert loss.label_smoothing == 0.1


def penalised() -> cl.Problem:
    model = net()
    return cl.Problem(
        model, (X, Y), lambda o, b: (o.square().sum() + sum(p.square().sum() for p in model.parameters()), 1)
    )


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.mul_(2))
        return y


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator = net(), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + torch.randn(y.shape, generator=self.generator, dtype=y.dtype)


def max_norm() -> cl.Problem:
    table = nn.Embedding(7, 4, max_norm=0.1).double()
    return cl.Problem(nn.Sequential(table, nn.Linear(4, 7).double()), tokens_and_labels(), cl.losses.CrossEntropy())


class TwoOutputs(cl.losses.Loss):
    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        y = model(batch[0])
        return y, y.tanh()

    def sum_and_count(self, outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        return outputs[0].square().sum() + outputs[1].sum(), 5


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters beside the outputs": (penalised, "beside the outputs"),
    "count with a gradient": (lambda: cl.Problem(net(), (X, Y), cl.losses.FromModel(counted)).gradient(), "count of"),
    "count that is no number": (lambda: cl.Problem(net(), (X, Y), lambda o, b: (o.sum(), None)), "as its count"),
    "input written to": (lambda: cl.Problem(WritesInput(), (X, Y), cl.losses.MSE()), "writes into its inputs"),
    "noise of its own": (lambda: cl.Problem(Noisy(), (X, Y), cl.losses.MSE()), "The loss is random"),
    "weights rewritten": (max_norm, "writes into the parameters"),
    "Fisher of two outputs": (
        lambda: cl.empirical_fisher(cl.Problem(net(), (X, Y), TwoOutputs())) @ direction(13),
        "2 tensors",
    ),
    "sum over different parameters": (
        lambda: cl.hessian(problem())["h.0.attn.q.weight"] + cl.hessian(problem())["h.0.attn.k.weight"],
        "different parameters",
    ),
    "complex factor": (lambda: cl.hessian(problem()) * (1 + 2j), "real number"),
}


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    y = model(batch[0])
    return y.square().sum(), y.detach().abs().sum() + model.get_parameter("0.weight").square().sum()


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        act()


def test_fisher_matrices_of_outputs_with_one_axis() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.squeeze(-1)

    flat, full = (cl.Problem(m, (X, y), cl.losses.MSE()) for m, y in ((Flat(), Y.squeeze(-1)), (net(), Y)))
    for make in (cl.fisher, cl.empirical_fisher):
        assert relative(make(flat).dense(), make(full).dense()) < 1e-13


# Memory, precision, arrays


def test_released_graphs_are_freed() -> None:
    """A softmax saves its own output: a naive hook around it keeps the graph alive for ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Softmax(-1))
    x = torch.randn(500, 64)
    held = cl.Problem(model, (x, x), cl.losses.MSE())
    H, v = cl.hessian(held), torch.randn(held.layout.size)

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(5):
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1e-3)
        H @ v
    before = resident()
    for _ in range(40):
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1e-3)
        H @ v
    assert resident() - before < 20e6  # forty graphs of 2 MB would be more


def test_keep_dtype_passes_everything_on() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with cl.keep_dtype(nn.Linear(1, 1).double()):
        copied = x.to(torch.ones(1, dtype=torch.float32), copy=True)
        bits = torch.ones(2, dtype=torch.int32).view(torch.float32)
    assert copied.data_ptr() != x.data_ptr()
    assert bits.dtype == torch.float32


def test_arrays_of_every_layout() -> None:
    H, v = cl.hessian(problem()), direction(242)
    truth = (H @ v).numpy()
    for array in (v.numpy()[::-1].copy()[::-1], v.numpy().astype(">f8"), v.numpy().astype("longdouble")):
        assert abs(H @ array - truth).max() < 1e-12


def text_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=23, max_position_embeddings=16, **sizes)
    make: Any = transformers.LlamaForCausalLM
    return make(config).double().eval()


def test_padding_on_the_left_changes_nothing() -> None:
    """The first token of a text is predicted from nothing, with padding before it or without."""
    model = text_model()
    ids = torch.randint(3, 23, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    padded = cl.Problem(model, batch, cl.losses.CausalLM())
    alone = [{"input_ids": row[there == 1][None]} for row, there in zip(ids, mask, strict=True)]
    apart = cl.Problem(model, alone, cl.losses.CausalLM())
    assert padded.n_tokens == apart.n_tokens == 10
    v = direction(padded.layout.size)
    assert padded.loss() == pytest.approx(apart.loss(), rel=1e-13)
    assert relative(cl.hessian(padded) @ v, cl.hessian(apart) @ v) < 1e-12
    labelled = {**batch, "labels": ids.where(mask != 0, -100)}  # as given: Hugging Face counts all of these
    theirs = cl.Problem(model, labelled, cl.losses.CausalLM())
    assert theirs.n_tokens == 12
    assert theirs.loss() == pytest.approx(float(model(**labelled).loss), rel=1e-6)
    assert "counted-padding" in {finding.name for finding in cl.doctor(theirs)}
    assert "counted-padding" not in {finding.name for finding in cl.doctor(padded)}


@pytest.mark.parametrize("seed", range(8))
def test_dropout_that_happens_to_drop_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.001), nn.Linear(4, 2)).double()
    data = (torch.randn(5, 3).double(), torch.randint(2, (5,)))
    with pytest.raises(cl.CurvlensError, match=r"model.eval\(\)"):
        cl.Problem(model, data, cl.losses.CrossEntropy())
    assert cl.Problem(model.eval(), data, cl.losses.CrossEntropy()).loss() > 0


def test_a_first_batch_without_samples() -> None:
    model = text_model()
    ids = torch.randint(3, 23, (2, 5), generator=torch.Generator().manual_seed(1))
    whole = cl.Problem(model, {"input_ids": ids}, cl.losses.CausalLM())
    begun = cl.Problem(model, [{"input_ids": ids[:0]}, {"input_ids": ids}], cl.losses.CausalLM())
    assert begun.loss() == pytest.approx(whole.loss(), rel=1e-14)
    with pytest.raises(cl.CurvlensError, match="No token of the data counts"):
        cl.Problem(model, {"input_ids": ids[:0]}, cl.losses.CausalLM()).loss()


def test_labels_at_the_last_token_alone_are_not_shifted() -> None:
    model = text_model()
    ids = torch.randint(3, 23, (3, 6), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(ids, -100)
    labels[:, -1] = torch.tensor([1, 2, 0])
    batch = {"input_ids": ids, "labels": labels}
    assert cl.Problem(model, batch, cl.losses.CausalLM()).loss() == pytest.approx(float(model(**batch).loss), rel=1e-6)


def test_ids_beyond_the_vocabulary_are_told() -> None:
    with pytest.raises(cl.CurvlensError, match="a token id is outside the vocabulary"):
        cl.Problem(text_model(), {"input_ids": torch.full((1, 4), 40)}, cl.losses.CausalLM())
