"""Parameters without block names, and names that were only guessed."""

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
    """Check that the blocks have names. If not, pass ``blocks=`` to `Problem`, or use parameter names."""
    assert patient.problem is not None
    blocks = patient.problem.blocks
    kind = model_type(patient.model)
    family = next((family for family in FAMILIES if family.name == blocks.family), None)
    if family is not None and kind is not None and kind not in family.checked:
        yield Finding(
            "named-by-likeness",
            "note",
            f"The parameters of {kind} look like those of {family.name} and got its block names. Nobody checked the "
            f"layout of {kind}.",
            "If it stores a fused or transposed tensor differently, roles and heads are cut in the wrong place. "
            "Results for whole parameters are right.",
            "print(problem.blocks)  # compare the places of q, k, v and heads with the model's code",
        )
    inside = _inside_layers(blocks)
    if inside:
        yield Finding(
            "partly-named",
            "note",
            f"{blocks.family} has no block name for {listing(inside)}.",
            "Each of them is a separate block, not a part of its layer. H['h.0'] and by='layer' leave it out.",
            f"Problem(..., blocks={_rest(blocks, inside)})  # or H[parameter]",
        )
    if blocks.family is None and set(blocks) == {part.key for part in blocks.order}:
        yield Finding(
            "unknown-architecture",
            "note",
            f"curvlens does not know the architecture {type(patient.model).__name__}.",
            "Each parameter is one block. Layers, roles and heads have no names. Numbers are not affected.",
            f"Problem(..., {blocks.suggestion})  # your own names for layers and roles",
        )


_NUMBERED = re.compile(r"(?:.*?\.)?\d+\.")


def _starts(blocks: Blocks) -> dict[str, str]:
    """Maps the first part of parameter names (``model.h.0.``) to the name of their layer (``h.0``)."""
    named = ((_NUMBERED.match(p), b.layer) for b in blocks.values() for p in b.parameters)
    return {found[0]: layer for found, layer in named if found and layer}


def _inside_layers(blocks: Blocks) -> list[str]:
    """Parameters without a block name inside a layer whose other parameters have one."""
    if blocks.family is None:
        return []
    alone = {b.parameters for b in blocks.values() if b.name.removeprefix("parameter ") == b.parameters[0]}
    return [name for name in blocks.unmapped if (name,) in alone and name.startswith(tuple(_starts(blocks)))]


def _rest(blocks: Blocks, inside: Sequence[str]) -> dict[str, str | list[str]]:
    """A ``blocks=`` dict that names the unnamed parameters of the first layer."""
    start, layer = next((s, layer) for s, layer in _starts(blocks).items() if inside[0].startswith(s))
    rest = [name for name in inside if name.startswith(start)]
    return {f"{layer}.rest": rest[0] if len(rest) == 1 else rest}
