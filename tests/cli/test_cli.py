"""What a user types."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

import curvlens as cl
from curvlens.cli import _told, app

SICK = """
import torch
from torch import nn
import curvlens as cl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
data = (torch.randn(4, 3).double(), torch.randn(4, 2).double())

def sick():
    return model, data, cl.losses.MSE()

def healthy():
    return cl.Problem(model.eval(), data, cl.losses.MSE())

number = 5

def needy(size, seed=0):
    return model
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SICK)
    return path


def test_blocks_of_a_type() -> None:
    result = run("blocks", "gpt2")
    assert result.exit_code == 0, result.output
    assert "h.11.attn.q" in result.output
    assert "transformer.h.0.attn.c_attn.weight.view(768, 3, 12, 64)[:, 1]" in result.output
    assert "embed = unembed" in result.output
    heads = run("blocks", "gpt2", "--by", "head")
    assert "h.0.attn.q.11" in heads.output
    fewer = run("blocks", "gpt2", "--by", "head", "--heads", "6")
    assert "h.0.attn.q.5" in fewer.output
    assert "h.0.attn.q.6" not in fewer.output


def test_blocks_of_a_folder(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=10,
        architectures=["BertForMaskedLM"],
    )
    config.save_pretrained(tmp_path)
    result = run("blocks", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "family BERT" in result.output
    assert "unembed.bias" in result.output


def test_blocks_of_own_code(script: Path) -> None:
    for name in ("model", "sick", "healthy"):  # a model, a tuple that begins with one, a problem of one
        result = run("blocks", f"{script}:{name}", "--by", "layer")
        assert result.exit_code == 0, result.output
        assert "one block per parameter" in result.output
        assert "0.weight" in result.output


POSED = """
import sys
import torch
import curvlens as cl

sys.path.insert(0, {tests!r})
from test_heads import model, problem

def whole():
    return problem(model(how="split"), heads=4)

def chosen():
    return problem(model(how="split"), params=["h.0.mlp.*", "h.0.norm1"], blocks={{"mine": "h.0.mlp.*"}})
"""


def test_blocks_of_a_problem_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "posed.py"
    path.write_text(POSED.format(tests=str(Path(__file__).parents[1] / "blocks")))
    heads = run("blocks", f"{path}:whole", "--by", "head")
    assert heads.exit_code == 0, heads.output
    assert "h.0.attn.q.3" in heads.output
    chosen = run("blocks", f"{path}:chosen")
    assert chosen.exit_code == 0, chosen.output
    assert "mine" in chosen.output
    assert "2 blocks" in chosen.output
    assert "attn" not in chosen.output
    refused = run("blocks", f"{path}:whole", "--heads", "2")
    assert refused.exit_code == 1
    assert "give it to the Problem: Problem(..., heads=2)" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("blocks", "nothing.py:model"), "There is no file 'nothing.py'"),
        (("blocks", "no.such.module:model"), "No module named 'no'"),
        (("blocks", "{script}:modle"), "Did you mean 'model'"),
        (("blocks", "{script}:number"), "returned an int, expected a torch.nn.Module"),
        (("blocks", "{script}"), "is a file without a name in it"),
        (("doctor", "{script}"), "is a file without a name in it"),
        (("blocks", "{script}:needy"), "needs arguments (size)"),
        (("doctor", "{script}:needy"), "needs arguments (size)"),
        (("doctor", "{script}:number"), "expected a curvlens.Problem"),
        (("doctor", "gpt2"), "--data"),
    ],
)
def test_what_cannot_be_had(script: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*(item.replace("{script}", str(script)) for item in arguments))
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_doctor_of_own_code(script: Path) -> None:
    result = run("doctor", f"{script}:sick")
    assert result.exit_code == 1
    assert "dropout-active" in result.output
    assert "fix: model.eval()" in result.output
    result = run("doctor", f"{script}:healthy")
    assert result.exit_code == 0, result.output
    assert "dropout" not in result.output


def test_doctor_of_a_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    words = ["<pad>", "a", "b", "c", "d"]
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrap: Any = transformers.PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = transformers.GPT2Config(
        vocab_size=5, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    make: Any = transformers.GPT2LMHeadModel
    make(config).save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a b c d b a c d " * 20)
    result = run("doctor", str(tmp_path), "--data", str(text), "--tokens", "12", "--sequences", "3")
    assert result.exit_code == 0, result.output
    assert "doctor" in result.output
    short = run("doctor", str(tmp_path), "--data", str(text), "--tokens", "1000")
    assert short.exit_code == 1
    assert "more than the 16 tokens" in " ".join(short.output.split())
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    without = run("doctor", str(tmp_path), "--data", str(text), "--tokens", "12")
    assert without.exit_code == 1
    assert "has no tokenizer" in " ".join(without.output.split())
    assert "not enough" not in without.output


def test_a_warning_names_no_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours are printed plainly, once the command runs; those of others stay as Python shows them."""

    def warned() -> None:
        warnings.warn("few samples\x1b[31m", cl.CurvlensWarning, stacklevel=1)
        warnings.warn("old name", FutureWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: print(f"{category.__name__} {message}")
        _told(warned)
    said = capsys.readouterr()
    assert said.err == "warning: few samples\\x1b[31m\n"
    assert said.out == "FutureWarning old name\n"


def test_a_flag_asks_for_no_value() -> None:
    result = run("analyze", "--help")
    (line,) = (line for line in result.output.splitlines() if "--dry-run" in line)
    assert "bool" not in line
