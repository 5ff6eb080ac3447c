"""Norms, feed-forward layers and blocks written plainly, drawn at random and adversarially, with dense Hessians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import functional as autograd

Weights = dict[str, Tensor]
PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: z * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)),  # exact far out too
    "silu": F.silu,
    "identity": lambda z: z,
}


@dataclass
class Draw:
    """A layer: its variables, its options and its output as a function of the variables."""

    variables: Weights
    options: dict[str, Any]
    output: Callable[[Weights], Tensor]
    target: Tensor | None = None
    grad: Tensor | None = None
    curvature: Tensor | None = None
    truth: dict[tuple[str, str], float] = field(init=False)
    """‖·‖₂ of every block."""
    norm: float = field(init=False)
    of_weights: float = field(init=False)
    """‖H‖₂ by all but the tokens."""

    def loss(self, of: Weights) -> Tensor:
        y = self.output(of)
        if self.target is not None:
            return (y - self.target).square().mean()
        assert self.grad is not None
        assert self.curvature is not None
        step = y - self.output(self.variables).detach()
        return (self.grad * step).sum() + torch.einsum("na,nab,nb->", step, self.curvature, step) / 2

    @property
    def behind(self) -> dict[str, Any]:
        if self.target is not None:
            return {"target": self.target}
        return {"grad": self.grad, "curvature": self.curvature}

    def solve(self, at_once: bool = True) -> Draw:
        """The dense Hessian, reverse over reverse in float64."""
        names = list(self.variables)
        sizes = [self.variables[name].numel() for name in names]

        def flat(v: Tensor) -> Tensor:
            parts = zip(names, torch.split(v, sizes), strict=True)
            return self.loss({name: part.view_as(self.variables[name]) for name, part in parts})

        point = torch.cat([t.reshape(-1) for t in self.variables.values()])
        H: Tensor = autograd.hessian(flat, point, vectorize=at_once)  # type: ignore[no-untyped-call]
        rows = [torch.split(row, sizes, 1) for row in torch.split(H, sizes)]
        pairs = [(i, j) for i in range(len(names)) for j in range(i + 1)]
        self.truth = {(names[i], names[j]): float(torch.linalg.matrix_norm(rows[i][j], 2)) for i, j in pairs}
        self.norm = float(torch.linalg.matrix_norm(H, 2))
        rest = len(point) - sizes[-1]  # the tokens are last
        self.of_weights = float(torch.linalg.matrix_norm(H[:rest, :rest], 2)) if rest else 0.0
        return self


class Dice:
    """Random numbers of a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def pick(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def decade(self, low: float, high: float) -> float:
        return float(10.0 ** (low + (high - low) * float(torch.rand((), generator=self.generator))))

    def behind(self, length: int, d: int) -> dict[str, Tensor]:
        if self.pick(True, False):
            return {"target": self(length, d)}
        half = self(length, d, d)
        return {"grad": self(length, d), "curvature": half + half.mT}


def normed(x: Tensor, w: Mapping[str, Tensor], prefix: str, kind: str, eps: float) -> Tensor:
    c = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    n = c / (c.square().mean(-1, keepdim=True) + eps).sqrt()
    n = n * w[f"{prefix}scale"] if f"{prefix}scale" in w else n
    return n + w[f"{prefix}shift"] if f"{prefix}shift" in w else n


def mlp(x: Tensor, w: Mapping[str, Tensor], activation: str) -> Tensor:
    z = x @ w["up"] + w.get("up_bias", torch.zeros(()))
    h = PHI[activation](x @ w["gate"] + w.get("gate_bias", torch.zeros(()))) * z if "gate" in w else PHI[activation](z)
    return h @ w["down"] + w.get("down_bias", torch.zeros(()))


def attend(x: Tensor, w: Mapping[str, Tensor], causal: bool) -> Tensor:
    wide = {name: w[name] if w[name].ndim == 3 else w[name][None] for name in "QKVO" if name in w}
    scores = (x @ wide["Q"]) @ (x @ wide["K"]).mT / wide["Q"].shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    heads = scores.softmax(-1) @ (x @ wide["V"])
    out: Tensor = heads @ wide["O"] if "O" in wide else heads
    return out.sum(0)


def a_norm(seed: int) -> Draw:
    """LayerNorm or RMSNorm; one token, one feature, tokens that hardly vary, large ones."""
    dice = Dice(seed)
    length, d, kind, eps = dice.pick(1, 2, 3), dice.pick(1, 2, 3, 4), dice.pick("layer", "rms"), dice.decade(-8, 0)
    x = dice(length, d, size=dice.decade(-4, 2)) + dice.pick(0.0, 1.0) * dice(length, 1)
    w = {}
    if dice.pick(True, False, True):
        w["scale"] = dice(d, size=dice.decade(-1, 1))
    if dice.pick(True, False):
        w["shift"] = dice(d)

    def output(of: Weights) -> Tensor:
        return normed(of["X"], of, "", kind, eps)

    return Draw({**w, "X": x}, {"kind": kind, "eps": eps}, output, **dice.behind(length, d)).solve()


def a_feedforward(seed: int) -> Draw:
    """Every activation, plain and gated, with and without biases."""
    dice = Dice(seed)
    length, d, m, out = (dice.pick(1, 2, 3) for _ in range(4))
    size, activation = dice.decade(-1, 1.5), dice.pick(*PHI)
    w = {"up": dice(d, m, size=size), "down": dice(m, out, size=dice.decade(-1, 1))}
    gated = dice.pick(True, False)
    if gated:
        w = {"gate": dice(d, m, size=dice.decade(-1, 1.5)), **w}
    for name, width in (("up", m), ("gate", m), ("down", out)):
        if name in w and dice.pick(True, False):
            w[f"{name}_bias"] = dice(width)
    x = dice(length, d, size=dice.decade(-1, 1))

    def output(of: Weights) -> Tensor:
        return mlp(of["X"], of, activation)

    return Draw({**w, "X": x}, {"activation": activation}, output, **dice.behind(length, out)).solve()


def an_attention(seed: int) -> Draw:
    """Heads behind W_O or added up, with a gradient alone behind them; every third draw saturated."""
    dice = Dice(seed)
    length, d, d_k, d_v = (dice.pick(1, 2, 3) for _ in range(4))
    heads, x = dice.pick(1, 2), dice(length, d, size=dice.decade(-0.5, 0.5))
    w = {"Q": dice(heads, d, d_k, size=30.0 if seed % 3 == 0 else 1.0), "K": dice(heads, d, d_k)}
    w["V"] = dice(heads, d, d_v)
    if dice.pick(True, False):
        w["O"] = dice(heads, d_v, dice.pick(1, 2))
    causal = dice.pick(True, False)

    def output(of: Weights) -> Tensor:
        return attend(of["X"], of, causal)

    out = w["O"].shape[-1] if "O" in w else d_v
    options = {"mask": "causal" if causal else None}
    still = torch.zeros(length, out, out, dtype=torch.float64)
    return Draw({**w, "X": x}, options, output, grad=dice(length, out), curvature=still).solve()


SORTS = ("plain", "saturated", "flat", "large", "token", "feature", "gated", "causal", "heads", "equal")


def a_block(seed: int) -> Draw:
    """A block of every placement of norms; by turns ordinary and adversarial, as the names of SORTS say."""
    dice, sort = Dice(seed), SORTS[seed % len(SORTS)]
    length = 1 if sort == "token" else dice.pick(2, 3)
    d, m = 1 if sort == "feature" else dice.pick(2, 3, 4), dice.pick(1, 2, 3)
    norm, kind, eps = dice.pick("pre", "post", "none"), dice.pick("layer", "rms"), dice.decade(-5, -1)
    lead = (2,) if sort == "heads" else dice.pick((), (1,))
    d_k = dice.pick(1, 2)
    sharp = dice.decade(1, 2) if sort == "saturated" else 1.0
    size = dice.decade(0, 1) if sort == "large" else 1.0
    w = {"Q": dice(*lead, d, d_k, size=sharp * size / d**0.5), "K": dice(*lead, d, d_k, size=size / d**0.5)}
    if dice.pick(True, False):
        w |= {"V": dice(*lead, d, d_k, size=size / d**0.5), "O": dice(*lead, d_k, d, size=size)}
    else:
        w["V"] = dice(*lead, d, d, size=size / d**0.5)
    if norm != "none" and dice.pick(True, False):
        w |= {f"norm{i}.{which}": dice(d) for i in (1, 2) for which in ("scale", "shift")}
    w |= {"up": dice(d, m, size=size / d**0.5), "down": dice(m, d, size=size / m**0.5)}
    if sort == "gated":
        w["gate"] = dice(d, m, size=d**-0.5)
    if dice.pick(True, False):
        w |= {"up_bias": dice(m), "down_bias": dice(d)}
    activation = dice.pick(*PHI)
    x = dice(length, d, size=dice.decade(-5, -2) if sort == "flat" else dice.decade(-0.5, 0.5))
    if sort == "flat":
        x = x + dice(length, 1)
    if sort == "equal":
        x = x[:1].expand(length, d).clone()
    causal = sort == "causal" or dice.pick(True, False)

    def output(of: Weights) -> Tensor:
        def attention(t: Tensor) -> Tensor:
            return attend(t, of, causal)

        def think(t: Tensor) -> Tensor:
            return mlp(t, of, activation)

        def ln(t: Tensor, i: int) -> Tensor:
            return normed(t, of, f"norm{i}.", kind, eps)

        x = of["X"]
        if norm == "pre":
            u = x + attention(ln(x, 1))
            return u + think(ln(u, 2))
        if norm == "post":
            u = ln(x + attention(x), 1)
            return ln(u + think(u), 2)
        u = x + attention(x)
        return u + think(u)

    options = {
        "norm": norm,
        "norm_kind": kind,
        "eps": eps,
        "activation": activation,
        "mask": "causal" if causal else None,
    }
    return Draw({**w, "X": x}, options, output, **dice.behind(length, d)).solve()
