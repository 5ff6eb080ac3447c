"""From what a user types to a problem: models, data, losses, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner

import curvlens as cl
from curvlens.cli import app
from curvlens.cli.defaults import Options
from curvlens.cli.door import Posed, pose, shuffled

hf: Any = transformers
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmno"]
SIZE = len(WORDS)
TEXT = "a b c d e f g h i j k l m n o " * 8
BERT = {
    "vocab_size": SIZE,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "max_position_embeddings": 32,
}


def save_tokenizer(folder: Path, *, around: bool = False, pad: bool = True) -> None:
    """One word a token; with ``around`` between [CLS] and [SEP]."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if around else {}
    special |= {"pad_token": "[PAD]"} if pad else {}
    if around:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **special).save_pretrained(folder)


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=SIZE, n_embd=8, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None
        )
    )


def llama() -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=SIZE,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=10,
            max_position_embeddings=32,
        )
    )


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=SIZE, d_model=8, d_kv=4, d_ff=10, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "bert-mlm": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "bert-bare": lambda: hf.BertModel(hf.BertConfig(**BERT)),
    "bert-classifier": lambda: hf.BertForSequenceClassification(
        hf.BertConfig(
            **BERT, num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"}, label2id={"bad": 0, "fair": 1, "good": 2}
        )
    ),
    "bert-words": lambda: hf.BertForTokenClassification(hf.BertConfig(**BERT, num_labels=3)),
    "gpt2-classifier": lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**gpt2().config.to_dict(), num_labels=3)),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders of tiny random models with tokenizers, each made once."""
    folders: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in folders:
            place = tmp_path_factory.mktemp("models") / name
            torch.manual_seed(0)
            MAKERS[name]().save_pretrained(place)
            save_tokenizer(place, around="bert" in name, pad="gpt2" not in name)
            folders[name] = str(place)
        return folders[name]

    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def lines(folder: Path, *records: Any) -> str:
    path = folder / "lines.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return str(path)


def own_loss(posed: Posed) -> float:
    """What the model itself computes from ``labels=``."""
    with torch.no_grad(), cl.keep_dtype(posed.model):
        return float(posed.model(**posed.data).loss)


def equal_losses(posed: Posed) -> bool:
    return posed.problem().loss() == pytest.approx(own_loss(posed), rel=1e-12)


def refused(match: str, target: str, data: str | None = None, **options: Any) -> str:
    with pytest.raises(cl.CurvlensError) as caught:
        pose(Options(target, data, **options))
    assert match in str(caught.value)
    return str(caught.value)


# Every kind of model and data


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_text(saved: Callable[[str], str], text: str, name: str) -> None:
    posed = pose(Options(saved(name), text, tokens=12, sequences=3, dtype="float64"))
    assert posed.data["input_ids"].shape == (3, 12)
    assert "attention_mask" not in posed.data
    assert posed.data["input_ids"][0, :3].tolist() == [5, 6, 7]
    assert equal_losses(posed)
    assert "next token (causal-lm), because config.json names" in posed.loss_sentence
    assert "3 sequences of 12 tokens from" in posed.data_sentence
    assert posed.decode([5, 6, 4]) == ["a", "b", "[MASK]"]
    assert posed.name == name
    assert posed.reproduce["tokens"] == 12
    assert posed.model.training is False
    assert "the weights" not in pose(Options(saved(name), text, loss="causal-lm")).loss_sentence


def test_defaults_fit_the_model(saved: Callable[[str], str]) -> None:
    posed = pose(Options(saved("gpt2"), "builtin", sequences=2))
    assert posed.data["input_ids"].shape == (2, 32)  # its positions, fewer than 64
    assert "built-in text" in posed.data_sentence
    assert posed.problem().dtype == torch.float32


def test_lines_of_text_are_padded(saved: Callable[[str], str], tmp_path: Path) -> None:
    data = lines(tmp_path, {"text": "a b c d"}, "", {"text": "a"}, {"text": "e f"}, {"text": "b a"})
    posed = pose(Options(saved("llama"), data, sequences=3, dtype="float64"))
    assert posed.data["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert posed.data["labels"][1].tolist() == [9, 10, -100, -100]
    assert equal_losses(posed)
    assert posed.problem().n_tokens == 3 + 1 + 1
    assert "1 line with too few tokens left out." in posed.data_sentence
    assert pose(Options(saved("llama"), data, tokens=3)).data["input_ids"].shape == (3, 3)


def test_only_the_target_of_a_prompt_counts(saved: Callable[[str], str], tmp_path: Path) -> None:
    data = lines(tmp_path, {"input": "a b", "target": "c d"}, {"input": "e", "target": "f"})
    posed = pose(Options(saved("gpt2"), data, dtype="float64"))
    assert posed.data["labels"].tolist() == [[-100, -100, 7, 8], [-100, 10, -100, -100]]
    assert posed.problem().n_tokens == 3
    assert equal_losses(posed)
    refused("Use --tokens 4", saved("gpt2"), data, tokens=2)


def test_encoder_decoder(saved: Callable[[str], str], tmp_path: Path, text: str) -> None:
    data = lines(tmp_path, {"input": "a b c", "target": "d"}, {"input": "e", "target": "f g"})
    posed = pose(Options(saved("t5"), data, dtype="float64"))
    assert posed.data["labels"].tolist() == [[8, -100], [10, 11]]
    assert posed.problem().n_tokens == 3
    assert equal_losses(posed)
    assert "seq2seq-lm" in posed.loss_sentence
    halves = pose(Options(saved("t5"), text, tokens=6, sequences=2, loss="causal-lm"))
    assert halves.data["labels"].tolist() == [[8, 9, 10], [14, 15, 16]]
    assert "first half is the input" in halves.data_sentence
    refused("lacks 'target'", saved("t5"), lines(tmp_path, {"input": "a"}))


def test_masked(saved: Callable[[str], str], text: str, tmp_path: Path) -> None:
    posed = pose(Options(saved("bert-mlm"), text, tokens=22, sequences=4, dtype="float64"))
    ids, labels = posed.data["input_ids"], posed.data["labels"]
    assert (ids[:, 0] == 2).all()
    assert (ids[:, -1] == 3).all()
    assert (labels >= 0).sum(1).tolist() == [3, 3, 3, 3]  # 15 % of 20
    assert (labels[:, [0, -1]] == -100).all()
    chosen = ids[labels >= 0]
    assert 0 < int((chosen == 4).sum()) <= 12
    assert equal_losses(posed)
    assert "80 % are the mask token" in posed.data_sentence
    again = pose(Options(saved("bert-mlm"), text, tokens=22, sequences=4))
    assert torch.equal(ids, again.data["input_ids"])
    other = pose(Options(saved("bert-mlm"), text, tokens=22, sequences=4, seed=1))
    assert not torch.equal(ids, other.data["input_ids"])
    padded = pose(Options(saved("bert-mlm"), lines(tmp_path, {"text": "a b c"}, {"text": "d"}), dtype="float64"))
    assert padded.data["attention_mask"].sum(1).tolist() == [5, 3]
    assert equal_losses(padded)


@pytest.mark.parametrize("name", ["bert-classifier", "gpt2-classifier"])
def test_classification(saved: Callable[[str], str], tmp_path: Path, name: str) -> None:
    data = lines(tmp_path, {"text": "a b c", "label": 2}, {"text": "d", "label": 0}, {"text": "e f", "label": 1})
    posed = pose(Options(saved(name), data, dtype="float64"))
    assert posed.data["labels"].tolist() == [2, 0, 1]
    assert equal_losses(posed)
    alone = [pose(Options(saved(name), lines(tmp_path, line), dtype="float64")) for line in records(data)]
    mean = sum(each.problem().loss() for each in alone) / 3
    assert posed.problem().loss() == pytest.approx(mean, rel=1e-12)  # padding changes nothing
    assert "labels of texts (classification)" in posed.loss_sentence


def records(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_labels_by_name(saved: Callable[[str], str], tmp_path: Path) -> None:
    data = lines(tmp_path, {"text": "a", "label": "good"})
    assert pose(Options(saved("bert-classifier"), data)).data["labels"].tolist() == [2]
    for label in (3, -1, True, 1.0, "fine", None):
        said = refused("has the label", saved("bert-classifier"), lines(tmp_path, {"text": "a", "label": label}))
        assert "Line 1 of" in said
        assert "'bad', 'fair', 'good'" in said


def test_words_with_labels(saved: Callable[[str], str], tmp_path: Path) -> None:
    data = lines(tmp_path, {"words": ["a", "b"], "labels": [0, 2]}, {"words": ["c"], "labels": [1]})
    posed = pose(Options(saved("bert-words"), data, dtype="float64", loss="classification"))
    assert posed.data["labels"].tolist() == [[-100, 0, 2, -100], [-100, 1, -100, -100]]
    assert equal_losses(posed)
    refused("Give one label a word", saved("bert-words"), lines(tmp_path, {"words": ["a"], "labels": []}))


def test_files_of_tokens(saved: Callable[[str], str], tmp_path: Path) -> None:
    ids = torch.arange(5, 5 + 14).repeat(4).numpy()
    np.save(tmp_path / "stream.npy", ids)
    np.save(tmp_path / "rows.npy", ids.reshape(4, 14).astype(np.uint8))
    ids.astype(np.uint16).tofile(tmp_path / "stream.bin")
    ids.astype(np.uint32).tofile(tmp_path / "wide.bin")
    stream = pose(Options(saved("gpt2"), str(tmp_path / "stream.npy"), tokens=10, sequences=2, dtype="float64"))
    assert stream.data["input_ids"].shape == (2, 10)
    assert equal_losses(stream)
    for file, dtype in (("stream.bin", None), ("wide.bin", "uint32")):
        same = pose(Options(saved("gpt2"), str(tmp_path / file), tokens=10, sequences=2, data_dtype=dtype))  # type: ignore[arg-type]
        assert torch.equal(same.data["input_ids"], stream.data["input_ids"])
    rows = pose(Options(saved("gpt2"), str(tmp_path / "rows.npy"), sequences=3))
    assert rows.data["input_ids"].tolist() == ids.reshape(4, 14)[:3].tolist()
    cut = pose(Options(saved("gpt2"), str(tmp_path / "rows.npy"), tokens=5))
    assert cut.data["input_ids"].shape == (4, 5)
    refused("Use --tokens 14", saved("gpt2"), str(tmp_path / "rows.npy"), tokens=15)


def test_a_folder_without_a_tokenizer_takes_tokens(tmp_path: Path, text: str) -> None:
    gpt2().save_pretrained(tmp_path / "bare")
    np.save(tmp_path / "ids.npy", np.arange(64) % SIZE)
    posed = pose(Options(str(tmp_path / "bare"), str(tmp_path / "ids.npy"), tokens=8))
    assert posed.tokenizer is None
    assert posed.decode(torch.tensor([3, 4])) == ["3", "4"]
    for data in (text, "builtin"):
        assert "--data tokens.npy" in refused("has no tokenizer", str(tmp_path / "bare"), data)
    MAKERS["bert-mlm"]().save_pretrained(tmp_path / "masked")
    refused("needs the mask token", str(tmp_path / "masked"), str(tmp_path / "ids.npy"))


def test_demo() -> None:
    posed = pose(Options("demo", sequences=8))
    problem = posed.problem()
    assert problem.dtype == torch.float64
    assert problem.n_tokens == 8 * 3
    assert problem.loss() < 1.3  # guessing a digit: 2.3
    assert "".join(posed.decode(posed.data[0][0])) == "44+39=08"
    worse = cl.Problem(posed.model, shuffled(posed.data, 0), posed.loss).loss()
    assert worse > problem.loss() + 0.5
    refused("--data is for Hugging Face models", "demo", "builtin")


def test_own_code(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import torch, curvlens as cl\n"
        "def parts():\n"
        "    data = torch.ones(4, 3).double(), torch.zeros(4, 2).double()\n"
        "    return torch.nn.Linear(3, 2).double(), data, cl.losses.MSE()\n"
        "def problem():\n"
        "    return cl.Problem(*parts())\n"
    )
    for name in ("parts", "problem"):
        posed = pose(Options(f"{script}:{name}"))
        assert (posed.given is not None) == (name == "problem")
        assert posed.problem().loss() > 0
        assert len(list(posed.batches())) == 1
        assert "MSE" in posed.loss_sentence
    refused("write model.double() yourself", f"{script}:parts", dtype="float64")
    refused("write model.to(device) yourself", f"{script}:parts", device="cpu")
    refused("--loss is for Hugging Face models", f"{script}:parts", loss="causal-lm")


# Shuffled inputs


def test_shuffled_inputs_keep_labels_and_padding(saved: Callable[[str], str], tmp_path: Path) -> None:
    data = lines(tmp_path, {"text": "a b c d e f"}, {"text": "g h i"})
    posed = pose(Options(saved("gpt2"), data))
    mixed = shuffled(posed.data, 3)
    mask = posed.data["attention_mask"] != 0
    assert torch.equal(mixed["labels"], posed.data["labels"])
    assert torch.equal(mixed["attention_mask"], posed.data["attention_mask"])
    assert torch.equal(mixed["input_ids"][~mask], posed.data["input_ids"][~mask])
    assert not torch.equal(mixed["input_ids"], posed.data["input_ids"])
    assert torch.equal(mixed["input_ids"][mask].sort()[0], posed.data["input_ids"][mask].sort()[0])
    assert torch.equal(mixed["input_ids"], shuffled(posed.data, 3)["input_ids"])
    bare = {key: value for key, value in posed.data.items() if key != "labels"}
    same = cl.Problem(posed.model, {**shuffled(bare, 3)}, posed.loss).loss()
    assert same == pytest.approx(cl.Problem(posed.model, mixed, posed.loss).loss())


def test_shuffled_inputs_of_other_kinds() -> None:
    ids = torch.arange(12).view(3, 4)
    mixed, labels = shuffled(ids, 0)
    assert torch.equal(labels, ids)
    assert not torch.equal(mixed, ids)
    images = torch.randn(5, 3, 2, 2)
    first, last = shuffled((images, torch.arange(5)), 0)
    assert torch.equal(last, torch.arange(5))
    assert sorted(first.sum((1, 2, 3)).tolist()) == pytest.approx(sorted(images.sum((1, 2, 3)).tolist()))
    named = shuffled({"pixel_values": images, "label": torch.arange(5)}, 0)
    assert torch.equal(named["label"], torch.arange(5))
    with pytest.raises(cl.CurvlensError, match="cannot be shuffled"):
        shuffled({"attention_mask": torch.ones(2, 2)}, 0)


# What is refused: models


def test_no_model_folders(saved: Callable[[str], str], tmp_path: Path, text: str) -> None:
    refused("is no model folder: it has no config.json", str(tmp_path), text)
    refused("There is no folder './nowhere'", "./nowhere", text)
    refused("is a file, expected a folder", text, text)
    folder = tmp_path / "half"
    gpt2().config.save_pretrained(folder)
    refused("has a config.json and no weights", str(folder), text)
    (folder / "config.json").write_text("{")
    refused("cannot be read", str(folder), text)
    (folder / "config.json").write_text("[]")
    refused("expected a JSON object", str(folder), text)
    gpt2().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    refused("could not be loaded", str(folder), text)


def test_pickle_is_refused_and_the_conversion_works(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "pickled"
    model = gpt2()
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    save_tokenizer(folder)
    said = refused("as pickle only ('pytorch_model.bin')", str(folder), text)
    python, *arguments = shlex.split(said.splitlines()[-1])
    assert python == "python"
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    assert pose(Options(str(folder), text, tokens=8)).problem().loss() > 0


def test_custom_code_is_not_run(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "custom"
    gpt2().save_pretrained(folder)
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    run = tmp_path / "it-ran"
    (folder / "modeling_own.py").write_text(
        f"open({str(run)!r}, 'w').close()\nfrom transformers import GPT2LMHeadModel\n"
        "class OwnForCausalLM(GPT2LMHeadModel): pass\n"
    )
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "add --trust-remote-code" in refused("brings custom code ('OwnForCausalLM')", str(folder), text)
    assert not run.exists()
    posed = pose(Options(str(folder), text, tokens=8, trust_remote_code=True))
    assert run.exists()
    assert type(posed.model).__name__ == "OwnForCausalLM"
    assert posed.problem().loss() > 0


def test_models_without_a_loss(saved: Callable[[str], str], tmp_path: Path, text: str) -> None:
    said = refused("is BertModel, and as BertForMaskedLM it lacks weights", saved("bert-bare"), text)
    assert "They would be random" in said
    refused("lacks weights: 'score.weight'", saved("gpt2"), text, loss="classification")
    refused("is_decoder false", saved("bert-mlm"), text, loss="causal-lm")
    refused("has no labels. Give JSONL", saved("bert-classifier"), text)
    folder = tmp_path / "image"
    hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=4, patch_size=2
        )
    ).save_pretrained(folder)
    assert "file.py:function" in refused("is ViTForImageClassification, and no loss is known", str(folder), text)
    hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=1)).save_pretrained(tmp_path / "regression")
    refused("has one output", str(tmp_path / "regression"), text)
    refused("There is no loss 'masked'. Did you mean 'masked-lm'?", saved("gpt2"), text, loss="masked")


def test_a_bare_folder_with_the_head_in_its_weights(saved: Callable[[str], str], tmp_path: Path, text: str) -> None:
    folder = tmp_path / "bare"
    MAKERS["bert-mlm"]().save_pretrained(folder)
    save_tokenizer(folder, around=True)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    posed = pose(Options(str(folder), text, tokens=8))
    assert "(masked-lm), because the weights have such a head" in posed.loss_sentence


def test_devices(saved: Callable[[str], str], text: str) -> None:
    refused("The device 'nonsense' is not available", saved("gpt2"), text, device="nonsense")
    refused("The device 'meta' holds no numbers", saved("gpt2"), text, device="meta")
    if not torch.cuda.is_available():
        refused("The device 'cuda' is not available", saved("gpt2"), text, device="cuda")


# What is refused: data


def test_files_that_cannot_be_read(saved: Callable[[str], str], tmp_path: Path, text: str) -> None:
    target = saved("gpt2")
    refused("needs data: --data FILE", target)
    refused("There is no file", target, str(tmp_path / "none.txt"))
    refused("is a folder", target, str(tmp_path))
    refused("--data-dtype is for .bin files", target, text, data_dtype="uint32")
    refused("is a .json file, expected a text file", target, str(tmp_path / "x.json"))
    for name in ("empty.txt", "empty.jsonl", "empty.npy", "empty.bin"):
        (tmp_path / name).touch()
        refused("is empty", target, str(tmp_path / name))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    refused("no text in UTF-8", target, str(tmp_path / "latin.txt"))
    (tmp_path / "huge.bin").touch()
    os.truncate(tmp_path / "huge.bin", 1 << 40)
    assert "head -c 100000000 huge.bin > part.bin" in refused("has 1 TiB", target, str(tmp_path / "huge.bin"))


def test_too_little_or_too_much(saved: Callable[[str], str], tmp_path: Path, text: str) -> None:
    target = saved("gpt2")
    (tmp_path / "short.txt").write_text("a b c")
    refused(
        "has 3 tokens, not enough for one sequence of 12. Use --tokens 3.",
        target,
        str(tmp_path / "short.txt"),
        tokens=12,
    )
    refused("--tokens 40 is more than the 32 tokens", target, text, tokens=40)
    np.save(tmp_path / "long.npy", np.ones((2, 40), dtype=np.int64))
    refused("more than the 32 that", target, str(tmp_path / "long.npy"))
    refused("leaves no room", saved("bert-mlm"), text, tokens=2)
    refused("has no token to mask", saved("bert-mlm"), "builtin", tokens=8)  # its tokenizer knows no such word
    refused("no line with enough tokens", target, lines(tmp_path, {"text": "a"}))


def test_tokens_that_are_none(saved: Callable[[str], str], tmp_path: Path) -> None:
    target, file = saved("gpt2"), tmp_path / "x.npy"

    def npy(values: Any) -> str:
        np.save(file, values, allow_pickle=True)
        return str(file)

    refused(f"has the token {SIZE}, and the model knows 0 to {SIZE - 1}", target, npy(np.full(64, SIZE)), tokens=8)
    refused("has the token -1", target, npy(np.full(64, -1)), tokens=8)
    refused(f"has the token {2**64 - 1}", target, npy(np.full(64, 2**64 - 1, dtype=np.uint64)), tokens=8)
    refused("holds Python objects", target, npy(np.array([{"a": 1}], dtype=object)))
    refused("has float64 numbers", target, npy(np.ones(64)))
    refused("has the shape (2, 2, 2)", target, npy(np.ones((2, 2, 2), dtype=int)))
    file.write_bytes(b"not an array")
    refused("is no .npy file", target, str(file))
    with file.open("wb") as out:
        np.savez(out, a=np.ones(3))
    refused("is a .npz file", target, str(file))
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    refused("has 3 bytes, no multiple of the 2", target, str(odd))
    odd.write_bytes(b"ab" * 64)
    assert "--data-dtype uint32" in refused("Is it uint16?", target, str(odd), tokens=8)


def test_lines_that_are_broken(saved: Callable[[str], str], tmp_path: Path) -> None:
    target = saved("gpt2")
    refused("Line 2 of", target, lines(tmp_path, {"text": "a b"}, "{nonsense"))
    refused("is no JSON object", target, lines(tmp_path, "[1]"))
    said = refused("lacks 'text'", target, lines(tmp_path, {"txt": "a b"}))
    assert '"input" and "target"; the keys are \'txt\'' in said
    refused("'text' is an int, expected a str", target, lines(tmp_path, {"text": 3}))
    refused("lacks 'target'", target, lines(tmp_path, {"input": "a"}))
    refused("lacks 'label'", saved("bert-classifier"), lines(tmp_path, {"text": "a"}))


# The commands


def test_the_commands_say_what_they_took(saved: Callable[[str], str], text: str) -> None:
    arguments = [saved("gpt2"), "--data", text, "--tokens", "6", "--sequences", "2", "--dtype", "float64"]
    for command in (["doctor"], ["profile", "--samples", "4", "--no-top"]):
        result = CliRunner().invoke(app, [*command, *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert "Loss: cross-entropy of the next token (causal-lm)" in result.output
        assert "Data: 2 sequences of 6 tokens" in result.output
    wrong = CliRunner().invoke(app, ["doctor", *arguments, "--loss", "nonsense"])
    assert wrong.exit_code == 2
    assert "masked-lm" in wrong.output


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from curvlens.cli import app\n"
        "try: app(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
