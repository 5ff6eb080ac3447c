"""Transformers written plainly in torch, every step noted down, and their Hessians and parts by dense autodiff."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import functional as autograd

from curvlens import assembly

D = torch.float64
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
}


@dataclass
class Step:
    """One primitive as the plain network computed it."""

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    output: Tensor


@dataclass(eq=False, repr=False)
class Case:
    """Layers with random weights of scale 1/√d, inputs, and a loss; ``layers=0`` is one block without a stack."""

    layers: int = 0
    norm: str = "pre"
    heads: int = 1
    activation: str = "gelu"
    loss: str = "square"
    norm_kind: str = "layer"
    mask: Any = "causal"
    bias: bool = True
    d: int = 4
    inner: int = 6
    length: int = 3
    samples: int = 2
    classes: int = 5
    eps: float = 1e-5
    seed: int = 0
    weights: dict[str, Tensor] = field(init=False)
    steps: list[Step] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        d, m = self.d, self.inner
        self.weights = {}
        for prefix in [f"h.{i}." for i in range(self.layers)] or [""]:
            shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, m), "gate": (d, m), "down": (m, d)}
            if self.activation != "swiglu":
                del shapes["gate"]
            for n in (1, 2) if self.norm != "none" else ():
                self.weights[f"{prefix}norm{n}.scale"] = 1 + 0.3 * self.draw(d)
                if self.norm_kind == "layer":
                    self.weights[f"{prefix}norm{n}.shift"] = 0.3 * self.draw(d)
            for name, shape in shapes.items():
                # without norms states grow from layer to layer, and a saturated softmax loses digits in autodiff itself
                scale = 0.4 if self.norm == "none" else 1.0
                self.weights[prefix + name] = scale * self.draw(*shape) / math.sqrt(shape[0])
                if self.bias:
                    self.weights[f"{prefix}{name}_bias"] = 0.3 * self.draw(shape[1])
        if self.layers:
            if self.norm == "pre":
                self.weights["final_norm.scale"] = 1 + 0.3 * self.draw(d)
            self.weights["unembedding"] = self.draw(d, self.classes) / math.sqrt(d)
        width = self.classes if self.layers else d
        self.X = self.draw(self.samples, self.length, d)
        self.target = self.draw(self.samples, self.length, width)
        self.labels = torch.randint(width, (self.samples, self.length), generator=self._generator)
        self.labels[0, 0] = -100
        if self.mask == "bool":
            allowed = torch.rand(self.samples, self.length, self.length, generator=self._generator) < 0.5
            allowed[..., 0, :], allowed[..., 1:, 0] = False, True  # one query that may look at nothing
            self.mask = allowed

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=D)

    # What curvlens is given

    def network(self) -> assembly.Network:
        options: Any = {
            "heads": self.heads,
            "norm": self.norm,
            "norm_kind": self.norm_kind,
            "activation": self.activation,
            "mask": self.mask,
            "eps": self.eps,
        }
        if not self.layers:
            return assembly.block(self.weights, **options)
        layers: list[dict[str, Tensor]] = [{} for _ in range(self.layers)]
        for name, weight in self.weights.items():
            if name.startswith("h."):
                layers[int(name[2])][name[4:]] = weight
        final = {"scale": self.weights["final_norm.scale"]} if self.norm == "pre" else None
        return assembly.stack(layers, **options, final_norm=final, unembedding=self.weights["unembedding"])

    def loss_given(self) -> dict[str, Tensor]:
        return {"target": self.target} if self.loss == "square" else {"labels": self.labels}

    def hessian(self, wrt: Any = None) -> assembly.NetworkHessian:
        return self.network().hessian(self.X, **self.loss_given(), wrt=wrt)

    # The network, plainly

    def step(self, name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self.steps.append(Step(name, function, inputs, function(*inputs)))
        return self.steps[-1].output

    def outputs(self, w: dict[str, Tensor]) -> Tensor:
        self.steps = []
        x = w["X"]
        for prefix in [f"h.{i}." for i in range(self.layers)] or [""]:
            x = self.layer(w, prefix, x)
        if not self.layers:
            return x
        if self.norm == "pre":
            x = self.normed(w, "final_norm", x)
        return self.step("unembed", torch.matmul, x, w["unembedding"])

    def layer(self, w: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
        pre, post = self.norm == "pre", self.norm == "post"
        x = x + self.attention(w, prefix, self.normed(w, f"{prefix}norm1", x) if pre else x)
        x = self.normed(w, f"{prefix}norm1", x) if post else x
        x = x + self.feed_forward(w, prefix, self.normed(w, f"{prefix}norm2", x) if pre else x)
        return self.normed(w, f"{prefix}norm2", x) if post else x

    def product(self, w: dict[str, Tensor], prefix: str, path: str, name: str, x: Tensor) -> Tensor:
        z = self.step(f"{prefix}{path}.{name}", torch.matmul, x, w[prefix + name])
        return z + w[f"{prefix}{name}_bias"] if self.bias else z

    def normed(self, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        scale, shift = w[f"{name}.scale"], w.get(f"{name}.shift")
        if self.norm_kind == "rms":
            return self.step(name, lambda x, s: F.rms_norm(x, (self.d,), s, self.eps), x, scale)
        inputs = (x, scale) if shift is None else (x, scale, shift)
        return self.step(name, lambda x, s, b=None: F.layer_norm(x, (self.d,), s, b, self.eps), *inputs)

    def attention(self, w: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
        q, k, v = (
            self.product(w, prefix, "attn", name, x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for name in "qkv"
        )
        scores = self.step(f"{prefix}attn.scores", lambda q, k: q @ k.mT / math.sqrt(q.shape[-1]), q, k)
        a = self.step(f"{prefix}attn.softmax", self.softmax, scores)
        mixed = self.step(f"{prefix}attn.mix", torch.matmul, a, v)
        return self.product(w, prefix, "attn", "o", mixed.transpose(1, 2).flatten(2))

    def softmax(self, scores: Tensor) -> Tensor:
        if self.mask is None:
            return scores.softmax(-1)
        if isinstance(self.mask, Tensor):
            allowed = self.mask[:, None]
        else:
            allowed = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        dead = ~allowed.any(-1, keepdim=True)  # zero, and no NaN in any derivative
        return scores.masked_fill(~(allowed | dead), -torch.inf).softmax(-1) * ~dead

    def feed_forward(self, w: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
        phi = ACTIVATIONS[self.activation]
        z = self.product(w, prefix, "mlp", "up", x)
        if self.activation == "swiglu":
            opened = self.step(f"{prefix}mlp.activation", phi, self.product(w, prefix, "mlp", "gate", x))
            h = self.step(f"{prefix}mlp.gating", torch.mul, opened, z)
        else:
            h = self.step(f"{prefix}mlp.activation", phi, z)
        return self.product(w, prefix, "mlp", "down", h)

    def loss_of(self, outputs: Tensor) -> Tensor:
        if self.loss == "square":
            return F.mse_loss(outputs, self.target)
        return F.cross_entropy(outputs.flatten(0, 1), self.labels.flatten())

    # Truths, flat in the order of the weights, X last

    def flat(self) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
        parts = {**self.weights, "X": self.X}

        def unflatten(theta: Tensor) -> dict[str, Tensor]:
            pieces = torch.split(theta, [part.numel() for part in parts.values()])
            return {n: piece.view(part.shape) for (n, part), piece in zip(parts.items(), pieces, strict=True)}

        return torch.cat([part.reshape(-1) for part in parts.values()]), unflatten

    def total(self) -> Tensor:
        theta, unflatten = self.flat()
        return _hessian(lambda t: self.loss_of(self.outputs(unflatten(t))), theta)

    def ggn(self) -> Tensor:
        theta, unflatten = self.flat()
        theta.requires_grad_()
        outputs = self.outputs(unflatten(theta))
        middle = _hessian(lambda f: self.loss_of(f.view(outputs.shape)), outputs.detach().reshape(-1))
        jacobian = _jacobian(outputs, theta)
        return jacobian.T @ middle @ jacobian

    def parts(self) -> dict[str, Tensor]:
        """Tᵀ (λ·D²f) T of every step: T by autograd of its inputs, λ·D²f by the Hessian of ⟨λ, f⟩ with λ held fixed."""
        theta, unflatten = self.flat()
        theta.requires_grad_()
        loss = self.loss_of(self.outputs(unflatten(theta)))
        found: dict[str, Tensor] = {}
        for step in list(self.steps):
            (adjoint,) = torch.autograd.grad(loss, step.output, retain_graph=True)
            tangents = torch.cat([_jacobian(x, theta) for x in step.inputs])
            sizes = [x.numel() for x in step.inputs]

            def contracted(flat: Tensor, step: Step = step, sizes: list[int] = sizes, g: Tensor = adjoint) -> Tensor:
                pieces = torch.split(flat, sizes)
                given = [p.view(x.shape) for p, x in zip(pieces, step.inputs, strict=True)]
                return (g * step.function(*given)).sum()

            bent = _hessian(contracted, torch.cat([x.detach().reshape(-1) for x in step.inputs]))
            assert step.name not in found
            found[step.name] = tangents.T @ bent @ tangents
        return found

    def by_differences(self, v: Tensor) -> Tensor:
        """H v by central differences of the gradient, with one Richardson step."""
        theta, unflatten = self.flat()

        def gradient(t: Tensor) -> Tensor:
            t = t.detach().requires_grad_()
            return torch.autograd.grad(self.loss_of(self.outputs(unflatten(t))), t)[0]

        def central(h: float) -> Tensor:
            return (gradient(theta + h * v) - gradient(theta - h * v)) / (2 * h)

        return (4 * central(5e-4) - central(1e-3)) / 3


def _hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    result: Tensor = autograd.hessian(function, at.detach(), vectorize=True)  # type: ignore[no-untyped-call]
    return result


def _jacobian(outputs: Tensor, theta: Tensor) -> Tensor:
    """∂outputs/∂theta, (numel, len(theta)), one backward pass for each output, all at once."""
    flat = outputs.reshape(-1)
    if not flat.requires_grad:
        return flat.new_zeros(len(flat), len(theta))
    units = torch.eye(len(flat), dtype=D)
    (rows,) = torch.autograd.grad(flat, theta, units, retain_graph=True, is_grads_batched=True)
    return rows
