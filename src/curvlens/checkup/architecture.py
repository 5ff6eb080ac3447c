"""Models whose parts curvlens has no names for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from curvlens.blocks import Blocks
from curvlens.blocks.families import FAMILIES
from curvlens.blocks.family import model_type
from curvlens.checkup.finding import Finding
from curvlens.checkup.patient import Patient
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
            f"Problem(..., blocks={_rest(blocks, inside)})  # or H[parameter]",
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


_NUMBERED = re.compile(r"(?:.*?\.)?\d+\.")


def _starts(blocks: Blocks) -> dict[str, str]:
    """How the names of the parameters of a layer begin, and what the layer is called."""
    named = ((_NUMBERED.match(p), b.layer) for b in blocks.values() for p in b.parameters)
    return {found[0]: layer for found, layer in named if found and layer}


def _inside_layers(blocks: Blocks) -> list[str]:
    """Parameters without a name, of the family's or the user's, that lie in a layer of which others have one."""
    if blocks.family is None:
        return []
    alone = {b.parameters for b in blocks.values() if b.name.removeprefix("parameter ") == b.parameters[0]}
    return [name for name in blocks.unmapped if (name,) in alone and name.startswith(tuple(_starts(blocks)))]


def _rest(blocks: Blocks, inside: Sequence[str]) -> dict[str, str | list[str]]:
    """What has no name in the first of the layers, as a block of the user's."""
    start, layer = next((s, layer) for s, layer in _starts(blocks).items() if inside[0].startswith(s))
    rest = [name for name in inside if name.startswith(start)]
    return {f"{layer}.rest": rest[0] if len(rest) == 1 else rest}
