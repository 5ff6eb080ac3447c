"""What an analysis did not measure for want of budget, in words a reader knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Content = Mapping[str, Any]
PANELS = {
    "attention": ("attention",), "the learning rate at the edge of stability": ("stability", "adam"),
    "the loss along the gradient": ("descent",), "the gradient noise scale": ("noise",),
    "the profile by module": ("profile",), "the Hessian along depth": ("depth",), "parts of the data": ("spread",),
}  # fmt: skip
"""What the stage of the panels tells, and where any of it is in a document."""


def missing(content: Content) -> list[str]:
    """All that did not fit into the budget: what is not there, and what could be finer."""
    return list(_missing(content))


def _missing(content: Content) -> Iterator[str]:
    blocks, left = len(content.get("blocks", ())), {each["stage"] for each in content.get("left", ())}
    cells, whole = content.get("cells", {}), content.get("whole", {})
    h, g = (whole.get(letter, {}) for letter in "HG")
    drawn = {
        (each["operator"], bool(each["role"] or each["block"]))
        for each in content.get("spectrum", {}).get("densities", ())
    }
    if "start" in left:
        yield "the doctor's checks" if content.get("point") else "the loss and its gradient"
    without = blocks - len(cells.get("H", {}).get("trace", {}))
    if without:
        yield f"the traces of {without} of {blocks} blocks of H"
    elif "blocks" in left:
        yield "finer traces of blocks of H"
    if "ggn" in left:
        yield "finer traces of blocks of G" if "G" in cells else "the traces of G"
    if left & {"ends", "sharp"}:
        yield "finer eigenvalues" if "top" in h else "the eigenvalues of H and their vectors"
    if "density" in left or "sharp" in left:
        yield "finer spectral densities" if ("H", False) in drawn else "the spectral density of H"
        if "G" in cells and ("top" not in g or ("G", False) not in drawn):
            yield "the spectrum of G"
    if "panels" in left:
        absent = [words for words, places in PANELS.items() if not any(content.get(place) for place in places)]
        yield from absent or ["finer panels"]
    if "block ends" in left:
        yield f"λ_max of {blocks - len(cells.get('H', {}).get('top', {}))} of {blocks} blocks of H"
    if "spectra" in left:
        yield ("more " if any(part for _, part in drawn) else "") + "densities of single roles and blocks"
