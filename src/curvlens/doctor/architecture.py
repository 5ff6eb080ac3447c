"""Models whose parts curvlens has no names for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from curvlens.blocks import Blocks
from curvlens.blocks.families import FAMILIES
from curvlens.blocks.family import model_type
from curvlens.doctor.finding import Finding
from curvlens.doctor.patient import Patient
from curvlens.errors import listing


def check_architecture(patient: Patient) -> Iterator[Finding]:
    """An unknown architecture, unless the user gave blocks."""
    assert patient.problem is not None
    blocks = patient.problem.blocks
    kind = model_type(patient.model)
    family = next((family for family in FAMILIES if family.name == blocks.family), None)
    if family is not None and kind is not None and kind not in family.checked:
        yield Finding(
            "named-by-likeness",
            "note",
            f"{kind} is named by its likeness to {family.name}; its own layout was not checked.",
            "A fused or transposed tensor that is stored in another way would be cut in the wrong place: numbers of "
            "whole parameters are right, those of roles and heads only if the layout is the same.",
            "print(problem.blocks)  # see whether q, k, v and heads lie where the model has them",
        )
    inside = _inside_layers(blocks)
    if inside:
        yield Finding(
            "partly-named",
            "note",
            f"{listing(inside)} {'has' if len(inside) == 1 else 'have'} no name in {blocks.family}.",
            "Each is a block by itself, and no part of its layer: H['h.0'] and by='layer' do not have it.",
            "Problem(..., blocks={'h.0.rest': 'layers.0.*'})  # or H[parameter]",
        )
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


def _inside_layers(blocks: Blocks) -> list[str]:
    """Parameters without a name that lie in a layer of which others have one."""
    numbered = re.compile(r"(?:.*?\.)?\d+\.")
    starts = {found[0] for b in blocks.values() if b.layer for p in b.parameters if (found := numbered.match(p))}
    return [name for name in blocks.unmapped if blocks.family is not None and name.startswith(tuple(starts))]
