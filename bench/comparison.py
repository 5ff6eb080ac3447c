"""The table of the README: what was measured beside other libraries, from ``results.json``.

``python -m bench.comparison`` writes it into the README.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- comparison: python -m bench.comparison -->", "<!-- end -->"
ROWS = {"curvlens": "ours-h", "curvlinops": "curvlinops-h", "PyHessian": "pyhessian-n", "eigenthings": "eigenthings-h"}
"""Each library's Hessian over several batches."""
HAVE = {
    "[blocks](tests/blocks/test_blocks.py)": ("layer, role, head", "parameters", "no", "parameters"),
    "[errors of estimates](tests/linalg/test_estimators.py)": ("all", "no", "no", "traces"),
    "[curvature of every module](tests/profiling/test_profile.py)": ("yes", "no", "no", "no"),
    "[closed forms](tests/calculus/test_attention.py)": ("yes", "no", "no", "no"),
    "Kronecker factors (KFAC, EKFAC)": ("no", "yes", "no", "no"),
}
"""What each library has, in the order of `ROWS`, and the test that shows it."""


def table(results: Mapping[str, Any]) -> str:
    """Markdown: measured cells, then what there is and is not."""
    found = results["correctness"]["rows"]
    measured: dict[str, Callable[[str], str]] = {
        "error of H v in LayerNorm rows": lambda row: _error(found[row]["dense"]["norm"]),
        "the same when sequences are padded": lambda row: _error(_worst(found[row])),
        "through fused attention": lambda row: "yes" if found[row]["fused"] == "runs" else "no",
        "cost of H v, in gradients": lambda row: f"{results['timing']['2']['rows'][row]['ratio']['median']:.2f}",
    }
    lines = ["| | " + " | ".join(ROWS) + " |", "|---|" + "--:|" * len(ROWS)]
    for what, cell in measured.items():
        lines.append(f"| {what} | " + " | ".join(cell(row) for row in ROWS.values()) + " |")
    for what, cells in HAVE.items():
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _worst(row: Mapping[str, Any]) -> float:
    return float(max(row["padded_2_2"] + row["padded_3_1"]))


def _error(error: float) -> str:
    return f"{error:.0e}" if error < 0.01 else f"**{error:.2f}**"


def written(readme: str, results: Mapping[str, Any]) -> str:
    """The README with the table of some results."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    kept = json.loads((ROOT / "bench" / "results.json").read_text())
    page.write_text(written(page.read_text(encoding="utf-8"), kept), encoding="utf-8")
