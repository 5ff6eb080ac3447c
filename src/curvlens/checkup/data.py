"""Data that cannot be gone through again and again, or is another one each time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvlens.batches import fingerprint
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import a_kind

MOST = 64
"""At most so many batches are read, twice."""


def check_data(patient: Patient) -> Iterator[Finding]:
    """A loader that shuffles, an iterator, and batches that differ between two passes."""
    source = patient.source
    if isinstance(source, DataLoader) and _draws(source):
        yield Finding(
            "shuffled-data",
            "error",
            f"The data is a DataLoader with {a_kind(source.sampler)}: every pass sees other batches.",
            "A curvature is applied many times to one loss; here each product would be of another one.",
            "DataLoader(..., shuffle=False)  # or, to freeze one epoch: data = list(loader)",
        )
    elif patient.one_shot:
        yield Finding(
            "one-shot-data",
            "error",
            f"The data is {a_kind(source)}, which can be gone through only once.",
            "A curvature needs many passes; the second would find nothing. The data was left unread here, so checks "
            "that need a batch were not made.",
            "data = list(batches)",
        )
    elif patient.batches is not None and not isinstance(patient.batches, list):
        yield from _changing(patient)


def _draws(loader: DataLoader[object]) -> bool:
    return isinstance(loader.sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def _changing(patient: Patient) -> Iterator[Finding]:
    """Two passes over the first batches. A list is not read: it holds still."""
    assert patient.batches is not None
    first, second = ([fingerprint(b) for b in islice(iter(patient.batches), MOST)] for _ in range(2))
    common = min(len(first), len(second))
    different = [i for i in range(common) if first[i] != second[i]] + [common] * (len(first) != len(second))
    if different:
        yield Finding(
            "changing-data",
            "error",
            f"Batch {different[0]} is not the same in two passes: it is shuffled, augmented, or gone. {len(different)} "
            f"batches of the first {max(len(first), len(second))} differ.",
            "A curvature is applied many times to one loss; here each product would be of another one. The size is "
            "the share of batches that differ.",
            "data = list(data)  # one pass, frozen",
            len(different) / max(len(first), len(second)),
        )
