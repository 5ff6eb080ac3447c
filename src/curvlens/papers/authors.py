"""The networks behind the paper's published figures, drawn again from their seeds.

The authors' notebook (dalab/transformer-hessian on GitHub) fixes every random number: one batch of 64 additions
for all networks; the weights of repeat r from the seed 1234 + r, on the CPU, in the order of TransformerLens; token and
position embeddings new at every σ, on the GPU. So the networks whose norms were published can be had again, and their
norms exactly, where the published ones are from 20 random probes in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig
from curvlens.papers.cuda_draws import normal
from curvlens.papers.setting import SEQUENCES, Layer
from curvlens.papers.sweeps import grid

SEED = 1234
WIDTH, REPEATS = 128, 20
CONTEXT = 18
"""Places that a position embedding is drawn for; the last one is never used."""
SIGMAS = tuple(grid(0.01, 10, 20))
SHORT = tuple(grid(0.1, 1, 20))
"""Of linear attention."""


@dataclass(frozen=True)
class Network:
    """What does not change with σ, in float64."""

    layers: list[Layer]
    unembed: Tensor


def batch() -> tuple[Tensor, Tensor]:
    """The one batch, (tokens, labels).

    With a chance of one in five, the notebook makes one digit in five a complement to nine. Run from top to bottom, it
    does not; it would move the slopes of Figure 3a by 0.002.
    """
    task = Addition()
    generator = torch.Generator().manual_seed(SEED)
    places = 10 ** torch.arange(task.digits - 1, -1, -1)
    digits = [torch.randint(10, (SEQUENCES, task.digits), generator=generator) for _ in range(2)]
    return task.of(torch.stack([(each * places).sum(1) for each in digits], 1))


def network(repeat: int, depth: int = 1, width: int = WIDTH, *, mlp: bool = True) -> Network:
    """The weights of a repeat, N(0, 0.64/d), with an MLP of width 4 d or none; embeddings drawn with them are not used.

    Figure 7 is of attention alone in the paper's text, and has an MLP in the notebook. The published slopes of H in the
    first of two layers, 12.4 to 12.6, are those of attention alone (12.41 and 12.61; with an MLP 13.10 and 13.27).
    """
    generator = torch.Generator().manual_seed(SEED + repeat)
    scale = 0.8 / math.sqrt(width)

    def draw(*shape: int) -> Tensor:
        return torch.empty(*shape).normal_(std=scale, generator=generator).double()

    vocab = Addition().vocab
    draw(vocab, width), draw(CONTEXT, width)
    layers = []
    for _ in range(depth):
        q, o, k, v = (draw(width, width) for _ in range(4))
        hidden = 4 * width if mlp else 0
        layers.append(Layer(q, k, v, o, draw(width, hidden), draw(hidden, width)))
    return Network(layers, draw(width, vocab))


def gpt(network: Network, tables: tuple[Tensor, Tensor], *, linear: bool = False) -> GPT:
    """A network with its embeddings as the reference GPT; linear attention has no skip, as in Figure 7."""
    config = GPTConfig(
        vocab=Addition().vocab,
        context=len(tables[1]),
        n_layer=len(network.layers),
        n_head=1,
        d_model=tables[0].shape[1],
        d_mlp=network.layers[0].up.shape[1],
        norm="none",
        activation="relu",
        bias=False,
        attention="linear" if linear else "softmax",
        attention_skip=not linear,
    )
    state = {"embed": tables[0], "pos": tables[1], "unembed": network.unembed.mT}
    for number, layer in enumerate(network.layers):
        attention = {name: getattr(layer, name).mT for name in ("q", "k", "v", "o")}
        state |= {f"h.{number}.attn.{name}": weight for name, weight in attention.items()}
        if layer.up.numel():
            state |= {f"h.{number}.mlp.up": layer.up.mT, f"h.{number}.mlp.down": layer.down.mT}
    model = GPT(config).double().eval()
    model.load_state_dict({f"{name}.weight": value for name, value in state.items()})
    return model


def embeddings(repeat: int, place: int, sigma: float, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Of tokens and positions, at the σ that comes at a place of its grid: two calls a place, whatever the depth."""
    task = Addition()
    tables = []
    for number, rows in enumerate((task.vocab, CONTEXT)):
        drawn = normal(rows * width, seed=SEED + repeat, call=2 * place + number)
        tables.append(torch.from_numpy(np.float32(sigma) * drawn).view(rows, width).double())
    return tables[0], tables[1][: task.context]
