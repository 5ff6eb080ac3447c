"""What measured numbers say: rules, each of which gives a sentence with its numbers, or none.

A sentence is written only if the errors support it. Each names the panel of the page that shows its evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from curvlens.dynamics.missing import missing

BEYOND = (ArithmeticError, TypeError, ValueError)
"""What Python raises for a number that is None, NaN, infinite or too large."""
Content = Mapping[str, Any]
Number = Mapping[str, Any]
"""A number of an analysis: value, and stderr or bound, and the ends of its interval."""
CLEARLY = 0.02
"""The loss on shuffled input is clearly higher from this part of the loss on."""


@dataclass(frozen=True)
class Sentence:
    """One thing that the numbers say."""

    text: str
    panel: str
    """The id of the section that shows its evidence."""
    tone: Literal["", "good", "warn", "bad"] = ""


def sentences(content: Content, most: int | None = 8) -> list[Sentence]:
    """The sentences that the numbers of an analysis support, at most so many; warnings are never left out.

    A number may be missing, not finite, or at the end of the range of floats: a rule that cannot compute with it says
    nothing, and the others are not lost.
    """
    found: list[tuple[int, Sentence]] = []
    for rule in RULES:
        with suppress(*BEYOND):
            first = MINOR.index(rule) + 1 if rule in MINOR else 0
            found.extend((first or (len(MINOR) + 1 if i else 0), each) for i, each in enumerate(rule(content)))
    while most is not None and len(found) > most:
        spare = [(rank, place) for place, (rank, each) in enumerate(found) if _spare(rank, each)]
        if not spare:
            break
        del found[min(spare)[1]]
    return [each for _, each in found]


def _spare(rank: int, sentence: Sentence) -> bool:
    """Whether a sentence may be left out: of a minor rule, or not the first of its rule."""
    return rank > 0 and not sentence.tone


def shuffled_input(content: Content) -> Iterator[Sentence]:
    """A model that reads its input has a higher loss on shuffled input."""
    loss, twin = content.get("point", {}).get("loss"), content.get("sanity", {}).get("shuffled_loss")
    if loss is None or twin is None or clearly_higher(twin, loss):
        return
    yield Sentence(
        f"The loss on shuffled input ({short(twin)}) is not clearly higher than the loss ({short(loss)}), which means "
        f"by more than {percent(CLEARLY)}. Either the model makes little use of its input, as one that is trained "
        "briefly or not at all, or the tokens belong to another vocabulary. Check the tokenizer before you trust this "
        "page.",
        "start",
        "bad",
    )


def clearly_higher(twin: float, loss: float) -> bool:
    """Whether the loss on shuffled input is above the loss by more than `CLEARLY`."""
    return twin > loss * (1 + CLEARLY) + 1e-12


def where_it_sits(content: Content) -> Iterator[Sentence]:
    """The few layers, or blocks outside of layers, that hold most of the trace of G."""
    letter = "G" if "G" in content.get("cells", {}) else "H"
    traces = content.get("cells", {}).get(letter, {}).get("trace", {})
    groups: dict[str, list[Number]] = {}
    for block in content.get("blocks", ()):
        if block["name"] in traces:
            groups.setdefault(block["layer"] or block["name"], []).append(traces[block["name"]])
    if len(traces) < len(content.get("blocks", ())) or len(groups) < 2:
        return
    sizes = {name: sum(each["value"] for each in cells) for name, cells in groups.items()}
    total = sum(sizes.values())
    if total <= 0 or min(sizes.values()) < 0:
        return
    order, held, taken = sorted(sizes, key=lambda name: -sizes[name]), 0.0, list[str]()
    for name in order[: min(3, len(order) - 1)]:
        held, taken = held + sizes[name], [*taken, name]
        if held > 0.5 * total:
            break
    inside = math.sqrt(sum(each["stderr"] ** 2 for name in taken for each in groups[name]))
    outside = math.sqrt(sum(each["stderr"] ** 2 for name in order if name not in taken for each in groups[name]))
    share = held / total
    error = math.hypot((1 - share) * inside, share * outside) / total
    what = "the Gauss–Newton trace" if letter == "G" else "the trace of H"
    also = {block["name"]: block.get("also", ()) for block in content.get("blocks", ())}
    named = [f"{name} (also {', '.join(also[name])})" if also.get(name) else name for name in taken]
    layers = len({block["layer"] for block in content.get("blocks", ()) if block["layer"]})
    rest = len(groups) - layers
    among = [f"{count} {word}{'s' * (count > 1)}" for count, word in ((layers, "layer"), (rest, "block")) if count]
    place = " outside of layers" if rest and layers else ""
    yield Sentence(
        f"{_joined(named)} {'hold' if len(taken) > 1 else 'holds'} {percent(share, error)} of {what}, in a model with "
        f"{' and '.join(among)}{place}.",
        "heat",
    )


def sharpness(content: Content) -> Iterator[Sentence]:
    """The largest eigenvalue, and the step that gradient descent may take."""
    top = content.get("whole", {}).get("H", {}).get("top")
    if top is None or top["low"] <= 0:
        return
    yield Sentence(
        f"The sharpness λ_max is {with_bound(top)}: plain gradient descent is stable below a learning rate of "
        f"{short(2 / top['high'])}, on the quadratic model.",
        "stability",
    )


def optimiser(content: Content) -> Iterator[Sentence]:
    """How far the optimiser is from its edge."""
    found = content.get("stability")
    if not found or found.get("ratio") is None:
        return
    ratio, bound = float(found["ratio"]), float(found.get("residual") or 0.0)
    tone: Literal["", "good", "warn", "bad"] = "bad" if ratio - bound > 1 else "warn" if ratio + bound > 0.8 else "good"
    amount = f"{percent(ratio, bound)} of" if ratio < 5 else f"{short(ratio)} times"
    beyond = " It is beyond the edge: the top direction grows." if ratio - bound > 1 else ""
    yield Sentence(
        f"{found['rule']} is at {amount} its edge of stability.{beyond}",
        "stability",
        tone,
    )


def next_step(content: Content) -> Iterator[Sentence]:
    """How much longer the step that comes may be; without an optimiser, that of gradient descent."""
    given = content.get("stability")
    found = given.get("step") if given else content.get("descent")
    if not found or not found["certain"]:
        return
    if found["climbs"]:
        rule = given["rule"] if given else "gradient descent"
        yield Sentence(f"The step of {rule} that comes climbs on this data.", "stability", "warn")
        return
    measured, critical = found["measured"], found["critical"]
    if measured is None:
        return
    model = "sees no end" if critical is None else f"says {short(critical)}"
    if given:
        short_of = measured["high"] < 1
        yield Sentence(
            f"The step of {given['rule']} that comes "
            f"{'is too long: it may be' if short_of else 'may be'} {with_bound(measured)} times as long before the "
            f"loss rises again, by line search; the quadratic model {model}.",
            "stability",
            "bad" if short_of else "",
        )
        return
    yield Sentence(
        f"Along the gradient the loss rises again at a learning rate of {with_bound(measured)}, by line search; the "
        f"quadratic model {model}.",
        "stability",
    )


def negative_curvature(content: Content) -> Iterator[Sentence]:
    """The smallest eigenvalue beside the largest."""
    whole = content.get("whole", {}).get("H", {})
    top, bottom = whole.get("top"), whole.get("bottom")
    if top is None or bottom is None:
        return
    if bottom["high"] >= 0:
        if bottom["low"] < -0.1 * abs(top["value"]):
            return  # too coarse a search to say either
        yield Sentence(
            f"No negative curvature was found: λ_min is {with_bound(bottom)}, beside λ_max {short(top['value'])}.",
            "spectrum",
        )
        return
    share = whole.get("negative_share")
    mass = f"; about {percent(share['value'])} of Σ|λ| is negative" if share is not None else ""
    size = abs(bottom["value"]) / abs(top["value"]) if top["value"] else math.inf
    yield Sentence(
        f"There is negative curvature: λ_min is {with_bound(bottom)}, {percent(size)} of λ_max in size{mass}.",
        "spectrum",
    )


def functional_part(content: Content) -> Iterator[Sentence]:
    """How far the Gauss–Newton matrix is from the Hessian."""
    whole = content.get("whole", {})
    h, g = whole.get("H", {}), whole.get("G", {})
    if "trace" in h and "trace" in g and h["trace"]["value"]:
        difference = h["trace"]["value"] - g["trace"]["value"]
        error = math.hypot(h["trace"]["stderr"], g["trace"]["stderr"])
        size = abs(g["trace"]["value"])
        if not size or not math.isfinite(difference / size):
            pass  # of a saturated model: a share of nothing is no number
        elif abs(difference) > 2 * error:
            sign = "below" if difference < 0 else "above"
            yield Sentence(
                f"The trace of H is {percent(abs(difference) / size, error / size)} {sign} that of the Gauss–Newton "
                "matrix: the functional part matters.",
                "origin",
            )
        elif error < 0.2 * size:
            yield Sentence(
                f"The trace of H equals that of the Gauss–Newton matrix within {percent(2 * error / size)}.", "origin"
            )
    if "top" in h and "top" in g and h["top"]["value"] > 0:
        ratio = g["top"]["value"] / h["top"]["value"]
        yield Sentence(
            f"The largest eigenvalue of the Gauss–Newton matrix is {short(g['top']['value'])}, {percent(ratio)} of "
            "that of H.",
            "spectrum",
        )


def directions(content: Content) -> Iterator[Sentence]:
    """How many directions matter, and where the sharpest one lives."""
    whole, vectors = content.get("whole", {}).get("H", {}), content.get("eigenvectors", [])
    half = whole.get("directions_half")
    if half is not None and half["value"] >= 1:
        count = half["value"]
        carry = "One direction" if count < 1.5 else f"About {short(count, 2)} directions"
        yield Sentence(
            f"{carry} of {content['parameters']:,} {'carries' if count < 1.5 else 'carry'} half of ‖H‖².", "spectrum"
        )
    if vectors and vectors[-1].get("value") != 0.0:
        mass = vectors[-1]["mass"]
        name = max(mass, key=mass.__getitem__)
        yield Sentence(f"{percent(mass[name])} of the top eigenvector lives in {name}.", "eigenvectors")


def own_steps(content: Content) -> Iterator[Sentence]:
    """Roles whose mean curvature differs so much that one step size cannot suit all."""
    cells = content.get("cells", {})
    means = cells.get("G", cells.get("H", {})).get("mean", {})
    roles: dict[str, list[float]] = {}
    for block in content.get("blocks", ()):
        cell = means.get(block["name"])
        if cell is not None and block["layer"] is not None and cell["stderr"] < 0.5 * abs(cell["value"]):
            roles.setdefault(block["role"], []).append(cell["value"])
    averages = {role: sum(values) / len(values) for role, values in roles.items() if len(values) > 0}
    averages = {role: value for role, value in averages.items() if value > 0}
    if len(averages) < 2:
        return
    high, low = max(averages, key=averages.__getitem__), min(averages, key=averages.__getitem__)
    ratio = averages[high] / averages[low]
    if ratio < 5:
        yield Sentence(f"Mean curvature per parameter differs by a factor of {short(ratio, 2)} between roles.", "heat")
        return
    yield Sentence(
        f"Curvature is uneven: {high} has {short(ratio, 2)} times the mean curvature per parameter of {low}. One step "
        "size does not suit both without a preconditioner.",
        "heat",
    )


def noise_scale(content: Content) -> Iterator[Sentence]:
    """The batch size at which noise and signal of the gradient are equal."""
    found = content.get("noise", {}).get("scale")
    if isinstance(found, Mapping) and isinstance(found.get("value"), (int, float)) and found["value"] > 0:
        error = found.get("stderr") or math.inf
        if error > 0.5 * found["value"]:
            return
        yield Sentence(
            f"The gradient noise scale is {short(found['value'])} ± {short(error, 2)} samples: much smaller batches "
            "are mostly noise, much larger ones mostly repeat.",
            "noise",
        )


def parts_of_the_data(content: Content) -> Iterator[Sentence]:
    """Numbers that differ more between parts of the data than they are uncertain on all of it."""
    parts, whole = content.get("spread", ()), on_all_data(content)
    said = []
    for name, title in (("sharpness", "λ_max"), ("trace_H", "tr H")):
        cells = [part[name] for part in parts if name in part]
        if len(cells) < 2 or name not in whole:
            continue
        least, most = min(cells, key=lambda cell: cell["value"]), max(cells, key=lambda cell: cell["value"])
        error = whole[name].get("bound", 2 * (whole[name].get("stderr") or 0.0))
        if most["low"] - least["high"] > 2 * error:  # the two intervals, and that of the whole
            said.append(f"{title} goes from {short(least['value'])} to {short(most['value'])}")
    if said:
        yield Sentence(
            f"Between {len(parts)} parts of the data {' and '.join(said)}: the choice of data matters more than the "
            "error of the measurement.",
            "noise",
        )


def on_all_data(content: Content) -> dict[str, Any]:
    """The numbers of a part of the data, on all of it: by the same names."""
    point, whole = content.get("point", {}), content.get("whole", {})
    found = {
        "loss": point.get("loss"),
        "gradient_norm": point.get("gradient_norm"),
        "trace": whole.get("G", {}).get("trace"),
        "sharpness": whole.get("H", {}).get("top"),
        "trace_H": whole.get("H", {}).get("trace"),
    }
    return {name: each for name, each in found.items() if each is not None}


def not_told(content: Content) -> Iterator[Sentence]:
    """What the budget did not allow: all of it."""
    found, seconds = missing(content), sum(each["seconds"] for each in content.get("left", ()))
    if found:
        more = f" (about {_time(seconds)} more)" if seconds >= 1 else ""
        yield Sentence(f"Not told in this budget: {_joined(found)}{more}.", "cost", "warn")


RULES: tuple[Callable[[Content], Iterator[Sentence]], ...] = (
    shuffled_input,
    where_it_sits,
    sharpness,
    optimiser,
    next_step,
    own_steps,
    negative_curvature,
    functional_part,
    directions,
    noise_scale,
    parts_of_the_data,
    not_told,
)

MINOR = (parts_of_the_data, noise_scale, next_step)
"""Rules whose sentences are left out first, in this order; then later sentences of the others."""


def short(number: float, digits: int = 3) -> str:
    """Three significant digits; powers of ten as 2.1e4.

    >>> short(137.46), short(20512.0), short(0.00003), short(-141.0, 2)
    ('137', '2.05e4', '3e-5', '−140')
    """
    if not math.isfinite(number):
        return str(number)
    size, sign = abs(number), "−" if number < 0 else ""
    if size and not 1e-3 <= size < 1e4:
        mantissa, _, power = f"{size:.{digits - 1}e}".partition("e")
        return f"{sign}{float(mantissa):g}e{int(power)}"
    return f"{sign}{float(f'{size:.{digits}g}'):.{digits + 4}g}"


def percent(share: float, error: float = 0.0) -> str:
    """A share, with its error if it has one: of two digits, as one digit can be a third too small.

    >>> percent(0.712, 0.041), percent(-0.871, 0.14), percent(0.0042)
    ('71 ± 4.1 %', '−87 ± 14 %', '0.42 %')
    """
    said = short(100 * share, 2 if abs(share) < 0.995 else 3)
    return f"{said} ± {short(100 * error, 2)} %" if error > 5e-4 * abs(share) and error > 0 else f"{said} %"


def with_bound(number: Number) -> str:
    """An eigenvalue with its residual; one from a coarse search with the interval that it lies in."""
    bound = float(number.get("bound") or 0.0)
    low, high = number.get("low"), number.get("high")
    if low is not None and high is not None and high - low < 1.99 * bound:
        return f"between {short(low)} and {short(high)}"
    if bound < 5e-4 * abs(number["value"]):
        return short(number["value"], 4)
    return f"{short(number['value'])} ± {short(bound, 2)}"


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds > 5400
        else f"{seconds / 60:.0f} min"
        if seconds > 90
        else f"{seconds:.0f} s"
    )
