"""What Figure 6 says of Appendix G: every layer of a deep Transformer beside a single layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from curvlens.papers.comparisons import ROUNDING, between, seeds
from curvlens.papers.experiment import Number
from curvlens.papers.first_paper.depths import depths, layers, of_layer
from curvlens.papers.first_paper.growth import LARGE, LIMIT, SMALL
from curvlens.papers.parts import SIGNS
from curvlens.papers.ranges import LOCAL, following, told
from curvlens.papers.sweeps import mean
from curvlens.papers.verdicts import Finding, all_of, judged, judged_parts
from curvlens.study import Record

PREDICTED = {("V", "outer"): 2, ("Q", "outer"): 6, ("Q", "functional"): 5}
"""Powers of a single layer; the value's functional part is zero there."""
HOLLOW = ("V", "functional")
MOST = 0.95
"""The share of cases that is called all of them."""
CLOSELY = 0.5
"""How near to a power a slope is that follows it quite closely."""
EARLY = 1
"""The layer whose power is compared between depths: the one next to the embeddings, which every depth has."""


def findings(records: Sequence[Record]) -> tuple[Finding, ...]:
    """One for each sentence."""
    return _same(records), _lower(records), _beyond(records), _top(records), _value_functional(records)


def _name(letter: str, part: str) -> str:
    return f"{SIGNS[part]}({letter})"


def _same(records: Sequence[Record]) -> Finding:
    """The powers of a single layer at all σ of (0, 1): in all depths together, or in each as far as it goes."""
    curves = {
        depth: [
            (of_layer(records, depth, letter, layer, part).within(0, 1), float(power))
            for (letter, part), power in PREDICTED.items()
            for layer in range(1, depth + 1)
        ]
        for depth in depths(records)
    }
    together = [pair for pairs in curves.values() for pair in pairs]
    where = following(together)
    own = {depth: following(pairs) for depth, pairs in curves.items()}
    worst = {
        window: max(abs(curve.law(window).slope - power) for curve, power in together)
        for window in (LIMIT, SMALL, (SMALL[1], 1.0))
    }
    each = "; ".join(f"depth {depth}: {found.said()}" for depth, found in own.items() if found)
    return judged(
        "deep-same",
        "Over all depths and layers the slopes of H_o(V), H_o(Q) and H_f(Q) differ from 2, 6 and 5 by up to "
        + ", ".join(f"{apart:.3f} for σ from {low:.3g} to {high:.3g}" for (low, high), apart in worst.items())
        + f"; all local slopes are within {LOCAL:g} for {told(where)}, by depth: "
        + ", ".join(f"{told(found)} ({depth})" for depth, found in own.items())
        + ".",
        holds=where is not None and where.whole,
        when=where.said() if where else each,
    )


def _lower(records: Sequence[Record]) -> Finding:
    """Whether each layer's block is smaller than the next one's, at all σ < 1: a block at a time."""
    shares = {}
    for letter, part in (*PREDICTED, HOLLOW):
        smaller = total = 0
        for depth, layer in layers(records):
            if layer + 1 > depth - ((letter, part) == HOLLOW):  # on top it is zero
                continue
            one, next_ = (of_layer(records, depth, letter, n, part).within(0, 1).values for n in (layer, layer + 1))
            known = one.isfinite() & next_.isfinite()
            smaller, total = smaller + int((one < next_)[known].sum()), total + int(known.sum())
        shares[_name(letter, part)] = (smaller, total)
    return judged_parts(
        "deep-lower",
        "Of all pairs of neighbouring layers at σ ≤ 1 (of H_f(V), below the top) the earlier one has the smaller block "
        f"in {', '.join(f'{n / max(1, of):.0%} ({name}: {n} of {of})' for name, (n, of) in shares.items())}; "
        f"the claim needs {MOST:.0%}.",
        {name: n >= MOST * of for name, (n, of) in shares.items() if of},
    )


def _beyond(records: Sequence[Record]) -> Finding:
    """Whether the power of the layer next to the embeddings rises with every layer above it, or beside none at all."""
    texts: list[str] = []
    parts: dict[str, bool | None] = {}
    for letter in ("V", "Q"):
        name = _name(letter, "total")
        of = {depth: of_layer(records, depth, letter, EARLY, "total").powers(LARGE) for depth in depths(records)}
        steps = [_higher(of[b], of[a]) for a, b in pairwise(of)]
        beside = {depth: _higher(of[depth], of[min(of)]) for depth in of if depth > min(of)}
        parts[f"{name}, with every layer more"] = all_of(between(step, 0, math.inf) for step in steps)
        parts[f"{name}, beside a single layer"] = all_of(between(each, 0, math.inf) for each in beside.values())
        count = len(next(iter(of.values())))
        texts.append(
            f"{name} {', '.join(f'{float(powers.mean()):.2f}' for powers in of.values())}; beside a single layer "
            + ", ".join(
                f"{each.value:+.2f} ± {each.error:.2f}"
                + ("" if between(each, 0, math.inf) is not None else f", which {seeds(count)} cannot tell from 0")
                for each in beside.values()
            )
            + "; from each depth to the next "
            + ", ".join(f"{step.value:+.2f} ± {step.error:.2f}" for step in steps)
        )
    return judged_parts(
        "deep-beyond",
        f"Slopes of layer {EARLY} for σ from {LARGE[0]:g} to {LARGE[1]:g} at depths "
        f"{', '.join(map(str, depths(records)))}: {'. '.join(texts)}. Two readings are judged: powers "
        "that rise with every layer more, and powers above those of a single layer.",
        parts,
    )


def _higher(powers: Tensor, lower: Tensor) -> Number:
    """By how much, in pairs of one seed."""
    return mean("", (powers - lower).tolist())


def _top(records: Sequence[Record]) -> Finding:
    """The top layer of networks of several layers beyond σ = 1."""
    texts, parts = [], {}
    for letter, part, power in (("Q", "total", PREDICTED["Q", "functional"]), ("V", "outer", PREDICTED["V", "outer"])):
        name, slopes = _name(letter, part), []
        for depth in depths(records):
            slope = of_layer(records, depth, letter, depth, part).slope("", LARGE)
            slopes.append(f"{slope.value:.2f} ± {slope.error:.2f}")
            if depth > 1:
                parts[f"{name} at depth {depth}"] = between(slope, power - CLOSELY, power + CLOSELY)
        texts.append(f"{name}, predicted {power}: {', '.join(slopes)}")
    window = of_layer(records, depths(records)[0], "Q", 1, "total").finite().within(*LARGE).x
    return judged_parts(
        "deep-top",
        f"Slopes of the top layer for σ from {window[0]:.3g} to {window[-1]:.3g} at depths "
        f"{', '.join(map(str, depths(records)))}: {'; '.join(texts)}. Closely means within {CLOSELY:g}; depth 1 "
        "is beside them, not judged.",
        parts,
    )


def _value_functional(records: Sequence[Record]) -> Finding:
    """The value's functional part beside the outer one, in all layers below the top."""
    parts: dict[str, bool | None] = {}
    shares, powers, outer_powers = [], [], []
    for depth, layer in layers(records):
        if layer == depth:
            continue
        outer, functional = (of_layer(records, depth, "V", layer, part) for part in ("outer", "functional"))
        known = outer.values.isfinite()
        share = (functional.values / outer.values).nan_to_num(0.0)[known]  # what has no float64 counts as zero
        parts[f"layer {layer} of {depth}"] = bool((share > ROUNDING).all()) and bool(known.any())
        shares += share.tolist()
        if parts[f"layer {layer} of {depth}"]:
            powers.append(functional.law(SMALL).slope)
            outer_powers.append(outer.law(SMALL).slope)
    text = f"‖H_f(V)‖/‖H_o(V)‖ below the top is {min(shares):.1e} to {max(shares):.1e}" if shares else "No such layer"
    if powers:
        text += (
            f"; for σ ≤ 0.1 H_f(V) grows with σ^{min(powers):.3f} to σ^{max(powers):.3f}, H_o(V) with "
            f"σ^{min(outer_powers):.3f} to σ^{max(outer_powers):.3f}"
        )
    return judged_parts("deep-value-functional", f"{text}. At most {ROUNDING:.0e} counts as zero.", parts)
