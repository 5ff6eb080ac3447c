"""Records of the first paper's experiments, made up: results by configuration that follow a law, or break it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from curvlens.calculus import exponents
from curvlens.papers.first_paper import growth, moments
from curvlens.papers.first_paper.layer import BLOCKS, LENGTH
from curvlens.papers.parts import SPLIT
from curvlens.papers.sizes import UNDERFLOW

Result = Callable[[Mapping[str, Any]], dict[str, Any]]
KNEE = 0.35
"""Where curves bend; a decade of every grid lies on either side of it."""


def law(x: float, power: float, beyond: float | None = None, knee: float = KNEE) -> float:
    """x^power, and with another power beyond the knee."""
    return float(x**power if beyond is None or x <= knee else knee ** (power - beyond) * x**beyond)


def seeded(config: Mapping[str, Any], value: float) -> float:
    """A little different in every seed."""
    return float(value * (1 + 0.002 * config["seed"]))


# Figures 3 and 5


def grown(change: Callable[[int], tuple[float, float]], total: Literal["outer", "functional"] = "functional") -> Result:
    """Blocks of Figure 3a: of each predicted power, the one that is measured below the knee, and the one beyond."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        norms = {}
        for block in (*growth.DIAGONAL, *growth.PAIRS):
            powers = dict.fromkeys(SPLIT, 2) if "O" in block else {p: growth.equation_5(p, block) for p in SPLIT}
            parts = {
                part: 0.0 if power is None else seeded(config, law(config["sigma"], *change(power)))
                for part, power in powers.items()
            }
            norms[block] = [*parts.values(), parts[total] or parts["outer"]]
        return {"norms": norms}

    return result


def pre_ln(q: tuple[float, ...], v: tuple[float, ...], below: tuple[float, float] = (0, 0)) -> Result:
    """Powers of the query and the value block, below the knee and beyond, and how many more there are below √ε."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        more = min(1.0, config["sigma"] / 0.003)
        sizes = {
            block: law(config["sigma"], *powers) * more**extra
            for block, powers, extra in zip("QV", (q, v), below, strict=True)
        }
        blocks = (*growth.DIAGONAL, *growth.PAIRS)
        return {"norms": {block: [seeded(config, sizes.get(block, 1 / config["sigma"]))] * 3 for block in blocks}}

    return result


# Figures 1 and 4


def entries(
    soft: tuple[float, float],
    linear: tuple[float, float],
    negative: tuple[float, ...] = (0.3, 0.2, 0.1),
    power: float = 0.0,
) -> Result:
    """Medians of query and value with softmax and without, and the shares of negative eigenvalues with it.

    The query's median moves from that at σ = 0.2 with a power of σ.
    """

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        q, v = soft if config["kind"] == "softmax" else linear
        q += power * math.log10(config["sigma"] / 0.2)
        shares = negative if config["kind"] == "softmax" else (0.0,) * 3
        return {
            "median": {"Q": q + 0.01 * config["seed"], "K": q, "V": v},
            "histogram": {block: [1] * 44 for block in "QKV"},
            "negative": dict(zip("QKV", shares, strict=True)),
        }

    return result


# Figures 6, 7 and 8


def deep(
    below: float = 0.0,
    beyond: float = 0.0,
    knee: float = 1.0,
    higher: float = 1.0,
    smaller: float = 0.5,
    hollow: bool = False,
) -> Result:
    """Layers with the powers of one, changed below and beyond the knee, higher with each layer above for σ > 1."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        norms: dict[str, list[list[Any]]] = {}
        for letter in "QKVO":
            norms[letter] = []
            for layer in range(1, config["depth"] + 1):
                above = config["depth"] - layer

                def size(power: float, above: int = above) -> float:
                    bent = law(config["sigma"], power + below, power + beyond, knee)
                    return seeded(config, smaller**above * bent * max(1.0, config["sigma"]) ** (higher * above))

                outer, functional = (6, 5) if letter in "QK" else (2, 3)
                zero = 0.0 if above == 0 else UNDERFLOW if hollow else size(functional)
                parts = [size(outer), size(functional) if letter in "QK" else zero]
                norms[letter].append([*parts, parts[1] if letter in "QK" else parts[0]])
        return {"norms": norms}

    return result


def stacked(last: float, small_: float, large_: float) -> Result:
    """Linear attention: the factor of 2·3^D in the last layer, and of the others for small and for large σ."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        sigma, power = config["sigma"], 2 * 3 ** config["depth"]
        early = [seeded(config, law(sigma, small_ * power, large_ * power))] * 3
        top = seeded(config, sigma ** (last * power))
        return {"norms": {letter: [early] * (config["depth"] - 1) + [[top, 0.0, top]] for letter in "QKV"}}

    return result


def mlp(*powers: float) -> Result:
    return lambda c: {"norms": [seeded(c, law(c["sigma"], *powers))] * c["depth"], "functional": 0.0}


# One layer


def linear(
    attention: tuple[int, int], mlp: tuple[int, int], cnn: tuple[int, int], block: float = 6.0, hollow: float = 0.0
) -> Result:
    """Table 1: powers of the parts of three networks, and of the outer blocks of linear attention."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        more = config["residual"] == "scaling"
        powers = {"attention": attention, "mlp": mlp, "cnn": cnn}[config["network"]]
        sizes = [seeded(config, config["sigma"] ** power) for power in (powers[0], powers[1] + more)]
        found: dict[str, Any] = dict(zip(SPLIT, sizes, strict=True))
        if config["network"] == "attention":
            blocks = dict.fromkeys(BLOCKS, config["sigma"] ** block)
            found |= {"blocks": blocks, "hollow": hollow, "apart": 1e-15}
        return found

    return result


def one_layer(q: tuple[float, ...], v: tuple[float, ...], outer: float, crossed: float) -> Result:
    """Powers of the Jacobians, and how many times H_f, without the residual, H_o is: on the diagonal and off it."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        sigma = config["sigma"]
        jacobian = {"Q": law(sigma, *q), "K": law(sigma, *q), "V": law(sigma, *v)}
        times = {block: crossed if block in ("VQ", "VK") else outer for block in BLOCKS}
        norms = {block: [seeded(config, times[block] * sigma), 0.0 if block == "VV" else sigma] for block in BLOCKS}
        return {"norms": norms, "residual": 1.0, "jacobian": {w: seeded(config, j) for w, j in jacobian.items()}}

    return result


def scaled(off: Mapping[str, float]) -> Result:
    """Powers of the weights as predicted, but for what is added in some blocks."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        norms: dict[str, list[float]] = {}
        for block in BLOCKS:
            norms[block] = []
            for part in SPLIT:
                power = exponents.predicted(part, block).weights.get(config["weight"], 0)
                norms[block].append(seeded(config, config["factor"] ** (power + off.get(block, off.get("all", 0.0)))))
        return {"norms": norms, "scores": 1e-6}

    return result


def spread(power: float, query: float = 0.0, beyond: float | None = None) -> Result:
    """Powers of the tokens' spread: those of the moments, changed by so much, and by more in the query block."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        norms: dict[str, list[float]] = {}
        for block in BLOCKS:
            norms[block] = []
            for part in SPLIT:
                known = moments.POWERS.get((block, part), moments.POWERS.get(("QQ", part), 2)) if block != "VV" else 0
                own = power / 2 if block == "VV" else known + power + (query if block == "QQ" else 0)
                bent = None if beyond is None or block == "VV" else beyond
                norms[block].append(seeded(config, law(config["spread"], own, bent, 0.05)))
        return {"norms": norms}

    return result


def tempered(outer: tuple[float, ...], functional: tuple[float, ...], cold: float = 1e-9) -> Result:
    """T-parts as powers of t, and blocks that have so much of their size at the lowest t."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        t = config["temperature"]
        size = cold if t < 0.002 else 1.0
        norms = {block: [seeded(config, size), seeded(config, size)] for block in BLOCKS}
        norms["VV"] = [1.0, 0.0]
        parts = [seeded(config, law(t, *outer)), seeded(config, law(t, *functional))]
        return {"norms": norms, "t": parts, "entropy": min(1.0, t)}

    return result


def shared(*shares: float, rise: float = 0.1) -> Result:
    """The share of the query-key blocks with attention over all, for each size of the tokens; less over few."""
    sizes = dict(zip((0.5, 1.0, 2.0, 4.0), shares, strict=True))

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        few = config["seen"] < LENGTH
        return {"share": seeded(config, sizes[config["size"]] * (1 - rise * few)), "entropy": 0.5}

    return result


def keys(by_width: float, by_keys: float) -> Result:
    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        entropy = {"1/d": by_width, "1/d_K": by_keys}[config["variance"]]
        norms = {block: [1.0, 1.0] for block in BLOCKS}
        return {"norms": norms, "negative": dict.fromkeys("QKV", 0.1), "entropy": entropy - 1e-4 * config["seed"]}

    return result


def single(pairs: float, over: int, pulled: float, narrow: bool = False) -> Result:
    """What is off, everywhere or only with keys narrower than the tokens."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        off = not narrow or config["d_k"] < config["width"]
        return {
            "rank": 9 + over * off,
            "bound": 9,
            "pairs": pairs * off,
            "multiple": 0.0,
            "pulled": pulled * off,
            "apart": 1e-15,
            "share": 0.2,
            "negative": {"one": 0.4, "two": 0.5},
        }

    return result


def heads(outer: float, filled: float, between: float = 0.0, hollow: float = 0.0, low_only: bool = False) -> Result:
    """‖H_o‖/‖H_f‖, the share of entries with four heads, and what is found where there should be zeros."""

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "filled": 1 - (1 - filled) * (config["heads"] - 1) / 3,
            "outer": seeded(config, outer),
            "functional": 1.0,
            "between": between,
            "hollow": hollow if not low_only or config["heads"] > 1 else 0.0,
            "apart": 1e-15,
        }

    return result


def value(*shares: float, wide: float = 0.0) -> Result:
    """‖H_f(V)‖/‖H(V)‖ by what lies behind attention, and what is left of directions in wide networks."""
    behind = dict(zip(("unembedding", "relu", "gelu", "pre relu"), shares, strict=True))

    def result(config: Mapping[str, Any]) -> dict[str, Any]:
        if config["width"] != 16:
            return {"functional": wide}
        size = seeded(config, config["sigma"] ** 2)
        return {"functional": behind[config["behind"]] * size, "total": size}

    return result
