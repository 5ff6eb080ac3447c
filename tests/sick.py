"""Models and data with one ailment each, and what plain torch makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from small import direction, gpt, tokens_and_labels

TOKENS, LABELS = tokens_and_labels()
ANGLES = torch.linspace(0.1, 1.0, 7, dtype=torch.float32)


class Wrapped(nn.Module):
    """A GPT, and something done to its logits."""

    def __init__(self, then: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.inner = gpt(**options)
        self.then = then

    def forward(self, tokens: Tensor) -> Tensor:
        return self.then(self.inner(tokens))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor] = (TOKENS, LABELS)) -> Tensor:
    """The mean cross-entropy, by torch alone."""
    tokens, labels = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def plain_product(model: nn.Module, loss: Callable[[nn.Module], Tensor], seed: int = 1) -> Tensor:
    """H v by torch alone, with attention that can be differentiated twice."""
    parameters = list(model.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradient = torch.autograd.grad(loss(model), parameters, create_graph=True, materialize_grads=True)
    flat = torch.cat([g.reshape(-1) for g in gradient])
    product = torch.autograd.grad(flat @ direction(flat.numel(), seed).to(flat), parameters, materialize_grads=True)
    return torch.cat([p.reshape(-1) for p in product]).detach()


class Bare(nn.Module):
    """One parameter, and no module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.2, 0.5]).double())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).sin()


# Modes


def dropping(drop: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), drop or nn.Dropout(0.3), nn.Linear(4, 7)).double()


class DropPath(nn.Module):
    """Stochastic depth as timm writes it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.rand(len(x), *(1,) * (x.ndim - 1), dtype=x.dtype) > self.drop_prob
        return x * keep / (1 - self.drop_prob)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


# Data


class Augmented:
    """The first batch holds still, the second is noise of its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        yield TOKENS, LABELS
        yield torch.randint(7, TOKENS.shape, generator=self.generator), LABELS


# Precision


class Float32(nn.Module):
    """x, by way of float32 that is not asked for by name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.angles: Tensor
        self.register_buffer("angles", ANGLES)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "new tensor":
            rows = torch.zeros(x.shape)
            rows[:] = x
            return rows.double()
        if self.way == "numpy":
            return x * torch.from_numpy(np.cos(np.arange(7)).astype(np.float32))
        return x * self.angles.cos()  # in float32, then promoted


def with_island(way: str) -> nn.Module:
    """Built in float64, with a layer put into it later; only the buffer is float32."""
    model = Wrapped(Float32(way))
    if way != "buffer":
        model.double()
    return model


def exactly(x: Tensor, way: str) -> Tensor:
    """What `Float32` would do without float32."""
    if way == "new tensor":
        return x
    if way == "numpy":
        return x * torch.arange(7).double().cos()
    return x * ANGLES.double().cos()


# Numerics


def decided(size: float) -> nn.Module:
    """A GPT whose queries are so large that attention has decided."""
    model = gpt(seed=1, d_model=8)
    with torch.no_grad():
        dict(model.named_parameters())["h.0.attn.q.weight"].mul_(size)
    return model


def faint(size: float, eps: float = 1e-5) -> nn.Module:
    """A GPT whose embeddings are so small that the first norm sees its ε only."""
    model = gpt(eps=eps)
    with torch.no_grad():
        model.embed.weight.mul_(size)
        model.pos.weight.mul_(size)
    return model


class Root(nn.Module):
    """NaN where x is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


# Parameters


class Linear8bitLt(nn.Module):
    """A linear layer with int8 weights, called as bitsandbytes calls it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().max() / 127
        self.scale = float(scale)
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


class Offloading:
    """A hook as accelerate leaves it on a module."""

    offload = True


class Idle(Wrapped):
    """A GPT with a layer nobody calls."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.idle = nn.Linear(2, 3).double()


# Kernels


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos()  # type: ignore[no-any-return]


class _Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.detach().cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.slope  # type: ignore[no-any-return]


def once(x: Tensor) -> Tensor:
    """sin x, without a second derivative."""
    return _Once.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def detached(x: Tensor) -> Tensor:
    """sin x, with a first derivative that is right and a second that lacks −sin x."""
    return _Detached.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Table(nn.Module):
    """An embedding with a padding row that is an ordinary token, and an unembedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 4, padding_idx=3).double(), nn.Linear(4, 7, bias=False).double()
        nn.init.normal_(self.embed.weight)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens).tanh())
        return y


class Gated(Table):
    """A gate that gradients do not pass, if they are stopped."""

    def __init__(self, *, stop: bool) -> None:
        super().__init__(tied=False)
        self.embed.padding_idx = None
        self.stop = stop

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gate = x.sigmoid()
        y: Tensor = self.head(x * (gate.detach() if self.stop else gate))
        return y


class Checkpointed(nn.Module):
    """A layer computed anew in the backward pass, if it is to be."""

    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.anew = anew
        self.embed, self.head = nn.Embedding(7, 4).double(), nn.Linear(4, 7).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).tanh()
        y: Tensor = checkpoint(self.head, h, use_reentrant=True) if self.anew else self.head(h)
        return y


def flash(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
    """Causal attention of a Hugging Face model by torch's fused CPU kernel itself."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return out.transpose(1, 2).contiguous(), None


KINKED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "product with a comparison": lambda h: h * (h > 0),
    "root of a square": lambda h: h.square().sqrt(),
    "maximum": lambda h: torch.maximum(h, torch.zeros_like(h)),
    "largest of two": lambda h: torch.stack([h, -h]).max(0).values,
    "clamp": lambda h: h.clamp(min=-0.1, max=0.1),
    "where": lambda h: torch.where(h > 0, h, h.expm1()),
}


def kinked(kind: str, width: int = 1000) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A wide layer with kinks: nearly every step from here crosses some."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, width), nn.Linear(width, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(KINKED[kind](self.up(x)) / math.sqrt(width))
            return y

    torch.manual_seed(0)
    x = direction(6 * 8).view(6, 8)
    return Model().double(), (x, x[:, :1])
