"""Every finding is provoked, beside the wrong number it warns of; none appears where nothing is wrong."""

from __future__ import annotations

import ast
import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlens as cl
import sick
from cases import CASES, Case, hugging_face
from curvlens.checkup import Finding, Report, doctor, examine
from curvlens.checkup import kernels as kernels_module
from curvlens.checkup.untouched import untouched
from curvlens.models import GPT, GPTConfig
from sick import LABELS, TOKENS, Wrapped, mean_loss, plain_product
from small import Cells, direction, gpt, problem, relative

CE = cl.losses.CrossEntropy
DATA = (TOKENS, LABELS)
BY_NAME = {case.name: case for case in CASES}


def product(model: nn.Module, data: Any = DATA, loss: Any = None, seed: int = 1) -> Tensor:
    """H v in float64."""
    found = cl.Problem(model, data, CE() if loss is None else loss)
    result: Tensor = cl.hessian(found) @ direction(found.layout.size, seed).to(found.dtype)
    return result.double()


def only(report: Report, name: str, severity: str) -> Finding:
    """The one finding; that the architecture is unknown is no matter here."""
    names = [f.name for f in report if f.name != "unknown-architecture"]
    assert names == [name], str(report)
    finding = next(f for f in report if f.name == name)
    assert finding.severity == severity
    assert finding.what
    assert finding.effect
    assert finding.fix
    return finding


# Nothing found where nothing is wrong


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_healthy(case: Case) -> None:
    assert list(doctor(cl.Problem(case.model(), case.batches, case.loss))) == []


def test_healthy_in_float32() -> None:
    report = doctor(gpt().float(), DATA, CE())
    assert list(report) == [], str(report)
    assert report.ok
    report.require()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", sick.KINKED)
def test_kinks_are_no_wrong_derivatives(kind: str, dtype: torch.dtype) -> None:
    model, (x, y) = sick.kinked(kind)
    report = doctor(model.to(dtype), (x.to(dtype), y.to(dtype)), cl.losses.MSE())
    assert [f.name for f in report] == ["unknown-architecture"], str(report)


# Modes


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), sick.DropPath(0.3)], ids=["dropout", "depth"])
def test_dropout(drop: nn.Module) -> None:
    model = sick.dropping(drop)
    finding = only(doctor(model, DATA, CE()), "dropout-active", "error")
    assert "'1'" in finding.what
    assert finding.size is not None
    assert finding.size > 1e-3
    torch.manual_seed(0)
    a, b = (plain_product(model, mean_loss) for _ in range(2))
    assert relative(a, b) > 0.05
    model.eval()
    assert relative(plain_product(model, mean_loss), product(model)) < 1e-12


def test_dropout_that_few_draws_hide() -> None:
    model, x = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.001)).double(), torch.ones(1, 2).double()
    torch.manual_seed(0)
    assert len({float(model(x).detach()) for _ in range(20)}) == 1
    only(doctor(model, (x, x[:, :1]), cl.losses.MSE()), "dropout-active", "error")


def test_dropout_that_drops_nothing_is_not_found() -> None:
    model = gpt()
    model.spare = nn.Dropout(0.5)
    assert list(doctor(model.train(), DATA, CE())) == []


def test_batch_norm() -> None:
    model, x = sick.normed(), direction(24).view(8, 3)
    y = x.sum(1, keepdim=True)
    finding = only(doctor(model, (x, y), cl.losses.MSE()), "batch-norm-training", "error")
    assert "'1'" in finding.what
    assert finding.size is not None
    assert finding.size > 1e-3

    def cut(m: nn.Module) -> Tensor:
        halves = [nn.functional.mse_loss(m(x[i : i + 4]), y[i : i + 4]) for i in (0, 4)]
        return (halves[0] + halves[1]) / 2

    def whole(m: nn.Module) -> Tensor:
        return nn.functional.mse_loss(m(x), y)

    assert relative(plain_product(model, cut), plain_product(model, whole)) > 0.05
    model.eval()
    assert relative(plain_product(model, cut), plain_product(model, whole)) < 1e-12


def test_random_loss() -> None:
    model = Wrapped(lambda x: nn.functional.dropout(x, 0.1)).eval()
    assert "torch.randn" in only(doctor(model, DATA, CE()), "random-loss", "error").fix
    torch.manual_seed(0)
    a, b = (plain_product(model, mean_loss) for _ in range(2))
    assert relative(a, b) > 0.01
    assert relative(plain_product(gpt(), mean_loss), product(gpt())) < 1e-12


# Data


def test_shuffled_data() -> None:
    loader = DataLoader(TensorDataset(TOKENS, LABELS), batch_size=2, shuffle=True)
    only(doctor(gpt(), loader, CE()), "shuffled-data", "error")
    torch.manual_seed(0)
    a, b = ([mean_loss(gpt(), batch).item() for batch in loader] for _ in range(2))
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) > 1e-3
    still = DataLoader(TensorDataset(TOKENS, LABELS), batch_size=2)
    assert list(doctor(gpt(), still, CE())) == []
    assert relative(product(gpt(), still), product(gpt())) < 1e-12


def test_one_shot_data() -> None:
    data = iter([DATA, DATA])
    only(doctor(gpt(), data, CE()), "one-shot-data", "error")
    assert len(list(data)) == 2  # the doctor has not used it up …
    assert len(list(data)) == 0  # … as the first product would
    assert list(doctor(gpt(), [DATA, DATA], CE())) == []


def test_changing_data() -> None:
    data = sick.Augmented()
    finding = only(doctor(gpt(), data, CE()), "changing-data", "error")
    assert "Batch 1 " in finding.what
    assert finding.size == 0.5
    a, b = ([mean_loss(gpt(), batch).item() for batch in data] for _ in range(2))
    assert a[0] == b[0]
    assert abs(a[1] - b[1]) > 1e-3
    found = cl.Problem(gpt(), data, CE())
    found.loss()
    with pytest.raises(cl.CurvlensError, match="the data has changed"):
        found.loss()


# Padding and labels


def padded(name: str, *, mask: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and a batch whose second sample ends in two tokens of padding."""
    batch = dict(BY_NAME[name].batches[0])
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    batch["input_ids"] = batch["input_ids"].masked_fill(padding, 0)
    batch["attention_mask"] = (~padding).long()
    if not mask:
        del batch["attention_mask"]
    model = BY_NAME[name].model()
    model.config.eos_token_id = model.config.bos_token_id = 6  # type: ignore[union-attr]
    return model, batch


def test_unmasked_padding() -> None:
    model, bare = padded("bert", mask=False)
    _, masked = padded("bert", mask=True)
    loss = cl.losses.MaskedLM()
    finding = only(doctor(model, bare, loss), "unmasked-padding", "error")
    assert "2 tokens in samples 1" in finding.what
    assert finding.size is not None
    assert finding.size > 1e-3
    assert relative(product(model, bare, loss), product(model, masked, loss)) > 0.05
    assert list(doctor(model, masked, loss)) == []


class Encoder(nn.Module):
    """Sees all tokens; with ``masking``, those of padding only from where they are."""

    def __init__(self, *, masking: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masking = masking
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.body = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.embed(tokens), src_key_padding_mask=(tokens == 0) if self.masking else None)
        y: Tensor = self.head(x)
        return y


def test_unmasked_padding_without_a_configuration() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [3, 2, 1, 0, 0]])
    batch = tokens, tokens.masked_fill(tokens == 0, -100)
    blind, seeing = (Encoder(masking=masking).double().eval() for masking in (False, True))
    assert only(doctor(blind, batch, CE()), "unmasked-padding", "warning").size
    assert relative(product(blind, batch), product(seeing, batch)) > 0.01
    assert only_names(doctor(seeing, batch, CE())) == set()


def test_counted_padding() -> None:
    model, good = padded("gpt2", mask=True)
    bad = {**good, "labels": good["input_ids"].clone()}
    loss = cl.losses.CausalLM()
    finding = only(doctor(model, bad, loss), "counted-padding", "error")
    wrong, right = (cl.Problem(model, batch, loss).loss() for batch in (bad, good))
    assert finding.size == pytest.approx(abs(wrong - right) / right)
    assert finding.size is not None
    assert finding.size > 1e-2
    assert relative(product(model, bad, loss), product(model, good, loss)) > 0.05
    assert list(doctor(model, good, loss)) == []


def test_counted_padding_of_causal_text_without_mask() -> None:
    model, bare = padded("gpt2", mask=False)
    _, masked = padded("gpt2", mask=True)
    only(doctor(model, bare, cl.losses.CausalLM()), "counted-padding", "error")
    wrong, right = (cl.Problem(model, batch, cl.losses.CausalLM()).loss() for batch in (bare, masked))
    assert abs(wrong - right) > 1e-2 * right


def test_counted_padding_of_a_translation() -> None:
    case = BY_NAME["t5"]
    model, good = case.model(), case.batches[0]
    model.config.eos_token_id = 6  # type: ignore[union-attr]
    bad = {**good, "labels": good["labels"].masked_fill(good["labels"] == -100, 0)}
    only(doctor(model, bad, case.loss), "counted-padding", "error")
    assert relative(product(model, bad, case.loss), product(model, good, case.loss)) > 0.05
    assert list(doctor(model, good, case.loss)) == []


def test_nothing_counts() -> None:
    nothing = (TOKENS, torch.full_like(LABELS, -100))
    only(doctor(gpt(), nothing, CE()), "nothing-counts", "error")
    with pytest.raises(cl.CurvlensError, match="No token"):
        cl.Problem(gpt(), nothing, CE()).loss()


def test_uncounted_samples() -> None:
    labels = LABELS.clone()
    labels[[1, 3]] = -100
    finding = only(doctor(gpt(), (TOKENS, labels), CE()), "uncounted-samples", "note")
    assert finding.size == 0.4
    assert "1 of batch 0, 3 of batch 0" in finding.what
    rest = [0, 2, 4]
    assert relative(product(gpt(), (TOKENS, labels)), product(gpt(), (TOKENS[rest], LABELS[rest]))) < 1e-14


# Precision


@pytest.mark.filterwarnings("ignore::curvlens.CurvlensWarning")
def test_half_precision() -> None:
    model = gpt().bfloat16()
    finding = only(doctor(model, DATA, CE()), "half-precision", "warning")
    assert finding.size is not None
    assert 1e-5 < finding.size < 0.1
    same = copy.deepcopy(model)
    assert relative(product(model), product(same.double())) > 0.01
    assert relative(product(same.float()), product(same.double())) < 1e-5


def test_autocast() -> None:
    model = gpt().float()
    exact = product(copy.deepcopy(model).double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        finding = only(doctor(model, DATA, CE()), "autocast-active", "warning")
        assert finding.size is not None
        assert finding.size > 1e-5
        assert relative(product(model), exact) > 1e-3
    assert relative(product(model), exact) < 1e-5


def test_autocast_leaves_float64_alone() -> None:
    exact = product(gpt())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert list(doctor(gpt(), DATA, CE())) == []
        assert relative(product(gpt()), exact) < 1e-14


@pytest.mark.parametrize("way", ["autocast", "casts", "casts in float64"])
def test_half_precision_inside(way: str) -> None:
    """What a forward pass rounds is announced as such: by the doctor, by Problem, and not as a wrong gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt().to(torch.float64 if "float64" in way else torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
                y: Tensor = self.inner(x)
            return y.bfloat16().to(y.dtype) if way != "autocast" else y.float()

    model = Model().eval()
    finding = only(doctor(model, DATA, CE()), "half-precision-inside", "warning")
    assert finding.size is not None
    assert 1e-4 < finding.size < 2**-8
    assert "'inner.h.0.attn.q'" in finding.what or way != "autocast"
    with pytest.warns(cl.CurvlensWarning, match="rounds to bfloat16"):
        rounded = cl.Problem(model, DATA, CE(), micro_batch=1)
    v = direction(rounded.layout.size)
    exact = product(copy.deepcopy(model.inner).double())
    assert relative((cl.hessian(rounded) @ v.to(rounded.dtype)).double(), exact) < 0.05
    if way == "autocast":  # leaves float64 alone
        assert list(doctor(model.double(), DATA, CE())) == []
        assert relative(product(model), exact) < 1e-14


@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_float32_that_does_not_reach_the_loss_is_no_island(kind: str) -> None:
    """LongT5 makes masks of −1e10 and numbers its blocks in float32: both are exact behind softmax and floor."""
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "local_radius": 2}
    options = {"decoder_start_token_id": 0, "encoder_attention_type": kind, "global_block_size": 3}
    torch.manual_seed(0)
    model: Any = hugging_face("LongT5ForConditionalGeneration", "LongT5Config", **sizes, **options)()
    ids = torch.randint(3, 20, (2, 6))
    report = doctor(model.double().eval(), {"input_ids": ids, "labels": ids}, cl.losses.CausalLM())
    assert "float32-island" not in {finding.name for finding in report}


@pytest.mark.parametrize("way", ["new tensor", "numpy", "buffer"])
def test_float32_island(way: str) -> None:
    model = sick.with_island(way)
    finding = only(doctor(model, DATA, CE()), "float32-island", "warning")
    assert "'then'" in finding.what
    assert finding.size is not None
    assert 1e-10 < finding.size < 1e-6
    exact = Wrapped(lambda x: sick.exactly(x, way))
    assert 1e-10 < relative(product(model), product(exact)) < 1e-5
    assert list(doctor(exact, DATA, CE())) == []
    assert relative(product(exact), plain_product(exact, mean_loss)) < 1e-14


def test_float32_parameter() -> None:
    model = gpt(norm_kind="rms")
    exact = product(copy.deepcopy(model))
    model.embed.float()
    finding = only(doctor(model, DATA, CE()), "float32-island", "warning")
    assert "'embed.weight'" in finding.what
    assert 1e-10 < relative(product(model), exact) < 1e-6


# Numerics


def test_values_that_are_not_finite() -> None:
    model = gpt()
    with torch.no_grad():
        model.pos.weight[0] = float("nan")
    report = doctor(model, DATA, CE())
    assert [f.name for f in report] == ["not-finite-values", "not-finite-output"]
    assert "parameter pos.weight" in report[0].what
    assert "h.0.norm1" in report[1].what
    assert not plain_product(model, mean_loss).isfinite().any()
    assert plain_product(gpt(), mean_loss).isfinite().all()


def test_inputs_that_are_not_finite() -> None:
    model, x = nn.Linear(3, 1).double(), direction(12).view(4, 3)
    bad = x.clone()
    bad[2, 1] = float("inf")
    report = doctor(model, (bad, x[:, :1]), cl.losses.MSE())
    assert {f.name for f in report.errors} == {"not-finite-values", "not-finite-output"}
    assert "input 0" in report[0].what
    assert not plain_product(model, lambda m: nn.functional.mse_loss(m(bad), x[:, :1])).isfinite().all()


def test_output_that_is_not_finite() -> None:
    model = nn.Sequential(gpt(), sick.Root(), nn.Identity())
    finding = only(doctor(model, DATA, CE()), "not-finite-output", "error")
    assert "1 (Root)" in finding.what
    assert not plain_product(model, mean_loss).isfinite().any()


def test_saturated_softmax() -> None:
    errors = {}
    for size in (1.0, 700.0):
        model = sick.decided(size).float()
        data = (TOKENS, TOKENS.flip(1))
        found = [cl.Problem(m, data, CE()) for m in (model, copy.deepcopy(model).double())]
        v = torch.zeros(found[0].layout.size).double()
        part = found[0].layout.slices["h.0.attn.q.weight"]
        v[part] = direction(64)
        narrow, wide = ((cl.hessian(p) @ v.to(p.dtype)).double()[part] for p in found)
        errors[size] = relative(narrow, wide)
        if size == 1.0:
            assert list(doctor(found[0])) == []
        else:
            finding = only(doctor(found[0]), "saturated-softmax", "warning")
            assert "'h.0.attn'" in finding.what
            assert finding.size is not None
            assert finding.size < 1
            assert f"saturated-softmax ({finding.size:.2g} digits left)" in str(doctor(found[0]))
            assert finding.fix.startswith("model.double()")
    assert errors[700.0] > 0.1
    assert errors[1.0] < 1e-5


def test_saturated_softmax_in_float64_is_not_mended_by_float64() -> None:
    finding = only(doctor(sick.decided(1e4), (TOKENS, TOKENS.flip(1)), CE()), "saturated-softmax", "warning")
    assert "double" not in finding.fix
    assert "query and key weights" in finding.fix


def test_tiny_variance() -> None:
    finding = only(doctor(sick.faint(1e-3), DATA, CE()), "tiny-variance", "warning")
    assert "'h.0.norm1'" in finding.what
    assert finding.size is not None
    assert finding.size < 1
    loud, faint = (
        relative(product(sick.faint(size, eps=2e-5)), product(sick.faint(size, eps=1e-5))) for size in (1.0, 1e-3)
    )
    assert faint > 0.3
    assert loud < 0.01


def test_small_rows_of_padding_are_no_tiny_variance() -> None:
    case = BY_NAME["llama"]
    model, batch = case.model(), dict(case.batches[0])
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 6)
    with torch.no_grad():
        model.get_input_embeddings().weight[6] = 1e-6  # type: ignore[operator]
    quiet = {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"].roll(1, 1) == 0, -100)}
    assert only_names(doctor(model, quiet, case.loss)) == set()


# Parameters


def test_unused_parameters() -> None:
    model = sick.Idle()
    finding = only(doctor(model, DATA, CE()), "unused-parameters", "warning")
    assert "of the first batch does not depend on 'idle.weight', 'idle.bias'" in finding.what
    assert "the first 2 batches" in only(doctor(model, [DATA, DATA], CE()), "unused-parameters", "warning").what
    assert finding.size == pytest.approx(9 / 251)
    with pytest.warns(cl.CurvlensWarning, match="does not depend"):
        rows = product(model)[-9:]
    assert not rows.any()
    assert only_names(doctor(cl.Problem(model, DATA, CE(), params="inner.*"))) == set()


def only_names(report: Report) -> set[str]:
    return {f.name for f in report} - {"unknown-architecture"}


def test_frozen_parameters() -> None:
    model = gpt()
    model.embed.requires_grad_(False)
    finding = only(doctor(model, DATA, CE()), "frozen-parameters", "note")
    assert finding.size == pytest.approx(28 / 242)
    assert len(product(model)) == 242 - 28  # 28 rows fewer than
    assert len(product(gpt())) == 242


def test_broken_tie() -> None:
    model = gpt(tied=True)
    broken = copy.deepcopy(model)
    broken.unembed.weight = nn.Parameter(model.embed.weight.detach().clone())
    finding = only(doctor(broken, DATA, CE()), "broken-tie", "warning")
    assert "'embed.weight'" in finding.what
    assert "'unembed.weight'" in finding.what
    whole, halves = (cl.hessian(cl.Problem(m, DATA, CE()))["embed.weight"].dense() for m in (model, broken))
    assert relative(halves, whole) > 0.1
    assert list(doctor(model, DATA, CE())) == []


def test_broken_tie_by_configuration() -> None:
    case = BY_NAME["gpt2"]
    model = case.model()
    head = model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.detach() + 1e-3)  # type: ignore[operator]
    assert "tie_word_embeddings" in only(doctor(model, case.batches, case.loss), "broken-tie", "warning").what
    assert len(list(model.parameters())) == len(list(case.model().parameters())) + 1


def test_a_frozen_copy_is_no_broken_tie() -> None:
    """An adapter that trains the unembedding as a whole keeps the one it was copied from, frozen."""
    import peft

    case, make = BY_NAME["gpt2"], peft.get_peft_model
    config: Any = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"])
    inner: Any = case.model()
    model: Any = make(inner, config).double().eval()
    finding = only(doctor(model, case.batches, case.loss), "frozen-parameters", "note")
    assert "adapters" in finding.fix
    names = cl.Problem(model, case.batches, case.loss).layout.names
    assert [name for name in names if "lm_head" in name] == ["base_model.model.lm_head.modules_to_save.default.weight"]
    merged = model.merge_and_unload().requires_grad_(True)
    assert "frozen-parameters" not in {f.name for f in doctor(merged, case.batches, case.loss)}


def test_quantised_weights() -> None:
    model = gpt()
    mlp = model.get_submodule("h.0.mlp")
    assert isinstance(mlp.up, nn.Linear)
    mlp.up = sick.Linear8bitLt(mlp.up)
    report = doctor(model, DATA, CE())
    assert only_names(report) == {"quantised-weights", "frozen-parameters"}
    assert "Linear8bitLt" in report.errors[0].what
    assert "h.0.mlp.up.weight" not in cl.Problem(model, DATA, CE()).layout.names
    assert "h.0.mlp.up.weight" in problem().layout.names


def test_layers_that_could_quantise_and_do_not() -> None:
    """I-BERT's layers are called QuantLinear; with quant_mode=False they are linear layers."""
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 16}
    ids = torch.randint(3, 20, (2, 6))
    found = {}
    for quantises in (False, True):
        torch.manual_seed(0)
        model: Any = hugging_face("IBertForMaskedLM", "IBertConfig", **sizes, quant_mode=quantises)()
        report = doctor(model.double().eval(), {"input_ids": ids, "labels": ids}, cl.losses.MaskedLM())
        found[quantises] = {finding.name for finding in report.errors}
    assert found[False] == set()
    assert "quantised-weights" in found[True]


def test_complex_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).abs().sum(-1, keepdim=True)

    x = direction(6).view(2, 3)
    only(doctor(Model(), (x, x[:, :1]), cl.losses.MSE()), "complex-parameters", "error")
    with pytest.raises(cl.CurvlensError, match="real"):
        cl.Problem(Model(), (x, x[:, :1]), cl.losses.MSE())


@pytest.mark.parametrize("where", ["meta", "hook"])
def test_offloaded_parameters(where: str) -> None:
    model = gpt()
    if where == "meta":
        model.h[0].to("meta")
        with pytest.raises(cl.CurvlensError, match="several devices"):
            product(model)
    else:
        model.get_submodule("h.0.attn.q")._hf_hook = sick.Offloading()  # type: ignore[assignment]
    finding = only(doctor(model, DATA, CE()), "offloaded-parameters", "error")
    assert "h.0" in finding.what


# Kernels


def test_no_second_derivative() -> None:
    model = Wrapped(sick.once)
    finding = only(doctor(model, DATA, CE()), "no-second-derivative", "error")
    assert "once_differentiable" in finding.what
    with pytest.raises(cl.CurvlensError, match="differentiated twice"):
        product(model)
    assert product(Wrapped(torch.sin)).isfinite().all()


def by_differences(found: cl.Problem, v: Tensor, h: float = 1e-4) -> Tensor:
    """Second differences of the loss, ∂⟨∇ℓ, v⟩ by entries: no derivative of torch is used."""
    size = len(v)
    steps = torch.eye(size).double() * h

    def loss(x: Tensor) -> float:
        return found.with_params(found.theta + x).loss()

    rows = [
        (loss(e + h * v) - loss(e - h * v) - loss(-e + h * v) + loss(-e - h * v)) / (4 * h * h) for e in steps.unbind()
    ]
    return torch.tensor(rows).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wrong_gradient(dtype: torch.dtype) -> None:
    wrong, right = sick.Gated(stop=True).to(dtype), sick.Gated(stop=False).to(dtype)
    assert only(doctor(wrong, DATA, CE()), "wrong-gradient", "error").size
    found = cl.Problem(wrong.double(), DATA, CE())
    v = direction(found.layout.size)
    truth = by_differences(found, v)
    assert relative(cl.hessian(found) @ v, truth) > 0.05
    assert relative(cl.hessian(cl.Problem(right.double(), DATA, CE())) @ v, truth) < 1e-4
    assert only_names(doctor(right, DATA, CE())) == set()


@pytest.mark.parametrize("tied", [True, False])
def test_padding_row_used(tied: bool) -> None:
    model, tokens = sick.Table(tied=tied), (TOKENS, TOKENS.flip(1))
    finding = only(doctor(model, tokens, CE()), "padding-row-used", "error")
    assert "row 3 of embed.weight" in finding.what
    found = cl.Problem(model, tokens, CE())
    v = direction(found.layout.size)
    truth = by_differences(found, v)
    assert relative(cl.hessian(found) @ v, truth) > 0.05
    model.embed.padding_idx = None
    assert relative(cl.hessian(cl.Problem(model, tokens, CE())) @ v, truth) < 1e-4
    assert only_names(doctor(model, tokens, CE())) == set()


def test_scaled_gradient() -> None:
    model = sick.Table(tied=False)
    model.embed.padding_idx, model.embed.scale_grad_by_freq = None, True
    report = doctor(model, DATA, CE())
    assert "scaled-gradient" in only_names(report)
    found = cl.Problem(model, DATA, CE())
    wrong = found.gradient()
    model.embed.scale_grad_by_freq = False
    assert relative(wrong, cl.Problem(model, DATA, CE()).gradient()) > 0.05
    assert only_names(doctor(model, DATA, CE())) == set()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wrong_second_derivative(dtype: torch.dtype) -> None:
    wrong, right = Wrapped(sick.detached).to(dtype), Wrapped(torch.sin).to(dtype)
    finding = only(doctor(wrong, DATA, CE()), "wrong-second-derivative", "error")
    assert finding.size is not None
    assert finding.size > 0.01
    found = cl.Problem(wrong.double(), DATA, CE())
    v, h = direction(found.layout.size), 1e-5
    slopes = [found.with_params(found.theta + c * h * v).gradient() for c in (1, -1)]
    differences = (slopes[0] - slopes[1]) / (2 * h)
    assert relative(cl.hessian(found) @ v, differences) > 0.01
    assert relative(product(right.double()), differences) < 1e-5
    assert only_names(doctor(right, DATA, CE())) == set()


def test_gradient_checkpointing() -> None:
    only(doctor(sick.Checkpointed(anew=True), DATA, CE()), "gradient-checkpointing", "error")
    with pytest.raises(cl.CurvlensError, match="checkpointing is active"):
        product(sick.Checkpointed(anew=True))
    plain = sick.Checkpointed(anew=False)
    assert relative(product(plain), plain_product(plain, mean_loss)) < 1e-12


def test_gradient_checkpointing_of_hugging_face() -> None:
    case = BY_NAME["llama"]
    model = case.model()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert list(doctor(model, case.batches, case.loss)) == []  # asleep in evaluation mode, and harmless
    product(model, case.batches, case.loss)
    model.train()
    assert "'model.layers.0'" in only(doctor(model, case.batches, case.loss), "gradient-checkpointing", "error").what
    with pytest.raises(cl.CurvlensError, match="checkpointing is active"):
        product(model, case.batches, case.loss)


def test_compiled_model() -> None:
    plain = Wrapped(torch.sin)
    model = torch.compile(plain, backend="aot_eager")
    assert isinstance(model, nn.Module)
    only(doctor(model, DATA, CE()), "compiled-model", "error")
    with pytest.raises(RuntimeError, match="double backward"):
        plain_product(model, mean_loss)
    assert relative(plain_product(plain, mean_loss), product(plain)) < 1e-12
    part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    part[0].compile()
    assert kernels_module.compiled(part) == ["0"]


def test_fused_attention() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    case = BY_NAME["gpt-neox"]
    model = case.model()
    right = product(model, case.batches, case.loss)
    ALL_ATTENTION_FUNCTIONS.register("flash_test", sick.flash)
    try:
        model.config._attn_implementation = "flash_test"  # type: ignore[union-attr]
        finding = only(doctor(model, case.batches, case.loss), "fused-attention", "error")
        assert "'flash_test'" in finding.what
        with pytest.raises(cl.CurvlensError, match="differentiated twice"):
            product(model, case.batches, case.loss)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["flash_test"]
    model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    assert relative(product(model, case.batches, case.loss), right) == 0


def test_unknown_architecture() -> None:
    model = sick.dropping().eval()
    report = doctor(model, DATA, CE())
    assert [(f.name, f.severity) for f in report] == [("unknown-architecture", "note")]
    found = cl.Problem(model, DATA, CE())
    assert len(found.blocks) == len(found.layout.names)
    own = cl.Problem(model, DATA, CE(), blocks={"ends": ["0.*", "2.*"]})
    assert list(doctor(own)) == []
    cases = [
        (model, DATA, CE()),
        (sick.Bare(), torch.ones(2, 3).double(), lambda y, batch: (y.sum(), 2)),
        (Cells().double(), torch.randint(7, (3, 5)), cl.losses.CausalLM()),
    ]
    for arguments in cases:  # the fix, typed as it is
        fix = next(f.fix for f in doctor(*arguments) if f.name == "unknown-architecture")
        named = eval(fix.replace("Problem(...,", "cl.Problem(*arguments,"))
        assert named.blocks.layers
        assert "unknown-architecture" not in [finding.name for finding in doctor(named)]


# What Problem refuses, and checks that fail


REFUSED: dict[str, tuple[Callable[[], Report], str]] = {
    "labels": (lambda: doctor(gpt(), (TOKENS, LABELS[:, :-1]), CE()), "do not fit"),
    "loss": (lambda: doctor(gpt(), DATA, nn.CrossEntropyLoss()), "reduction hides"),
    "no data": (lambda: doctor(gpt(), [], CE()), "holds no batch"),
    "number as data": (lambda: doctor(gpt(), 3, CE()), "is an int"),
    "params": (lambda: doctor(gpt(), DATA, CE(), params="nothing.*"), "nothing"),
    "micro_batch": (lambda: doctor(gpt(), DATA, CE(), micro_batch=0), "1 or more"),
    "forward": (lambda: doctor(nn.Linear(2, 2), torch.ones(3, 5), CE()), "RuntimeError|shape|labels"),
}


@pytest.mark.parametrize(("act", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(act: Callable[[], Report], text: str) -> None:
    assert re.search(text, only(act(), "refused", "error").what)


def test_a_check_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_nothing(patient: Any) -> Any:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(examine, "FORWARD_CHECKS", (check_nothing, *examine.FORWARD_CHECKS))
    finding = only(doctor(gpt(), DATA, CE()), "check-failed", "warning")
    assert "check_nothing" in finding.what
    assert "ZeroDivisionError: no luck" in finding.what


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: doctor(5), "given an int, expected a Problem"),  # type: ignore[arg-type]
        (lambda: doctor(gpt()), "without data and loss"),
        (lambda: doctor(gpt(), DATA), "without loss"),
        (lambda: doctor(problem(), DATA), "expected the Problem alone"),
    ],
)
def test_bad_input(act: Callable[[], Report], text: str) -> None:
    with pytest.raises(cl.CurvlensError, match=text):
        act()


def test_a_problem_whose_model_went_back_to_training() -> None:
    model = sick.dropping().eval()
    found = cl.Problem(model, DATA, CE())
    assert only_names(doctor(found)) == set()
    model.train()
    only(doctor(found), "dropout-active", "error")
    assert all(m.training for m in model.modules())


def test_a_problem_at_another_point_is_looked_at_there() -> None:
    found = problem()
    far = found.with_params({"h.0.attn.q.weight": torch.full((4, 4), 1e9).double()})
    assert list(doctor(found)) == []
    assert "saturated-softmax" in {f.name for f in doctor(far)}


# The report


def test_report() -> None:
    findings = [
        Finding("small", "note", "A <b>.", "Little.", "pass"),
        Finding("bad", "error", "B & c.", "Wrong.", "x < y", 0.125),
        Finding("odd", "warning", "C.", "Rounding.", "pass", float("nan")),
    ]
    report = Report(findings)
    assert [f.severity for f in report] == ["error", "warning", "note"]
    assert not report.ok
    assert (report.errors, report.warnings, report.notes) == ((findings[1],), (findings[2],), (findings[0],))
    assert "1 error, 1 warning, 1 note" in str(report)
    assert "fix: x < y" in str(report)
    html = report._repr_html_()
    assert "A &lt;b&gt;." in html
    assert "<code>x &lt; y</code>" in html
    assert "<b>" not in html
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["findings"][0]["size"] == 0.125
    with pytest.raises(cl.CurvlensError, match=r"(?s)bad \(size 0.12\): B & c.*Fix: x < y.*'bad'"):
        report.require()
    report.require(allow=["bad"])
    report.require(allow="bad")
    with pytest.raises(cl.CurvlensError):
        report.require(allow=["odd"])
    assert str(Report()) == "curvlens doctor: nothing found"


# Nothing is left behind


def state(model: nn.Module) -> tuple[Any, ...]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    return (
        [m.training for m in model.modules()],
        [(name, id(x), x.requires_grad, x.grad, x.tolist()) for name, x in tensors],
        hooks,
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


@pytest.mark.parametrize("make", [sick.normed, lambda: nn.Sequential(sick.dropping(), nn.Identity())])
def test_nothing_is_left_behind(make: Callable[[], nn.Module]) -> None:
    model = make()
    model[0].requires_grad_(False)  # type: ignore[index]
    generator = torch.Generator().manual_seed(3)
    tensors = TensorDataset(TOKENS, LABELS)
    loss: cl.losses.Loss = CE()
    if isinstance(model[0], nn.Linear):  # type: ignore[index]
        x = direction(24).view(8, 3)
        tensors, loss = TensorDataset(x, x[:, :1]), cl.losses.MSE()
    loader = DataLoader(tensors, batch_size=4, shuffle=True, generator=generator)
    copies = [x.clone() for x in tensors.tensors]
    before, drawn = state(model), generator.get_state()
    doctor(model, loader, loss)
    assert state(model) == before
    assert bool((generator.get_state() == drawn).all())
    assert all(map(torch.equal, copies, tensors.tensors))


def test_a_model_that_writes_into_itself_is_put_back() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(7, 7, max_norm=0.1).double()
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            y: Tensor = self.inner(x)
            return y

    model = Writing()
    values, calls = model.inner.weight.tolist(), model.calls
    with untouched(model, None):
        model(TOKENS)
        assert model.inner.weight.tolist() != values
    assert model.inner.weight.tolist() == values
    assert model.calls is calls
    report = doctor(model, DATA, CE())
    assert [f.name for f in report.errors] == ["refused"]
    assert "writes into the parameters" in report.errors[0].what
    assert next(f for f in report if f.name == "written-buffers").severity == "note"
    assert model.inner.weight.tolist() == values


@pytest.mark.parametrize("seed", range(3))
def test_buffers_that_the_loss_depends_on(seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    before = [b.tolist() for b in model.buffers()]
    finding = only(doctor(model, (x, x[:, :1]), cl.losses.MSE()), "written-buffers", "error")
    assert finding.fix == "model.eval()"
    assert model.training
    assert [b.tolist() for b in model.buffers()] == before
    assert "written-buffers" not in [f.name for f in doctor(model.eval(), (x, x[:, :1]), cl.losses.MSE())]


class Handed(nn.Module):
    """Bidirectional attention that is handed a mask, and uses it or does not."""

    def __init__(self, *, heeds: bool) -> None:
        super().__init__()
        self.heeds = heeds
        self.embed = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        padding = attention_mask == 0
        x = self.layer(self.embed(input_ids), src_key_padding_mask=padding if self.heeds else None)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("heeds", [True, False])
def test_a_mask_that_is_taken_and_not_used(heeds: bool) -> None:
    torch.manual_seed(0)
    model = Handed(heeds=heeds).double().eval()
    ids, mask = torch.randint(1, 9, (4, 6)), torch.ones(4, 6, dtype=torch.long)
    mask[:, 4:] = 0
    ids[mask == 0] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    report = doctor(model, batch, cl.losses.MaskedLM())
    # the damage: the same texts with shorter padding have another curvature
    short = {name: x[:, :5] for name, x in batch.items()}
    short["attention_mask"] = short["attention_mask"].clone()
    short_of = cl.Problem(model, short, cl.losses.MaskedLM())
    H = cl.hessian(cl.Problem(model, batch, cl.losses.MaskedLM()))
    v = direction(H.shape[1])
    different = relative(cl.hessian(short_of) @ v, H @ v)
    if heeds:
        assert "ignored-mask" not in [f.name for f in report]
        assert different < 1e-12
    else:
        finding = next(f for f in report if f.name == "ignored-mask")
        assert finding.severity == "error"
        assert finding.size is not None
        assert finding.size > 1e-4
        assert different > 1e-3


@pytest.mark.parametrize("kind", ["batch-norm", "by hand"])
def test_samples_that_see_each_other(kind: str) -> None:
    torch.manual_seed(0)

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    middle = nn.BatchNorm1d(6, track_running_stats=False) if kind == "batch-norm" else Centred()
    model = nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Linear(6, 3)).double().eval()
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    finding = only(doctor(model, (x, y), CE()), "coupled-samples", "error")
    assert finding.size is not None
    assert finding.size > 1e-3
    whole, cut = (cl.Problem(model, data, CE()) for data in ([(x, y)], [(x[:4], y[:4]), (x[4:], y[4:])]))
    v = direction(cl.hessian(whole).shape[1])
    assert relative(cl.hessian(cut) @ v, cl.hessian(whole) @ v) > 1e-2
    healthy = nn.Sequential(model[0], nn.LayerNorm(6).double(), model[2], model[3])
    assert "coupled-samples" not in [f.name for f in doctor(healthy, (x, y), CE())]


def test_names_by_likeness_and_layers_named_in_part() -> None:
    """DeepSeek's projections have names of their own: its layer is more than H['h.0'] has."""
    config = transformers.DeepseekV2Config(
        vocab_size=20,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
        moe_intermediate_size=8,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    make: Any = transformers.DeepseekV2ForCausalLM
    model = make(config).double().eval()
    posed = cl.Problem(model, {"input_ids": torch.randint(3, 20, (2, 6))}, cl.losses.CausalLM())
    report = cl.doctor(posed)
    assert [f.name for f in report] == ["named-by-likeness", "partly-named"]
    assert "deepseek_v2" in report[0].what
    assert "kv_b_proj" in report[1].what
    layer = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
    assert cl.hessian(posed)["h.0"].shape[0] < layer
    found = re.match(r"Problem\(\.\.\., blocks=(.*)\)  #", report[1].fix)
    assert found is not None
    own = ast.literal_eval(found[1])
    mended = cl.Problem(model, {"input_ids": torch.randint(3, 20, (2, 6))}, cl.losses.CausalLM(), blocks=own)
    assert cl.hessian(mended)[["h.0", "h.0.rest"]].shape[0] == layer
    assert [f.name for f in cl.doctor(mended)] == ["named-by-likeness"]


def test_every_finding_is_provoked_here() -> None:
    source = Path(examine.__file__).parent
    text = "".join(file.read_text() for file in source.glob("*.py"))
    names = set(re.findall(r'Finding\(\s*"([a-z0-9-]+)"', text))
    assert len(names) > 25
    here = "".join(file.read_text() for file in Path(__file__).parent.glob("test_doctor*.py"))
    assert [name for name in sorted(names) if f'"{name}"' not in here] == []


def test_a_function_that_wiggles_more_than_the_steps_can_see() -> None:
    """Weights three times as large: differences over 2e-2 to 5e-3 have not converged, and say nothing about H v."""
    torch.manual_seed(101)
    for _ in range(4):  # the fourth of these networks was called wrong
        model = GPT(GPTConfig(vocab=11, context=8, n_layer=2, n_head=2, d_model=8, d_mlp=16))
        tokens = torch.randint(11, (3, 8))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    found = cl.doctor(cl.Problem(model.eval(), (tokens, tokens), cl.losses.CausalLM()))
    assert not {"wrong-second-derivative", "wrong-gradient"} & {finding.name for finding in found}
