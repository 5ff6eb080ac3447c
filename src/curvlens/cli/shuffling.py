"""The same batch with its inputs mixed up: a model that reads its inputs has a larger loss on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvlens.batches import Batch, split_target
from curvlens.errors import CurvlensError
from curvlens.losses.language import both

IGNORED = -100
"""The label of tokens that do not count."""


def shuffled(batch: Batch, seed: int) -> Batch:
    """The batch with the tokens of its inputs permuted across positions and sequences, and with the same labels.

    Padding stays where it is. A batch without labels, as `CausalLM` takes it, gets those it had: its unpermuted
    tokens. Of an encoder-decoder, the inputs of the encoder are permuted. Inputs that are no tokens, such as images,
    are permuted among the samples.

    >>> tokens, labels = shuffled((torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])), seed=1)
    >>> tokens.tolist(), labels.tolist()
    ([[2, 4], [3, 1]], [[5, 6], [7, 8]])
    """
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = split_target(batch)
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        real = mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None
        key = _main(inputs)
        found = inputs[key]
        mixed = {**inputs, key: _permuted(found, real, generator)}
        if labels is None:
            return {**mixed, "labels": found if real is None else found.where(both(real), IGNORED)}
        target = next(name for name in batch if batch[name] is labels) if isinstance(batch, Mapping) else "labels"
        return {**mixed, target: labels}
    first, *others = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if not isinstance(first, Tensor):
        raise CurvlensError("The batch does not begin with a tensor, so its inputs cannot be shuffled.")
    return (_permuted(first, None, generator), *others, first if labels is None else labels)


def _main(inputs: Mapping[str, object]) -> str:
    """The name of the inputs that are permuted: the tokens, otherwise the first tensor that is no mask."""
    names = [str(name) for name, value in inputs.items() if isinstance(value, Tensor) and "mask" not in str(name)]
    for name in ("input_ids", "tokens"):
        if name in names:
            return name
    if not names:
        raise CurvlensError("The batch has no tensor among its inputs, so they cannot be shuffled.")
    return names[0]


def _permuted(values: Tensor, real: Tensor | None, generator: torch.Generator) -> Tensor:
    """All tokens that are ``real`` in another order; of anything but tokens (samples, positions), the samples."""
    tokens = values.ndim == 2 and not values.is_floating_point()
    if not tokens:
        return values[torch.randperm(len(values), generator=generator).to(values.device)]
    where = torch.ones_like(values, dtype=torch.bool) if real is None else real
    chosen = values[where]
    mixed = values.clone()
    mixed[where] = chosen[torch.randperm(len(chosen), generator=generator).to(values.device)]
    return mixed
