"""Models whose parts curvlens has no names for."""

from __future__ import annotations

from collections.abc import Iterator

from curvlens.doctor.finding import Finding
from curvlens.doctor.patient import Patient


def check_architecture(patient: Patient) -> Iterator[Finding]:
    """An unknown architecture, unless the user gave blocks."""
    assert patient.problem is not None
    blocks = patient.problem.blocks
    if blocks.family is None and len(blocks) == len(blocks.order):
        first = blocks.order[0].parameter
        pattern = f"{first.rpartition('.')[0]}.*" if "." in first else first
        yield Finding(
            "unknown-architecture",
            "note",
            f"{type(patient.model).__name__} is no architecture that curvlens knows.",
            "There is one block a parameter: no layers, roles and heads by name. Numbers are not affected.",
            f"Problem(..., blocks={{'first': {pattern!r}}})  # names and patterns of your own, for by='block'",
        )
