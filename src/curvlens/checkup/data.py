"""Data that can be read only once, or that changes from pass to pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvlens.batches import fingerprint
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
from curvlens.errors import a_kind

MOST = 64
"""The checks read at most this many batches, twice."""


def check_data(patient: Patient) -> Iterator[Finding]:
    """Check that every pass reads the same batches. If not, freeze them: ``data = list(data)``."""
    source = patient.source
    if isinstance(source, DataLoader) and _draws(source):
        yield Finding(
            "shuffled-data",
            "error",
            f"The data is a DataLoader with {a_kind(source.sampler)}: every pass reads different batches.",
            "A curvature needs many products with one fixed loss. Here each product would belong to a different loss.",
            "DataLoader(..., shuffle=False)  # or, to freeze one epoch: data = list(loader)",
        )
    elif patient.one_shot:
        yield Finding(
            "one-shot-data",
            "error",
            f"The data is {a_kind(source)}, which can be read only once.",
            "A curvature needs many passes, and the second one would find no data. The doctor did not read the data "
            "and skipped the checks that need a batch.",
            "data = list(batches)",
        )
    elif patient.batches is not None and not isinstance(patient.batches, list):
        yield from _changing(patient)


def _draws(loader: DataLoader[object]) -> bool:
    return isinstance(loader.sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def _changing(patient: Patient) -> Iterator[Finding]:
    """Compare two passes over the first batches. A list is not read, since it cannot change by itself."""
    assert patient.batches is not None
    first, second = ([fingerprint(b) for b in islice(iter(patient.batches), MOST)] for _ in range(2))
    common = min(len(first), len(second))
    different = [i for i in range(common) if first[i] != second[i]] + [common] * (len(first) != len(second))
    if different:
        yield Finding(
            "changing-data",
            "error",
            f"Batch {different[0]} differs between two passes (shuffled, augmented or missing). In all, "
            f"{len(different)} of the first {max(len(first), len(second))} batches differ.",
            "A curvature needs many products with one fixed loss. Here each product would belong to a different loss. "
            "The size is the share of batches that differ.",
            "data = list(data)  # freezes one pass",
            len(different) / max(len(first), len(second)),
        )
