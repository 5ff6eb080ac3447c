"""The heat map of Figure 1: log₁₀ |H| of the query, key and value weights of one Transformer block at initialisation.

The model adds numbers of five digits: causal attention with one head, skip, ReLU MLP, skip, unembedding, cross-entropy
of the answer; d = 16, MLP 64, 64 sequences, embeddings of standard deviation 0.2, weights N(0, 0.64/d). Attention's
Hessian is exact, in closed form.

    pip install matplotlib
    python examples/attention_heatmap.py heatmap.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from curvlens.calculus import attention
from curvlens.calculus.attention import AttentionHessian
from curvlens.data import Addition

D = torch.float64


def hessian(
    width: int = 16,
    samples: int = 64,
    sigma: float = 0.2,
    kind: Literal["softmax", "linear"] = "softmax",
    seed: int = 0,
) -> AttentionHessian:
    """The Hessian of the model's loss by W_Q, W_K and the value's two factors."""
    draws = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.8 / width**0.5) -> Tensor:
        return scale * torch.randn(*shape, generator=draws, dtype=D)

    task = Addition()
    ids, labels = task.batch(samples, seed=seed)
    embed, pos = draw(task.vocab, width, scale=sigma), draw(task.context, width, scale=sigma)
    WQ, WK, WV, WO = (draw(width, width) for _ in range(4))
    up, down, unembed = draw(width, 4 * width), draw(4 * width, width), draw(width, task.vocab)

    x = embed[ids] + pos
    y = x + attention.forward(x, WQ, WK, (WV, WO), mask="causal", kind=kind)
    hidden = y @ up
    logits = (y + hidden.relu() @ down) @ unembed
    # From the output of attention to the logits everything is linear where the ReLUs stand as they do.
    jacobian = unembed + up @ ((hidden > 0)[..., None] * (down @ unembed))
    p = logits.softmax(-1)
    counted = (labels >= 0)[..., None].to(D)
    target = torch.nn.functional.one_hot(labels.clamp(min=0), task.vocab).to(D)
    share = counted / counted.sum(1, keepdim=True)
    grad = share * (jacobian @ (p - target)[..., None]).squeeze(-1)
    root = jacobian * p.sqrt()[..., None, :] - (jacobian @ p[..., None]) * p.sqrt()[..., None, :]
    curvature = share[..., None] * (root @ root.mT)
    return attention.hessian(x, WQ, WK, (WV, WO), grad=grad, curvature=curvature, mask="causal", kind=kind)


def draw(H: AttentionHessian, path: str) -> None:
    """log₁₀ of the absolute entries of the blocks Q, K and V, and their medians."""
    names = ("Q", "K", "V")
    rows = torch.cat([torch.cat([H.total[a, b] for b in names], 1) for a in names])
    size = rows.shape[0] // 3
    figure, axes = plt.subplots(figsize=(6.4, 5.2), layout="constrained")
    image = axes.imshow(rows.abs().clamp(min=1e-12).log10().numpy(), cmap="magma", vmin=-10, vmax=-2)
    ticks = [size * (i + 0.5) for i in range(3)]
    axes.set_xticks(ticks, [f"$W_{name}$" for name in names])
    axes.set_yticks(ticks, [f"$W_{name}$" for name in names])
    axes.tick_params(length=0)
    for edge in (size - 0.5, 2 * size - 0.5):
        axes.axhline(edge, color="white", linewidth=0.8)
        axes.axvline(edge, color="white", linewidth=0.8)
    medians = {name: float(H.total[name].abs().log10().median()) for name in ("Q", "V")}
    shown = f"{medians['Q']:.1f} (Q), {medians['V']:.1f} (V)"
    axes.set_title(f"Hessian of attention: median $\\log_{{10}}|H|$ is {shown}", fontsize=10)
    figure.colorbar(image, label="$\\log_{10}|H_{ij}|$", shrink=0.85)
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw log₁₀ |H| of the attention weights of one Transformer block.")
    parser.add_argument("path", nargs="?", default="heatmap.png", help="the picture to write (default: heatmap.png)")
    path = parser.parse_args().path
    if not Path(path).absolute().parent.is_dir():
        parser.error(f"there is no folder {Path(path).parent} for {Path(path).name}")
    draw(hessian(), path)
