"""What changed between analyses, as sentences. Each is written only if the errors support it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from curvlens.analysis.differences import BY_CHANCE, SIGMAS, clear_among, difference, error_of, said
from curvlens.dynamics.advice import Sentence, percent, short

Content = Mapping[str, Any]
Change = Mapping[str, Any]
SPOKEN = {
    "loss": "the loss", "H.top": "the sharpness λ_max", "H.bottom": "λ_min of H", "G.trace": "the Gauss–Newton trace",
    "functional_share": "the functional share tr F / tr G",
}  # fmt: skip
"""Numbers with a sentence of their own, in this order."""
BRIEFLY = {
    "gradient_norm": "the gradient norm", "H.trace": "the trace of H", "G.top": "λ_max of G",
    "F.trace": "the trace of F", "H.norm": "the norm of H", "G.norm": "the norm of G", "F.norm": "the norm of F",
    "H.stable_rank": "the stable rank of H", "noise_scale": "the gradient noise scale",
}  # fmt: skip
"""Numbers that share a sentence."""
SHARES = {"functional_share", "H.negative_share"}


def changes(content: Content) -> list[Sentence]:
    """All sentences about the change from the first analysis to the last, and about the course between them."""
    return [sentence for rule in RULES for sentence in rule(content)]


def whole_numbers(content: Content) -> Iterator[Sentence]:
    """Numbers of the whole model that changed, each with both values."""
    last = content["differences"][-1]["whole"]
    for key, name in SPOKEN.items():
        if key in last and last[key]["clear"]:
            values = content["numbers"][key]["values"]
            panel = "spectrum" if key in ("H.top", "H.bottom") else "numbers"
            yield Sentence(f"{_capital(name)} {_moved(values[0], values[-1], last[key], share=key in SHARES)}.", panel)


def cells(content: Content) -> Iterator[Sentence]:
    """How many blocks changed, and the one that changed most."""
    found = content["differences"][-1]["cells"]
    judged = {
        letter: {
            quantity: {name: each for name, each in of.items() if each["clear"] is not None}
            for quantity, of in quantities.items()
        }
        for letter, quantities in found.items()
    }
    traces = "G" if judged.get("G", {}).get("trace") else "H"
    for letter, quantity, title in ((traces, "trace", "trace"), ("H", "top", "λ_max")):
        of = judged.get(letter, {}).get(quantity, {})
        if any(each["clear"] for each in of.values()):
            counted, largest = _counted(letter, title, list(of.values())), _largest(content, letter, quantity, of)
            yield Sentence(f"{counted}{largest}.", "heat")
    for letter, quantities in judged.items():
        every = [each for of in quantities.values() for each in of.values()]
        if every and not any(each["clear"] for each in every):
            text = f"No cell of {letter} changed by more than its error, of {len(every)} that were compared."
            yield Sentence(text, "heat")


def _counted(letter: str, title: str, found: Sequence[Change]) -> str:
    changed = sum(bool(each["clear"]) for each in found)
    text = f"The {title} of {letter} changed in {changed} of {len(found)} blocks"
    if all("bound" in each for each in found):
        return text
    chance = BY_CHANCE * len(found)
    if changed > chance + SIGMAS * math.sqrt(chance * (1 - BY_CHANCE)):
        return f"{text} by more than 2 σ (by chance: about {short(chance, 1)})"
    return f"{text} by more than 2 σ, no more than by chance"


def _largest(content: Content, letter: str, quantity: str, found: Mapping[str, Change]) -> str:
    """The block with the largest change, if it stands out although it was chosen among all."""
    name = max(found, key=lambda each: abs(found[each]["value"]))
    if not clear_among(found[name], len(found)):
        return ""
    values = content["cells"][letter][quantity][name]
    moved = _moved(values[0], values[-1], found[name])
    rivals = sum(other != name and not _exceeds(found[name], each) for other, each in found.items())
    if not rivals:
        return f", most in {name}: it {moved}"
    return f"; in {name} it {moved}, and {rivals} other block{'s' * (rivals > 1)} may have changed as much"


def _exceeds(one: Change, other: Change) -> bool:
    """Whether one change is clearly larger in size than the other."""
    errors = [error_of(each) or 0.0 for each in (one, other)]
    apart = sum(errors) if "bound" in one or "bound" in other else math.hypot(*errors)
    return bool(abs(one["value"]) - abs(other["value"]) > SIGMAS * apart)


def course(content: Content) -> Iterator[Sentence]:
    """Over three or more analyses: what only rises, what only falls, and what is higher or lower on the way."""
    names, rounding = [run["name"] for run in content["runs"]], content["rounding"]
    if len(names) < 3:
        return
    steady, turning = list[str](), list[Sentence]()
    for key, spoken in SPOKEN.items():
        values = content["numbers"].get(key, {}).get("values", ())
        if not values or any(value is None for value in values):
            continue
        steps = [difference(*pair, rounding) for pair in pairwise(values)]
        ups = {step["value"] > 0 for step in steps}
        if all(step["clear"] for step in steps) and len(ups) == 1:
            steady.append(f"{spoken} {'rises' if ups == {True} else 'falls'}")
            continue
        ordered = sorted(range(len(values)), key=lambda place: values[place]["value"])
        for place, word, sign in ((ordered[-1], "higher", 1), (ordered[0], "lower", -1)):
            ends = [difference(values[end], values[place], rounding) for end in (0, -1)]
            if all(clear_among(end, len(values)) and sign * end["value"] > 0 for end in ends):
                one, middle, last = (_value(values[i], share=key in SHARES) for i in (0, place, -1))
                beside = f"{one} at {names[0]} and {last} at {names[-1]}"
                text = f"{_capital(spoken)} is {word} on the way: {middle} at {names[place]}, beside {beside}."
                turning.append(Sentence(text, "course"))
    if steady:
        yield Sentence(f"At each of the {len(names) - 1} steps {', '.join(steady)}.", "course")
    yield from turning


def other_numbers(content: Content) -> Iterator[Sentence]:
    """The rest: what else changed, what did not, and what cannot be judged."""
    last = content["differences"][-1]["whole"]
    also = []
    for key, name in BRIEFLY.items():
        if key in last and last[key]["clear"]:
            values = content["numbers"][key]["values"]
            also.append(f"{name} ({said(values[0])} → {said(values[-1])})")
    if also:
        yield Sentence(f"Also changed: {', '.join(also)}.", "numbers")
    same = [name for key, name in (SPOKEN | BRIEFLY).items() if key in last and last[key]["clear"] is False]
    if same:
        yield Sentence(f"No change beyond the errors: {', '.join(same)}.", "numbers")
    unknown = [content["numbers"][key]["title"] for key in last if last[key]["clear"] is None]
    if unknown:
        yield Sentence(f"Not judged, since the errors are not known: {', '.join(unknown)}.", "numbers")


RULES: tuple[Callable[[Content], Iterator[Sentence]], ...] = (whole_numbers, cells, course, other_numbers)


def _moved(one: Change, other: Change, change: Change, *, share: bool = False) -> str:
    """'rose from 12.1 to 28.7 (× 2.4)'. Two values that differ look different."""
    digits, ratio = 3, change["ratio"]
    while digits < 8 and short(one["value"], digits) == short(other["value"], digits):
        digits += 1
    factor = "" if ratio is None or share else f" (× {short(ratio, 2 if abs(ratio - 1) > 0.1 else 3)})"
    values = _value(one, digits, share=share), _value(other, digits, share=share)
    return f"{'rose' if change['value'] > 0 else 'fell'} from {values[0]} to {values[1]}{factor}"


def _value(found: Change, digits: int = 3, *, share: bool = False) -> str:
    return percent(found["value"], error_of(found) or 0.0) if share else said(found, digits)


def _capital(text: str) -> str:
    return text if text.startswith("λ") else text[0].upper() + text[1:]
