"""The last attention layer in closed form: traces of G by its queries, keys and values.

Behind the last attention layer tokens no longer meet, so the Gauss–Newton matrix by its outputs f_i has one block S_i
for each query token i. With Z from the paper's formulas, G = Zᵀ S Z has the traces

    by W_V  Σ_i ‖m_i‖² tr S_i,    by W_Q  Σ_i ‖x_i‖² tr(C_i S_i C_iᵀ),    by W_K  Σ_i ‖q_i‖² tr(D_i S_i D_iᵀ),

m_i = M1 of token i, D_i = τ M2_i W_V and C_i = W_Kᵀ D_i. A root r of S, with E r rᵀ = S, is pulled back from the loss
to the outputs of the heads. It gives p_i = D_i r_i without the matrix M2, as p = τ W X with W the derivative of the
softmax (`docs/explanation/math.md`, "Attention: blocks").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens._evaluation.graph import LossBoundary
from curvlens._evaluation.pieces import Piece
from curvlens._evaluation.sums import Table, summed
from curvlens.analysis.attention import Call, Watch, parameters, tokens_of
from curvlens.analysis.estimates import Row
from curvlens.analysis.projections import Projections, Site, Weights, layouts, near
from curvlens.operators.draws import drawn, signs
from curvlens.problem import Problem
from curvlens.surroundings import within

ROLES = "qkv"
SEEDS = 0x5EED_0000
"""The draws are others than those of the measured traces, so that their errors are independent."""
SUPPORT = 1e-6
"""Weights below this say nothing of their scores."""


class NotCoveredError(Exception):
    """Why theory does not apply."""


@dataclass(frozen=True)
class Layer:
    """What the formulas need of one call: its weights by head, its tokens, and the factor τ of the scores."""

    A: Float[Tensor, "b h q k"]
    queries: Float[Tensor, "b q d"]
    keys: Float[Tensor, "b k d"]
    weights: Mapping[str, Weights]
    tau: float | None
    """None if the scores are not those of the theory: then only values have a closed form."""
    why: str

    def made(self, role: str) -> Float[Tensor, "b h l c"]:
        """Queries, keys or values for each of the heads of A; keys and values may be shared by a group of them."""
        found = self.weights[role].of(self.queries if role == "q" else self.keys)
        return found.repeat_interleave(self.A.shape[1] // found.shape[1], 1)


def traces(layer: Layer, r: Float[Tensor, "b h q c"]) -> dict[str, Tensor]:
    """Σ_i tr(Z_iᵀ r_i r_iᵀ Z_i) by W_Q, W_K, W_V with their biases, for one root r by the outputs of the heads."""
    found = {role: torch.zeros((), dtype=torch.float64) for role in (ROLES if layer.tau is not None else "v")}
    made = {role: layer.made(role) for role in found}
    for b in range(len(layer.A)):
        A, x, X, own = (each[b].double() for each in (layer.A, layer.queries, layer.keys, r))
        q = made["q"][b].double() if "q" in made else None
        m = A @ X
        groups = {role: len(layer.weights[role].W) for role in "kv"}
        found["v"] += _pairs(_extended(m, layer.weights["v"]), own, groups["v"])
        if layer.tau is None or q is None:
            continue
        s = own @ made["v"][b].double().mT
        W = layer.tau * A * (s - (A * s).sum(-1, keepdim=True))
        by_query = (W @ made["k"][b].double()).square().sum((0, 2))
        found["q"] += (_extended(x, layer.weights["q"]).square().sum(-1) * by_query).sum().cpu()
        found["k"] += _pairs(q, W @ X, groups["k"])
    return found


def _pairs(u: Float[Tensor, "h q a"], w: Float[Tensor, "h q c"], groups: int) -> Tensor:
    """Σ_i ‖Σ_h u_hi ⊗ w_hi‖² with the sum over the heads of a group, which share their weights."""
    u, w = (each.reshape(groups, -1, *each.shape[1:]) for each in (u, w))
    inner = [torch.einsum("gaic,gbic->gabi", each, each) for each in (u, w)]
    return (inner[0] * inner[1]).sum().cpu()


def _extended(x: Tensor, weights: Weights) -> Tensor:
    """A bias is the weight of one more coordinate, which is 1 for every token."""
    return x if weights.bias is None else torch.cat([x, torch.ones_like(x[..., :1])], -1)


class Behind:
    """One piece of the data, with the graph from the outputs of the heads to the loss."""

    def __init__(self, problem: Problem, piece: Piece, place: str) -> None:
        self.problem = problem
        self.projections = Projections(problem.blocks, parameters(problem))
        calls: list[Call] = []
        watch = Watch(self.projections, calls.append, only=place)
        with torch.enable_grad():
            outputs = within([watch], lambda: problem.loss_function.outputs(problem.model, piece.batch))
        if watch.skipped:
            raise NotCoveredError("The matrices of attention weights are too large to look at.")
        shared = max(self.projections.uses.get(Site(place, role), 0) for role in "qkvo")
        if shared > 1:
            raise NotCoveredError(f"The weights of {place} are used {shared} times in a forward pass.")
        if len(calls) != 1 or watch.order[-1] != place:
            raise NotCoveredError(f"{place} is not the last call of attention in every batch.")
        self.boundary = LossBoundary(problem._evaluation, piece, outputs)
        self.count = self.boundary.count
        self.layer, self.heads = self._layer(calls[0], place, watch.leaf)
        self.projections.inputs.clear()
        self._leaf = watch.leaf
        self.outputs = self._tokenwise(self.boundary.flat(outputs), problem.loss_function.row_dim)

    def _layer(self, call: Call, place: str, leaf: Tensor | None) -> tuple[Layer, int]:
        weights = {role: self.projections.weights(Site(place, role)) for role in ROLES}
        tokens = {role: tokens_of(call, self.projections, role) for role in ROLES}
        if leaf is None or any(each is None for each in (*weights.values(), *tokens.values())):
            raise NotCoveredError(f"The projections of {place} were not seen, or their heads are not known.")
        known = {role: each for role, each in weights.items() if each is not None}
        queries, keys, values = (each for each in tokens.values() if each is not None)
        if not torch.equal(keys, values):
            raise NotCoveredError("Keys and values are made of different tokens.")
        W = known["q"].W
        queries, keys = queries.to(W), keys.to(W)
        layer = Layer(call.A.to(W), queries, keys, known, None, "")
        if layer.A.shape[1] != len(W):
            raise NotCoveredError(f"{place} has {len(W)} heads of queries, and {layer.A.shape[1]} matrices of weights.")
        outputs = (layer.A @ layer.made("v")).transpose(1, 2).flatten(2)
        ways = list(layouts(leaf, *outputs.shape[:2]))
        self._way = next((i for i, way in enumerate(ways) if near(way.detach(), outputs)), None)
        if self._way is None:
            raise NotCoveredError(
                "What the output projection takes is not A X W_V (a gate or a norm of the heads, or values with "
                "parameters that are not among the chosen ones)."
            )
        tau, why = _scores(layer, call)
        return Layer(layer.A, queries, keys, known, tau, why), len(W)

    def _tokenwise(self, outputs: list[Tensor], row_dim: int) -> Tensor:
        """The outputs as one row for each query token."""
        n = self.layer.queries.shape[0] * self.layer.queries.shape[1]
        live = [x for x in outputs if x.requires_grad]
        if len(outputs) != 1 or len(live) != 1:
            raise NotCoveredError("The model has several outputs, or none that depends on the last attention.")
        (f,) = live
        if row_dim not in (-1, f.ndim - 1) or f.ndim < 2 or f.numel() // f.shape[-1] != n:
            shape = tuple(f.shape)
            raise NotCoveredError(
                f"The outputs have the shape {shape}, not one row for each of the {n} tokens: they are pooled, and the "
                "tokens meet again behind the last attention."
            )
        return f

    def pulled(self, t: Tensor) -> Float[Tensor, "b h q c"]:
        """Jᵀ t by the outputs of the heads."""
        assert self._leaf is not None
        assert self._way is not None
        (found,) = torch.autograd.grad(self.outputs, self._leaf, t.to(self.outputs.dtype), retain_graph=True)
        way = list(layouts(found, *self.layer.queries.shape[:2]))[self._way]
        by_head: Tensor = way.reshape(*way.shape[:2], self.heads, -1).transpose(1, 2)
        return by_head

    def root(self, z: Tensor) -> Tensor:
        """Λ^½ z."""
        (found,) = self.boundary.sqrt_curvature([z])
        return found

    def require_separate(self) -> None:
        """Raise an error if tokens meet behind the layer. Any two tokens are on different sides of some of the cuts."""
        f = self.outputs
        n = f.numel() // f.shape[-1]
        places = torch.arange(n, device=f.device)
        generator = torch.Generator().manual_seed(0)
        separate = {"samples first", "tokens first"}  # how the rows of the outputs may be ordered
        for bit in range(max(n - 1, 1).bit_length()):
            for side in (0, 1):
                inside = places >> bit & 1 == side
                z = torch.randn(f.shape, generator=generator).to(f) * inside.view(*f.shape[:-1], 1)
                if self.root(z).reshape(n, -1)[~inside].any():
                    raise NotCoveredError("The loss couples tokens.")
                sizes = self.pulled(z).transpose(1, 2).flatten(2).norm(dim=-1)
                orders = {"samples first": sizes, "tokens first": sizes.T}
                for name, ordered in orders.items():
                    if ordered.reshape(-1)[~inside].sum() > 1e-12 * ordered.sum():
                        separate.discard(name)
        if not separate:
            raise NotCoveredError("Tokens meet again behind the last attention, as where outputs are pooled.")

    def term(self, z: Tensor) -> dict[str, Tensor]:
        """The traces for one root."""
        return traces(self.layer, self.pulled(self.root(z)))


def _scores(layer: Layer, call: Call) -> tuple[float | None, str]:
    """τ, if the weights are softmax(τ X W_Q (X W_K)ᵀ + mask); else why they are not."""
    q, k, A = layer.made("q").double(), layer.made("k").double(), layer.A.double()
    if call.query is not None and not near(call.query, q) and near(call.query.norm(dim=-1), q.norm(dim=-1)):
        return None, "positions are rotary: the scores are not X W_Q W_Kᵀ Xᵀ/√d_K."
    weights = A.where(A > SUPPORT, 0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)

    def centred(x: Tensor) -> Tensor:
        return x - (weights * x).sum(-1, keepdim=True)

    wanted, found = centred(q @ k.mT), centred(A.clamp(min=SUPPORT).log())
    squares = (weights * wanted.square()).sum()
    # where a softmax was seen, but not the function that scales its scores, they tell the factor
    tau = float((weights * wanted * found).sum() / squares.clamp(min=1e-300)) if call.scale is None else call.scale
    apart = (weights * (found - tau * wanted).square()).mean().sqrt()
    size = tau * (weights * wanted.square()).mean().sqrt()
    if apart <= 1e-2 * size + 200 * torch.finfo(call.A.dtype).eps:
        return tau, ""
    return None, (
        "the scores are not X W_Q W_Kᵀ Xᵀ/√d_K alone (rotary positions, a bias or a cap of the scores, a norm of "
        "queries or keys, or parameters that are not among the chosen ones)."
    )


def last_place(problem: Problem, piece: Piece) -> str:
    """The last attention of a forward pass."""

    def action() -> list[str | None]:
        watch = Watch(Projections(problem.blocks, parameters(problem)), lambda call: None, only="")
        with torch.no_grad():
            within([watch], lambda: problem.loss_function.outputs(problem.model, piece.batch))
        return watch.order

    places = problem._evaluation.at(None, action)
    if not places:
        raise NotCoveredError("No softmax attention was seen.")
    if places[-1] is None:
        raise NotCoveredError("The queries, keys and values of the last attention have no named blocks.")
    return places[-1]


def closed_form(problem: Problem, samples: int, seed: int) -> Mapping[str, Any]:
    """Traces of G by q, k, v of the last attention, as rows of estimates, and why some of them are missing."""
    place = ""
    try:
        loss = problem.loss_function
        if loss.couples_batch or not loss.row_wise or not loss.has_sqrt_curvature:
            raise NotCoveredError(f"{loss!r} is no sum over tokens with a root of its curvature.")
        with problem._evaluation.isolated():
            pieces = problem._evaluation.pieces()
            place = last_place(problem, next(pieces))
            pieces.close()  # type: ignore[attr-defined]
            found, missing = _estimates(problem, place, samples, seed)
    except NotCoveredError as error:
        return {"block": place, "trace": {}, "why": dict.fromkeys(ROLES, str(error))}
    return {"block": place, "trace": found, "why": missing}


def _estimates(problem: Problem, place: str, samples: int, seed: int) -> tuple[dict[str, Row], dict[str, str]]:
    evaluation, totals = problem._evaluation, [Table() for _ in range(samples)]
    missing: dict[str, str] = {}
    exact = 0

    def behind() -> Iterator[Behind]:
        nonlocal exact
        for number, piece in enumerate(evaluation.pieces()):
            each = evaluation.at({}, lambda piece=piece: Behind(problem, piece, place))  # type: ignore[misc]
            if number == 0:
                evaluation.at({}, each.require_separate)
                exact = each.outputs.shape[-1] if each.outputs.shape[-1] <= samples else 0
            if each.layer.tau is None:
                missing.update(dict.fromkeys("qk", each.layer.why))
            yield each

    def term(each: Behind, j: int) -> dict[str, Tensor]:
        if j >= exact > 0:
            return {}
        f = each.outputs.detach()
        if exact:  # tokens do not meet: one column of the root of all of them at once
            z = torch.zeros_like(f)
            z[..., j] = 1
        else:
            (z,) = drawn(each.boundary, SEEDS + seed * samples + j, signs)
        return evaluation.at({}, partial(each.term, z))

    count = summed(evaluation, behind(), term, totals)
    found: dict[str, Row] = {}
    for role in ROLES:
        values = [float(total.values[role]) / count for total in totals if role in total.values]
        if role in missing or not values:
            continue
        x = torch.tensor(values, dtype=torch.float64)
        if exact:
            found[role] = [float(x.sum()), 0.0, float(exact), float("inf"), 0.0, 0.0]
        else:
            found[role] = [float(x.mean()), float(x.std()) / samples**0.5, float(samples), samples - 1.0, 0.0, 0.0]
    return found, missing
