"""The full block: curvature along depth, with norms before, behind or none; bounds; the Hessian while a GPT learns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlens import assembly
from curvlens.calculus import attention, bounds, feedforward, norms
from curvlens.data import Addition
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Report
from curvlens.experiments.growth import grid
from curvlens.experiments.slides import trained
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, mean, sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Curve, Heat, Panel

SECOND = "Closing the curvature gap"
ARTICLE = "article on the full block"
NORMS = {"pre": "Pre-LN", "post": "Post-LN", "none": "no norm"}


def matrices(model: Any, samples: int) -> tuple[Tensor, Tensor, dict[str, slice]]:
    """H and GGN of a GPT that adds, dense and in closed form, and where each parameter is in them."""
    tokens, labels = Addition(digits=2).batch(samples, seed=0)
    found = assembly.read(model).hessian(tokens, labels=labels)
    return found.total.dense(), found.ggn.dense(), dict(found.total.slices)


def _rows(places: Mapping[str, slice], prefix: str) -> Tensor:
    found = [torch.arange(part.start, part.stop) for name, part in places.items() if name.startswith(prefix)]
    return torch.cat(found)


# Depth


def points_depth(effort: Effort) -> list[Config]:
    """GPTs of one to six layers at initialisation."""
    depths = (1, 2, 3) if effort.quick else (1, 2, 3, 4, 6)
    return [
        {"norm": norm, "layers": layers, "seed": seed}
        for layers in reversed(depths)
        for norm in NORMS
        for seed in effort.repeats(2, 5)
    ]


def measure_depth(config: Config) -> Mapping[str, Any]:
    """Norms of the whole and of every layer's block, of H, GGN and the functional part."""
    task = Addition(digits=2)
    model = trained(task, seed=config["seed"], steps=0, n_layer=config["layers"], norm=config["norm"])
    H, G, places = matrices(model, 16)
    parts = (H, G, H - G)
    layers = []
    for number in range(config["layers"]):
        rows = _rows(places, f"h.{number}.")
        layers.append([float(part[rows][:, rows].norm()) for part in parts])
    return {
        "whole": [float(part.norm()) for part in parts],
        "top": float(torch.linalg.eigvalsh(H)[-1]),
        "layers": layers,
    }


def report_depth(records: Sequence[Record]) -> Report:
    """Growth with the number of layers, and along them."""
    depths = sorted({record.config["layers"] for record in records})
    deepest = depths[-1]
    every = list(range(1, deepest + 1))
    growing: list[Curve] = []
    along, texts, factors, sizes = [], [], {}, {}
    for colour, (norm, name) in enumerate(NORMS.items()):
        of = [record for record in records if record.config["norm"] == norm]
        line = sweep(of, "layers", "whole", 0)
        growing.append(line.curve(name, colour=colour))
        middle = line.values.log().mean(0).exp()
        factors[norm], sizes[norm] = float(middle[-1] / middle[0]), float(middle[-1])
        texts.append(f"{name} {float(middle[0]):.3g} → {float(middle[-1]):.3g}")
        deep = [record for record in of if record.config["layers"] == deepest]
        panel = []
        for part, label in enumerate(("$H$", "GGN", "functional")):
            values = torch.tensor([[layer[part] for layer in record.result["layers"]] for record in deep])
            line = Sweep(tuple(range(1, deepest + 1)), values.double())
            panel.append(line.curve(label, colour=part))
        along.append(
            Panel(
                panel, (), f"{name}, {deepest} layers", "layer", "norm of its block", y_scale="log", ticks=_ticks(every)
            )
        )
    chart = Chart(
        "depth",
        "Curvature along depth at initialisation",
        "GPTs that are to add numbers of two digits. First panel: the norm of the whole Hessian over the number of "
        "layers. Others: the norm of each layer's diagonal block, for H, GGN and functional part.",
        [Panel(growing, (), "whole Hessian", "layers", r"$\|H\|_F$", y_scale="log", ticks=_ticks(depths)), *along],
    )
    grows = [NORMS[norm] for norm, factor in factors.items() if factor > 1.1]
    slowest = min(factors, key=lambda norm: factors[norm])
    largest = max(sizes, key=lambda norm: sizes[norm])
    cured = slowest == "pre" and largest != "pre"
    verdict: Verdict = "holds" if len(grows) == 3 and cured else "holds when" if grows else "does not hold"
    finding = Finding(
        "depth-growth",
        verdict,
        f"‖H‖ from 1 to {deepest} layers at initialisation: {'; '.join(texts)}.",
        f"it grows with {', '.join(grows)}, slowest with {NORMS[slowest]}; at the largest depth it is largest with "
        f"{NORMS[largest]}"
        if verdict == "holds when"
        else "",
    )
    return Report((chart,), (finding,))


def _ticks(numbers: Sequence[int]) -> tuple[list[float], list[str]]:
    return [float(number) for number in numbers], [str(number) for number in numbers]


# Bounds


OF = {
    "attention": "attention",
    "norm": "LayerNorm",
    "feedforward": "feed-forward",
    "block none": "block, no norm",
    "block pre": "block, Pre-LN",
    "block post": "block, Post-LN",
}


def points_bounds(effort: Effort) -> list[Config]:
    """Layers and blocks of one sample, with small and large tokens."""
    return [
        {"of": of, "sigma": sigma, "seed": seed}
        for of in OF
        for seed in effort.repeats(10, 50)
        for sigma in grid(0.01, 10, 4 if effort.quick else 10)
    ]


def measure_bounds(config: Config) -> Mapping[str, Any]:
    """Bound over the true spectral norm, from norms alone and from the data."""
    draw, (length, width), of = Draws(config["seed"]), (6, 4), config["of"]
    x, y = config["sigma"] * draw(length, width), draw(length, width)
    scale = 1 / math.sqrt(width)
    w = {name: draw(width, width, scale=scale) for name in "qkvo"}
    w |= {"up": draw(width, 2 * width, scale=scale), "down": draw(2 * width, width, scale=scale / math.sqrt(2))}
    if of == "attention":
        true: Any = attention.hessian(x, w["q"], w["k"], w["v"], target=y).total

        def bound(data: bool) -> bounds.Bound:
            return bounds.attention(x, w["q"], w["k"], w["v"], y, data=data)
    elif of == "norm":
        ones = torch.ones_like(x[0])
        true = norms.hessian(x, ones, 0 * ones, y, wrt="scale shift X").total

        def bound(data: bool) -> bounds.Bound:
            return bounds.norm(x, ones, 0 * ones, y, wrt="scale shift X", data=data)
    elif of == "feedforward":
        true = feedforward.hessian(x, w["up"], w["down"], y).total

        def bound(data: bool) -> bounds.Bound:
            return bounds.feedforward(x, w["up"], w["down"], y, data=data)
    else:
        norm: Any = of.split()[1]
        true = assembly.block(w, heads=1, norm=norm).hessian(x, target=y).total

        def bound(data: bool) -> bounds.Bound:
            return bounds.block(x, w, y, heads=1, norm=norm, data=data)

    size = float(torch.linalg.matrix_norm(true.dense(), 2))
    return {"prior": bound(False).total / size, "data": bound(True).total / size}


def report_bounds(records: Sequence[Record]) -> Report:
    """Whether they hold, and how far above they are."""
    panels, texts, least = [], [], math.inf
    for way, title in (("prior", "from norms of tokens and weights alone"), ("data", "from the data")):
        curves = []
        for colour, (of, name) in enumerate(OF.items()):
            line = sweep([record for record in records if record.config["of"] == of], "sigma", way)
            curves.append(line.curve(name, colour=colour))
            least = min(least, float(line.values.min()))
            middle = line.values.log().mean(0).exp()
            how = "a priori" if way == "prior" else "by data"
            texts.append(f"{name} {how} {float(middle.min()):.2g} to {float(middle.max()):.2g}")
        label = r"bound / $\|H\|_2$"
        panels.append(Panel(curves, (), title, r"$\sigma$ of the tokens", label, "log", "log", y_lines=(1.0,)))
    chart = Chart(
        "bounds",
        "Spectral bounds of layers and blocks: valid, and loose",
        "Bound over the true spectral norm of the Hessian, for one sample: geometric mean over the seeds.",
        panels,
    )
    finding = Finding(
        "bound",
        "holds" if least >= 1 - 1e-12 else "does not hold",
        f"Never violated in {len(records)} layers and blocks, with corrected constants; the smallest bound over "
        f"truth is {least:.3f}. Geometric means, smallest and largest over σ: {'; '.join(texts)}.",
    )
    return Report((chart,), (finding,))


# Training


def points_training(effort: Effort) -> list[Config]:
    """A GPT of two layers before, in the middle and at the end of its training."""
    steps = (0, 25, 50, 100, 200) if effort.quick else (0, 10, 25, 50, 100, 200, 400, 800)
    return [{"steps": step, "seed": seed} for seed in effort.repeats(2, 5) for step in reversed(steps)]


ROLES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", "norm1", "norm2")


def measure_training(config: Config) -> Mapping[str, Any]:
    """Norms of the blocks by role, of groups on and off the diagonal, and of what is zero."""
    model = trained(Addition(digits=2), seed=config["seed"], steps=config["steps"])
    H, G, places = matrices(model, 16)
    square = H.square()
    groups = {f"h.{i}.": _rows(places, f"h.{i}.") for i in range(2)}
    groups |= {name: _rows(places, name) for name in ("embed", "pos", "final_norm", "unembed")}
    pairs = [[float(square[a][:, b].sum().sqrt()) for b in groups.values()] for a in groups.values()]
    spectral = [[float(torch.linalg.matrix_norm(H[a][:, b], 2)) for b in groups.values()] for a in groups.values()]
    roles = {}
    for role in ROLES:
        rows = [_rows(places, f"h.{layer}.{role}") for layer in range(2)]
        roles[role] = [math.sqrt(sum(float(part[r][:, r].square().sum()) for r in rows)) for part in (H, G, H - G)]
    values = torch.linalg.eigvalsh(H)
    names = list(places)
    largest = float(H.abs().max())
    zero = [(a, b) for a in names for b in names if float(H[places[a]][:, places[b]].abs().max()) < 1e-13 * largest]
    return {
        "norm": float(H.norm()),
        "top": float(values[-1]),
        "roles": roles,
        "groups": pairs,
        "spectral": spectral,
        "zero": len(zero),
        "zero beside key biases": sum("k.bias" not in a and "k.bias" not in b for a, b in zero),
        "pairs": len(names) ** 2,
    }


def report_training(records: Sequence[Record]) -> Report:
    """How uneven the blocks are while the model learns, what lies beside the diagonal, and when it changes."""
    lines = {role: sweep(records, "steps", "roles", role, 0) for role in ROLES}
    x = next(iter(lines.values())).x
    weights = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")
    stacked = torch.stack([lines[role].values.log() for role in weights])
    spread = Sweep(x, (stacked.max(0).values - stacked.min(0).values).exp())
    norm, top = sweep(records, "steps", "norm"), sweep(records, "steps", "top")
    group_names = ("layer 1", "layer 2", "tokens", "positions", "norm", "unembed")
    last = [record for record in records if record.config["steps"] == x[-1]]
    heat = torch.tensor([record.result["groups"] for record in last]).double().log10().mean(0)
    panels: list[Panel | Heat] = [
        Panel(
            [lines[role].curve(role, colour=i) for i, role in enumerate(weights)],
            (),
            "diagonal blocks by role",
            "training steps",
            r"$\|H\|_F$",
            y_scale="log",
        ),
        Panel([spread.curve("")], (), "largest over smallest role", "training steps", "ratio", y_scale="log"),
        Panel(
            [norm.curve(r"$\|H\|_F$"), top.curve(r"$\lambda_{\max}$", colour=1)],
            (),
            "whole Hessian",
            "training steps",
            "",
            y_scale="log",
        ),
        Heat(heat.tolist(), "after training", r"$\log_{10}\|H\|_F$ of the block", group_names),
    ]
    chart = Chart(
        "training",
        "The Hessian while a GPT learns to add",
        "A GPT of two layers with Pre-LN. Heat map: the blocks between layers, embeddings, the last norm and the "
        "unembedding after training.",
        panels,
    )
    uneven = [float(v) for v in spread.values.log().mean(0).exp()]
    note = (
        f"The largest of the six roles' blocks is {uneven[0]:.2g} times the smallest at initialisation, "
        f"{uneven[len(uneven) // 2]:.2g} times after {x[len(x) // 2]:g} steps and {uneven[-1]:.2g} times after "
        f"{x[-1]:g}."
    )
    return Report((chart,), (_dominance(last), _zero(records), _phases(norm)), notes=(note,))


def _dominance(records: Sequence[Record]) -> Finding:
    """Of groups: the share of ‖H‖² on the diagonal, and rows whose diagonal block outweighs the others."""
    shares, dominant, rows = [], 0, 0
    for record in records:
        squares = torch.tensor(record.result["groups"]).double().square()
        shares.append(float(squares.diagonal().sum() / squares.sum()))
        sizes = torch.tensor(record.result["spectral"]).double()
        others = sizes.sum(1) - sizes.diagonal()
        dominant += int((sizes.diagonal() > others).sum())
        rows += len(sizes)
    share = mean("", shares)
    return Finding(
        "diagonal",
        "holds" if dominant == rows else "does not hold" if share.value < 0.9 else "holds when",
        f"After training the diagonal blocks of the six groups hold {share.value:.0%} of ‖H‖²; {dominant} of {rows} "
        "diagonal blocks are larger (spectral norm) than the others of their row together.",
    )


def _zero(records: Sequence[Record]) -> Finding:
    zero, beside = (max(record.result[name] for record in records) for name in ("zero", "zero beside key biases"))
    pairs = records[0].result["pairs"]
    return Finding(
        "zero-blocks",
        "does not hold" if beside < 0.1 * pairs else "holds",
        f"At most {zero} of the {pairs} pairs of parameters have a zero block, and without the biases of the keys, "
        f"which do nothing, {beside}.",
    )


def _phases(norm: Sweep) -> Finding:
    """Relative change of ‖H‖ a step, early and late."""
    steps = torch.tensor(norm.x, dtype=torch.float64)
    rates = norm.values.log().diff(dim=1).abs() / steps.diff()
    early, late = float(rates[:, 0].mean()), float(rates[:, -1].mean())
    return Finding(
        "training-phases",
        "holds" if late < early / 3 else "does not hold",
        f"‖H‖ changes by {early:.1%} a step over the first {norm.x[1]:g} steps and by {late:.2%} a step over the last "
        f"{norm.x[-1] - norm.x[-2]:g} of {norm.x[-1]:g}.",
    )


# Norms and feed-forward


def points_norm(effort: Effort) -> list[Config]:
    """Tokens of a given spread through LayerNorm; and a ReLU block."""
    return [{"spread": spread, "seed": seed} for seed in effort.repeats(5, 20) for spread in grid(1e-4, 10, 11)]


def measure_norm(config: Config) -> Mapping[str, Any]:
    """‖g · ∂²LN‖₂ of a token, with ε of 1e-5 and without."""
    draw = Draws(config["seed"])
    token, g = config["spread"] * draw(8), draw(8)
    return {
        name: float(torch.linalg.matrix_norm(norms.contracted(token, g, eps=eps), 2))
        for name, eps in (("with", 1e-5), ("without", 1e-30))
    }


def report_norm(records: Sequence[Record]) -> Report:
    """A power law until √ε."""
    lines = {name: sweep(records, "spread", name) for name in ("with", "without")}
    law = lines["without"].law((1e-4, 10))
    largest = float(lines["with"].values.max())
    chart = Chart(
        "layernorm",
        "The second derivative of LayerNorm grows as its input shrinks",
        "Spectral norm of the second derivative of a token's LayerNorm, contracted with a gradient; ε = 10⁻⁵ stops the "
        "growth at a spread of about 0.003.",
        [
            Panel(
                [
                    lines["with"].curve(r"$\varepsilon = 10^{-5}$"),
                    lines["without"].curve(r"$\varepsilon \to 0$", colour=1),
                ],
                (),
                "",
                "spread of the token",
                r"$\|g\cdot\partial^2\mathrm{LN}\|_2$",
                "log",
                "log",
            )
        ],
        columns=1,
    )
    finding = Finding(
        "norm-bounded",
        "holds when" if law.slope < -0.05 else "holds",
        f"It grows with the spread s of a token as s^{law.slope:.3f}; with ε = 1e-5 it reaches {largest:.2g}.",
        "tokens whose spread stays away from 0; else the only bound is 1/ε",
    )
    return Report((chart,), (finding,))


def points_relu(effort: Effort) -> list[Config]:
    """Trained blocks with ReLU and with GELU."""
    return [
        {"activation": activation, "steps": 50, "seed": seed}
        for activation in ("relu", "gelu")
        for seed in effort.repeats(2, 5)
    ]


def measure_relu(config: Config) -> Mapping[str, Any]:
    """GGN and functional part of the feed-forward blocks of the top layer."""
    model = trained(
        Addition(digits=2), seed=config["seed"], steps=config["steps"], norm="none", activation=config["activation"]
    )
    H, G, places = matrices(model, 16)
    up, down = places["h.1.mlp.up.weight"], places["h.1.mlp.down.weight"]
    pairs = {"up": (up, up), "down": (down, down), "between": (up, down)}
    return {name: [float(G[a, b].norm()), float((H - G)[a, b].norm())] for name, (a, b) in pairs.items()}


def report_relu(records: Sequence[Record]) -> Report:
    """Hollow on the diagonal; not beside it."""
    ratios: dict[tuple[str, str], float] = {}
    for activation in ("relu", "gelu"):
        of = [record for record in records if record.config["activation"] == activation]
        for name in ("up", "down", "between"):
            ratios[activation, name] = mean("", [r.result[name][1] / r.result[name][0] for r in of]).value
    hollow = max(ratios["relu", "up"], ratios["relu", "down"])
    names = ("up", "down", "between")
    chart = Chart(
        "feedforward",
        "The feed-forward Hessian: hollow with ReLU, but not small",
        "Norm of the functional part over that of the Gauss–Newton part, for the weights of the top layer's "
        "feed-forward part, without norms behind.",
        [
            Panel(
                [
                    Curve(
                        activation,
                        [0, 1, 2],
                        [ratios[activation, n] for n in names],
                        colour=j,
                        style="bars",
                    )
                    for j, activation in enumerate(("relu", "gelu"))
                ],
                y_label=r"$\|H_f\| / \|GGN\|$",
                ticks=([0, 1, 2], ["(up, up)", "(down, down)", "(up, down)"]),
            )
        ],
        columns=1,
    )
    finding = Finding(
        "relu-simple",
        "holds when" if hollow < 1e-9 else "does not hold",
        f"With ReLU ‖H_f‖/‖GGN‖ of (up, up) and (down, down) is {hollow:.0e}, of (up, down) "
        f"{ratios['relu', 'between']:.2f}; with GELU of (up, up) {ratios['gelu', 'up']:.2f}.",
        "the diagonal blocks; between the two weights the functional part is there as well",
    )
    return Report((chart,), (finding,))


DEPTH = Experiment(
    "depth", "Curvature along depth", f"{SECOND}; {ARTICLE}, Section 5", points_depth, measure_depth, report_depth
)
BOUNDS = Experiment(
    "bounds",
    "Spectral bounds of layers and blocks",
    f"{SECOND}, Theorem 1",
    points_bounds,
    measure_bounds,
    report_bounds,
)
TRAINING = Experiment(
    "training",
    "The Hessian while a GPT learns",
    f"{ARTICLE}, Sections 5 and 7",
    points_training,
    measure_training,
    report_training,
)
LAYERNORM = Experiment(
    "layernorm", "LayerNorm's second derivative", f"{ARTICLE}, Section 5.4", points_norm, measure_norm, report_norm
)
FEEDFORWARD = Experiment(
    "feedforward", "The feed-forward part with ReLU", f"{ARTICLE}, Section 5.4", points_relu, measure_relu, report_relu
)
