"""From tokens to a batch: windows of a stream, samples of several lengths with padding, masks, checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.errors import CurvlensError

IGNORED = -100
"""The label of tokens that do not count."""
MASKED = 0.15
"""The share of tokens that a masked language model is asked for."""


@dataclass(frozen=True)
class Sample:
    """The tokens of one sequence, and a label for each of them, for each token of a target, or for all."""

    tokens: list[int]
    labels: list[int] | int


def windows(stream: Sequence[int], length: int, count: int) -> list[list[int]]:
    """The beginning of a stream, cut into at most ``count`` windows of one length.

    >>> windows([5, 6, 7, 8, 9], 2, 3)
    [[5, 6], [7, 8]]
    """
    whole = min(count, len(stream) // length)
    return [[int(token) for token in stream[i * length : (i + 1) * length]] for i in range(whole)]


def batch(samples: Sequence[Sample], pad: int) -> dict[str, Tensor]:
    """Samples as one batch: padded behind their ends, with a mask and labels -100 where anything is padded.

    >>> batch([Sample([1, 2, 3], [1, 2, 3]), Sample([4], [4])], pad=0)["labels"]
    tensor([[   1,    2,    3],
            [   4, -100, -100]])
    """
    made = {"input_ids": _rectangle([sample.tokens for sample in samples], pad)}
    if len({len(sample.tokens) for sample in samples}) > 1:
        made["attention_mask"] = _rectangle([[1] * len(sample.tokens) for sample in samples], 0)
    labels = [sample.labels for sample in samples]
    rows = [row for row in labels if isinstance(row, list)]
    made["labels"] = _rectangle(rows, IGNORED) if rows else torch.tensor(labels)
    return made


def _rectangle(rows: Sequence[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def padding(model: nn.Module, tokenizer: Any | None, samples: Sequence[Sample]) -> int:
    """The token to pad with: the model's, the tokenizer's, or one that occurs in no sample.

    A classifier reads its answer behind the last token that is no padding, so padding must not be a word.
    """
    config: Any = model.config
    size = vocabulary(model)
    for known in (getattr(config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None)):
        if isinstance(known, int) and 0 <= known < size:
            return known
    used = {token for sample in samples for token in sample.tokens}
    return next((token for token in range(size) if token not in used), 0)


def vocabulary(model: nn.Module) -> int:
    """How many tokens the model knows."""
    embedding: Any = model
    weight = getattr(embedding.get_input_embeddings(), "weight", None)
    return len(weight) if isinstance(weight, Tensor) else int(embedding.config.vocab_size)


def require_known(tokens: Sequence[int], size: int, name: str, hint: str = "") -> None:
    """An error for tokens that the model does not know."""
    for token in (max(tokens, default=0), min(tokens, default=0)):
        if not 0 <= token < size:
            raise CurvlensError(
                f"{name} has the token {token}, and the model knows 0 to {size - 1}.{hint} Use the tokenizer that "
                "belongs to the model."
            )


def masked(sample: Sample, tokenizer: Any, size: int, generator: torch.Generator) -> Sample | None:
    """A sample with 15 % of its tokens to be found: 80 % of them masked, 10 % random, 10 % as they were.

    At least one token is chosen, never a special one. None, if all are special.
    """
    special = set(tokenizer.all_special_ids)
    free = [i for i, token in enumerate(sample.tokens) if token not in special]
    if not free:
        return None
    order = torch.randperm(len(free), generator=generator).tolist()
    tokens, labels = list(sample.tokens), [IGNORED] * len(sample.tokens)
    for place in (free[i] for i in order[: max(1, round(MASKED * len(free)))]):
        labels[place] = tokens[place]
        draw = float(torch.rand((), generator=generator))
        other = int(torch.randint(size, (), generator=generator))
        tokens[place] = tokenizer.mask_token_id if draw < 0.8 else other if draw < 0.9 else tokens[place]
    return replace(sample, tokens=tokens, labels=labels)
