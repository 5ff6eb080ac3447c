"""The closed-form Hessian of attention beside automatic differentiation: dense matrix, product, memory, and norms."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian

from bench.measuring import peak, ratio, reason, seconds, turns
from bench.tables import Results, Table, Target, absent, absent_table, value
from curvlens.calculus import attention
from curvlens.data import Addition

LENGTHS = (17, 64, 128)
WIDTH = 16
PROBES = 20
DENSE_TARGETS = {"17": 10.0, "64": 40.0, "128": 100.0}
PRODUCT_TARGET = 4.0
NORMS_TARGET = 20.0
MEMORY_TARGET = 3.0
Norms = dict[str, float]


# Dense matrix and product


def problem(length: int, width: int) -> tuple[Tensor, ...]:
    """Tokens, targets and W_Q, W_K, W_V, in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw(length, width), draw(length, width), *(draw(width, width) / width**0.5 for _ in range(3))


def dense(*, quick: bool, length: int, repetitions: int = 15) -> dict[str, Any]:
    """Seconds of every way for one sample, d_V = d_K = 16, square loss; all take turns.

    One process a length, since what was freed before makes torch.func faster or slower.
    """
    X, Y, WQ, WK, WV = problem(length, WIDTH)
    theta = torch.cat([w.reshape(-1) for w in (WQ, WK, WV)])

    def loss(t: Tensor) -> Tensor:
        q, k, v = t.view(3, WIDTH, WIDTH)
        scores: Tensor = X @ q @ k.T @ X.T / WIDTH**0.5
        apart: Tensor = scores.softmax(-1) @ X @ v - Y
        return (apart**2).mean()

    def closed() -> Tensor:
        return attention.hessian(X, WQ, WK, WV, target=Y).total.dense()

    def by_torch() -> Tensor:
        matrix: Tensor = hessian(loss)(theta)
        return matrix

    disagreement = float((closed() - by_torch()).norm() / by_torch().norm())
    H = attention.hessian(X, WQ, WK, WV, target=Y)
    v, at = torch.randn_like(theta), theta.clone().requires_grad_()
    (kept,) = torch.autograd.grad(loss(at), at, create_graph=True)

    def fresh() -> Tensor:
        (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
        return torch.autograd.grad(gradient, at, v)[0]

    ways: dict[str, Callable[[], Tensor]] = {
        "dense": closed,
        "dense_torch": by_torch,
        "product": lambda: H.matvec(v),
        "product_fresh": fresh,
        "product_kept": lambda: torch.autograd.grad(kept, at, v, retain_graph=True)[0],
    }
    for way in ways.values():
        way()
    calls = {name: 3 if name == "dense_torch" else 20 for name in ways}
    times = turns(ways, 3 if quick else repetitions, calls)
    return {
        **{name: median(values) for name, values in times.items()},
        "dense_faster": ratio(times["dense_torch"], times["dense"]),
        "product_faster": ratio(times["product_fresh"], times["product"]),
        "disagreement": disagreement,
    }


def memory(*, quick: bool) -> dict[str, Any]:
    """MiB of the dense matrix, of one block, and of the peak above what the process held before the assembly."""
    width, length = (16, 17) if quick else (40, 64)
    X, Y, WQ, WK, WV = problem(length, width)
    few = slice(0, 4)  # kernels and imports are no cost of the assembly
    attention.hessian(X[:, few], WQ[few, few], WK[few, few], WV[few, few], target=Y[:, few]).total.dense()
    size = width**2
    return {
        "megabytes": peak(lambda: attention.hessian(X, WQ, WK, WV, target=Y).total.dense()),
        "output": (3 * size) ** 2 / 2**17,
        "block": size**2 / 2**17,
        "width": width,
    }


# Norms


class Block(nn.Module):
    """The model of the paper's Figure 3a; its outputs are the logits of the tokens that count.

    Causal attention with W_V and W_O, skip, ReLU MLP, skip, unembedding, for cross-entropy of the answer's digits.
    """

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


def norms(*, quick: bool, repetitions: int = 5) -> dict[str, Any]:
    """Norms of the Q and V blocks of H, its outer and its functional part: seconds of both ways, and how far off."""
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


# In the report


def targets(results: Results) -> list[Target]:
    """Times faster, and memory."""
    data, found, held = (results[name] for name in ("attention", "attention_norms", "attention_memory"))
    lengths = [value(row, "product_faster") for row in data.values()]
    precisions = [value(found, dtype, "faster") for dtype in ("float32", "float64")]
    beyond = None if "not_run" in held else (held["megabytes"] - held["output"]) / held["block"]
    closed = "closed-form attention Hessian, {} tokens, times faster than torch.func"
    return [
        *(
            Target(closed.format(length), value(data.get(length, {"not_run": ""}), "dense_faster"), limit)
            for length, limit in DENSE_TARGETS.items()
        ),
        Target(
            "its product, times faster than a double backward (least of all lengths)", least(lengths), PRODUCT_TARGET
        ),
        Target("block norms, times faster than 20 probes with curvlinops", least(precisions), NORMS_TARGET),
        Target("memory of the assembly beyond its output, in blocks", beyond, MEMORY_TARGET, below=True),
    ]


def least(values: list[float | None]) -> float | None:
    """The smallest, if all were measured."""
    known = [x for x in values if x is not None]
    return min(known) if len(known) == len(values) else None


def dense_table(results: Results) -> Table:
    """By length."""
    data = results["attention"]
    title = "Closed-form Hessian of attention"
    head = [
        "Tokens",
        "dense",
        "torch.func.hessian",
        "faster by",
        "product",
        "double backward",
        "faster by",
        "graph kept",
    ]
    rows = []
    for length, row in data.items():
        if "not_run" in row:
            rows.append([length, *absent(row, 7)])
            continue
        rows.append(
            [
                length,
                f"{row['dense'] * 1e3:.2f} ms",
                f"{row['dense_torch'] * 1e3:.1f} ms",
                f"{row['dense_faster']:.1f}×",
                f"{row['product'] * 1e6:.0f} µs",
                f"{row['product_fresh'] * 1e6:.0f} µs",
                f"{row['product_faster']:.1f}×",
                f"{row['product_kept'] * 1e6:.0f} µs",
            ]
        )
    worst = max((row["disagreement"] for row in data.values() if "not_run" not in row), default=0.0)
    notes = [
        "One sample, d_V = d_K = 16, float64, square loss, one thread, a process for each length; all ways take turns, "
        "a ratio is the median of the turns' ratios. “double backward” builds the gradient's graph for each product, "
        f"“graph kept” has it. The dense matrices agree to {worst:.0e}."
    ]
    return Table(title, head, rows, notes)


def norms_table(results: Results) -> Table:
    """By precision."""
    data = results["attention_norms"]
    title = "Norms of the Q and V blocks of H, outer and functional part"
    head = ["Precision", "closed form, exact", "20 probes with curvlinops", "faster by", "error of the probes"]
    if "not_run" in data:
        return absent_table(title, data, head)
    rows = []
    for dtype, row in data.items():
        if "not_run" in row:
            rows.append([dtype, f"{row['exact']:.3f} s", *absent(row, 3)])
            continue
        off = max(abs(value) for value in row["off"].values())
        times = [f"{row['exact']:.3f} s", f"{row['probes']:.2f} s", f"{row['faster']:.0f}×"]
        rows.append([dtype, *times, f"up to {off:.0%}"])
    notes = [
        "The paper's Figure 3a: causal attention, skip, ReLU MLP, skip, unembedding, cross-entropy; d = 128, 64 "
        "sequences of 17 tokens, 2 threads. Both ways start at the weights; H − G gives the probes' functional part."
    ]
    return Table(title, head, rows, notes)
