"""What the pages say beside other libraries.

``python -m bench.comparison`` writes the table of the README, from ``results.json``; with ``--side-by-side`` it prints
the numbers of docs/howto/coming-from.md, ours and the peers' on the little model of that page.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import curvlens as cl
from bench.measuring import reason
from bench.tables import Table

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


# Side by side


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    """As on the page."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 3, (30,))


def ours() -> tuple[Any, Any]:
    model, x, y = model_and_data()
    H = cl.hessian(cl.Problem(model, (x, y), cl.losses.CrossEntropy()))
    return cl.eigs(H, 1).values[0], cl.trace(H, 40)


def dense() -> tuple[Any, Any]:
    model, x, y = model_and_data()
    A = cl.hessian(cl.Problem(model, (x, y), cl.losses.CrossEntropy())).dense()
    return torch.linalg.eigvalsh(A)[-1], A.trace()


def pyhessian() -> tuple[Any, Any]:
    from pyhessian import hessian

    model, x, y = model_and_data()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # it draws its vectors in the default dtype
    try:
        state: Any = hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=False)
        return state.eigenvalues()[0][0], mean(state.trace())
    finally:
        torch.set_default_dtype(torch.float32)


def curvlinops() -> tuple[Any, Any]:
    from curvlinops import HessianLinearOperator, xtrace
    from scipy.sparse.linalg import eigsh

    model, x, y = model_and_data()
    H: Any = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)])
    torch.manual_seed(0)
    start = np.random.default_rng(0).standard_normal(H.shape[0])
    return eigsh(H.to_scipy(), k=1, which="LA", v0=start, return_eigenvectors=False)[0], xtrace(H, 40)


def eigenthings() -> tuple[Any, Any]:
    import hessian_eigenthings as he

    model, x, y = model_and_data()
    H = he.HessianOperator(model, [(x, y)], he.supervised_loss(nn.CrossEntropyLoss()))
    top = he.lanczos(H, k=1, max_iter=20, which="LA", seed=0).eigenvalues[0]
    trace = he.hutch_plus_plus(H, num_matvecs=40, seed=0)
    return top, f"{trace.estimate:.2f} ± {trace.stderr:.2f}"


def side_by_side() -> Table:
    """Largest eigenvalue and trace by each library."""
    ways: dict[str, Callable[[], tuple[Any, Any]]] = {
        "dense matrix": dense,
        "curvlens": ours,
        "PyHessian": pyhessian,
        "curvlinops": curvlinops,
        "hessian-eigenthings": eigenthings,
    }
    rows = []
    for name, way in ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                top, trace = way()
            shown = str(trace) if isinstance(trace, (cl.Estimate, str)) else f"{float(trace):.5f}"
            rows.append([name, f"{float(top):.6f}", shown])
        except Exception as error:
            rows.append([name, f"not run: {reason(error)}", ""])
    return Table("Side by side", ["library", "largest eigenvalue", "trace, 40 products"], rows)


def main() -> None:
    """Write or print."""
    parser = argparse.ArgumentParser(prog="python -m bench.comparison", description=__doc__)
    parser.add_argument("--side-by-side", action="store_true", help="print the numbers of docs/howto/coming-from.md")
    if parser.parse_args().side_by_side:
        found = side_by_side()
        found.show(Console())
        print(found.markdown())
        return
    page = ROOT / "README.md"
    kept = json.loads((ROOT / "bench" / "results.json").read_text())
    page.write_text(written(page.read_text(encoding="utf-8"), kept), encoding="utf-8")


if __name__ == "__main__":
    main()
