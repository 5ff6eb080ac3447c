"""What changed between analyses, as sentences. Each is written only if the errors support it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from curvlens.analysis.differences import BY_CHANCE, SIGMAS, clear_among, difference, error_of, said
from curvlens.dynamics.advice import Sentence, percent, short

Content = Mapping[str, Any]
SPOKEN = {
    "loss": "the loss", "gradient_norm": "the gradient norm", "H.top": "the sharpness λ_max", "H.bottom": "λ_min of H",
    "G.top": "λ_max of the Gauss–Newton matrix", "H.trace": "the trace of H", "G.trace": "the Gauss–Newton trace",
    "H.norm": "the Frobenius norm of H", "functional_share": "the functional share tr F / tr G",
    "noise_scale": "the gradient noise scale",
}  # fmt: skip
"""Numbers that have a sentence of their own, in this order."""
PANELS = {
    "loss": "numbers",
    "gradient_norm": "numbers",
    "H.top": "spectrum",
    "H.bottom": "spectrum",
    "G.top": "spectrum",
}
QUANTITIES = {"trace": "trace", "top": "λ_max"}


def changes(content: Content) -> list[Sentence]:
    """All sentences about the change from the first analysis to the last, and about the course between them."""
    return [sentence for rule in RULES for sentence in rule(content)]


def whole_numbers(content: Content) -> Iterator[Sentence]:
    """Numbers of the whole model that changed, each with both values."""
    last = content["differences"][-1]["whole"]
    for key, name in SPOKEN.items():
        change = last.get(key)
        if change is not None and change["clear"]:
            values = content["numbers"][key]["values"]
            text = f"{_capital(name)} {_moved(values[0], values[-1], change, share=key == 'functional_share')}."
            yield Sentence(text, PANELS.get(key, "numbers"))


def unchanged_numbers(content: Content) -> Iterator[Sentence]:
    """Numbers of the whole model whose difference is within the errors."""
    last = content["differences"][-1]["whole"]
    same = [name for key, name in SPOKEN.items() if key in last and last[key]["clear"] is False]
    if same:
        yield Sentence(f"No change beyond the errors: {', '.join(same)}.", "numbers")
    unknown = [content["numbers"][key]["title"] for key in last if last[key]["clear"] is None]
    if unknown:
        yield Sentence(f"Not judged, since the errors are not known: {', '.join(unknown)}.", "numbers")


def cells(content: Content) -> Iterator[Sentence]:
    """How many blocks changed, and the one that changed most."""
    for letter, quantities in content["differences"][-1]["cells"].items():
        judged = [each for of in quantities.values() for each in of.values() if each["clear"] is not None]
        if judged and not any(each["clear"] for each in judged):
            yield Sentence(
                f"No cell of {letter} changed by more than its error, of {len(judged)} that were compared.", "heat"
            )
            continue
        for quantity, title in QUANTITIES.items():
            of = {name: each for name, each in quantities.get(quantity, {}).items() if each["clear"] is not None}
            if of:
                yield from _count(letter, title, list(of.values()))
                yield from _largest(content, letter, quantity, title, of)


def _count(letter: str, title: str, found: Sequence[Mapping[str, Any]]) -> Iterator[Sentence]:
    changed = sum(each["clear"] for each in found)
    if not changed:
        return
    of = f"{changed} of {len(found)} blocks changed in the {title} of {letter}"
    if all("bound" in each for each in found):
        yield Sentence(f"{of} by more than twice the bound of its error.", "heat")
        return
    chance = BY_CHANCE * len(found)
    beyond = changed > chance + SIGMAS * math.sqrt(chance * (1 - BY_CHANCE))
    rest = f"chance alone gives about {short(chance, 1)}" if beyond else "which is no more than chance gives"
    yield Sentence(f"{of} by more than 2 σ; {rest}." if beyond else f"{of} by more than 2 σ, {rest}.", "heat")


def _largest(
    content: Content, letter: str, quantity: str, title: str, found: Mapping[str, Mapping[str, Any]]
) -> Iterator[Sentence]:
    """The block with the largest change, if it stands out although it was chosen among all."""
    name = max(found, key=lambda each: abs(found[each]["value"]))
    change = found[name]
    if not clear_among(change, len(found)):
        return
    values = content["cells"][letter][quantity][name]
    rivals = [each for other, each in found.items() if other != name and not _exceeds(change, each)]
    moved = _moved(values[0], values[-1], change)
    if rivals:
        some = f"{len(rivals)} other block{'s' * (len(rivals) > 1)}"
        text = f"The {title} of {letter} in {name} {moved}; {some} may have changed as much."
    else:
        text = f"The largest change of a {title} of {letter} is in {name}: it {moved}."
    yield Sentence(text, "heat")


def _exceeds(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one change is clearly larger in size than the other."""
    errors = [error_of(each) or 0.0 for each in (one, other)]
    apart = sum(errors) if "bound" in one or "bound" in other else math.hypot(*errors)
    return abs(one["value"]) - abs(other["value"]) > SIGMAS * apart


def course(content: Content) -> Iterator[Sentence]:
    """Over three or more analyses: what only rises, only falls, or peaks on the way."""
    names = [run["name"] for run in content["runs"]]
    if len(names) < 3:
        return
    for key, spoken in SPOKEN.items():
        values = content["numbers"].get(key, {}).get("values", ())
        if not values or any(value is None for value in values):
            continue
        steps = [difference(*pair, content["rounding"]) for pair in pairwise(values)]
        ups = [step["value"] > 0 for step in steps]
        if all(step["clear"] for step in steps) and len(set(ups)) == 1:
            yield Sentence(
                f"{_capital(spoken)} {'rises' if ups[0] else 'falls'} at each of {len(steps)} steps.", "course"
            )
            continue
        top = max(range(len(values)), key=lambda place: values[place]["value"])
        low = min(range(len(values)), key=lambda place: values[place]["value"])
        for place, word, sign in ((top, "highest", 1), (low, "lowest", -1)):
            ends = [difference(values[end], values[place], content["rounding"]) for end in (0, -1)]
            if 0 < place < len(values) - 1 and all(end["clear"] and sign * end["value"] > 0 for end in ends):
                beside = f"{said(values[0])} at {names[0]} and {said(values[-1])} at {names[-1]}"
                yield Sentence(
                    f"{_capital(spoken)} is {word} on the way, {said(values[place])} at {names[place]}, beside {beside}.",
                    "course",
                )


RULES: tuple[Callable[[Content], Iterator[Sentence]], ...] = (whole_numbers, cells, course, unchanged_numbers)


def _moved(one: Mapping[str, Any], other: Mapping[str, Any], change: Mapping[str, Any], *, share: bool = False) -> str:
    """'rose from 12.1 to 28.7 (× 2.4)'. The factor needs a first value that is clear of 0."""
    word = "rose" if change["value"] > 0 else "fell"
    if share:
        both = [percent(each["value"], error_of(each) or 0.0) for each in (one, other)]
        return f"{word} from {both[0]} to {both[1]}"
    error, ratio = error_of(one), change["ratio"]
    factor = ""
    if ratio is not None and error is not None and abs(one["value"]) > SIGMAS * error:
        factor = f" (× {short(ratio, 2 if abs(ratio - 1) > 0.1 else 3)})"
    digits = 3
    while digits < 7 and short(one["value"], digits + 1) == short(other["value"], digits + 1):
        digits += 1  # two values that differ look different
    return f"{word} from {said(one, digits)} to {said(other, digits)}{factor}"


def _capital(text: str) -> str:
    return text if text.startswith("λ") else text[0].upper() + text[1:]
