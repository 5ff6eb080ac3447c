"""The blocks of the value matrix with those of query and key, written together.

W_Q and W_K act through their product Ω = W_Q W_Kᵀ alone, and W_V does not know how Ω is factored: the blocks (Q, V) and
(K, V) are the one block (Ω, V), multiplied with W_K on one side and with W_Q on the other. Products of matrices write
them and their mirrors where they belong, with no copy between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvlens.calculus.attention.layer import Layer
from curvlens.calculus.terms import Term, Tokens


def pays(layer: Layer) -> bool:
    """Whether Ω is no larger than its factors, and tokens are enough for what is multiplied afterwards."""
    if layer.WK is None or layer.up is not None:
        return False
    (_, wide, key), tall = layer.WQ.shape, layer.keys.shape[2]
    tokens = layer.queries.shape[0] * layer.queries.shape[1]
    return key >= wide >= max(tall, layer.d_out) and tokens >= wide


def write_values(
    terms: Sequence[Term], x: Tensor, wq: Tensor, wk: Tensor, places: Mapping[str, Tensor], work: Tensor, more: Tensor
) -> None:
    """Write the blocks QV, KV, VQ and VK of one head to their places.

    ``terms`` are those of the block (K, V), all with the vector q on the axis d: without it, they are the derivative
    T_i[a, c, e] of one token. ``work`` and ``more`` are to calculate in, each as large as a block.
    """
    (wide, key), tall, values = wq.shape, wk.shape[0], places["QV"].shape[1]
    count, size = len(x), tall * values
    block = more[: wide * size].view(wide, size)
    parts = -(-count // (len(work) // size))  # of the tokens: their derivatives have to fit `work`
    for i in range(parts):
        some = slice(count * i // parts, count * (i + 1) // parts)
        flat = work[: (some.stop - some.start) * size].view(-1, size)
        derivative = flat.view(len(flat), tall, tall, -1)
        for j, term in enumerate(terms):
            assert isinstance(term, Tokens)
            if term.on_w == "c":
                first, second = term.w[some].unsqueeze(1).unsqueeze(3), term.matrix[some].unsqueeze(2)
            else:
                first, second = term.w[some].unsqueeze(1).unsqueeze(1), term.matrix[some].mT.unsqueeze(3)
            derivative.addcmul_(first, second) if j else torch.mul(first, second, out=derivative)
        block.addmm_(x[some].T, flat) if i else torch.mm(x[some].T, flat, out=block)
    by_query = block.view(wide, tall, values)
    by_key = by_query.transpose(0, 1)
    keys, queries = wk.expand(wide, tall, key), wq.expand(tall, wide, key)
    torch.bmm(keys.mT, by_query, out=places["QV"].view(wide, key, values))
    torch.bmm(queries.mT, by_key, out=places["KV"].view(tall, key, values))
    torch.bmm(by_query.mT, keys, out=places["VQ"].view(values, wide, key).transpose(0, 1))
    torch.bmm(by_key.mT, queries, out=places["VK"].view(values, tall, key).transpose(0, 1))
