"""An analysis in the terminal: headline, sentences, and the heat map in half-blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from curvlens.errors import printable

STEPS = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")
TONES = {"good": "green", "warn": "yellow", "bad": "bold red", "": ""}


def summary(content: Mapping[str, Any], *, colours: bool = True) -> Iterator[Text]:
    """Lines for one screen. Without colours the heat map is in digits."""
    point = content.get("point", {})
    facts = [f"{content['parameters']:,} parameters"]
    if "tokens" in point:
        facts.append(f"{point['tokens']:,} tokens, loss {point['loss']:.4g}")
    yield Text(f"\n{printable(content['name'])}", style="bold").append(f" · {' · '.join(facts)}", style="dim")
    for number, sentence in enumerate(content["sentences"], start=1):
        yield Text(f" {number} ").append(printable(sentence["text"]), style=TONES[sentence["tone"]])
    yield from heat_map(content, colours=colours)


def heat_map(content: Mapping[str, Any], *, colours: bool = True) -> Iterator[Text]:
    """Traces of G (or of H) by role and layer; two roles share a line of half-blocks."""
    letter = "G" if "trace" in content["cells"].get("G", {}) else "H"
    traces = content["cells"].get(letter, {}).get("trace", {})
    inside = [block for block in content["blocks"] if block["layer"] is not None and block["name"] in traces]
    if not inside:
        return
    layers, roles = ([*dict.fromkeys(block[key] for block in inside)] for key in ("layer", "role"))
    values = {(block["role"], block["layer"]): traces[block["name"]]["value"] for block in inside}
    sizes = [abs(value) for value in values.values() if value and math.isfinite(value)]
    low, high = min(sizes, default=1.0), max(sizes, default=1.0)
    yield Text(f"\n trace of {letter}, layers 0 to {len(layers) - 1} from left to right", style="dim")
    width = max(len(printable(role)) for role in roles)
    if not colours:
        for role in roles:
            digits = (_step(values.get((role, layer)), low, high) for layer in layers)
            yield Text(f" {printable(role):>{width}} {' '.join('.' if d is None else str(d) for d in digits)}")
        yield Text(f" 0 to {len(STEPS) - 1}: {low:.2g} to {high:.2g}, in even steps of the logarithm", style="dim")
        return
    for pair in _pairs(roles):
        line = Text(f" {' / '.join(printable(role) for role in pair if role):>{2 * width + 3}} ")
        for layer in layers:
            upper, lower = (_colour(values.get((role, layer)), low, high) if role else None for role in pair)
            line.append("▀▀", style=f"{upper or 'default'} on {lower or 'default'}")
        yield line
    line = Text(f" {low:.2g} ")
    for step in STEPS:
        line.append("█", style=step)
    yield line.append(f" {high:.2g}")


def _pairs(roles: Sequence[str]) -> list[tuple[str, str | None]]:
    return [(roles[i], roles[i + 1] if i + 1 < len(roles) else None) for i in range(0, len(roles), 2)]


def _colour(value: float | None, low: float, high: float) -> str | None:
    step = _step(value, low, high)
    return None if step is None else STEPS[step]


def _step(value: float | None, low: float, high: float) -> int | None:
    if not value or not math.isfinite(value):
        return None
    place = math.log(max(abs(value), low) / low) / (math.log(high / low) or 1.0)
    return min(int(place * len(STEPS)), len(STEPS) - 1)
