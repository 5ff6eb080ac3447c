"""In what order an analysis measures: every panel coarsely, then finer, where the largest errors are.

A step is a unit of work with its cost in gradients. Costs are fixed numbers, so that a budget of gradients does the
same steps on every machine, and after any interruption. The schedule looks at what was measured so far: it is a
generator, and asks `Known` before each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from curvlens.analysis.known import Known
from curvlens.study import Unit

PRODUCT, GGN_PRODUCT, BACKWARD, FORWARD = 2.2, 1.5, 0.7, 0.4
"""Gradients of a product with H, with G, of a backward pass through a kept graph, and of a forward pass."""
PROBE, SETTING_UP, LATER = 6.0, 4.5, 0.9
"""Of a probe of a profile, of a problem with its gradient and graphs, and of a product by activations of a layer, over
one by parameters."""
BLOCK = 0.8
"""Of a product with one block of H: autograd leaves out what other blocks need."""
STEP = 1 + PRODUCT + 18 * FORWARD
"""The search along a step: its gradient, its curvature, and the loss at multiples of it."""
PARTS = ("spread", "sharp-part")
"""Kinds that set up a problem on a part of the data."""
REVISIONS = {"attention": 2, "stability": 2}
"""Of kinds whose numbers have changed; others have 1."""
LIKE = {"gradient": 1.0, "H": PRODUCT, "G": GGN_PRODUCT}
"""What the time of a step follows, with its cost."""
OVERHEAD = 0.3
"""The part of a pass that does not shrink with the samples: most of it for few, short samples."""
CLOSE = 0.25
"""An error below this part of max(|cell|, LEAST of the largest cell) is small enough."""
LEAST = 0.01
SAMPLES = 8
"""Of the first round of a block: enough for half of them to find its largest eigenvalues, which are then exact."""
MOST_ROUNDS = 12
LATE, MANY = 12, 256
"""Rounds of G after which a round has so many samples."""
FINEST = 0.02
"""The error at which a heat map is fine enough for any budget."""


@dataclass(frozen=True)
class Step:
    """A unit, the stage of the plan that it belongs to, and its cost in gradients."""

    stage: str
    unit: Unit
    cost: float
    like: str = "H"
    """What its time follows: an entry of `LIKE`."""
    part: float = 1.0
    """The part of the samples that each of its passes sees."""


def share(part: float, overhead: float) -> float:
    """The cost of a pass through a part of the samples, over that of one through all."""
    return part + (1 - part) * overhead


STAGES = {
    "start": "loss, gradient, accuracy, shuffled input, doctor",
    "ggn": "traces and norms of all blocks of G, from the same backward passes",
    "ends": "largest and smallest eigenvalue of H, with vectors",
    "density": "spectral density of H and G",
    "panels": "lines, tokens, stability, noise, profile, depth, attention by head: a first look",
    "blocks": "trace and norm of the blocks of H, largest first, one by one",
    "sharp": "more and sharper eigenvalues, finer profile",
    "block ends": "largest and smallest eigenvalue of blocks, largest trace first",
    "spectra": "densities by role and of single blocks",
}
"""What each stage will know."""


def unit(kind: str, **config: Any) -> Unit:
    """A unit of an analysis."""
    return Unit(kind, REVISIONS.get(kind, 1), config)


@dataclass(frozen=True)
class Outline:
    """What the schedule has to know of a problem."""

    blocks: Mapping[str, int]
    """Sizes by name."""
    roles: Sequence[str]
    """Roles that several layers have."""
    layers: Mapping[str, str]
    """The module path of each layer."""
    has_ggn: bool
    has_heads: bool
    has_optimizer: bool
    samples: int
    """Samples of the data."""
    seed: int
    budget: float
    """In gradients; infinite without one."""
    minimal: bool = False
    vectors: int = 1 << 20
    """How many vectors of all parameters the memory should hold at a time."""


def schedule(of: Outline, known: Known) -> Iterator[Step]:
    """All steps, in their order, each once. Each part of it takes its share of the budget and no more.

    Parts overlap: the finer traces of G begin with the first round. A record that is counted twice would pass for two.
    """
    seen: set[str] = set()
    for step in _in_order(of, known):
        if step.unit.key not in seen:
            seen.add(step.unit.key)
            yield step


def _in_order(of: Outline, known: Known) -> Iterator[Step]:
    yield from _start(of)
    yield from _ggn(of, known, rounds=1)
    yield from _ends(of, k=1, tol=5e-2, most=16)
    steps = _steps(of, 10)
    yield Step("density", _density(of, "H", probes=1, steps=steps), steps * PRODUCT)
    if not of.minimal:
        yield from _glance(of, known)
    yield from _block_sizes(of, known, share=0.25, once=True)
    if not of.minimal:
        yield from _first_look(of, known)
    steps = _steps(of, 20)
    yield Step("density", _density(of, "H", probes=1, steps=steps), steps * PRODUCT)
    # finer
    yield from _block_sizes(of, known, share=0.35)
    yield from _ggn(of, known, rounds=8, share=0.7)
    yield from _sharper(of, known)
    yield from _block_ends(of, known, share=0.9)
    yield from _spectra(of, known, share=0.95)
    yield from _block_sizes(of, known, share=1.0)
    yield from _block_ends(of, known, share=1.0)
    yield from _finest(of, known)


def _start(of: Outline) -> Iterator[Step]:
    yield Step("start", unit("clock"), 6.0, "gradient")
    yield Step("start", unit("start"), 1.5, "gradient")
    yield Step("start", unit("sanity", seed=of.seed), 1.0, "gradient")
    yield Step("start", unit("doctor"), 15.0, "gradient")


def _finest(of: Outline, known: Known) -> Iterator[Step]:
    """What is left of a budget halves the errors of the heat map, again and again."""
    if not math.isfinite(of.budget):
        return
    close, rounds = CLOSE, 8
    while close > FINEST and known.cost < of.budget:
        close, rounds = close / 2, 4 * rounds
        yield from _block_sizes(of, known, share=1.0, close=close, rounds=rounds)
        yield from _ggn(of, known, rounds=rounds, close=close)


def _ggn(of: Outline, known: Known, rounds: int, share: float = 1.0, close: float = CLOSE) -> Iterator[Step]:
    """Traces of G until their errors are small, twice as many samples in each round, up to some."""
    if not of.has_ggn:
        return
    for number in range(rounds):
        samples = 8 << min(number, 3) if number < LATE else MANY
        done = known.settled("G", close, LEAST) or known.left_out("ggn") or known.cost > share * of.budget
        if number and done:
            return
        config = {"samples": samples, "seed": _seed(of, number), "norms": True}
        yield Step("ggn", unit("ggn", **config), 2 * samples * BACKWARD, "gradient")


def _ends(of: Outline, k: int, tol: float, most: int) -> Iterator[Step]:
    config = {"operator": "H", "k": k, "tol": tol, "most": most, "seed": of.seed}
    yield Step("ends" if k == 1 else "sharp", unit("eigs", **config), most * PRODUCT * (1.0 if k == 1 else 0.8))


def _block_sizes(
    of: Outline,
    known: Known,
    *,
    share: float,
    once: bool = False,
    close: float = CLOSE,
    rounds: int = MOST_ROUNDS,
) -> Iterator[Step]:
    """Blocks of H: each once, largest trace of G first; then those that need the fewest samples to be close.

    All of it takes ``share`` of the budget, beyond what was spent before.
    """
    end = known.cost + share * of.budget
    while known.cost < end:
        name = known.next_block(once=once, close=close, least=LEAST)
        if name is None:
            return
        number = known.rounds(name)
        if number >= rounds:
            return
        some = max(min(SAMPLES << min(number, 4), of.blocks[name]), 2)
        config = {"operator": "H", "block": name, "samples": some, "seed": _seed(of, number)}
        yield Step("blocks", unit("block", **config), some * BLOCK)


def _glance(of: Outline, known: Known) -> Iterator[Step]:
    """Something for every panel. With the steps before it, it takes some 165 gradients; with an optimiser 210."""
    yield Step("panels", unit("attention"), 1.0, "gradient")
    yield from _along(known, "top")
    yield Step("panels", unit("descent"), STEP, "gradient")
    yield from _edge_given(of)
    yield from _noise(of, 8)
    for path in list(of.layers.values())[:1]:
        yield _depth(of, path)
    yield Step("panels", _profile(of, 4), 4 * PROBE)


def _first_look(of: Outline, known: Known) -> Iterator[Step]:
    """What is missing of every panel."""
    config = {"operator": "H", "samples": SAMPLES, "seed": _seed(of, 0)}
    yield Step("panels", unit("whole", **config), SAMPLES * PRODUCT)
    yield from _along(known, "bottom")
    if not of.has_optimizer or known.left_out("stability"):
        yield Step("panels", unit("adam", lr=1e-3, tol=5e-2, most=24), 16 * PRODUCT + STEP)
    if not known.left_out("noise"):
        yield from _noise(of, 64)
    for path in _some(list(of.layers.values()), 4):
        yield _depth(of, path)
    if of.has_ggn and of.has_heads:
        samples = 16  # a backward pass through one layer, and the softmax once more, for each
        cost = 1.0 + samples * (BACKWARD / max(len(of.layers), 1) + 0.1)
        yield Step("panels", unit("attention-theory", samples=samples, seed=_seed(of, 0)), cost, "gradient")
        yield Step("panels", unit("ggn-heads", samples=16, seed=_seed(of, 0)), 16 * BACKWARD, "gradient")
    parts = _parts(of)
    for config in parts:
        cost = (SETTING_UP + 8 * BACKWARD) * share(1 / len(parts), OVERHEAD)
        yield Step("panels", unit("spread", **config), cost, "gradient", 1 / len(parts))


def _edge_given(of: Outline) -> Iterator[Step]:
    """The edge of the optimiser that was given."""
    if of.has_optimizer:
        yield Step("panels", unit("stability", tol=5e-2, most=24), 16 * PRODUCT + STEP)


def _along(known: Known, end: str) -> Iterator[Step]:
    """The loss along an extreme eigenvector, and the tokens that it moves."""
    number = known.extremes().get(end)
    if number is None:
        return
    vector = [known.vectors_key, number]
    yield Step("panels", unit("line", vector=vector), 24 * FORWARD + 1 + PRODUCT, "gradient")
    radius = known.radius(vector)
    if radius:
        yield Step("panels", unit("tokens", vector=vector, radius=radius, most=12), 2 * FORWARD, "gradient")


def _noise(of: Outline, most: int) -> Iterator[Step]:
    """The covariance of the gradients of some samples. It and its error need three."""
    if of.samples > 2:
        drawn, one = min(of.samples, most), 1 / of.samples  # each sample goes through the model twice
        cost = 1.0 + 2 * drawn * share(one, OVERHEAD)
        yield Step("panels", unit("noise", samples=drawn, seed=of.seed), cost, "gradient", one)


def _parts(of: Outline) -> list[dict[str, Any]]:
    """Up to four parts of the data; none of a single sample."""
    parts = min(of.samples, 4)
    return [{"part": part, "of": parts, "samples": 8, "seed": of.seed} for part in range(parts if parts > 1 else 0)]


def _depth(of: Outline, path: str) -> Step:
    return Step("panels", unit("depth", path=path, samples=4, seed=of.seed), 4 * (PRODUCT + GGN_PRODUCT) * LATER)


def _profile(of: Outline, samples: int, top: str | bool = False) -> Unit:
    """With the largest eigenvalue if it is known: the search of a profile takes as long as it takes."""
    return unit("profile", samples=samples, seed=of.seed, top=top)


def _some(names: Sequence[str], most: int) -> list[str]:
    """The first, the last, and others between them at even distances."""
    if len(names) <= most:
        return list(names)
    places = sorted({round(i * (len(names) - 1) / (most - 1)) for i in range(most)})
    return [names[i] for i in places]


def _steps(of: Outline, wanted: int) -> int:
    """Lanczos steps of a density, each of which keeps a vector: fewer for very long vectors, ten at least."""
    return max(min(wanted, of.vectors), 10)


def _density(of: Outline, letter: str, *, probes: int, steps: int, role: str = "", block: str = "") -> Unit:
    config = {"operator": letter, "role": role, "block": block, "probes": probes, "steps": steps, "seed": of.seed}
    return unit("density", **config)


def _sharper(of: Outline, known: Known) -> Iterator[Step]:
    k = min(max(min(5, of.vectors // 5), 2), sum(of.blocks.values()) // 2)
    if k > 1:
        yield from _ends(of, k=k, tol=1e-3, most=80)
    steps = _steps(of, 40)
    yield Step("density", _density(of, "H", probes=2, steps=steps), 2 * steps * PRODUCT)
    if of.has_ggn:
        config = {"operator": "G", "k": 1, "tol": 1e-2, "most": 40, "seed": of.seed}
        yield Step("sharp", unit("eigs", **config), 30 * GGN_PRODUCT, "G")
        yield Step("density", _density(of, "G", probes=2, steps=steps), 2 * steps * GGN_PRODUCT, "G")
        yield Step("sharp", unit("whole", operator="F", samples=16, seed=_seed(of, 1)), 16 * PRODUCT)
    yield Step("sharp", unit("whole", operator="H", samples=16, seed=_seed(of, 1)), 16 * PRODUCT)
    if not of.minimal:
        parts = _parts(of)
        for part in parts:
            cost = (SETTING_UP + (8 + 14) * PRODUCT) * share(1 / len(parts), OVERHEAD)
            yield Step("sharp", unit("sharp-part", **part, tol=2e-2, most=14), cost, "H", 1 / len(parts))
        yield Step("sharp", _profile(of, 16, known.two_largest_key or False), 17 * PROBE)
        for path in of.layers.values():
            yield _depth(of, path)


def _block_ends(of: Outline, known: Known, share: float) -> Iterator[Step]:
    for name in known.largest():
        for letter in ("H", "G") if of.has_ggn else ("H",):
            if known.cost >= share * of.budget:
                return
            config = {"operator": letter, "block": name, "tol": 2e-2, "most": 40, "seed": of.seed}
            yield Step("block ends", unit("ends", **config), 14 * BLOCK, letter)


def _spectra(of: Outline, known: Known, share: float) -> Iterator[Step]:
    for role in of.roles:
        if known.cost >= share * of.budget:
            return
        steps = _steps(of, 30)
        yield Step("spectra", _density(of, "H", probes=1, steps=steps, role=role), steps * PRODUCT)
    for name in known.largest():
        if known.cost >= share * of.budget:
            return
        yield Step("spectra", _density(of, "H", probes=1, steps=30, block=name), 30 * BLOCK)


def _seed(of: Outline, number: int) -> int:
    """Rounds have seeds of their own; those of two analyses with other seeds do not meet."""
    return of.seed * 1_000_003 + number
