"""Where the curvature of a Transformer sits, and how it moves with depth: norms before the layers, or behind them.

Two GPTs of six layers that differ in nothing else, at initialisation, on sums of numbers. For each: what every layer
contributes to the Hessian (`curvlens.profile`), the largest eigenvalue of the block of each layer's parameters, and of
the Hessian with respect to the activations that leave it (`curvlens.profiling.propagation`).

    pip install matplotlib
    python examples/pre_or_post_norm.py pre_or_post_norm.png
"""

from __future__ import annotations

import argparse
from typing import Literal

import matplotlib.pyplot as plt
import torch

import curvlens as cl
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig
from curvlens.profiling import propagation
from curvlens.results import Profile, Propagation

COLOURS = {"pre": "#2563eb", "post": "#d97706"}


def measured(
    norm: Literal["pre", "post"], *, layers: int = 6, width: int = 16, sequences: int = 8, samples: int = 8
) -> tuple[Profile, Propagation]:
    """The profile of a GPT, and its curvature along depth."""
    torch.manual_seed(0)
    task = Addition(digits=3)
    config = GPTConfig(vocab=12, context=task.context, n_layer=layers, n_head=2, d_model=width, norm=norm)
    problem = cl.Problem(GPT(config).double().eval(), task.batch(sequences, seed=0), cl.losses.CrossEntropy())
    return cl.profile(problem, samples=2 * samples), propagation(problem, samples=samples)


def draw(found: dict[str, tuple[Profile, Propagation]], path: str) -> None:
    """Three panels: shares by layer, and the largest eigenvalues by parameters and by activations."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for i, (norm, (profile, depth)) in enumerate(found.items()):
        names = list(depth.levels)
        shares = [profile[name].total.share for name in names]
        places = [j + 0.38 * (i - 0.5) for j in range(len(names))]
        errors = [float(share.stderr) for share in shares]
        axes[0].bar(
            places, [float(share) for share in shares], 0.36, yerr=errors, color=COLOURS[norm], label=f"{norm}-LN"
        )
        for axis, what in ((axes[1], "parameters"), (axes[2], "activations")):
            for part, style in (("hessian", "-o"), ("ggn", ":s")):
                tops = [float(getattr(level, what)[part].top) for level in depth.levels.values()]
                label = f"{norm}-LN, {'H' if part == 'hessian' else 'GGN'}"
                axis.plot(range(len(names)), tops, style, color=COLOURS[norm], markersize=4, label=label)
    axes[0].set_title("share ⟨M, H⟩/‖H‖² of a layer's functional part", fontsize=10)
    axes[1].set_title("λ_max by the layer's parameters", fontsize=10)
    axes[2].set_title("λ_max by the activations that leave it", fontsize=10)
    for axis in axes:
        axis.set_xlabel("layer")
        axis.set_xticks(range(len(names)))
        axis.legend(fontsize=8, frameon=False)
    for axis in axes[1:]:
        axis.set_yscale("log")
    axes[0].axhline(0, color="black", linewidth=0.6)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the curvature of pre-LN and post-LN Transformers by layer.")
    parser.add_argument("path", nargs="?", default="pre_or_post_norm.png", help="the picture to write")
    path = parser.parse_args().path
    results = {norm: measured(norm) for norm in ("pre", "post")}
    for norm, (profile, depth) in results.items():
        print(f"{norm}-LN: functional share {float(profile[''].total.share):.2f}, GGN {float(profile.ggn.share):.2f}")
        print(depth, end="\n\n")
    draw(results, path)
