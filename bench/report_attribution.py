"""Tables of the profiler, and of closed forms put together to a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.tables import Table

Results = Mapping[str, Any]

PROBE_TARGET = 8.0
MEMORY_TARGET = 3.0
BLOCK_TARGET = 5.0


def targets(results: Results) -> list[tuple[str, float | None, float, bool]]:
    """(what, measured, limit, whether it is an upper limit)."""
    data = results["attribution"]
    cost = None if "not_run" in data else data["profile"]
    block = results["assembly"]
    faster = None if "not_run" in block else block["faster"]["torch"]
    return [
        ("closed-form Hessian of a Transformer block, times faster than torch.func", faster, BLOCK_TARGET, False),
        ("one probe of a profile, over all modules", cost, PROBE_TARGET, True),
        ("memory of a profile, in products with H", _memory(results), MEMORY_TARGET, True),
    ]


def _memory(results: Results) -> float | None:
    data = results["attribution_memory"]
    if any("not_run" in row for row in data.values()):
        return None
    return float(data["profile"]["megabytes"] / data["product"]["megabytes"])


def tables(results: Results) -> list[Table]:
    """A block in closed form; what a probe costs, and what of it is what."""
    return [_block(results["assembly"]), _profile(results)]


def _block(data: Results) -> Table:
    title, head = "Dense Hessian of a Transformer block", ["Way", "seconds", "in closed forms", "error"]
    if "not_run" in data:
        return Table(title, head, [["not run", str(data["not_run"]), "", ""]])
    names = {
        "closed": "closed forms",
        "torch": "torch.func.hessian, norms written out",
        "torch_fused": "torch.func.hessian, F.layer_norm",
    }
    rows = [
        [label, f"{data['seconds'][key]:.3f}", f"{data['faster'][key]:.1f}", f"{data['off'][key]:.0e}"]
        for key, label in names.items()
    ]
    notes = [
        f"Pre-LN, one head, GELU, d = 16, MLP 64, 17 tokens, {data['parameters']} parameters, float64, square loss, "
        "one thread; all take turns, a ratio is the median of the turns' ratios. Errors are those of a product, "
        "against reverse over reverse: torch.func.hessian is forward over reverse, and wrong through F.layer_norm in "
        "torch 2.13."
    ]
    return Table(title, head, rows, notes)


def _profile(results: Results) -> Table:
    data, memory = results["attribution"], results["attribution_memory"]
    head = ["Step", "gradients", "peak memory"]
    if "not_run" in data:
        return Table("A profile", head, [["not run", str(data["not_run"]), ""]])
    held = {key: f"{row['megabytes']:.0f} MiB" if "not_run" not in row else "not run" for key, row in memory.items()}
    rows = [
        [f"**a probe, of {data['samples']} in a profile, all in all**", f"**{data['profile']:.1f}**", held["profile"]],
        ["cut forward pass and adjoints, once a profile", f"{data['build']:.1f}", ""],
        ["product with H, by which the sum is checked", f"{data['product']:.1f}", held["product"]],
        ["tangents along a probe, and second derivatives of all modules", f"{data['probe']:.1f}", ""],
        ["tangents along H times a probe", f"{data['tangent']:.1f}", ""],
    ]
    notes = [
        f"{data['rows']} rows; they add up to the quadratic form of H within {data['mismatch']:.0e} of the sum of "
        "their sizes, in float32."
    ]
    return Table("A profile", head, rows, notes)
