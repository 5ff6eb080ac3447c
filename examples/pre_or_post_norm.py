"""Where the curvature of a Transformer sits, and how it moves with depth: norms before the layers, or behind them.

Two GPTs of six layers that differ in nothing else, at initialisation, on sums of numbers. For each: what every layer
contributes to the Hessian (`curvlens.profile`), the spectral norm of the block of each layer's parameters, and of the
Hessian with respect to the activations that leave it (`curvlens.propagation`). Takes some two minutes.

    pip install matplotlib
    python examples/pre_or_post_norm.py pre_or_post_norm.png
"""

from __future__ import annotations

import argparse
import sys
from typing import Literal

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import curvlens as cl
from curvlens.data import Addition
from curvlens.models import GPT, GPTConfig
from curvlens.results import Profile, Propagation

COLOURS = {"pre": "#2563eb", "post": "#d97706"}
Found = tuple[Profile, Propagation, dict[str, float]]


def measured(
    norm: Literal["pre", "post"], *, layers: int = 6, width: int = 16, sequences: int = 8, samples: int = 16
) -> Found:
    """The profile of a GPT, its curvature along depth, and the size of its stream; tells how far it is."""

    def tell(done: int, total: int | None) -> None:
        print(f"{norm}-LN: matrix {done} of {total}", file=sys.stderr)

    torch.manual_seed(0)
    task = Addition(digits=3)
    config = GPTConfig(vocab=12, context=task.context, n_layer=layers, n_head=2, d_model=width, norm=norm)
    model, batch = GPT(config).double().eval(), task.batch(sequences, seed=0)
    problem = cl.Problem(model, batch, cl.losses.CrossEntropy())
    print(f"{norm}-LN: profile", file=sys.stderr)
    profile = cl.profile(problem, samples=samples)
    return profile, cl.propagation(problem, samples=samples, progress=tell), stream(model, batch[0])


def stream(model: GPT, tokens: Tensor) -> dict[str, float]:
    """The standard deviation s of a token in the stream that leaves each layer, as a root mean square."""
    sizes: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        sizes[name] = float(x.var(-1, unbiased=False).mean().sqrt())

    hooks = [
        layer.register_forward_hook(lambda _module, _given, x, name=f"h.{i}": note(name, x))
        for i, layer in enumerate(model.h)
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return sizes


def report(norm: str, found: Found) -> None:
    """Print what was measured, and how the first layer compares with the last."""
    profile, depth, sizes = found
    functional, ggn = profile[""].total, profile.ggn
    norms = [float(part.frobenius) / float(profile.hessian.frobenius) for part in (functional, ggn)]
    print(f"{norm}-LN: share ⟨M, H⟩/‖H‖² of the functional part {functional.share}, of GGN {ggn.share}")
    print(f"‖functional part‖/‖H‖ {norms[0]:.2f}, ‖GGN‖/‖H‖ {norms[1]:.2f}")
    print("share of each layer's functional part, and size s of the stream that leaves it:")
    for name, size in sizes.items():
        print(f"  {name}  {profile[name].total.share!s:>15}  s = {size:.3f}")
    print(depth)
    levels = list(depth.levels.values())
    first, last = levels[0], levels[-1]
    for what in ("parameters", "activations"):
        a, b = (getattr(level, what)["hessian"] for level in (first, last))
        top, spectral = (float(getattr(a, x)) / float(getattr(b, x)) for x in ("top", "spectral"))
        print(f"{first.name} against {last.name}, by {what}: λ_max {top:.1f} times, ‖M‖₂ {spectral:.1f} times")
    print(f"1/s²: {(sizes[last.name] / sizes[first.name]) ** 2:.1f} times\n")


def draw(found: dict[str, Found], path: str) -> None:
    """Three panels: shares by layer, and spectral norms by parameters and by activations."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for i, (norm, (profile, depth, _)) in enumerate(found.items()):
        names = list(depth.levels)
        shares = [profile[name].total.share for name in names]
        places = [j + 0.38 * (i - 0.5) for j in range(len(names))]
        errors = [float(share.stderr) for share in shares]
        axes[0].bar(
            places, [float(share) for share in shares], 0.36, yerr=errors, color=COLOURS[norm], label=f"{norm}-LN"
        )
        for axis, what in ((axes[1], "parameters"), (axes[2], "activations")):
            for part, style in (("hessian", "-o"), ("ggn", ":s")):
                sizes = [float(getattr(level, what)[part].spectral) for level in depth.levels.values()]
                label = f"{norm}-LN, {'H' if part == 'hessian' else 'GGN'}"
                axis.plot(range(len(names)), sizes, style, color=COLOURS[norm], markersize=4, label=label)
    axes[0].set_title("share ⟨M, H⟩/‖H‖² of a layer's functional part", fontsize=10)
    axes[1].set_title("‖·‖₂ by the layer's parameters", fontsize=10)
    axes[2].set_title("‖·‖₂ by the activations that leave it", fontsize=10)
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
    for norm, found in results.items():
        report(norm, found)
    draw(results, path)
