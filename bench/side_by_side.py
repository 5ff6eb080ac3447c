"""``python -m bench.side_by_side``: the numbers of docs/howto/coming-from.md on its little model, ours and peers'."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import curvlens as cl
from bench.methods import reason
from bench.tables import Table


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


def main() -> None:
    """Print the table."""
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
    table = Table("Side by side", ["library", "largest eigenvalue", "trace, 40 products"], rows)
    table.show(Console())
    print(table.markdown())


if __name__ == "__main__":
    main()
