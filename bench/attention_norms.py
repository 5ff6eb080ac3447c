"""Norms of the Q and V blocks of H, its outer and its functional part: exact, and by 20 probes with curvlinops.

The model of the paper's Figure 3a: causal attention with W_V and W_O, skip, ReLU MLP, skip, unembedding, cross-entropy
of the answer's digits; d = 128, 64 sequences of 17 tokens.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.child import serve
from bench.methods import reason
from bench.timing import seconds
from curvlens.calculus import attention
from curvlens.data import Addition

PROBES = 20
Norms = dict[str, float]


class Block(nn.Module):
    """One block, whose outputs are the logits of the tokens that count."""

    def __init__(self, width: int, sigma: float, dtype: torch.dtype) -> None:
        super().__init__()
        task = Addition()

        def draw(*shape: int, scale: float = 0.8 / width**0.5) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, dtype=dtype))

        self.embed, self.pos = draw(task.vocab, width, scale=sigma), draw(task.context, width, scale=sigma)
        self.q, self.k, self.v, self.o = (draw(width, width) for _ in range(4))
        self.up, self.down, self.unembed = draw(width, 4 * width), draw(4 * width, width), draw(width, task.vocab)
        self.counted = slice(2 * task.digits + 1, task.context)

    def tokens(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed[ids] + self.pos
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        scores = x @ self.q @ (x @ self.k).mT / self.q.shape[1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = x + scores.masked_fill(future, -torch.inf).softmax(-1) @ (x @ self.v) @ self.o
        z = y + (y @ self.up).relu() @ self.down
        logits: Tensor = (z @ self.unembed)[:, self.counted]
        return logits.flatten(0, 1)


def exact(model: Block, ids: Tensor, labels: Tensor) -> Norms:
    """The closed form: gradient and curvature of each token's loss at the output of attention, then norms."""
    with torch.no_grad():
        x = model.tokens(ids)
        of = attention.forward(x, model.q, model.k, (model.v, model.o), mask="causal")[:, model.counted]
        y = x[:, model.counted] + of
        hidden = y @ model.up
        logits = (y + hidden.relu() @ model.down) @ model.unembed
        # the Jacobian from the output of attention to the logits, (…, vocabulary, d)
        jacobian = model.unembed.T + ((hidden > 0)[..., None, :] * (model.down @ model.unembed).T) @ model.up.T
        p = logits.softmax(-1)
        share = 1 / labels[:, model.counted].shape[1]
        target = nn.functional.one_hot(labels[:, model.counted], p.shape[-1]).to(p.dtype)
        g = share * ((p - target)[..., None, :] @ jacobian).squeeze(-2)
        back = (p.sqrt()[..., None] * (jacobian - p[..., None, :] @ jacobian)).mT
        grad, root = torch.zeros_like(x), x.new_zeros(*x.shape, p.shape[-1])
        grad[:, model.counted], root[:, model.counted] = g, share**0.5 * back
        S = attention.Root(root)
        H = attention.hessian(x, model.q, model.k, (model.v, model.o), grad=grad, curvature=S, mask="causal")
        return {f"{block} {part}": H.norm(block, part) for block in "QV" for part in ("total", "outer", "functional")}


def probes(model: Block, ids: Tensor, labels: Tensor) -> Norms:
    """√E‖A z‖² over 20 vectors of signs, with curvlinops' operators of one parameter at a time."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    data = [(ids, labels[:, model.counted].flatten())]
    found: Norms = {}
    for block, parameter in (("Q", model.q), ("V", model.v)):
        make: Any = {"params": [parameter], "data": data}
        operators: list[Any] = [
            kind(model, nn.CrossEntropyLoss(), make["params"], make["data"], check_deterministic=False)
            for kind in (HessianLinearOperator, GGNLinearOperator)
        ]
        sums = {"total": 0.0, "outer": 0.0, "functional": 0.0}
        for _ in range(PROBES):
            z = torch.randint(2, (parameter.numel(),)).to(parameter.dtype) * 2 - 1
            h, g = (operator @ z for operator in operators)
            for part, product in (("total", h), ("outer", g), ("functional", h - g)):
                sums[part] += float(product.double().square().sum()) / PROBES
        found |= {f"{block} {part}": total**0.5 for part, total in sums.items()}
    return found


def measure(*, quick: bool, repetitions: int = 5) -> dict[str, Any]:
    """Seconds of both ways in both precisions, and how far the probes are off."""
    return {
        str(dtype).removeprefix("torch."): _compared(dtype, quick, 1 if quick else repetitions)
        for dtype in (torch.float32, torch.float64)
    }


def _compared(dtype: torch.dtype, quick: bool, repetitions: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Block(16 if quick else 128, 0.2, dtype)
    ids, labels = Addition().batch(8 if quick else 64, seed=0)
    truth = exact(model, ids, labels)
    entry: dict[str, Any] = {"exact": median(seconds(lambda: exact(model, ids, labels)) for _ in range(3))}
    try:
        guess = probes(model, ids, labels)
        times = [
            (
                median(seconds(lambda: exact(model, ids, labels)) for _ in range(3)),
                seconds(lambda: probes(model, ids, labels)),
            )
            for _ in range(repetitions)
        ]
        entry |= {"exact": median(fast for fast, _ in times), "probes": median(slow for _, slow in times)}
        entry["faster"] = median(slow / fast for fast, slow in times)
        entry["off"] = {name: guess[name] / value - 1 for name, value in truth.items() if value}
    except Exception as error:
        entry["not_run"] = reason(error)
    return {**entry, "norms": truth}


if __name__ == "__main__":
    serve(measure)
