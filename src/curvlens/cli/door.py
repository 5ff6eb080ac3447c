"""From what a user types to a problem: ``demo``, own code, or a Hugging Face model on data of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlens import batches
from curvlens.cli.adder import trained
from curvlens.cli.code import first_line, from_code, is_code
from curvlens.cli.defaults import DEMO_SEQUENCES, Options
from curvlens.cli.records import read
from curvlens.cli.shuffling import shuffled
from curvlens.cli.texts import Reader
from curvlens.cli.weights import load
from curvlens.data import Addition
from curvlens.errors import CurvlensError, a_kind
from curvlens.losses import CausalLM
from curvlens.problem import Problem

DEMO_STEPS = 300
"""Steps of training of ``demo``: some two seconds on one core."""

__all__ = ["Posed", "pose", "shuffled"]


@dataclass(frozen=True)
class Posed:
    """A model, data and a loss, as a user asked for them."""

    target: str
    """What was typed."""
    name: str
    """A short name of the model, for titles."""
    model: nn.Module
    data: Any
    """A batch, or batches."""
    loss: Any
    loss_sentence: str
    """Which loss was chosen, and why."""
    data_sentence: str
    """Which data it is."""
    tokenizer: Any | None
    decode: Callable[[Iterable[int]], list[str]]
    """The text of each token."""
    reproduce: Mapping[str, Any]
    """The options with which the same problem is posed again."""
    given: Problem | None = field(default=None, repr=False)
    """The problem itself, where own code returned one."""

    def problem(self) -> Problem:
        """The problem; own code's, if it made one."""
        return self.given if self.given is not None else Problem(self.model, self.data, self.loss)

    def batches(self) -> batches.Data:
        """The data as batches that can be iterated over many times."""
        return self.given.data if self.given is not None else batches.Data(self.data)


def pose(options: Options) -> Posed:
    """What the options ask for: ``demo``, ``file.py:name``, or a Hugging Face folder or name with data."""
    device = _device(options.device)
    if options.target == "demo":
        return _demo(options, device)
    if is_code(options.target):
        return _own(options)
    source = read(options)
    loaded = load(options)
    reader = Reader(loaded, options)
    batch, sentence = reader.batch(source)
    model = loaded.model.to(device=device, dtype=_dtype(options.dtype))
    rows, length = batch["input_ids"].shape
    return Posed(
        target=options.target,
        name=Path(options.target).resolve().name if Path(options.target).exists() else options.target,
        model=model,
        data=batches.map_tensors(lambda x: x.to(device), batch),
        loss=loaded.task.loss(),
        loss_sentence=loaded.task.sentence,
        data_sentence=sentence,
        tokenizer=loaded.tokenizer,
        decode=_numbers if loaded.tokenizer is None else _decoder(loaded.tokenizer),
        reproduce=asdict(options) | {"tokens": options.tokens or length, "sequences": rows},
    )


def _demo(options: Options, device: torch.device) -> Posed:
    for option in ("--data", "--data-dtype", "--loss", "--tokens", "--trust-remote-code"):
        if option in options.given():
            raise CurvlensError(f"{option} is for Hugging Face models. demo has a model, data and a loss of its own.")
    task, count = Addition(digits=2), options.sequences or DEMO_SEQUENCES
    model = trained(task, DEMO_STEPS, seed=options.seed)
    return Posed(
        target="demo",
        name="demo",
        model=model.to(device=device, dtype=_dtype(options.dtype)),
        data=tuple(x.to(device) for x in task.batch(count, seed=options.seed)),
        loss=CausalLM(shift=False),
        loss_sentence="Loss: cross-entropy of the digits of the answer (causal-lm), because demo learns to add.",
        data_sentence=f"Data: {count} sums of two numbers of two digits, such as 44+39=083.",
        tokenizer=None,
        decode=lambda ids: list(task.text(torch.as_tensor(list(ids)))),
        reproduce=asdict(options) | {"sequences": count},
    )


def _own(options: Options) -> Posed:
    """Own code brings model, data and loss, and does with them what options do to others."""
    target = options.target
    for option in options.given():
        if option == "--dtype":
            raise CurvlensError(f"--dtype is for Hugging Face models. In {target} write model.double() yourself.")
        if option == "--device":
            raise CurvlensError(f"--device is for Hugging Face models. In {target} write model.to(device) yourself.")
        raise CurvlensError(f"{option} is for Hugging Face models. {target} brings its own model, data and loss.")
    made = from_code(target)
    if isinstance(made, Problem):
        model, data, loss, given = made.model, made.data, made.loss_function, made
    elif isinstance(made, tuple) and len(made) == 3:
        (model, data, loss), given = made, None
    else:
        raise CurvlensError(
            f"{target} returned {a_kind(made)}, expected a curvlens.Problem or a tuple (model, data, loss), or a "
            "function that returns one."
        )
    return Posed(
        target=target,
        name=target.rpartition("/")[2],
        model=model,
        data=data,
        loss=loss,
        loss_sentence=f"Loss: {loss!r}, because {target} returned it.",
        data_sentence=f"Data: what {target} returned.",
        tokenizer=None,
        decode=_numbers,
        reproduce=asdict(options),
        given=given,
    )


def _device(name: str | None) -> torch.device:
    """A device that can be used."""
    try:
        device = torch.device(name or "cpu")
        torch.empty(1, device=device)
    except Exception as error:  # AssertionError, RuntimeError or NotImplementedError, as torch was built
        raise CurvlensError(f"The device {name!r} is not available: {first_line(error)} Use --device cpu.") from error
    if device.type == "meta":
        raise CurvlensError("The device 'meta' holds no numbers. Use --device cpu.")
    return device


def _dtype(name: str | None) -> torch.dtype | None:
    """The dtype to take a model to; None leaves it as it is stored."""
    found = getattr(torch, name) if name else None
    return found if isinstance(found, torch.dtype) else None


def _numbers(ids: Iterable[int]) -> list[str]:
    """Tokens without a tokenizer."""
    return [str(int(token)) for token in ids]


def _decoder(tokenizer: Any) -> Callable[[Iterable[int]], list[str]]:
    def texts(ids: Iterable[int]) -> list[str]:
        numbers = [int(token) for token in ids]
        pieces = tokenizer.convert_ids_to_tokens(numbers)
        # decoding one token takes the blank away that SentencePiece writes as ▁
        return [
            piece.replace("▁", " ") if piece is not None and "▁" in piece else tokenizer.decode([number])
            for piece, number in zip(pieces, numbers, strict=True)
        ]

    return texts
