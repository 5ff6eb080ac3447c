"""Figure 6: the attention blocks of every layer of a deep Transformer without norms, exact and dense.

Layer by layer from the top, the loss as a function of a layer's states X has a gradient and a second derivative S = S_o
+ S_f over all tokens of a sequence; through attention with its skip, y = x + f(x), and through the MLP, which is linear
where no ReLU turns,

    S_y = Mᵀ S M,    S_x = (I + ∂f/∂x)ᵀ S_y (I + ∂f/∂x) + g_y · ∂²f/∂x² (the last in the functional part),

and the block of a weight W that acts as u = Z W is

    H_W = Σ_sequences Σ_jk z_j z_kᵀ ⊗ (∂f/∂u_jᵀ S_y ∂f/∂u_k) + (g_y · ∂²f/∂W²).

The outer part has S_o = R Rᵀ with as many columns as logits behind the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.data import Addition
from curvlens.experiments.draws import Draws
from curvlens.experiments.experiment import Effort, Experiment, Number, Report
from curvlens.experiments.growth import PARTS, SMALL, grid
from curvlens.experiments.store import Config, Record
from curvlens.experiments.sweeps import Sweep, marked, sized, sweep
from curvlens.experiments.verdicts import Finding, Verdict
from curvlens.figures.charts import Chart, Panel, Slope

LETTERS = ("Q", "K", "V", "O")
NAMES = {"Q": "query", "K": "key", "V": "value", "O": "output"}


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, inputs first."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Behind:
    """The loss of each sequence as a function of states (B, L, d): gradient, root of S_o, and S_f."""

    grad: Tensor
    """(B, L, d)."""
    root: Tensor
    """(B, L, d, columns)."""
    rest: Tensor | None
    """(B, L, d, L, d); None where it is zero."""

    def through(self, step: Tensor) -> Behind:
        """As a function of what a map of each token (B, L, d, d), inputs first, is applied to."""
        grad = (step @ self.grad[..., None]).squeeze(-1)
        if self.rest is None:
            return Behind(grad, step @ self.root, None)
        rest = torch.einsum("biac,bicjd->biajd", step, self.rest)
        return Behind(grad, step @ self.root, torch.einsum("bjed,biajd->biaje", step, rest))


@dataclass(frozen=True)
class Attended:
    """Attention at some states, and its derivatives."""

    x: Tensor
    layer: Layer
    a: Tensor
    """A, (B, L, L)."""
    q: Tensor
    """Queries over √d."""
    pulled: Tensor
    """A_ij (v_j W_O − f_i), (B, L, L, d): what score (i, j) does to f_i."""
    by_query: Tensor
    """∂f_i/∂q_i, (B, L, d_K, d)."""
    out: Tensor
    """f."""


def attended(x: Tensor, layer: Layer) -> Attended:
    """One causal head."""
    scale = 1 / math.sqrt(layer.q.shape[1])
    q, k, v = x @ layer.q * scale, x @ layer.k, x @ layer.v @ layer.o
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    a = (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    out = a @ v
    pulled = a[..., None] * (v[:, None] - out[:, :, None])
    by_query = scale * torch.einsum("bjk,bijc->bikc", k, pulled)
    return Attended(x, layer, a, q, pulled, by_query, out)


def mlp_step(y: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """y + φ(y W_up) W_down, and its derivative at every token, inputs first."""
    hidden = y @ layer.up
    step = layer.up @ ((hidden > 0)[..., None] * layer.down) + torch.eye(y.shape[-1], dtype=y.dtype)
    return y + hidden.relu() @ layer.down, step


def blocks(at: Attended, behind: Behind) -> dict[str, tuple[Tensor, Tensor]]:
    """H_o and H_f of each weight, (d², d²), the mean over the sequences; ``behind`` is that of y = x + f."""
    count, heads = len(at.x), {}
    layer = at.layer
    mixed = at.a @ at.x @ layer.v  # what W_O is applied to
    own = attention.hessian(
        at.x, layer.q, layer.k, (layer.v, layer.o), grad=behind.grad, curvature=0.0, mask="causal"
    ).functional
    for letter, inputs in (("Q", at.x), ("K", at.x), ("V", at.x), ("O", mixed)):
        root, rest = pulled(at, behind, letter)
        rows = torch.einsum("bja,bjkr->akbr", inputs, root).flatten(2).flatten(0, 1)
        outer = rows @ rows.mT / count
        heads[letter] = (outer, own[letter] if rest is None else own[letter] + _summed(inputs, rest) / count)
    return heads


def _summed(z: Tensor, rest: Tensor) -> Tensor:
    """Σ_sequences Σ_jk z_j z_kᵀ ⊗ E_jk of a symmetric E (B, L, d', L, d'): half of the pairs, and their transpose."""
    j, k = torch.tril_indices(z.shape[1], z.shape[1])
    weight = torch.where(j == k, 0.5, 1.0).to(z)[:, None, None]
    pairs = (weight * z[:, j, :, None] * z[:, k, None, :]).reshape(-1, z.shape[2] ** 2)
    of_pairs = rest[:, j, :, k].transpose(0, 1)
    half = (pairs.mT @ of_pairs.reshape(len(pairs), -1)).view(*2 * z.shape[2:], *of_pairs.shape[2:])
    matrix = half.permute(0, 2, 1, 3).reshape(z.shape[2] * of_pairs.shape[2], -1)
    return matrix + matrix.mT


def pulled(at: Attended, behind: Behind, letter: str) -> tuple[Tensor, Tensor | None]:
    """The root and the rest of S_y, as of queries, keys, values or W_O's outputs u: ∂f/∂uᵀ S_y ∂f/∂u."""
    root, rest = behind.root, behind.rest
    if letter == "Q":
        through = behind.through(at.by_query)
        return through.root, through.rest
    if letter == "K":
        root = torch.einsum("bik,bijr->bjkr", at.q, at.pulled @ root)
        if rest is not None:
            half = torch.einsum("bijc,bicud->bijud", at.pulled, rest)
            scores = torch.einsum("bijud,buvd->bijuv", half, at.pulled)
            rest = torch.einsum("bjkuv,bul->bjkvl", torch.einsum("bik,bijuv->bjkuv", at.q, scores), at.q)
    if letter == "V":
        root = torch.einsum("bij,bikr->bjkr", at.a, at.layer.o @ root)
        if rest is not None:
            through = behind.through(at.layer.o.expand(*at.x.shape[:2], -1, -1))
            rest = torch.einsum("bij,bikul->bjkul", at.a, through.rest)
            rest = torch.einsum("bjkul,buv->bjkvl", rest, at.a)
    return root, rest


def before(at: Attended, behind: Behind) -> Behind:
    """The loss as a function of the layer's states x, from that of y = x + f(x)."""
    layer, (batch, length, d) = at.layer, at.x.shape
    jacobian = torch.einsum("bijc,bia->biajc", at.pulled, at.q @ layer.k.mT).permute(0, 1, 4, 3, 2)  # (i, c, j, a)
    jacobian = jacobian + torch.einsum("bij,ac->bicja", at.a, layer.v @ layer.o)
    each = torch.arange(length)
    jacobian[:, each, :, each] += (layer.q @ at.by_query).mT.transpose(0, 1)
    jacobian[:, each, :, each] += torch.eye(d, dtype=at.x.dtype)
    flat = jacobian.reshape(batch, length * d, length * d)
    rest = at.x.new_zeros(batch, length * d, length * d)
    if behind.rest is not None:
        rest = flat.mT @ behind.rest.reshape(batch, length * d, -1) @ flat
    for sample in range(batch):
        own = attention.hessian(
            at.x[sample],
            layer.q,
            layer.k,
            (layer.v, layer.o),
            grad=behind.grad[sample],
            curvature=0.0,
            mask="causal",
            wrt="X",
        )
        rest[sample] += own.functional["X"]
    return Behind(
        (flat.mT @ behind.grad.reshape(batch, -1, 1)).view(batch, length, d),
        (flat.mT @ behind.root.reshape(batch, length * d, -1)).view(batch, length, d, -1),
        rest.view(batch, length, d, length, d),
    )


def layer_norms(x: Tensor, labels: Tensor, layers: Sequence[Layer], unembed: Tensor) -> list[dict[str, list[float]]]:
    """‖H_o‖, ‖H_f‖ and ‖H‖ of every weight of every layer, for the cross-entropy of the labels that count."""
    passes, states = [], x
    for layer in layers:
        at = attended(states, layer)
        states, step = mlp_step(states + at.out, layer)
        passes.append((at, step))
    behind = _loss(states @ unembed, labels, unembed)
    found: list[dict[str, list[float]]] = []
    for number, (at, step) in reversed(list(enumerate(passes))):
        behind = behind.through(step)
        found.insert(0, {})
        for letter, (outer, functional) in blocks(at, behind).items():
            found[0][letter] = [float(matrix.norm()) for matrix in (outer, functional, outer + functional)]
        if number:
            behind = before(at, behind)
    return found


def _loss(logits: Tensor, labels: Tensor, unembed: Tensor) -> Behind:
    """Of the states before the unembedding."""
    batch, length, classes = logits.shape
    d = unembed.shape[0]
    p = logits.softmax(-1)
    share = (labels >= 0).to(logits)[..., None]
    share = share / share.sum(1, keepdim=True)
    error = share * (p - torch.nn.functional.one_hot(labels.clamp(min=0), classes))
    token = (unembed - unembed @ p[..., None]) * (share * p).sqrt()[..., None, :]  # (B, L, d, classes)
    counted = (labels[0] >= 0).nonzero()[:, 0].tolist()
    root = logits.new_zeros(batch, length, d, len(counted), classes)
    for column, place in enumerate(counted):
        root[:, place, :, column] = token[:, place]
    return Behind(error @ unembed.mT, root.flatten(3), None)


def points(effort: Effort) -> list[Config]:
    """One to five layers."""
    depths, width, count, sequences = ((1, 2, 3), 12, 7, 16) if effort.quick else ((1, 2, 3, 4, 5), 32, 12, 64)
    return [
        {"depth": depth, "width": width, "sequences": sequences, "sigma": sigma, "seed": seed}
        for depth in reversed(depths)  # the longest first
        for seed in effort.repeats(3, 5)
        for sigma in grid(0.01, 10, count)
    ]


def measure(config: Config) -> Mapping[str, Any]:
    """The norms of every layer's attention blocks."""
    width = config["width"]
    draw, scale, sigma = Draws(config["seed"]), 0.8 / math.sqrt(width), config["sigma"]
    task = Addition()
    ids, labels = task.batch(config["sequences"], seed=config["seed"])
    x = draw(task.vocab, width, scale=sigma)[ids] + draw(task.context, width, scale=sigma)
    unembed = draw(width, task.vocab, scale=scale)
    layers = []
    for _ in range(config["depth"]):
        q, k, v, o = (draw(width, width, scale=scale) for _ in range(4))
        up, down = draw(width, 4 * width, scale=scale), draw(4 * width, width, scale=scale)
        layers.append(Layer(q, k, v, o, up, down))
    norms = layer_norms(x, labels, layers, unembed)
    top = len(norms) - 1
    return {
        "norms": {
            letter: [
                [
                    value if part == "functional" and layer == top and letter in "VO" else sized(value)
                    for part, value in zip(PARTS, found[letter], strict=True)
                ]
                for layer, found in enumerate(norms)
            ]
            for letter in LETTERS
        }
    }


def _line(records: Sequence[Record], depth: int, letter: str, layer: int, part: str) -> Sweep:
    of = [record for record in records if record.config["depth"] == depth]
    return sweep(of, "sigma", "norms", letter, layer - 1, PARTS.index(part))


def _depths(records: Sequence[Record]) -> list[int]:
    return sorted({record.config["depth"] for record in records})


def _panel(records: Sequence[Record], depth: int, letter: str, part: str, power: int) -> Panel:
    curves = []
    layers = range(1, depth + (part != "functional" or letter == "Q"))  # on top the value's functional part is zero
    for layer in layers:
        curves.append(_line(records, depth, letter, layer, part).curve(f"layer {layer}", colour=layer - 1))
    slopes = []
    if curves:
        first = curves[0]
        slopes = [Slope(power, (first.x[0], 1.0), (first.x[0], first.y[0] / 10), rf"$\sigma^{power}$")]
    sign = {"outer": "H_o", "functional": "H_f"}[part]
    return Panel(
        curves,
        slopes,
        f"depth {depth}",
        r"$\sigma$",
        rf"$\|{sign}(W_{letter}, W_{letter})\|_F$",
        "log",
        "log",
        lines=(1.0,),
    )


def report(records: Sequence[Record]) -> Report:
    """Slopes of every layer."""
    depths = _depths(records)
    rows = (("V", "outer", 2), ("V", "functional", 3), ("Q", "outer", 6), ("Q", "functional", 5))
    chart = Chart(
        "fig6",
        "Every layer of a deep Transformer: powers of a single layer for small embeddings, higher ones beyond",
        "Norms of the diagonal blocks of value (upper rows) and query (lower rows) in every layer of Transformers "
        "without norms; layer 1 is next to the embeddings. Dashed grey: the powers of a single layer (3 for the "
        "value's functional part below the top, which a single layer does not have), drawn a little below.",
        [
            _panel(records, depth, *row)
            for row in rows
            for depth in depths
            if row[:2] != ("V", "functional") or depth > 1
        ],
        columns=len(depths),
    )
    predicted = {("V", "outer"): 2, ("Q", "outer"): 6, ("Q", "functional"): 5}
    every = [(depth, layer) for depth in depths for layer in range(1, depth + 1)]
    worst = dict.fromkeys((SMALL, (0.1, 1.0), (1.0, 10.0)), 0.0)
    spread: dict[str, list[float]] = {}
    for (letter, part), power in predicted.items():
        for depth, layer in every:
            line = _line(records, depth, letter, layer, part)
            for window in worst:
                worst[window] = max(worst[window], abs(line.law(window).slope - power))
            spread.setdefault(f"{letter} {part}", []).append(line.law(SMALL).slope)
    value = [_line(records, d, "V", n, "functional").law(SMALL).slope for d, n in every if n < d]
    numbers = [_farthest(f"fig6 {name} small", slopes, predicted[_pair(name)]) for name, slopes in spread.items()]
    numbers.append(_farthest("fig6 V functional small below the top", value, 3))
    findings = (
        Finding(
            "deep-same",
            "holds when" if worst[SMALL] < 0.05 else "does not hold",
            f"Over all depths and layers the slopes of H_o(V), H_o(Q) and H_f(Q) differ from 2, 6 and 5 by at most "
            f"{worst[SMALL]:.3f} for σ ≤ 0.1, but by {worst[0.1, 1.0]:.2f} for σ from 0.1 to 1.",
            "σ ≲ 0.1, not all of (0, 1)",
        ),
        _lower(records),
        _beyond(records, worst[1.0, 10.0]),
        _top(records, predicted),
        Finding(
            "deep-value-functional",
            "holds" if value and min(value) > 0 else "does not hold",
            f"Below the top it grows with σ^{min(value):.3f} to σ^{max(value):.3f} for σ ≤ 0.1, one power more than "
            "H_o."
            if value
            else "",
        ),
    )
    laws = tuple(
        _line(records, depth, letter, layer, part).fitted(
            f"depth {depth}, layer {layer}: {'H_o' if part == 'outer' else 'H_f'}({letter}, {letter})", power
        )
        for letter, part, power in rows
        for depth, layer in every
        if (letter, part) != ("V", "functional") or layer < depth
    )
    return Report((chart,), findings, tuple(numbers), laws, marked(records))


def _pair(name: str) -> tuple[str, str]:
    letter, part = name.split()
    return letter, part


def _farthest(name: str, slopes: Sequence[float], power: float) -> Number:
    return Number(name, max(slopes, key=lambda slope: abs(slope - power)), 0.0)


def _lower(records: Sequence[Record]) -> Finding:
    """Whether each layer's block is smaller than the next one's, at all σ < 1."""
    counts = {"outer": [0, 0], "functional": [0, 0]}
    for depth in _depths(records):
        for layer in range(1, depth):
            for letter, part in (("V", "outer"), ("Q", "outer"), ("Q", "functional")):
                one, next_ = (_line(records, depth, letter, n, part).within(0, 1) for n in (layer, layer + 1))
                counts[part][0] += int((one.values < next_.values).sum())
                counts[part][1] += one.values.numel()
    shares = {part: smaller / max(1, total) for part, (smaller, total) in counts.items()}
    true = [f"the {part} part" for part, share in shares.items() if share > 0.95]
    verdict: Verdict = "holds" if len(true) == 2 else "holds when" if true else "does not hold"
    return Finding(
        "deep-lower",
        verdict,
        "Of all pairs of neighbouring layers at σ ≤ 1 the earlier one has the smaller block in "
        f"{shares['outer']:.0%} (outer) and {shares['functional']:.0%} (functional) of the cases.",
        " and ".join(true) if verdict == "holds when" else "",
    )


def _beyond(records: Sequence[Record], apart: float) -> Finding:
    """Powers beyond σ = 1."""
    texts = []
    steepest = {}
    for depth in _depths(records):
        slopes = [_line(records, depth, "V", n, "outer").law((1.0, 10.0)).slope for n in range(1, depth + 1)]
        steepest[depth] = max(slopes)
        texts.append(f"{max(slopes):.2f} at depth {depth}")
    deep = max(steepest)
    rising = deep > 1 and steepest[deep] > steepest[min(steepest)] + 0.2
    return Finding(
        "deep-beyond",
        "holds" if rising else "does not hold",
        f"Steepest slope of H_o(V) over the layers for σ from 1 to 10: {', '.join(texts)}; the slopes of a single "
        f"layer are missed by up to {apart:.1f}.",
    )


def _top(records: Sequence[Record], predicted: Mapping[tuple[str, str], int]) -> Finding:
    """The top layer beyond σ = 1."""
    texts, worst = [], 0.0
    for (letter, part), power in predicted.items():
        slopes = [_line(records, depth, letter, depth, part).law((1.0, 10.0)).slope for depth in _depths(records)]
        worst = max(worst, *(abs(slope - power) for slope in slopes))
        sign = {"outer": "H_o", "functional": "H_f"}[part]
        texts.append(f"{sign}({letter}) {min(slopes):.2f} to {max(slopes):.2f} ({power})")
    return Finding(
        "deep-top",
        "holds" if worst < 0.2 else "does not hold",
        f"Slopes of the top layer for σ from 1 to 10 over all depths (predicted): {', '.join(texts)}.",
    )


FIG6 = Experiment(
    "fig6",
    "Every layer of deep Transformers",
    "What does it mean to be a Transformer?, Figure 6",
    points,
    measure,
    report,
)
