"""How much memory a second derivative of attention takes, by length: by tiles, and with every score written out.

Forward pass, gradient, and derivative of the gradient along a direction, of causal attention with four heads of size
64 in float32; each in a process of its own. Takes about a minute, and 8 GB for torch's kernel at 4096 tokens; needs
Linux.

    pip install matplotlib
    python examples/attention_memory.py attention_memory.png
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl

LENGTHS = (1024, 2048, 4096, 8192)
WAYS = {
    "tiles": ("curvlens.sdpa", "#2563eb", "o"),
    "math": ("torch, SDPBackend.MATH", "#d97706", "s"),
}


def product(way: str, length: int) -> None:
    """The derivative of the gradient along a direction."""
    q, k, v, w = (torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(4))
    with cl.second_order() if way == "tiles" else sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.autograd.grad(y, (q, k, v), w, create_graph=True)
    torch.autograd.grad(gradient, (q, k, v, w), [q, k, v])


def held(field: str) -> int:
    """Kilobytes that this process holds now (VmRSS), or held at most (VmHWM)."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def peak(way: str, length: int) -> float:
    """MiB at the highest point of this process, above what it held after a small product."""
    product(way, 300)  # libraries and kernels are no cost of it
    Path("/proc/self/clear_refs").write_text("5")  # the highest point is now
    before = held("VmRSS")
    product(way, length)
    return (held("VmHWM") - before) / 1024


def measured(way: str, length: int) -> float:
    """`peak` in a process of its own."""
    command = [sys.executable, __file__, "--one", way, str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def draw(found: dict[str, dict[int, float]], path: str) -> None:
    """Both curves, with the slopes of linear and quadratic growth."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for way, values in found.items():
        label, colour, marker = WAYS[way]
        axes.loglog(list(values), list(values.values()), color=colour, marker=marker, label=label)
        last, size = list(values.items())[-1]
        axes.annotate(f"{size:,.0f} MiB", (last, size), textcoords="offset points", xytext=(-4, 8), ha="right")
    first = min(LENGTHS)
    for power, name in ((1, "linear"), (2, "quadratic")):
        start = found["tiles" if power == 1 else "math"][first] * 0.6
        line = [start * (length / first) ** power for length in LENGTHS]
        axes.loglog(LENGTHS, line, color="#9ca3af", linestyle=":", linewidth=1)
        axes.annotate(name, (LENGTHS[-2], line[-2]), color="#6b7280", textcoords="offset points", xytext=(4, -14))
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel("peak memory of a second derivative, MiB")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="attention_memory.png")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--one", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(peak(options.one[0], int(options.one[1])))
        return
    found: dict[str, dict[int, float]] = {}
    for way in WAYS:
        for length in LENGTHS:
            if length <= (options.longest if way == "tiles" else min(options.longest, 4096)):
                found.setdefault(way, {})[length] = measured(way, length)
                print(f"{WAYS[way][0]}, {length} tokens: {found[way][length]:,.0f} MiB")
    draw(found, options.path)


if __name__ == "__main__":
    main()
