"""A batch as a tree of tensors: moved to a device, measured, cut along its first axis, fingerprinted.

A tree is a tensor, a mapping (a dict, Hugging Face's ``BatchEncoding`` and ``ModelOutput``), a list, a tuple or a named
tuple of trees. Anything else is a leaf that is passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from curvlens.checksum import checksum
from curvlens.errors import CurvlensError, a_kind

Batch = Any
"""A tree of tensors; see the module's docstring."""

TARGET_KEYS = ("labels", "label", "targets", "target")


def is_namedtuple(tree: Any) -> bool:
    """Whether ``tree`` is a named tuple."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def map_tensors(function: Callable[[Tensor], Any], tree: Batch) -> Batch:
    """Apply ``function`` to every tensor of the tree; containers are rebuilt, mappings as plain dicts.

    >>> map_tensors(lambda x: x + 1, {"a": torch.zeros(1), "n": "text"})
    {'a': tensor([1.]), 'n': 'text'}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if is_namedtuple(tree):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors(tree: Batch) -> list[Tensor]:
    """All tensors of the tree, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def replace_tensors(tree: Batch, new: Iterable[Tensor]) -> Batch:
    """The tree with its tensors replaced, in the order of `tensors`."""
    iterator = iter(new)
    return map_tensors(lambda _: next(iterator), tree)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A copy of the batch on the device: kept graphs must not see what is later written into the user's tensors."""
    return map_tensors(lambda x: x.to(device, copy=True), batch)


def batch_size(batch: Batch) -> int | None:
    """The common length of the first axis of all tensors, or None if they have none in common."""
    sizes = {x.shape[0] if x.ndim else None for x in tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """The samples ``start:stop`` of a batch."""
    return map_tensors(lambda x: x[start:stop], batch)


def split_target(batch: Batch) -> tuple[Batch, Tensor | None]:
    """Take a batch apart into what the model is called with and the target, None where there is none.

    A mapping gives up its ``labels`` (or ``label``, ``target``, ``targets``); of a tuple the last entry is the target.
    """
    if is_namedtuple(batch) and any(key in batch._fields for key in (*TARGET_KEYS, "input_ids")):
        batch = batch._asdict()
    if isinstance(batch, Mapping):
        found = [key for key in TARGET_KEYS if batch.get(key) is not None]
        inputs = {key: value for key, value in batch.items() if key not in TARGET_KEYS}
        return inputs, batch[found[0]] if found else None
    if isinstance(batch, (tuple, list)):
        if len(batch) < 2:
            return tuple(batch), None
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    return batch, None


def call(model: Callable[..., Any], inputs: Batch, **extra: Any) -> Any:
    """``model(**inputs)`` for a mapping, ``model(*inputs)`` for a tuple, ``model(inputs)`` otherwise."""
    if isinstance(inputs, Mapping):
        return model(**{str(key): value for key, value in inputs.items()}, **extra)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs, **extra)
    return model(inputs, **extra)


Fingerprint = tuple[Any, ...]


def fingerprint(batch: Batch) -> Fingerprint:
    """Shape, dtype and checksum of every tensor."""
    leaves = tensors(batch)
    return (*((tuple(x.shape), x.dtype) for x in leaves), *checksum(leaves))


def _one_shot(source: Iterable[Any]) -> bool:
    """Whether going through the source uses it up: it is its own iterator."""
    iterator: object = iter(source)
    return iterator is source


class Data:
    """Batches that can be iterated over many times, the same ones in every pass.

    A list or any other re-iterable is a collection of batches; a tensor, a mapping or a tuple is one batch.
    """

    def __init__(self, source: Any) -> None:
        self.source: Iterable[Batch] = self._iterable(source)
        self._seen: list[Fingerprint] | None = None
        self._check_repeats()

    @staticmethod
    def _iterable(source: Any) -> Iterable[Batch]:
        if isinstance(source, (Tensor, Mapping, tuple)):
            return [source]
        if isinstance(source, DataLoader):
            if isinstance(source.sampler, RandomSampler):
                raise CurvlensError(
                    "The data is a DataLoader that shuffles: every pass would see different batches. Curvature needs "
                    "the same loss in every pass. Use DataLoader(..., shuffle=False), or freeze one epoch: "
                    "data=list(loader)."
                )
            if isinstance(source.dataset, IterableDataset) and _one_shot(source.dataset):
                raise CurvlensError("The data set of the DataLoader can be read only once. Use data=list(loader).")
            return source
        if not hasattr(source, "__iter__"):
            raise CurvlensError(
                f"The data is {a_kind(source)}, expected batches that can be iterated over: a list, a "
                "DataLoader, or a single batch (tensor, dict or tuple)."
            )
        if _one_shot(source):
            raise CurvlensError(
                f"The data is {a_kind(source)}, which can be iterated over only once. Curvature needs many passes. "
                "Keep the batches: data=list(batches)."
            )
        return source  # type: ignore[no-any-return]

    def _check_repeats(self) -> None:
        """Fetch the first batch twice and compare: this is cheap and catches most shuffling and augmentation."""
        marks = []
        for _ in range(2):
            first = next(iter(self.source), None)
            if first is None:
                raise CurvlensError("The data holds no batch. Give at least one: data=[(inputs, labels)].")
            if not tensors(first):
                raise CurvlensError(
                    f"The first batch is {a_kind(first)} without a tensor in it. A batch is a tensor, or a dict, list "
                    "or tuple of tensors. Convert arrays with torch.as_tensor(array)."
                )
            marks.append(fingerprint(first))
        if marks[0] != marks[1]:
            raise CurvlensError(
                "Two passes over the data gave two different first batches: the data is shuffled or randomly "
                "augmented. Switch that off, or freeze one pass: data=list(data)."
            )

    def check_unchanged(self) -> None:
        """Check batches in a list again, which is cheap. A loader is not read again for this."""
        if isinstance(self.source, list):
            for _ in self:
                pass

    def first(self) -> Batch:
        """The first batch."""
        return next(iter(self.source))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over all batches and check that they equal those of the first pass."""
        seen: list[Fingerprint] = []
        for index, batch in enumerate(self.source):
            mark = fingerprint(batch)
            if self._seen is not None and (index >= len(self._seen) or mark != self._seen[index]):
                raise CurvlensError(
                    f"Batch {index} is not the same as in the first pass: the data has changed. Freeze it with "
                    "data=list(data), or build a new Problem for the new data."
                )
            seen.append(mark)
            yield batch
        if self._seen is not None and len(seen) < len(self._seen):
            raise CurvlensError(
                f"The data has {len(seen)} batches; in the first pass it had {len(self._seen)}. Freeze it with "
                "data=list(data), or build a new Problem for the new data."
            )
        self._seen = seen
