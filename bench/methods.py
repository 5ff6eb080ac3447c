"""The rows of every table: one way to multiply a curvature matrix by a vector, from us or from a peer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import curvlens_rows, peer_rows, torch_rows
from bench.model import Batch

Kind = Literal["Hessian", "GGN", "functional"]
Product = Callable[[Tensor], Tensor]
"""Flat vector in the order of ``model.parameters()`` → flat vector."""


@dataclass(frozen=True)
class Method:
    """How to build a product, and what it needs."""

    key: str
    library: str
    label: str
    kind: Kind
    make: Callable[[nn.Module, Sequence[Batch]], Product]
    once: str
    """What is paid once, before the first product is there."""
    unaided: bool = False
    """Whether attention is left as torch chooses it; otherwise the math kernel is switched on around it."""
    splits: bool = True
    """Whether it takes several batches."""
    timed: bool = True

    def build(self, model: nn.Module, batches: Sequence[Batch], *, unaided: bool | None = None) -> Product:
        """The product at a copy of the model, since some peers write to ``.grad``."""
        unaided = self.unaided if unaided is None else unaided
        model = copy.deepcopy(model)
        with _attention(unaided), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            product = self.make(model, batches)

        def aided(v: Tensor) -> Tensor:
            with _attention(unaided), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return product(v).detach()

        return aided


def _attention(unaided: bool) -> nullcontext[None]:
    return nullcontext() if unaided else sdpa_kernel(SDPBackend.MATH)  # type: ignore[return-value]


METHODS: tuple[Method, ...] = (
    Method("ours-h", "curvlens", "hessian", "Hessian", curvlens_rows.hessian, "graph", unaided=True),
    Method("ours-g", "curvlens", "ggn", "GGN", curvlens_rows.ggn, "graph", unaided=True),
    Method("ours-f", "curvlens", "functional", "functional", curvlens_rows.functional, "graph", unaided=True),
    Method(
        "curvlinops-h", "curvlinops", "HessianLinearOperator", "Hessian", peer_rows.curvlinops_hessian, "its own check"
    ),
    Method("curvlinops-g", "curvlinops", "GGNLinearOperator", "GGN", peer_rows.curvlinops_ggn, "its own check"),
    Method("pyhessian-1", "PyHessian", "one batch", "Hessian", peer_rows.pyhessian_batch, "graph", splits=False),
    Method("pyhessian-n", "PyHessian", "data loader", "Hessian", peer_rows.pyhessian_loader, "nothing"),
    Method(
        "eigenthings-h", "hessian-eigenthings", "HessianOperator", "Hessian", peer_rows.eigenthings_hessian, "nothing"
    ),
    Method("eigenthings-g", "hessian-eigenthings", "GGNOperator", "GGN", peer_rows.eigenthings_ggn, "nothing"),
    Method("func-jvp-grad", "torch.func", "jvp(grad)", "Hessian", torch_rows.jvp_grad, "nothing", splits=False),
    Method("func-vjp-grad", "torch.func", "vjp(grad), kept", "Hessian", torch_rows.vjp_grad, "graph", splits=False),
    Method(
        "func-jvp-jacrev", "torch.func", "jvp(jacrev)", "Hessian", torch_rows.jvp_jacrev, "", splits=False, timed=False
    ),
    Method("func-grad-jvp", "torch.func", "grad(jvp)", "Hessian", torch_rows.grad_jvp, "", splits=False, timed=False),
)

BY_KEY = {method.key: method for method in METHODS}


def reason(error: BaseException) -> str:
    """The first line of an error, short enough for a table."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return f"{type(error).__name__}: {first}"[:160]
