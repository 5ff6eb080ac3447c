"""One attention layer with square loss, as in the theorems: what weights, moments, temperature and heads do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch

from curvlens.calculus import attention, exponents
from curvlens.calculus.attention import AttentionHessian
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.growth import grid
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, mean, negative_share, sized, sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Curve, Panel, Slope

PAPER = "What does it mean to be a Transformer?"
BLOCKS = ("QQ", "KK", "VV", "QK", "VQ", "VK")
SPLIT: tuple[Literal["outer", "functional"], ...] = ("outer", "functional")
SIGNS = {"outer": "H_o", "functional": "H_f"}
LENGTH, WIDTH = 12, 8


def norms(H: AttentionHessian) -> dict[str, list[float | str]]:
    """‖H_o‖ and ‖H_f‖ of every block."""
    return {
        block: [
            0.0 if block == "VV" and part == "functional" else sized(H.norm((block[0], block[1]), part))
            for part in SPLIT
        ]
        for block in BLOCKS
    }


def line(records: Sequence[Record], over: str, block: str, part: str) -> Sweep:
    """The norm of a block's part over an entry of the configurations."""
    return sweep(records, over, "norms", block, SPLIT.index(cast(Any, part)))


# Weights


def points_weights(effort: Effort) -> list[Config]:
    """Each weight is scaled by itself; tokens so small that attention stays even, so that the weights act beside it."""
    return [
        {"weight": weight, "factor": factor, "seed": seed}
        for weight in "QKV"
        for seed in effort.repeats(5, 20)
        for factor in grid(0.1, 10, 5 if effort.quick else 9)
    ]


def measure_weights(config: Config) -> Mapping[str, Any]:
    """Norms with one weight scaled; the targets stay, so that the residual does."""
    draw = Draws(config["seed"])
    x, y = draw(LENGTH, WIDTH, scale=1e-4), draw(LENGTH, WIDTH)
    w = {letter: draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for letter in "QKV"}
    w[config["weight"]] *= config["factor"]
    return {"norms": norms(attention.hessian(x, w["Q"], w["K"], w["V"], target=y))}


def report_weights(records: Sequence[Record]) -> Report:
    """Powers of every weight in every block."""
    worst, rows, names = 0.0, [], []
    for block in BLOCKS:
        for part in SPLIT:
            growth = exponents.predicted(part, block)
            if growth.data is None:
                continue
            row = []
            for weight in "QKV":
                of = [record for record in records if record.config["weight"] == weight]
                slope = line(of, "factor", block, part).law((0.1, 10)).slope
                worst = max(worst, abs(slope - growth.weights.get(weight, 0)))
                row.append(slope)
            rows.append(row)
            names.append(f"{SIGNS[part]}({block[0]},{block[1]})")
    chart = Chart(
        "weights",
        "Powers of the weights in the blocks of attention",
        "How the norm of each block grows when one of the weights is scaled by 0.1 to 10 and attention stays even: "
        "quadratic, linear or not at all.",
        [
            Panel(
                [
                    Curve(
                        f"$W_{weight}$",
                        list(range(len(rows))),
                        [row[j] for row in rows],
                        colour=j,
                        style="bars",
                    )
                    for j, weight in enumerate("QKV")
                ],
                y_label="power of the weight",
                ticks=(list(range(len(names))), [f"${name}$".replace("(", "$\n$(") for name in names]),
            )
        ],
        columns=1,
    )
    text = "; ".join(f"{name}: {_powers(row)}" for name, row in zip(names, rows, strict=True))
    finding = Finding(
        "weights",
        "holds when" if worst < 0.02 else "does not hold",
        f"Largest difference of a power from the prediction: {worst:.3f}. Measured: {text}.",
        "beside the weights' influence through the attention matrix, that is for small scores",
    )
    return Report((chart,), (finding,))


def _powers(row: Sequence[float]) -> str:
    """``K² V²`` with the measured powers."""
    found = [f"W_{weight}^{power:.2f}" for weight, power in zip("QKV", row, strict=True) if abs(power) > 0.005]
    return " ".join(found) or "none"


# Moments


def points_moments(effort: Effort) -> list[Config]:
    """Tokens with a common mean and deviations of a given spread; attention even, or as it comes."""
    return [
        {"attention": kind, "spread": spread, "seed": seed}
        for kind in ("even", "own")
        for seed in effort.repeats(5, 20)
        for spread in grid(1e-3, 1, 7 if effort.quick else 13)
    ]


def measure_moments(config: Config) -> Mapping[str, Any]:
    """Norms of all blocks."""
    draw = Draws(config["seed"])
    x = draw(1, WIDTH) + config["spread"] * draw(LENGTH, WIDTH)
    y = draw(LENGTH, WIDTH)
    w = [draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for _ in range(3)]
    H = attention.hessian(x, w[0], w[1], w[2], target=y, temperature=1e6 if config["attention"] == "even" else 1.0)
    return {"norms": norms(H)}


MOMENTS = {
    ("QQ", "outer"): 4,  # M2², and X stays
    ("QQ", "functional"): 3,  # M3
    ("QK", "functional"): 2,  # M2, beside M3
    ("VQ", "outer"): 2,  # M1 M2
    ("VQ", "functional"): 2,  # M2
    ("VV", "outer"): 0,  # M1²
}


def report_moments(records: Sequence[Record]) -> Report:
    """Powers of the spread of the tokens: M1 stays, M2 grows with its square, M3 with its cube."""
    even = [record for record in records if record.config["attention"] == "even"]
    own = [record for record in records if record.config["attention"] == "own"]
    texts, worst, panels = [], 0.0, []
    for of, title in ((even, "even attention"), (own, "softmax attention")):
        curves, slopes = [], []
        for colour, ((block, part), power) in enumerate(MOMENTS.items()):
            found = line(of, "spread", block, part)
            curve = found.curve(f"${SIGNS[part]}({block[0]},{block[1]})$", colour=colour)
            curves.append(curve)
            slopes.append(Slope(power, (curve.x[0], 0.1), (curve.x[0], curve.y[0] / 3)))
            if of is even:
                slope = found.law((1e-3, 0.1)).slope
                worst = max(worst, abs(slope - power))
                texts.append(f"{SIGNS[part]}({block[0]},{block[1]}) {slope:.3f} ({power})")
        panels.append(
            Panel(curves, slopes, title, "spread of the tokens about their mean", "Frobenius norm", "log", "log")
        )
    chart = Chart(
        "moments",
        "The blocks follow the attention moments",
        "Tokens with a common mean and deviations of a growing size: the first attention moment stays, the second "
        "grows with the square of the spread, the third with its cube. Dashed grey: the powers that Remark 3.1 "
        "gives.",
        panels,
    )
    share = line(own, "spread", "QQ", "outer").values / line(own, "spread", "VV", "outer").values
    rising = bool((share.log().mean(0).diff() > 0).all())
    ends = share.log().mean(0).exp()
    findings = (
        Finding(
            "moments",
            "holds" if worst < 0.05 else "does not hold",
            "Powers of the tokens' spread with even attention, spread ≤ 0.1 (predicted): " + ", ".join(texts) + ".",
        ),
        Finding(
            "similar",
            "holds" if rising else "does not hold",
            f"‖H_o(Q,Q)‖ / ‖H_o(V,V)‖ rises with every step of the spread, from {float(ends[0]):.2g} for nearly "
            f"equal tokens to {float(ends[-1]):.2g} for independent ones.",
        ),
    )
    return Report((chart,), findings)


# Temperature and entropy


def points_temperature(effort: Effort) -> list[Config]:
    """From one-hot attention to even attention."""
    return [
        {"temperature": temperature, "seed": seed}
        for seed in effort.repeats(5, 20)
        for temperature in grid(1e-3, 1e3, 13 if effort.quick else 25)
    ]


def measure_temperature(config: Config) -> Mapping[str, Any]:
    """Norms, those of the split at the scores, and the entropy of the attention rows over its largest value."""
    draw = Draws(config["seed"])
    x, y = draw(LENGTH, WIDTH), draw(LENGTH, WIDTH)
    w = [draw(WIDTH, WIDTH, scale=1 / math.sqrt(WIDTH)) for _ in range(3)]
    H = attention.hessian(x, w[0], w[1], w[2], target=y, temperature=config["temperature"])
    scores = x @ w[0] @ w[1].mT @ x.mT / math.sqrt(WIDTH) / config["temperature"]
    logs = scores.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).mean() / math.log(LENGTH)
    return {
        "norms": norms(H),
        "t": [sized(H.t_outer().norm()), sized(H.t_functional().norm())],
        "entropy": float(entropy),
    }


def report_temperature(records: Sequence[Record]) -> Report:
    """The two parts of the query-key Hessian, and the whole between one-hot and even attention."""
    parts = [sweep(records, "temperature", "t", i) for i in range(2)]
    labels = (r"T-outer", r"T-functional")
    hot = (10.0, 1000.0)
    slopes = [part.law(hot).slope for part in parts]
    panels = [
        Panel(
            [part.curve(label, colour=i) for i, (part, label) in enumerate(zip(parts, labels, strict=True))],
            [
                Slope(power, (1.0, 1000.0), (10.0, part.within(9.9, 10.1).curve("").y[0] * 3), rf"$t^{{{power}}}$")
                for part, power in zip(parts, (-2, -1), strict=True)
            ],
            "split at the scores",
            "temperature $t$",
            "Frobenius norm",
            "log",
            "log",
        ),
        Panel(
            [
                line(records, "temperature", block, part).curve(f"${SIGNS[part]}({block[0]},{block[1]})$", colour=i)
                for i, (block, part) in enumerate(
                    (("QQ", "outer"), ("QQ", "functional"), ("QK", "functional"), ("VV", "outer"))
                )
            ],
            (),
            "blocks",
            "temperature $t$",
            "Frobenius norm",
            "log",
            "log",
        ),
    ]
    entropy = sweep(records, "temperature", "entropy")
    panels.append(Panel([entropy.curve("", shares=True)], (), "entropy", "temperature $t$", "entropy / log L", "log"))
    ratio = (parts[0].values / parts[1].values).log().mean(0).exp()
    share = _share(records)
    chart = Chart(
        "temperature",
        "Temperature: from one-hot attention to even attention",
        "One layer with Gaussian tokens. Left: the query-key Hessian split at the scores; dashed grey: 1/t² and "
        "1/t. Middle: blocks. Right: the entropy of the attention rows.",
        panels,
        columns=3,
    )
    cold = [
        float(line(records, "temperature", b, p).values[:, 0].log().mean().exp())
        for b, p in (("QQ", "outer"), ("VV", "outer"))
    ]
    warm = [float(line(records, "temperature", "QQ", "outer").values.log().mean(0).exp().max())]
    good = abs(slopes[0] + 2) < 0.05 and abs(slopes[1] + 1) < 0.05
    findings = (
        Finding(
            "temperature",
            "holds when" if good else "does not hold",
            f"For t from 10 to 1000 the T-outer part falls with t^{slopes[0]:.3f} and the T-functional part with "
            f"t^{slopes[1]:.3f}. Their ratio is {float(ratio[-1]):.2g} at t = 1000, {float(ratio.max()):.2g} at its "
            f"largest (t = {parts[0].x[int(ratio.argmax())]:.2g}) and {float(ratio[0]):.2g} at t = 0.001.",
            "large t, where attention is even and only the factors act; for t → 0 attention becomes one-hot and "
            "both parts vanish",
        ),
        Finding(
            "one-hot",
            "holds" if cold[0] < 1e-3 * warm[0] else "holds when" if cold[0] < 0.1 * warm[0] else "does not hold",
            f"At t = 0.001 (mean entropy {float(entropy.values[:, 0].mean()):.1e} of its largest) ‖H_o(Q,Q)‖ is "
            f"{cold[0]:.2g}, at its largest {warm[0]:.2g}; ‖H_o(V,V)‖ is {cold[1]:.2g}.",
        ),
        Finding(
            "dispersed",
            _dispersed(share),
            "Share of the query-key blocks in ‖H_o‖², without their factors 1/t: "
            + ", ".join(f"{value:.0%} at entropy {at:.2f}" for at, value in share)
            + ".",
            "" if _dispersed(share) != "holds when" else "some entropies, not the largest",
        ),
    )
    return Report((chart,), findings)


def _share(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Of the blocks QQ, KK and QK in ‖H_o‖², beside the entropy, at a few temperatures.

    A query or key brings a factor 1/t of its own; without it what is left is what the attention matrix does.
    """
    entropy = sweep(records, "temperature", "entropy")
    t = torch.tensor(entropy.x, dtype=torch.float64)
    squares = {block: line(records, "temperature", block, "outer").values.square() for block in BLOCKS}
    inner = (squares["QQ"] + squares["KK"] + 2 * squares["QK"]) * t**4
    whole = inner + 2 * (squares["VQ"] + squares["VK"]) * t**2 + squares["VV"]
    shares, levels = (inner / whole).mean(0).tolist(), entropy.values.mean(0).tolist()
    wanted = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    places = sorted({min(range(len(levels)), key=lambda i, at=at: abs(levels[i] - at)) for at in wanted})  # type: ignore[misc]
    return [(levels[place], shares[place]) for place in places]


def _dispersed(share: Sequence[tuple[float, float]]) -> Verdict:
    """Dominant where attention is spread: at the highest entropies, or only somewhere."""
    at_even = share[-1][1] > 0.5
    return "holds" if at_even else "holds when" if any(value > 0.5 for _, value in share) else "does not hold"


# One matrix or two


def points_single(effort: Effort) -> list[Config]:
    """Key sizes below, at and above the width."""
    return [
        {"width": width, "d_k": d_k, "seed": seed}
        for width in ((4, 6) if effort.quick else (4, 6, 8))
        for d_k in range(1, width + 2)
        for seed in effort.repeats(3, 10)
    ]


def measure_single(config: Config) -> Mapping[str, Any]:
    """Ranks, pairs of eigenvalues, and how the Hessian of W_QK = W_Q W_Kᵀ/√d_K enters that of two matrices."""
    draw = Draws(config["seed"])
    width, d_k = config["width"], config["d_k"]
    x, y = draw(2 * width, width), draw(2 * width, width)
    wq, wk = draw(width, d_k), draw(width, d_k)
    wv = draw(width, width, scale=1 / math.sqrt(width))
    two = attention.hessian(x, wq, wk, wv, target=y)
    one = attention.hessian_single(x, wq @ wk.mT / math.sqrt(d_k), wv, y)
    outer, functional = two.t_outer().dense(), two.t_functional().dense()
    # ∂ vec(W_Q W_Kᵀ)/∂(W_Q, W_K), row-vec
    eye = torch.eye(width, dtype=x.dtype)
    by_q = torch.einsum("ac,bk->abck", eye, wk).reshape(width * width, -1)
    by_k = torch.einsum("ak,bc->abck", wq, eye).reshape(width * width, -1)
    through = torch.cat([by_q, by_k], 1) / math.sqrt(d_k)
    expected = through.mT @ one.total["QK"] @ through
    values = torch.linalg.eigvalsh(functional)
    return {
        "rank": int(torch.linalg.matrix_rank(outer, hermitian=True, rtol=1e-11)),
        "bound": 2 * width * d_k - d_k**2 if d_k < width else width**2,
        "pairs": float((values + values.flip(0)).abs().max() / values.abs().max()),
        "multiple": float(
            (values.view(-1, d_k).max(1).values - values.view(-1, d_k).min(1).values).max() / values.abs().max()
        ),
        "apart": float((outer - expected).norm() / outer.norm()),
        "share": float(functional.norm() / (outer + functional).norm()),
        "negative": {"one": negative_share(one.total["QK"]), "two": negative_share(outer + functional)},
    }


def report_single(records: Sequence[Record]) -> Report:
    """Remark D.1, Lemma D.2 and Lemma 4.1."""
    pairs = max(record.result["pairs"] for record in records)
    multiple = max(record.result["multiple"] for record in records)
    apart = max(record.result["apart"] for record in records)
    over = [record for record in records if record.result["rank"] > record.result["bound"]]
    reached = sum(record.result["rank"] == record.result["bound"] for record in records) / len(records)
    share = mean("", [record.result["share"] for record in records])
    negative = {name: mean("", [record.result["negative"][name] for record in records]) for name in ("one", "two")}
    width = max(record.config["width"] for record in records)
    of = [record for record in records if record.config["width"] == width]
    ranks = sweep(of, "d_k", "rank")
    bounds = sweep(of, "d_k", "bound")
    shares = sweep(of, "d_k", "share")
    both = [sweep(of, "d_k", "negative", name) for name in ("one", "two")]
    chart = Chart(
        "single-matrix",
        f"One matrix or two in the scores, d = {width}",
        "Left: the rank of the T-outer part and its bound. Middle: the share that the T-functional part has in the "
        "norm of the query-key Hessian. Right: the share of negative eigenvalues in the squared norm, with one "
        "matrix W_QK and with two.",
        [
            Panel(
                [
                    ranks.curve("rank of the T-outer part", shares=True),
                    bounds.curve("bound", shares=True, colour=1, style="dashed"),
                ],
                (),
                "rank",
                "$d_K$",
                "rank",
            ),
            Panel([shares.curve("", shares=True)], (), "T-functional part", "$d_K$", r"$\|H_f^T\| / \|H\|$"),
            Panel(
                [both[0].curve("one matrix", shares=True), both[1].curve("two matrices", shares=True, colour=1)],
                (),
                "negative eigenvalues",
                "$d_K$",
                r"share of $\|H\|^2$",
            ),
        ],
        columns=3,
    )
    findings = (
        Finding(
            "t-pairs",
            "holds" if max(pairs, multiple) < 1e-10 else "does not hold",
            f"Over {len(records)} layers the eigenvalues sum up in pairs to {pairs:.0e} of the largest, and groups "
            f"of d_K are equal to {multiple:.0e}.",
        ),
        Finding(
            "t-rank",
            "holds" if not over else "does not hold",
            f"Never exceeded in {len(records)} layers; reached in {reached:.0%} of them.",
        ),
        Finding(
            "single-matrix",
            "holds" if apart < 1e-10 else "does not hold",
            f"The T-outer part is the Hessian of W_QK pulled back through W_Q W_Kᵀ/√d_K to {apart:.0e}. What is gone "
            f"with one matrix is {share.value:.0%} of the norm of the query-key Hessian; negative eigenvalues hold "
            f"{negative['one'].value:.0%} of ‖H‖² with one matrix, {negative['two'].value:.0%} with two.",
        ),
    )
    return Report((chart,), findings)


# Key size


def points_keys(effort: Effort) -> list[Config]:
    """Keys of 1 to 64 dimensions for tokens of 16."""
    return [
        {"d_k": d_k, "seed": seed}
        for seed in effort.repeats(3, 10)
        for d_k in ((1, 4, 16) if effort.quick else (1, 2, 4, 8, 16, 32, 64))
    ]


def measure_keys(config: Config) -> Mapping[str, Any]:
    """Norms of all blocks, and the share of negative eigenvalues in those on the diagonal."""
    draw, width = Draws(config["seed"]), 16
    x, y = draw(LENGTH, width), draw(LENGTH, width)
    wq, wk = (draw(width, config["d_k"], scale=1 / math.sqrt(width)) for _ in range(2))
    H = attention.hessian(x, wq, wk, draw(width, width, scale=1 / math.sqrt(width)), target=y)
    return {
        "norms": norms(H),
        "negative": {letter: negative_share(H.total[letter]) for letter in "QKV"},
    }


def report_keys(records: Sequence[Record]) -> Report:
    """What the size of the keys does."""
    chosen = (("QQ", "outer"), ("QQ", "functional"), ("QK", "functional"), ("VQ", "outer"), ("VV", "outer"))
    negative = [sweep(records, "d_k", "negative", letter) for letter in "QK"]
    ticks = (list(negative[0].x), [f"{x:g}" for x in negative[0].x])
    chart = Chart(
        "key-size",
        "The blocks over the size of the keys",
        "One layer with Gaussian tokens of 16 dimensions and weights of unit scale; the scores are divided by the "
        "root of d_K. Right: the share of ‖block‖² in negative eigenvalues; the value block has none.",
        [
            Panel(
                [
                    line(records, "d_k", block, part).curve(f"${SIGNS[part]}({block[0]},{block[1]})$", colour=i)
                    for i, (block, part) in enumerate(chosen)
                ],
                (),
                "norms",
                "$d_K$",
                "Frobenius norm",
                "log",
                "log",
                ticks=ticks,
            ),
            Panel(
                [
                    found.curve(letter, shares=True, colour=i)
                    for i, (letter, found) in enumerate(zip("QK", negative, strict=True))
                ],
                (),
                "negative eigenvalues",
                "$d_K$",
                "share",
                "log",
                ticks=ticks,
            ),
        ],
    )
    return Report((chart,))


# Heads


def points_heads(effort: Effort) -> list[Config]:
    """Heads that share a width of 16, with full values and with values of low rank."""
    return [
        {"heads": heads, "value": value, "seed": seed}
        for value in ("full", "low rank")
        for heads in ((1, 2, 4) if effort.quick else (1, 2, 4, 8))
        for seed in effort.repeats(3, 10)
    ]


def measure_heads(config: Config) -> Mapping[str, Any]:
    """How full the functional part is, its norm beside the outer part's, and what is zero by structure."""
    draw = Draws(config["seed"])
    width, heads = 8 if config["value"] == "full" else 16, config["heads"]
    d_k = width // heads
    x, y = draw(LENGTH, width), draw(LENGTH, width)
    wq, wk = draw(heads, width, d_k, scale=width**-0.5), draw(heads, width, d_k, scale=width**-0.5)
    value: Any = draw(heads, width, width, scale=width**-0.5)
    if config["value"] != "full":
        value = draw(heads, width, d_k, scale=width**-0.5), draw(heads, d_k, width, scale=d_k**-0.5)
    H = attention.hessian(x, wq, wk, value, target=y)
    outer, functional = H.outer.dense(), H.functional.dense()
    names = H.total.names
    between = max((H.norm((a, b), "functional") for a in names for b in names if a[1:] != b[1:]), default=0.0)
    hollow = max(H.norm(name, "functional") for name in names if name[0] in "VO")
    return {
        "filled": float((functional != 0).double().mean()),
        "outer": float(outer.norm()),
        "functional": float(functional.norm()),
        "between": between,
        "hollow": hollow,
    }


def report_heads(records: Sequence[Record]) -> Report:
    """Sparser with more heads; whether it also matters less."""
    texts, panels, falling = [], [], []
    for value in ("full", "low rank"):
        of = [record for record in records if record.config["value"] == value]
        filled = sweep(of, "heads", "filled")
        mass = Sweep(filled.x, sweep(of, "heads", "functional").values / sweep(of, "heads", "outer").values)
        panels.append(
            Panel(
                [
                    filled.curve("share of entries of $H_f$ that are not zero"),
                    mass.curve(r"$\|H_f\| / \|H_o\|$", colour=1),
                ],
                (),
                f"{value} value",
                "heads",
                "",
                "log",
                "log",
                ticks=(list(filled.x), [f"{x:g}" for x in filled.x]),
            )
        )
        ratios = mass.values.log().mean(0).exp().tolist()
        entries = filled.values.mean(0).tolist()
        falling.append(ratios[-1] < 0.5 * ratios[0])
        texts.append(
            f"{value} value, {', '.join(f'{x:g}' for x in mass.x)} heads: ‖H_f‖/‖H_o‖ = "
            + ", ".join(f"{r:.2f}" for r in ratios)
            + "; entries of H_f not zero "
            + ", ".join(f"{e:.0%}" for e in entries)
        )
    between = max(record.result["between"] for record in records)
    hollow = max(record.result["hollow"] for record in records)
    chart = Chart(
        "heads",
        "More heads make the functional part sparse",
        "One layer of heads that share the width. The functional part has no entries between heads; its norm beside "
        "the outer part's is another matter.",
        panels,
    )
    findings = (
        Finding(
            "heads",
            "does not hold" if between else "holds" if all(falling) else "holds when",
            f"Norm of the functional part between heads: {between:g}. " + ". ".join(texts) + ".",
            ""
            if all(falling)
            else "as a count of entries; the norm of the functional part does not become small beside the outer one",
        ),
        Finding(
            "low-rank-value",
            "holds" if hollow == 0 else "does not hold",
            f"The functional part of the diagonal blocks of W_V and W_O is {hollow:g} for all heads.",
        ),
    )
    return Report((chart,), findings)


WEIGHTS = Experiment(
    "weights", "Powers of the weights", f"{PAPER}, Section 3.3", points_weights, measure_weights, report_weights
)
MOMENTS_ = Experiment(
    "moments",
    "Attention moments and similar tokens",
    f"{PAPER}, Section 3.2",
    points_moments,
    measure_moments,
    report_moments,
)
TEMPERATURE = Experiment(
    "temperature",
    "Temperature, from one-hot to even attention",
    f"{PAPER}, Sections 3.2 and 4.3",
    points_temperature,
    measure_temperature,
    report_temperature,
)
SINGLE = Experiment(
    "single-matrix",
    "One matrix or two in the scores",
    f"{PAPER}, Section 4.2 and Appendix D",
    points_single,
    measure_single,
    report_single,
)
KEYS = Experiment("key-size", "The size of the keys", f"{PAPER}, Section 2", points_keys, measure_keys, report_keys)
HEADS = Experiment("heads", "Multi-head attention", f"{PAPER}, Appendix E", points_heads, measure_heads, report_heads)
