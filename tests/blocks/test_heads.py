"""The number of heads: told by the model, seen in a pass, said by the user, or an error; never blocks instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from curvlens.blocks import map_blocks
from lookalikes import Fused, Lens, NanoGPT, gpt2, reference
from test_blocks import gauge
from truth import Truth

WIDTH, HEADS = 8, 2
TOKENS = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """nanoGPT's attention, fused, with ``keys`` heads of keys and values; how many there are stands nowhere."""

    def __init__(self, heads: int = HEADS, keys: int = HEADS, how: str = "view") -> None:
        super().__init__()
        own = WIDTH // heads * keys
        self.c_attn, self.c_proj = nn.Linear(WIDTH, WIDTH + 2 * own), nn.Linear(WIDTH, WIDTH)
        self.mix = self._mix(heads, keys, own, how)

    @staticmethod
    def _mix(heads: int, keys: int, own: int, how: str) -> Any:
        def cut(x: Tensor, n: int) -> Tensor:
            if how == "view":
                return x.view(*x.shape[:2], n, x.shape[2] // n).transpose(1, 2)
            return torch.stack(torch.split(x, x.shape[2] // n, 2), 1)

        def mix(qkv: Tensor) -> Tensor:
            q, k, v = torch.split(qkv, [WIDTH, own, own], 2)
            q, k, v = cut(q, heads), *(cut(x, keys).repeat_interleave(heads // keys, 1) for x in (k, v))
            future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
            mixed: Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            return mixed

        return mix

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(self.mix(self.c_attn(x)))
        return y


def model(**options: Any) -> Any:
    torch.manual_seed(1)
    result: Any = NanoGPT(WIDTH)
    result.transformer["h"][0].attn = Attention(**options)
    return result.double().eval()


def problem(of: nn.Module, **options: Any) -> cl.Problem:
    return cl.Problem(of, TOKENS, cl.losses.CausalLM(), **options)


def flatness(p: cl.Problem, keys: int, group: int = 1) -> float:
    """The largest ‖G v‖ of all gauge directions v of all heads, relative to λ_max ‖v‖."""
    G = cl.ggn(p)
    width = WIDTH // keys // group
    scale = float(cl.eigs(G, 1, tol=1e-3, check_copies=False).values[-1])
    found = []
    for j in range(keys):
        S = small.direction(width * width, seed=j).view(width, width)
        for left, right in (("q", "k"), ("v", "o")):
            v = gauge(p, "h.0.attn", left, right, S, j, group, -1.0)
            found.append(float((G @ v).norm()) / scale / float(v.norm()))
    return max(found)


@pytest.mark.parametrize("name", ["n_head", "num_heads", "heads", "n_heads", "num_attention_heads"])
@pytest.mark.parametrize("where", ["attention", "its config", "layer", "model's config"])
def test_told_by_the_model(name: str, where: str) -> None:
    of = model(how="split")
    layer = of.transformer["h"][0]
    teller = {"attention": layer.attn, "layer": layer}.get(where) or SimpleNamespace()
    setattr(teller, name, HEADS)
    if "config" in where:
        (layer.attn if where == "its config" else of).config = teller
    blocks = map_blocks(of)
    assert {role: blocks[f"h.0.attn.{role}"].n_heads for role in "qkvo"} == dict.fromkeys("qkvo", HEADS)
    assert list(blocks.by("head")) == list(map_blocks(NanoGPT(WIDTH)).by("head"))


def test_seen_in_a_forward_pass() -> None:
    p = problem(model())
    assert [b for b in p.blocks.by("head") if b.startswith("h.0.attn.q")] == ["h.0.attn.q.0", "h.0.attn.q.1"]
    assert flatness(p, HEADS) < 1e-11
    true = Truth(p.model, [TOKENS], _rows, square=False).hessian
    weight = torch.arange(3 * WIDTH * WIDTH).view(3, HEADS, WIDTH // HEADS, WIDTH)[1, 1].flatten()
    bias = 3 * WIDTH * WIDTH + torch.arange(3 * WIDTH).view(3, HEADS, WIDTH // HEADS)[1, 1]
    rows = p.layout.slices["transformer.h.0.attn.c_attn.weight"].start + torch.cat([weight, bias])
    own = cl.hessian(p)["h.0.attn.k.1"].dense()
    assert small.relative(own, true[rows][:, rows]) < 1e-10
    assert set(p.blocks.by("head")) > {"h.0.mlp.up", "h.0.norm1", "embed"}  # what has no heads keeps its block


def _rows(of: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    return of(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()


def test_not_known_is_an_error_that_says_how_to_give_it() -> None:
    p = problem(model(how="split"))
    H, G = cl.hessian(p), cl.ggn(p)
    assert p.blocks["h.0.attn.q"].n_heads == 0
    saying = r"Problem\(\.\.\., heads=6\)"
    for ask in (
        lambda: p.blocks.by("head"),
        lambda: cl.trace(G, samples=2, by="head"),
        lambda: cl.frobenius(H, samples=2, by="head"),
        lambda: H.blocks("head"),
        lambda: H["h.0.attn.q.0"],
        lambda: H["h.*.attn.?.1"],
        lambda: cl.eigs(H, 1, tol=1e-2).mass("head"),
        lambda: problem(p.model, blocks={"first": "h.0.attn.q.0"}),
    ):
        with pytest.raises(cl.CurvlensError, match=saying):
            ask()
    assert "h.0" in cl.trace(G, samples=2, by="layer")  # nothing else needs heads
    assert cl.trace(cl.ggn(problem(p.model, params="h.0.mlp.*")), samples=2, by="head")


@pytest.mark.parametrize("heads", [2, (2, 2), {"h.0.attn": 2}, {"h.*": (2, 2)}, {"transformer.h.0.attn": 2}])
def test_said_by_the_user(heads: Any) -> None:
    p = problem(model(how="split"), heads=heads)
    assert list(p.blocks.by("head")) == list(problem(model()).blocks.by("head"))
    assert flatness(p, HEADS) < 1e-11


def test_a_wrong_number_breaks_the_gauge_and_overrides_the_model() -> None:
    of = model()
    of.transformer["h"][0].attn.n_head = HEADS
    assert flatness(problem(of), HEADS) < 1e-11
    assert flatness(problem(of, heads=1), 1) > 1e-4


@pytest.mark.parametrize("how", ["view", "split", "told"])
def test_grouped_queries_in_a_fused_tensor(how: str) -> None:
    of = model(heads=4, keys=2, how="view" if how == "view" else "split")
    if how == "told":
        of.config = {"n_head": 4, "n_kv_head": 2}
    p = problem(of, heads=(4, 2) if how == "split" else None)
    assert {role: p.blocks[f"h.0.attn.{role}"].n_heads for role in "qkvo"} == {"q": 4, "k": 2, "v": 2, "o": 4}
    assert flatness(p, 2, group=2) < 1e-11


def test_grouped_queries_are_not_cut_in_three_where_the_heads_are_unknown() -> None:
    blocks = problem(model(heads=4, keys=1, how="split")).blocks  # 8 + 2 + 2 rows: three times 4, none of them q
    assert "h.0.attn.q" not in blocks
    with pytest.raises(cl.CurvlensError, match="queries, keys"):
        blocks.by("head")


def test_roles_that_alternate_are_not_cut_where_the_heads_are_unknown() -> None:
    of: Any = Fused(reference(), interleaved=True)
    for layer in of.layers:
        del layer.attention.head_size
    assert "h.0.attn.q" not in map_blocks(of)
    p = problem(of)
    assert p.blocks.to_dict() == problem(Fused(reference(), interleaved=True)).blocks.to_dict()


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (3, "does not fit 'h.0.attn'"),
        (0, "expected a number of heads"),
        ((4, 3), "expected a number of heads"),
        ({"h.7.attn": 2}, "Use one of 'h.0.attn'"),
        ("two", "expected a number of heads"),
    ],
)
def test_heads_that_cannot_be(heads: Any, said: str) -> None:
    with pytest.raises(cl.CurvlensError, match=said.replace("(", r"\(")):
        problem(model(), heads=heads)


def test_heads_of_a_model_without_attention() -> None:
    with pytest.raises(cl.CurvlensError, match="no attention is known"):
        cl.Problem(nn.Linear(4, 3), (torch.zeros(1, 4), torch.zeros(1, 3)), cl.losses.MSE(), heads=2)


class Apart(nn.Module):
    """Four heads of three by projections of their own, which no attribute tells."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

    def _cut(self, x: Tensor) -> Tensor:
        if self.how == "first":
            return x.view(*x.shape[:2], 4, 3).transpose(1, 2)
        if self.how == "last":
            return x.view(*x.shape[:2], 3, 4).permute(0, 3, 1, 2)
        if self.how == "turned":
            return x.view(*x.shape[:2], 3, 4).mT.transpose(1, 2)
        return torch.stack(torch.split(x, 3, 2), 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "einsum":
            q, k, v = (proj(x).view(*x.shape[:2], 4, 3) for proj in (self.q_proj, self.k_proj, self.v_proj))
            weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
            mixed = torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)
        else:
            q, k, v = (self._cut(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
            mixed = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        y: Tensor = self.o_proj(mixed)
        return y


class Stack(nn.Module):
    def __init__(self, how: str = "first") -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": Apart(how)})])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0]["self_attn"](x)  # type: ignore[index]
        return y


def stack(how: str = "first", **options: Any) -> tuple[Any, cl.Problem]:
    of: Any = Stack(how).double().eval()
    for name, value in options.items():
        setattr(of.layers if name == "head_dim" else of, name, value)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    return of, cl.Problem(of, (x, x), cl.losses.MSE())


FAR: list[dict[str, Any]] = [
    {"heads": 2},
    {"n_heads": 2},
    {"num_heads": 6},
    {"config": {"num_heads": 3}},
    {"head_dim": 6},
    {"n_embd": 12, "n_head": 2},
]


@pytest.mark.parametrize("far", FAR, ids=str)
@pytest.mark.parametrize("how", ["first", "einsum"])
def test_a_number_far_off_does_not_overrule_a_pass(far: dict[str, Any], how: str) -> None:
    of, p = stack(how, **far)
    assert {role: p.blocks[f"h.0.attn.{role}"].n_heads for role in "qkvo"} == dict.fromkeys("qkvo", 4)
    assert map_blocks(of)["h.0.attn.q"].n_heads not in (0, 4)  # without a pass it is all there is
    assert stack("split", **far)[1].blocks["h.0.attn.q"].n_heads not in (0, 4)  # nor does this pass show one


@pytest.mark.parametrize("far", [{}, {"heads": 2}], ids=str)
def test_outputs_that_are_chosen_alone_have_the_heads_of_the_queries(far: dict[str, Any]) -> None:
    of, whole = stack(**far)
    p = cl.Problem(of, whole.data.source, cl.losses.MSE(), params="h.0.attn.o")
    assert p.blocks["h.0.attn.o"].n_heads == 4


def test_queries_that_are_turned_before_they_are_moved() -> None:
    """With rotary positions only the values are moved as they were viewed; grouped queries."""
    of, _ = stack()
    attn = of.layers[0]["self_attn"]
    attn.k_proj, attn.v_proj = nn.Linear(12, 6).double(), nn.Linear(12, 6).double()

    def forward(x: Tensor) -> Tensor:
        q, k = ((proj(x).view(2, 5, n, 3) * 2).transpose(1, 2) for proj, n in ((attn.q_proj, 4), (attn.k_proj, 2)))
        k, v = (y.repeat_interleave(2, 1) for y in (k, attn.v_proj(x).view(2, 5, 2, 3).transpose(1, 2)))
        y: Tensor = attn.o_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y

    attn.forward = forward
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    p = cl.Problem(of, (x, x), cl.losses.MSE())
    assert [p.blocks[f"h.0.attn.{role}"].n_heads for role in "qkvo"] == [4, 2, 2, 4]


def test_the_attention_itself_is_believed_without_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: cl.Problem, whole: Any) -> None:
        raise AssertionError("a pass for heads that are certain")

    monkeypatch.setattr(cl.Problem, "_seen_splits", never)
    for told in ({"num_heads": 4}, {"head_dim": 3}, {"config": SimpleNamespace(n_head=4)}):
        of = Stack().double().eval()
        of.num_heads = 6  # type: ignore[assignment]
        for name, value in told.items():
            setattr(of.layers[0]["self_attn"], name, value)  # type: ignore[index]
        x = torch.randn(2, 5, 12, dtype=torch.float64)
        p = cl.Problem(of, (x, x), cl.losses.MSE())
        assert p.blocks["h.0.attn.q"].n_heads == 4
    for like in (gpt2(reference()), reference(), Lens(reference())):
        batch: Any = {"input_ids": TOKENS} if hasattr(like, "config") else TOKENS
        assert cl.Problem(like, batch, cl.losses.CausalLM()).blocks["h.0.attn.q"].n_heads == 2


@pytest.mark.parametrize("far", [{}, *FAR], ids=str)
@pytest.mark.parametrize("how", ["last", "turned"])
def test_heads_along_the_last_axis_are_not_claimed(how: str, far: dict[str, Any]) -> None:
    _, p = stack(how, **far)
    assert p.blocks["h.0.attn.q"].n_heads == 0
    with pytest.raises(cl.CurvlensError, match=r"number of heads .* is not known"):
        p.blocks.by("head")


def test_a_head_as_a_parameter_is_told_that_it_is_a_part() -> None:
    with pytest.raises(cl.CurvlensError, match="takes whole parameters") as error:
        problem(model(how="split"), params="h.0.attn.q.1", heads=4)
    assert "not known" not in str(error.value)
