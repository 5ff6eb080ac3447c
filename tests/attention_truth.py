"""Attention written plainly, and its Hessians by dense autodiff in float64 and by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import functional as autograd

from curvlens.calculus import attention

D = torch.float64


@dataclass
class Case:
    """An attention layer with random weights of scale 1/√d, and a loss."""

    length: int = 5
    d: int = 4
    d_k: int = 3
    d_v: int = 2
    heads: int | None = None
    rank: int | None = None
    batch: tuple[int, ...] = ()
    mask: Any = None
    temperature: float = 1.0
    kind: str = "softmax"
    keys: int | None = None
    d_keys: int | None = None
    loss: str = "square"
    root: bool = False
    """Give the curvature (of a pair, the first) by a root of it."""
    wrt: str = "QKV"
    reduction: str = "mean"
    single: bool = False
    seed: int = 0
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(*shape, generator=generator, dtype=D)

        crossed = self.keys is not None
        l_k = self.keys or self.length
        d_c = (self.d_keys or self.d) if crossed else self.d
        lead = () if self.heads is None else (self.heads,)
        self.X = draw(*self.batch, self.length, self.d)
        self.context = draw(*self.batch, l_k, d_c) if crossed else None
        self.weights = {}
        if self.single:
            self.weights["QK"] = draw(*lead, self.d, d_c, scale=(self.d * d_c) ** -0.5)
        else:
            self.weights["Q"] = draw(*lead, self.d, self.d_k, scale=self.d**-0.5)
            self.weights["K"] = draw(*lead, d_c, self.d_k, scale=d_c**-0.5)
        if self.rank is None:
            self.weights["V"] = draw(*lead, d_c, self.d_v, scale=d_c**-0.5)
        else:
            self.weights["V"] = draw(*lead, d_c, self.rank, scale=d_c**-0.5)
            self.weights["O"] = draw(*lead, self.rank, self.d_v, scale=self.rank**-0.5)
        if self.mask == "bool":
            allowed = torch.rand(*self.batch, self.length, l_k, generator=generator) < 0.6
            allowed[..., 0, :] = False  # a query that may attend to nothing
            if self.length > 1:
                allowed[..., 1:, 0] = True
            self.mask = allowed
        self.target = draw(*self.batch, self.length, self.d_v)
        self.unembedding = draw(self.d_v, 6, scale=self.d_v**-0.5)
        self.labels = torch.randint(6, (*self.batch, self.length), generator=generator)

    # The layer, plainly

    def output(self, theta: dict[str, Tensor]) -> Tensor:
        x = theta.get("X", self.X)
        keys = theta.get("C", self.context) if self.context is not None else x
        assert keys is not None
        weights = {**self.weights, **theta}
        heads = [None] if self.heads is None else list(range(self.heads))
        allowed = None
        if isinstance(self.mask, Tensor):
            allowed = self.mask
        elif self.mask == "causal":
            allowed = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        total = torch.zeros(*self.batch, self.length, self.d_v, dtype=D)
        for h in heads:
            w = {n: t if h is None else t[h] for n, t in weights.items() if n not in "XC"}
            if self.single:
                scores = x @ w["QK"] @ keys.mT / self.temperature
            else:
                scores = x @ w["Q"] @ w["K"].mT @ keys.mT / (self.temperature * self.d_k**0.5)
            if self.kind == "linear":
                a = scores if allowed is None else scores * allowed
            elif allowed is None:
                a = scores.softmax(-1)
            else:
                # rows without an allowed key: zero, and no NaN in any derivative
                dead = ~allowed.any(-1, keepdim=True)
                a = scores.masked_fill(~(allowed | dead), -torch.inf).softmax(-1) * ~dead
            value = w["V"] if self.rank is None else w["V"] @ w["O"]
            total = total + a @ keys @ value
        return total

    def samples(self) -> int:
        return max(1, int(torch.tensor(self.batch).prod())) if self.batch else 1

    def loss_of(self, f: Tensor) -> Tensor:
        scale = 1 / self.samples() if self.reduction == "mean" else 1.0
        if self.loss == "square":
            return scale * ((f - self.target) ** 2).sum() / (self.length * self.d_v)
        if self.loss == "ce":
            logits = f @ self.unembedding
            return (
                scale
                * torch.nn.functional.cross_entropy(logits.flatten(0, -2), self.labels.flatten(), reduction="sum")
                / self.length
            )
        assert self.loss == "pair"  # something non-linear behind the layer, split at its end: ½‖tanh(f E)‖²
        return scale * (self.tail(f) ** 2).sum() / 2

    def tail(self, f: Tensor) -> Tensor:
        return torch.tanh(f @ self.unembedding)

    # Truths, flat in the order of names

    def names(self) -> list[str]:
        letters = [n for n in ("QK", "Q", "K", "V", "O") if n in self.weights and (n[0] in self.wrt or n == "O")]
        names = letters if self.heads is None else [f"{n}{h}" for h in range(self.heads) for n in letters]
        return names + [n for n in "XC" if n in self.wrt]

    def flat(self) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]], dict[str, slice]]:
        parts: dict[str, Tensor] = {}
        for name in self.names():
            if name in "XC":
                parts[name] = self.X if name == "X" else self.context  # type: ignore[assignment]
            elif self.heads is None:
                parts[name] = self.weights[name]
            else:
                letter = name.rstrip("0123456789")
                parts[name] = self.weights[letter][int(name[len(letter) :])]
        slices, start = {}, 0
        for name, part in parts.items():
            slices[name] = slice(start, start + part.numel())
            start += part.numel()

        def unflatten(theta: Tensor) -> dict[str, Tensor]:
            found = {name: theta[slices[name]].view(part.shape) for name, part in parts.items()}
            if self.heads is None:
                return found
            stacked = {n: t for n, t in found.items() if n in "XC"}
            for letter in self.weights:
                rows = [found.get(f"{letter}{h}", self.weights[letter][h]) for h in range(self.heads)]
                stacked[letter] = torch.stack(rows)
            return stacked

        return torch.cat([part.reshape(-1) for part in parts.values()]), unflatten, slices

    def truth(self, part: str) -> Tensor:
        theta, unflatten, _ = self.flat()

        def outputs(t: Tensor) -> Tensor:
            return self.output(unflatten(t))

        if part == "total":
            return _hessian(lambda t: self.loss_of(outputs(t)), theta)
        f = outputs(theta).detach()
        if self.loss == "pair":
            end = self.tail(f).detach()
            scale = 1 / self.samples() if self.reduction == "mean" else 1.0
            if part == "outer":
                jacobian = autograd.jacobian(lambda t: self.tail(outputs(t)), theta).reshape(-1, len(theta))  # type: ignore[no-untyped-call]
                outer: Tensor = scale * jacobian.T @ jacobian
                return outer
            return _hessian(lambda t: scale * (end * self.tail(outputs(t))).sum(), theta)
        if part == "outer":
            jacobian = autograd.jacobian(outputs, theta).reshape(-1, len(theta))  # type: ignore[no-untyped-call]
            middle = _hessian(lambda x: self.loss_of(x.view(f.shape)), f.reshape(-1))
            sandwich: Tensor = jacobian.T @ middle @ jacobian
            return sandwich
        g = torch.autograd.grad(self.loss_of(f.requires_grad_()), f)[0].detach()
        return _hessian(lambda t: (g * outputs(t)).sum(), theta)

    def by_differences(self, v: Tensor) -> Tensor:
        """H v by central differences of the gradient, with one Richardson step."""
        theta, unflatten, _ = self.flat()

        def gradient(t: Tensor) -> Tensor:
            t = t.detach().requires_grad_()
            return torch.autograd.grad(self.loss_of(self.output(unflatten(t))), t)[0]

        def central(h: float) -> Tensor:
            return (gradient(theta + h * v) - gradient(theta - h * v)) / (2 * h)

        return (4 * central(5e-4) - central(1e-3)) / 3

    # What curvlens is given

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        value: Any = self.weights["V"] if self.rank is None else (self.weights["V"], self.weights["O"])
        keywords: dict[str, Any] = {
            "mask": self.mask,
            "temperature": self.temperature,
            "kind": self.kind,
            "context": self.context,
            "wrt": self.wrt,
            "reduction": self.reduction,
        }
        if self.loss == "square":
            keywords["target"] = self.target
        else:
            f = self.output({})
            g, s = self._at(f)
            keywords |= {"grad": g, "curvature": self._rooted(s) if self.root else s}
        front = (self.X, self.weights["QK"]) if self.single else (self.X, self.weights["Q"], self.weights["K"])
        return (*front, value), keywords

    def _rooted(self, s: Any) -> Any:
        if isinstance(s, tuple):
            return (self._rooted(s[0]), s[1])
        values, vectors = torch.linalg.eigh(s)
        return attention.Root(vectors * values.clamp(min=0).sqrt()[..., None, :])

    def _at(self, f: Tensor) -> tuple[Tensor, Any]:
        """Gradient and curvature of each sample's loss at each token, by autodiff token by token."""
        rows = f.reshape(-1, self.d_v)
        labels = self.labels.reshape(-1)

        def token(x: Tensor, label: Tensor) -> Tensor:
            if self.loss == "ce":
                return torch.nn.functional.cross_entropy(x @ self.unembedding, label) / self.length
            return (self.tail(x) ** 2).sum() / 2

        gradients, curvatures, outers = [], [], []
        for x, label in zip(rows, labels, strict=True):
            gradients.append(torch.autograd.grad(token(x.requires_grad_(), label), x)[0])
            curvatures.append(_hessian(lambda t, label=label: token(t, label), x.detach()))  # type: ignore[misc]
            j = autograd.jacobian(self.tail, x.detach())  # type: ignore[no-untyped-call]
            outers.append(j.T @ j)
        g = torch.stack(gradients).view(f.shape)
        s = torch.stack(curvatures).view(*f.shape, self.d_v)
        if self.loss == "ce":
            return g, s
        o = torch.stack(outers).view(*f.shape, self.d_v)
        return g, (o, s - o)


def _hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    result: Tensor = autograd.hessian(function, at.detach())  # type: ignore[no-untyped-call]
    return result
