"""The rows of every table: one way to multiply a curvature matrix by a vector, from us or from a peer.

Each library is used as its documentation says. Peers are imported inside: one that is missing is a row, no crash.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from bench.model import Batch, TokenLoss, join, split

Kind = Literal["Hessian", "GGN", "functional"]
Product = Callable[[Tensor], Tensor]
"""Flat vector in the order of ``model.parameters()`` → flat vector."""
Parts = dict[str, Tensor]


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

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.library}: {self.label} ({self.kind})"

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


# curvlens


def _problem(model: nn.Module, batches: Sequence[Batch]) -> cl.Problem:
    return cl.Problem(model, list(batches), cl.losses.CrossEntropy())


def hessian(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """H v with the graph kept."""
    return cl.hessian(_problem(model, batches)).apply


def ggn(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """G v with the graph kept."""
    return cl.ggn(_problem(model, batches)).apply


def functional(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """(H − G) v with the graph kept."""
    return cl.functional(_problem(model, batches)).apply


# The peers


def curvlinops_hessian(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward over `jacrev`, vmapped, anew for each vector; the constructor multiplies twice to check itself."""
    from curvlinops import HessianLinearOperator

    operator: Any = HessianLinearOperator(model, TokenLoss(), list(model.parameters()), list(batches))
    return lambda v: operator @ v


def curvlinops_ggn(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward mode, then reverse mode, vmapped, anew for each vector."""
    from curvlinops import GGNLinearOperator

    operator: Any = GGNLinearOperator(model, TokenLoss(), list(model.parameters()), list(batches))
    return lambda v: operator @ v


def pyhessian_batch(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse with the graph of one batch kept: what its ``eigenvalues`` and ``trace`` call."""
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    (batch,) = batches
    state: Any = hessian(model, TokenLoss(), data=batch, cuda=False)
    return lambda v: join(hessian_vector_product(state.gradsH, state.params, split(v, state.params)))


def pyhessian_loader(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse over a loader, anew for each vector."""
    from pyhessian import hessian

    state: Any = hessian(model, TokenLoss(), dataloader=list(batches), cuda=False)
    return lambda v: join(state.dataloader_hv_product(split(v, state.params))[1])


def eigenthings_hessian(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse, anew for each vector."""
    from hessian_eigenthings import HessianOperator, supervised_loss

    operator: Any = HessianOperator(model, list(batches), supervised_loss(TokenLoss()))
    return lambda v: operator @ v


def eigenthings_ggn(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward mode, then reverse mode, anew for each vector."""
    from hessian_eigenthings import GGNOperator, supervised_forward, supervised_loss_of_output

    operator: Any = GGNOperator(model, list(batches), supervised_forward, supervised_loss_of_output(TokenLoss()))
    return lambda v: operator @ v


# torch.func without a library around it, on one batch. The last two are for the correctness table only: they are wrong
# through ``layer_norm``.


def _loss(model: nn.Module, batches: Sequence[Batch]) -> tuple[Callable[[Parts], Tensor], Parts]:
    ((x, y),) = batches
    point = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Parts) -> Tensor:
        value: Tensor = TokenLoss()(functional_call(model, params, (x,)), y)
        return value

    return loss, point


def _named(v: Tensor, point: Parts) -> Parts:
    return dict(zip(point, split(v, list(point.values())), strict=True))


def jvp_grad(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward over reverse, everything anew for each vector."""
    loss, point = _loss(model, batches)
    return lambda v: join(list(jvp(grad(loss), (point,), (_named(v, point),))[1].values()))


def vjp_grad(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over reverse; the function that `vjp` returns holds the graph."""
    loss, point = _loss(model, batches)
    pull = vjp(grad(loss), point)[1]
    return lambda v: join(list(pull(_named(v, point))[0].values()))


def jvp_jacrev(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Forward over `jacrev`."""
    loss, point = _loss(model, batches)
    return lambda v: join(list(jvp(jacrev(loss), (point,), (_named(v, point),))[1].values()))


def grad_jvp(model: nn.Module, batches: Sequence[Batch]) -> Product:
    """Reverse over forward: the gradient of the directional derivative."""
    loss, point = _loss(model, batches)

    def product(v: Tensor) -> Tensor:
        return join(list(grad(lambda params: jvp(loss, (params,), (_named(v, point),))[1])(point).values()))

    return product


METHODS: tuple[Method, ...] = (
    Method("ours-h", "curvlens", "hessian", "Hessian", hessian, "graph", unaided=True),
    Method("ours-g", "curvlens", "ggn", "GGN", ggn, "graph", unaided=True),
    Method("ours-f", "curvlens", "functional", "functional", functional, "graph", unaided=True),
    Method("curvlinops-h", "curvlinops", "HessianLinearOperator", "Hessian", curvlinops_hessian, "its own check"),
    Method("curvlinops-g", "curvlinops", "GGNLinearOperator", "GGN", curvlinops_ggn, "its own check"),
    Method("pyhessian-1", "PyHessian", "one batch", "Hessian", pyhessian_batch, "graph", splits=False),
    Method("pyhessian-n", "PyHessian", "data loader", "Hessian", pyhessian_loader, "nothing"),
    Method("eigenthings-h", "hessian-eigenthings", "HessianOperator", "Hessian", eigenthings_hessian, "nothing"),
    Method("eigenthings-g", "hessian-eigenthings", "GGNOperator", "GGN", eigenthings_ggn, "nothing"),
    Method("func-jvp-grad", "torch.func", "jvp(grad)", "Hessian", jvp_grad, "nothing", splits=False),
    Method("func-vjp-grad", "torch.func", "vjp(grad), kept", "Hessian", vjp_grad, "graph", splits=False),
    Method("func-jvp-jacrev", "torch.func", "jvp(jacrev)", "Hessian", jvp_jacrev, "", splits=False, timed=False),
    Method("func-grad-jvp", "torch.func", "grad(jvp)", "Hessian", grad_jvp, "", splits=False, timed=False),
)

BY_KEY = {method.key: method for method in METHODS}
