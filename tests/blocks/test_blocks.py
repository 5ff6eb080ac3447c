"""Named blocks: disjoint and covering, the right numbers for every architecture, and the same in every storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlens as cl
import small
from cases import Case
from curvlens.blocks import Blocks, By, Family, Rule, map_blocks
from curvlens.blocks.cutting import overlap, union
from curvlens.blocks.parts import Part
from families import EXPECTED, FAMILY_CASES
from lookalikes import Fused, Holder, Lens, gpt2, reference
from truth import Truth

GRANULARITIES: tuple[By, ...] = ("block", "head", "layer", "role", "parameter")

every_family = pytest.mark.parametrize("case", FAMILY_CASES, ids=repr)


@dataclass(frozen=True)
class Setting:
    problem: cl.Problem
    truth: Truth

    def product(self, v: Tensor) -> Tensor:
        """The dense Hessian times a vector, by autodiff alone."""
        theta = self.truth.theta.clone().requires_grad_()
        (g,) = torch.autograd.grad(self.truth.loss(theta), theta, create_graph=True)
        return torch.autograd.grad(g @ v, theta)[0]


@cache
def setting(case: Case) -> Setting:
    model = case.model()
    truth = Truth(model, case.batches, case.rows, square=case.square)
    return Setting(cl.Problem(model, case.batches, case.loss), truth)


def indices_of(blocks: Blocks) -> dict[str, Tensor]:
    """Where in a flat vector the numbers of each block are."""
    return blocks.split(torch.arange(blocks.size))


# Every family


@every_family
def test_family_and_names(case: Case) -> None:
    blocks = setting(case).problem.blocks
    assert blocks.family == EXPECTED[case.name]
    outside = {"encoder-post": 2, "encoder-pre": 2, "multihead": 2, "transformer": 2, "multihead-separate": 2}
    outside |= {"timm": 2, "neox-like": 1}  # heads and norms of the tests' own around a family's layers
    assert len(blocks.unmapped) == outside.get(case.name, 0), blocks.table()


@every_family
@pytest.mark.parametrize("by", GRANULARITIES)
def test_disjoint_and_covering(case: Case, by: Any) -> None:
    problem = setting(case).problem
    blocks = problem.blocks.by(by)
    together = torch.cat(list(indices_of(blocks).values()))
    assert torch.equal(together.sort().values, torch.arange(problem.layout.size))
    v = small.direction(problem.layout.size)
    assert torch.equal(blocks.join(blocks.split(v)), v)
    for name, part in blocks.split(v).items():
        assert torch.equal(blocks[name].from_math(blocks[name].to_math(part)), part)
        assert len(part) == blocks[name].size


@every_family
def test_heads_against_autodiff(case: Case) -> None:
    """The first head of every block: its columns in the own rows, in those of its block and in those of another one."""
    s = setting(case)
    where = {**indices_of(s.problem.blocks), **indices_of(s.problem.blocks.by("head"))}
    H = cl.hessian(s.problem)
    blocks = list(s.problem.blocks.values())
    for block, other in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
        name = block.heads[0].name if block.heads else block.name
        v = torch.zeros(s.problem.layout.size, dtype=torch.float64)
        v[where[name]] = small.direction(len(where[name]))
        true = s.product(v)
        for rows in (name, block.name, other.name):
            error = H[rows, name] @ v[where[name]] - true[where[rows]]
            assert float(error.norm()) <= 1e-10 * float(true.norm()), (rows, name)


@pytest.mark.full
@every_family
def test_every_block_against_the_dense_hessian(case: Case) -> None:
    s = setting(case)
    true, H = s.truth.hessian, cl.hessian(s.problem)
    for name, rows in indices_of(s.problem.blocks.by("head")).items():
        error = H[name].dense() - true[rows][:, rows]
        assert float(error.norm()) <= 1e-10 * float(true[rows].norm()), name
    for name, rows in indices_of(s.problem.blocks.by("layer")).items():
        v = small.direction(len(rows))
        error = H[name] @ v - true[rows][:, rows] @ v
        assert float(error.norm()) <= 1e-10 * float(true[rows].norm()) * float(v.norm()), name


# Symmetries that every head has, whatever its storage

ROTARY = ("gpt-neox", "llama", "gemma", "gemma2", "mistral", "qwen2", "phi3", "mixtral")
NORMED = ("qwen3", "gemma3", "mamba")
"""Queries and keys are normed: a norm does not see their length, so other directions are the flat ones."""


def gauge(problem: cl.Problem, layer: str, left: str, right: str, S: Tensor, j: int, group: int, sign: float) -> Tensor:
    """The tangent of W_left → W_left (1 + ε S), W_right → W_right (1 − ε Sᵀ) or (1 − ε S) W_right, for one head."""
    blocks, heads = problem.blocks, problem.blocks.by("head")
    theta = blocks.by("head").split(problem.theta)
    width = len(S)
    parts = {}
    for q in range(j * group, (j + 1) * group) if left == "q" else [j]:
        block = heads[f"{layer}.{left}.{q}"]
        parts[block.name] = block.from_math((block.to_math(theta[block.name]).view(-1, width) @ S).reshape(-1))
    for o in range(j * group, (j + 1) * group) if right == "o" else [j]:
        block = heads[f"{layer}.{right}.{o}"]
        W = block.to_math(theta[block.name])
        turned = S @ W.view(width, -1) if right == "o" else W.view(-1, width) @ S.T
        parts[block.name] = block.from_math(sign * turned.reshape(-1))
    return heads.join(parts)


@every_family
def test_gauge_directions_are_flat(case: Case) -> None:
    problem = setting(case).problem
    G = cl.ggn(problem)
    layers = sorted({block.name.rsplit(".", 1)[0] for block in problem.blocks.values() if block.name.endswith(".v")})
    assert layers or case.name == "mamba"
    scale = float(cl.eigs(G, 1, tol=1e-3, check_copies=False).values[-1])
    for layer in layers:
        counts = {role: problem.blocks[f"{layer}.{role}"].n_heads for role in "qkvo"}
        assert counts["q"] == counts["o"] > 1
        assert counts["k"] == counts["v"] > 1
        group = counts["q"] // counts["k"]
        width = problem.blocks[f"{layer}.v"].heads[0].parts[0].in_math()[-1]
        for j in range(counts["k"]):
            S = small.direction(width * width, seed=j).view(width, width)
            pairs = [("v", "o", S)]
            if case.name not in NORMED and case.name not in ("gpt-linear",):
                pairs.append(("q", "k", torch.eye(width, dtype=torch.float64) if case.name in ROTARY else S))
            for left, right, turn in pairs:
                v = gauge(problem, layer, left, right, turn, j, group, -1.0)
                assert float((G @ v).norm()) <= 1e-11 * scale * float(v.norm()), (layer, left, j)
                wrong = gauge(problem, layer, left, right, turn, j, group, 1.0)
                assert float((G @ wrong).norm()) > 1e-7 * scale * float(wrong.norm()), (layer, left, j)


# One model in several storages

STORAGES: dict[str, Callable[[Any], nn.Module]] = {
    "GPT-2": gpt2,
    "TransformerLens": Lens,
    "timm": lambda like: Fused(like, interleaved=False),
    "GPT-NeoX": lambda like: Fused(like, interleaved=True),
}


def on_tokens(model: nn.Module) -> cl.Problem:
    tokens = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
    batch: Any = {"input_ids": tokens} if hasattr(model, "config") else tokens
    return cl.Problem(model, batch, cl.losses.CausalLM())


@pytest.mark.parametrize("storage", STORAGES)
def test_same_numbers_in_every_storage(storage: str) -> None:
    ours, theirs = on_tokens(reference()), on_tokens(STORAGES[storage](reference()))
    assert ours.loss() == pytest.approx(theirs.loss(), rel=1e-13)
    common = [name for name in ours.blocks if name in theirs.blocks]
    assert len(common) >= 2 * 8
    one, other = cl.hessian(ours), cl.hessian(theirs)
    for name in ("h.0.attn.q", "h.1.attn.k", "h.0.attn.v", "h.1.attn.o", "h.1.mlp.up", "h.0.attn.v.1", "h.1.attn.o.0"):
        a, b = (
            ours.blocks.by("head" if name[-1].isdigit() else "block")[name],
            theirs.blocks.by("head" if name[-1].isdigit() else "block")[name],
        )
        A, B = a.to_math(a.to_math(one[name].dense()).T), b.to_math(b.to_math(other[name].dense()).T)
        assert small.relative(A, B) < 1e-11, name
    mixed = "h.0.attn.q", "h.1.attn.v"
    A = ours.blocks[mixed[0]].to_math(one[mixed].dense())
    B = theirs.blocks[mixed[0]].to_math(other[mixed].dense())
    A, B = ours.blocks[mixed[1]].to_math(A.T), theirs.blocks[mixed[1]].to_math(B.T)
    assert small.relative(A, B) < 1e-11


def test_multihead_attention_of_torch() -> None:
    """Separate weights for keys and values of width 6, and one fused weight whose other columns are zero."""

    class Model(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width, narrow = width, None if width == 8 else width
            self.attention = nn.MultiheadAttention(8, 2, kdim=narrow, vdim=narrow, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            keys = x[..., : self.width]
            y: Tensor = self.attention(x, keys, keys, need_weights=False)[0]
            return y

    torch.manual_seed(0)
    separate, fused = Model(6).double().eval(), Model(8).double().eval()
    theirs, ours = separate.attention, fused.attention
    with torch.no_grad():
        padded = [nn.functional.pad(w, (0, 8 - w.shape[1])) for w in (theirs.q_proj_weight, theirs.k_proj_weight)]
        padded.append(nn.functional.pad(theirs.v_proj_weight, (0, 2)))
        ours.in_proj_weight.copy_(torch.cat(padded))
        ours.in_proj_bias.copy_(theirs.in_proj_bias.normal_())
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    data = (torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64))
    one, other = (cl.Problem(model, data, cl.losses.MSE()) for model in (separate, fused))
    assert list(one.blocks) == list(other.blocks) == ["attn.q", "attn.k", "attn.v", "attn.o"]
    for name in one.blocks:
        a, b = one.blocks[name], other.blocks[name]
        A = a.to_math(a.to_math(cl.hessian(one)[name].dense()).T)
        B = b.to_math(b.to_math(cl.hessian(other)[name].dense()).T)
        both = torch.cat([torch.arange(a.size - 8), torch.arange(b.size - 8, b.size)])
        assert small.relative(A, B[both][:, both]) < 1e-11, name


# Names


def test_tied_tensors_are_one_block_with_all_names() -> None:
    problem = cl.Problem(small.gpt(tied=True), small.tokens_and_labels(), cl.losses.CrossEntropy())
    assert problem.blocks["embed"].aliases == ("unembed",)
    assert problem.blocks["unembed"] is problem.blocks["embed"]
    assert "unembed" not in list(problem.blocks)
    H = cl.hessian(problem)
    v = small.direction(problem.blocks["embed"].size)
    assert torch.equal(H["embed"] @ v, H["unembed"] @ v)
    assert torch.equal(H["embed"] @ v, H["unembed.weight"] @ v)


def test_a_tied_weight_with_a_bias_of_its_own() -> None:
    case = next(case for case in FAMILY_CASES if case.name == "bert")
    blocks = setting(case).problem.blocks
    assert blocks["unembed"].name == "embed"
    assert blocks["unembed.bias"].parameters == ("cls.predictions.bias",)


def test_names_find_blocks_heads_layers_roles_and_parameters() -> None:
    H = cl.hessian(on_tokens(gpt2(reference())))
    width, d = 3, 6
    sizes = {
        "h.0.attn.q": d * d + d,
        "h.0.attn.q.1": d * width + width,
        "h.1.attn.o.0": width * d,
        "h.1.attn.o.bias": d,
        "attn.q": 2 * (d * d + d),
        "h.1": H["h.1.*"].shape[0],
        "h.*.attn.q": 2 * (d * d + d),
        "transformer.h.0.attn.c_attn.weight": 3 * d * d,
        "transformer.h.*.attn.c_attn.weight": 6 * d * d,
        "*.attn.?.0": 2 * 4 * d * width + 2 * 3 * width,
        "lm_head.weight": 7 * d,
    }
    assert {name: H[name].shape[0] for name in sizes} == sizes


def test_unions_and_blocks_of_blocks() -> None:
    problem = on_tokens(gpt2(reference()))
    H = cl.hessian(problem)
    q, k = "h.0.attn.q", "h.0.attn.k"
    both = H[[k, q]]
    assert both.shape[0] == H[q].shape[0] + H[k].shape[0]
    assert H[[q, k, "h.0.attn.q.0", q]].rows == both.rows
    assert torch.equal(both[q].dense(), H[q].dense())
    assert torch.equal(both[q, "h.0.attn.k.1"].dense(), H[q, "h.0.attn.k.1"].dense())
    assert list(both.rows.blocks) == [q, k]
    assert torch.equal(H["h.0"]["h.0.attn.q.1"].dense(), H["h.0.attn.q.1"].dense())
    fused = H["transformer.h.0.attn.c_attn.weight"]
    assert list(fused.rows.blocks) == [q, k, "h.0.attn.v"]
    assert torch.equal(fused["h.0.attn.v"].dense(), H["h.0.attn.v"].dense()[:36, :36])
    with pytest.raises(cl.CurvlensError, match=r"h\.1\.attn\.q"):
        both["h.1.attn.q"]
    v = small.direction(both.shape[0])
    assert set(both @ both.columns.unflatten(v)) == set(both.rows.names)
    assert small.relative((2.0 * H - H)[q].dense(), H[q].dense()) < 1e-14
    assert torch.equal(H.identity()["h.0.attn.q.0"].dense(), torch.eye(21, dtype=torch.float64))


def test_unknown_names() -> None:
    H = cl.hessian(on_tokens(gpt2(reference())))
    with pytest.raises(cl.CurvlensError, match=r"Did you mean 'h\.0\.attn\.q'"):
        H["h.0.atn.q"]
    with pytest.raises(cl.CurvlensError, match=r"Blocks: 'embed', 'pos', 'h\.0\.norm1'"):
        H["xyz"]
    for part, pattern in (("attn", "'\\*.attn.\\*'"), ("q", "'\\*.q'")):
        with pytest.raises(cl.CurvlensError, match=f"To select all of them, use {pattern}"):
            H[part]
    assert H["*.attn.*"].shape[0] == sum(H[f"attn.{letter}"].shape[0] for letter in "qkvo")
    with pytest.raises(cl.CurvlensError, match="a text"):
        H[3]
    with pytest.raises(KeyError, match=r"h\.0\.attn\.q"):
        on_tokens(gpt2(reference())).blocks["h.0.atn.q"]


def test_the_beginning_of_names_is_their_union() -> None:
    problem = on_tokens(gpt2(reference()))
    H = cl.hessian(problem)
    assert H["h.0.attn"].rows == H["h.0.attn.*"].rows
    assert H["h.0.attn", "h.1.mlp"].shape == (H["h.0.attn.*"].shape[0], H["h.1.mlp.*"].shape[0])
    assert H["h"].rows == H["h.*"].rows
    assert H["transformer.h.0.attn"].shape == H["h.0.attn"].shape
    for name in ("h.0.att", "h.9", "h.0.attn.x"):
        with pytest.raises(cl.CurvlensError, match="No block or parameter is called"):
            H[name]
    data = {"input_ids": torch.randint(7, (3, 5))}
    chosen = cl.Problem(problem.model, data, cl.losses.CausalLM(), params="h.0.attn")
    assert list(chosen.blocks) == [f"h.0.attn.{role}" for role in "qkvo"]
    plain = cl.Problem(nn.Sequential(nn.Linear(3, 2)), (torch.ones(1, 3), torch.ones(1, 2)), cl.losses.MSE())
    assert cl.hessian(plain)["0"].shape == (8, 8)


def test_an_unknown_name_lists_the_blocks_once() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    H = cl.hessian(cl.Problem(model, (torch.ones(1, 2), torch.ones(1, 2)), cl.losses.MSE()))
    with pytest.raises(cl.CurvlensError) as error:
        H["nothing"]
    assert str(error.value).count("'0.weight'") == 1


def test_a_layer_that_cannot_be_is_not_looked_for_elsewhere() -> None:
    G = cl.ggn(fused_problem())
    by_block, by_layer = (cl.trace(G, 2, by=by) for by in ("block", "layer"))
    for found, name in ((by_block, "h.9"), (by_layer, "h.9"), (by_layer, "h.9.attn.q")):
        with pytest.raises(KeyError) as error:
            found[name]
        assert "It may be" not in str(error.value)
    with pytest.raises(KeyError, match="by='block'"):
        by_layer["h.1.attn.q"]


def test_unknown_architecture_has_one_block_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    problem = cl.Problem(model, (torch.randn(5, 3).double(), torch.randn(5, 2).double()), cl.losses.MSE())
    assert problem.blocks.family is None
    assert list(problem.blocks) == list(problem.layout.names)
    assert problem.blocks["0.weight"].parts[0].in_math() == (3, 4)


@pytest.mark.parametrize("by", GRANULARITIES)
def test_layers_roles_and_heads_of_an_unknown_architecture_are_parameters_with_a_warning(by: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    problem = cl.Problem(model, (torch.randn(5, 3).double(), torch.randn(5, 2).double()), cl.losses.MSE())
    H = cl.hessian(problem)
    result = cl.eigs(H, 1)
    for act in (lambda: cl.trace(cl.ggn(problem), 4, by=by), lambda: H.blocks(by), lambda: result.mass(by)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert list(act()) == list(problem.layout.names)
        said = [
            w
            for w in said
            if issubclass(w.category, cl.CurvlensWarning) and "one row for each parameter" in str(w.message)
        ]
        assert len(said) == (by in ("head", "layer", "role"))
        assert all("Problem(..., blocks=" in str(w.message) for w in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused_problem().blocks.by(by)


def test_own_names_make_layers_and_roles_of_an_unknown_architecture() -> None:
    roles = {"attn": "sa", "mlp": "ff", "norm": "n"}
    parts = small.cells(blocks={f"h.{i}.{r}": f"cells.{i}.{m}.*" for i in range(2) for r, m in roles.items()}).blocks
    whole = small.cells(blocks={f"h.{i}": f"cells.{i}.*" for i in range(2)}).blocks
    outside = {"tok.weight", "to_vocab.weight", "to_vocab.bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(parts.by("role")) == {*roles, *outside}
        for blocks in (parts, whole):
            layers = blocks.by("layer")
            assert set(layers) == {"h.0", "h.1", *outside}
            assert {p.parameter for p in blocks.find(["h.0"])} == {n for n in blocks.by("parameter") if "cells.0" in n}
    with pytest.warns(cl.CurvlensWarning, match="one row for each block"):
        parts.by("head")
    H = cl.hessian(small.cells(blocks={"h.0": "cells.0", "h.1": "cells.1"}))
    assert set(cl.eigs(H, 1).mass("layer")) == {"h.0", "h.1", *outside}


@pytest.mark.parametrize(
    "names",
    [
        ["cells.0.sa.w", "cells.0.ff.w", "cells.1.sa.w", "cells.1.ff.w", "tok.w"],
        ["cells.0.sa.w", "cells.1.ff.w", "cells.1.sa.w"],
        ["cells.0.sa.q.w", "cells.0.sa.q.b", "cells.0.ff.0.w", "cells.1.sa.q.w", "cells.1.sa.q.b", "cells.1.ff.0.w"],
        ["cells.0.sa.w", "cells.0.sa.out.w", "cells.1.sa.w", "cells.1.sa.out.w"],
        [f"cells.{i}.experts.{j}.w" for i in range(2) for j in range(40)],
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["model.up.weight", "model.down.weight"],
        ["w"],
    ],
)
def test_the_suggested_names_run_and_make_layers(names: list[str]) -> None:
    blocks = Blocks.of_parameters([Part(name, (2,)) for name in names])
    assert not blocks.layers
    own: Any = eval(f"dict({blocks.suggestion})")["blocks"]
    assert blocks.grouped(own).layers


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h.0.attn.q", r"the architecture is not known.*Problem\(\.\.\., blocks=\{"),
        ("cell.0", r"Did you mean 'cells\.0'"),
        (0, r"Use a name such as H\['tok\.weight'\]"),
    ],
)
def test_a_wrong_name_in_an_unknown_architecture_is_told_what_there_is(name: Any, message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        cl.hessian(small.cells())[name]


def test_two_towers_keep_their_own_names() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = reference(), reference()

    blocks = map_blocks(Towers())
    assert "left.h.0.attn.q" in blocks
    assert "right.h.1.attn.o" in blocks
    assert blocks["left.h.0.attn.q"].layer == "left.h.0"
    assert blocks.size == sum(p.numel() for p in Towers().parameters())


def test_wrappers_do_not_change_names() -> None:
    inner = reference()
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": inner})})
    assert list(map_blocks(wrapped)) == list(map_blocks(inner))


# The user's own


def test_own_patterns() -> None:
    problem = cl.Problem(
        gpt2(reference()),
        {"input_ids": torch.randint(7, (3, 5))},
        cl.losses.CausalLM(),
        blocks={"attention": "h.*.attn.*"},
    )
    assert next(iter(problem.blocks)) == "attention"
    assert "h.0.attn.q" not in list(problem.blocks)
    assert "h.0.mlp.up" in problem.blocks
    assert sum(block.size for block in problem.blocks.values()) == problem.layout.size
    v = small.direction(problem.layout.size)
    assert torch.equal(problem.blocks.join(problem.blocks.split(v)), v)
    assert cl.hessian(problem)["attention"].shape[0] == problem.blocks["attention"].size
    assert "attention" in cl.trace(cl.ggn(problem), 8, by="block")


def test_own_patterns_leave_layers_roles_heads_and_names() -> None:
    model, data = gpt2(reference()), {"input_ids": torch.randint(7, (3, 5))}
    plain = cl.Problem(model, data, cl.losses.CausalLM())
    own = cl.Problem(model, data, cl.losses.CausalLM(), blocks={"attention": "h.*.attn.*", "first": "h.0.norm1"})
    H, mine = cl.hessian(plain), cl.hessian(own)
    for name in ("h.0", "attn.q", "h.0.attn.q", "h.0.attn.q.1", "unembed", "h.1.*", "lm_head.weight"):
        assert mine[name].rows == H[name].rows, name
    for by in ("layer", "role", "head", "parameter"):
        assert {k: b.size for k, b in own.blocks.by(by).items()} == {k: b.size for k, b in plain.blocks.by(by).items()}
    assert own.blocks["h.0.attn.q"] == plain.blocks["h.0.attn.q"]
    # The same inside of a block.
    inside = mine["h.0"]
    assert list(inside.blocks()) == ["attention", "first", *list(H["h.0"].blocks())[5:]]
    assert list(inside.rows.blocks.by("role")) == list(H["h.0"].rows.blocks.by("role"))
    assert inside["h.0.attn.q.1"].rows == H["h.0.attn.q.1"].rows
    assert mine["attention"]["h.0"].rows == H["h.0.attn.*"].rows
    v = cl.eigs(mine, 1)
    assert list(v.mass()) == list(own.blocks)
    assert list(v.mass("layer")) == list(plain.blocks.by("layer"))


def test_what_own_patterns_leave_of_a_block_has_a_name_of_its_own() -> None:
    blocks = map_blocks(gpt2(reference())).grouped({"biases": "*.ln_1.bias"})
    assert "h.0.norm1" not in list(blocks)
    assert blocks["h.0.norm1.rest"].parameters == ("transformer.h.0.ln_1.weight",)
    assert len(blocks["h.0.norm1"].parts) == 2  # as without groups
    assert sum(block.size for block in blocks.values()) == blocks.size


def test_own_patterns_may_take_a_head() -> None:
    blocks = map_blocks(gpt2(reference())).grouped({"mine": ["h.0.attn.q.0", "h.1.*"]})
    together = torch.cat(list(indices_of(blocks).values()))
    assert torch.equal(together.sort().values, torch.arange(blocks.size))
    assert "h.0.attn.q.1" in blocks
    assert "h.0.attn.k" in blocks


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"a": "h.0.*", "b": "*.attn.q"}, "overlap: both contain .*c_attn.weight"),
        ({"a": "h.7.*"}, "No block or parameter is called 'h.7.*'"),
        ({"h.0.attn.k": "h.0.attn.q"}, "name of two blocks"),
        ({"h.0": "h.0.attn.*"}, "name of two blocks"),
        ({"attn.q": "h.0.attn.q"}, "name of two blocks"),
        (["h.0.*"], "expected a dict"),
    ],
)
def test_own_patterns_that_cannot_be(patterns: Any, message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        cl.Problem(gpt2(reference()), {"input_ids": torch.ones(1, 5).long()}, cl.losses.CausalLM(), blocks=patterns)


def test_own_family() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(4, 8)}) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.stage:
                a, b = layer["mix"](x).chunk(2, -1)  # type: ignore[index]
                x = a * b.sigmoid()
            return x

    family = Family(
        "mixer",
        [
            Rule("stage.{i}.mix.weight", "h.{i}.mlp.*", "(up/gate out) in"),
            Rule("stage.{i}.mix.bias", "h.{i}.mlp.*", "(up/gate out)"),
        ],
    )
    data = (torch.randn(3, 4).double(), torch.randn(3, 4).double())
    problem = cl.Problem(Mixer().double(), data, cl.losses.MSE(), blocks=family)
    assert list(problem.blocks) == ["h.0.mlp.up", "h.0.mlp.gate", "h.1.mlp.up", "h.1.mlp.gate"]
    assert problem.blocks.family == "mixer"


def with_rules(*rules: Rule, **options: Any) -> cl.Problem:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    data = (torch.randn(3, 4).double(), torch.randn(3, 4).double())
    return cl.Problem(model, data, cl.losses.MSE(), blocks=Family("mine", rules), **options)


@pytest.mark.parametrize("axes", ["vocab d", "in out"])
def test_a_rule_with_other_words_for_in_and_out_is_told_which(axes: str) -> None:
    with pytest.raises(cl.CurvlensError, match=r"Use 'out in', or with heads '\(head dim\) in'"):
        with_rules(Rule("0.weight", "start", axes))
    assert "start" in with_rules(Rule("0.weight", "start", "out in")).blocks
    with pytest.raises(cl.CurvlensError, match="one word for each axis"):
        with_rules(Rule("0.weight", "start", "out"))


def test_an_own_family_is_used_however_little_it_names() -> None:
    problem = with_rules(Rule("0.bias", "start", "out"))
    assert problem.blocks.family == "mine"
    assert list(problem.blocks) == ["0.weight", "start", "2.weight", "2.bias"]
    assert with_rules(Rule("0.bias", "start", "out"), params="start").layout.names == ("0.bias",)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("0.wieght", "start", "out in"), r"No rule .*'mine'.*'0.wieght'.*'0.weight', '0.bias'.*Did you mean '0.w"),
        (Rule("0.weight", "start", "out"), r"axes 'out', but '0.weight' has the shape \(6, 4\)"),
        (Rule("0.weight", "start", "in out"), r"axes 'in out', but '0.weight' has the shape \(6, 4\) \(out × in"),
        (Rule("0.weight", "start.*", "(a/b/c/d out) in"), r"axes '\(a/b/c/d out\) in', .* \(6, 4\)"),
        (Rule("0.bias", "start", "out in more"), r"axes 'out in more', but '0.bias' has the shape \(6,\)"),
    ],
)
def test_an_own_family_that_does_not_fit(rule: Rule, message: str) -> None:
    with pytest.raises(cl.CurvlensError, match=message):
        with_rules(rule)


# Estimates and eigenvectors


@cache
def fused_problem() -> cl.Problem:
    return on_tokens(gpt2(reference()))


@cache
def diagonal_of(operator: str) -> Tensor:
    matrix: Tensor = getattr(cl, operator)(fused_problem()).dense()
    return matrix.diagonal()


@pytest.mark.parametrize("by", GRANULARITIES)
@pytest.mark.parametrize("operator", ["hessian", "ggn"])
def test_traces_by_block(operator: str, by: Any) -> None:
    problem, diagonal = fused_problem(), diagonal_of(operator)
    found = cl.trace(getattr(cl, operator)(problem), 16 if operator == "hessian" else 64, by=by)
    where = indices_of(problem.blocks.by(by))
    assert list(found) == list(where)
    for name, estimate in found.items():
        true = float(diagonal[where[name]].sum())
        assert abs(float(estimate.value) - true) <= 5 * float(estimate.stderr) + 1e-10 * float(diagonal.abs().sum())
    assert repr(found).startswith(f"trace by {by} ({len(where)})")


@pytest.mark.parametrize(("name", "by"), [("h.0", "layer"), ("attn.q", "role"), ("h.0.attn.q.1", "head")])
def test_a_name_that_estimates_do_not_have(name: str, by: Any, tmp_path: Any) -> None:
    G = cl.ggn(fused_problem())
    found = cl.frobenius(G, 4, by="block")
    with pytest.raises(KeyError, match=f"by block has no '{name}'.*by='{by}'.*'embed', 'pos'"):
        found[name]
    assert name not in found
    assert float(cl.trace(G, 4, by=by)[name]) > 0
    norms = cl.frobenius(G, 4, by=by)
    norms.save(tmp_path / "norms")
    assert repr(cl.load(tmp_path / "norms")).startswith(f"Frobenius norm by {by} (")
    with pytest.raises(KeyError, match="by='block'"):
        norms["h.0.mlp.up"] if by != "head" else cl.trace(G, 4, by="role")["h.0.mlp.up"]


def test_a_diagonal_by_layer_is_refused_with_the_way_to_cut_it() -> None:
    G = cl.ggn(fused_problem())
    with pytest.raises(cl.CurvlensError, match=r"problem\.blocks\.by\('layer'\)\.split"):
        cl.diagonal(G, 4, by="layer")  # type: ignore[call-arg]
    assert set(fused_problem().blocks.by("layer").split(cl.diagonal(G, 4).value)) >= {"h.0", "h.1"}


def test_mass_of_an_eigenvector(tmp_path: Any) -> None:
    problem = on_tokens(gpt2(reference()))
    result = cl.eigs(cl.hessian(problem), 2)
    result.save(tmp_path / "eigs")
    again: Any = cl.load(tmp_path / "eigs")
    for by in GRANULARITIES:
        where = indices_of(problem.blocks.by(by))
        for found in (result.mass(by), again.mass(by)):
            assert list(found) == list(where)
            for name, share in found.items():
                torch.testing.assert_close(
                    torch.tensor(share, dtype=torch.float64), result.vectors[where[name]].square().sum(0)
                )
            shares = torch.tensor(list(found.values()), dtype=torch.float64)
            torch.testing.assert_close(shares.sum(0), torch.ones(2, dtype=torch.float64))
    with pytest.raises(cl.CurvlensError, match="expected one of 'block', 'head'"):
        result.mass("heads")  # type: ignore[arg-type]
    block = cl.eigs(cl.hessian(problem)["h.0.attn.q"], 1)
    assert list(block.mass()) == ["h.0.attn.q"]
    assert len(block.mass("parameter")) == 2


# Choosing parameters


def test_parameters_are_chosen_by_block() -> None:
    data, loss = {"input_ids": torch.randint(7, (3, 5))}, cl.losses.CausalLM()
    problem = cl.Problem(gpt2(reference()), data, loss, params=["h.0.mlp.up", "h.1.norm1"])
    assert problem.layout.names == (
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_fc.bias",
        "transformer.h.1.ln_1.weight",
        "transformer.h.1.ln_1.bias",
    )
    with pytest.raises(cl.CurvlensError, match="takes whole parameters"):
        cl.Problem(gpt2(reference()), data, loss, params="h.0.attn.q")
    fused = cl.Problem(gpt2(reference()), data, loss, params="*.0.attn.c_attn.weight")
    assert list(fused.blocks) == ["h.0.attn.q", "h.0.attn.k", "h.0.attn.v"]
    with pytest.raises(cl.CurvlensError, match="takes whole parameters"):
        cl.Problem(gpt2(reference()), data, loss, params=["h.0.attn.q", "h.0.attn.v", "h.0.attn.q.0"])


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ("h.0", ""),
        ("h.0.*", ""),
        (["h.0.attn.q", "h.0.attn.k", "h.0.attn.v"], "attn.c_proj ln_1 ln_2 mlp"),
        (["h.0.attn.v", "*.0.attn.k.*", "h.0.attn.q.*"], "attn.c_proj ln_1 ln_2 mlp"),
    ],
)
def test_parts_that_are_the_whole_choose_it(params: str | list[str], missing: str) -> None:
    """Queries, keys and values in one tensor: together they are that tensor."""
    data, loss = {"input_ids": torch.randint(7, (3, 5))}, cl.losses.CausalLM()
    model = gpt2(reference())
    problem = cl.Problem(model, data, loss, params=params)
    layer = [name for name, _ in model.named_parameters() if name.startswith("transformer.h.0.")]
    wanted = [name for name in layer if not any(f".{item}." in name for item in missing.split())]
    assert list(problem.layout.names) == wanted


@pytest.mark.parametrize("params", ["h.0.attn.q", "h.0.attn.q.1", "h.0.attn.k.?"])
def test_a_part_of_a_tensor_names_all_parameters_of_its_block(params: str) -> None:
    data, loss = {"input_ids": torch.randint(7, (3, 5))}, cl.losses.CausalLM()
    fused = r"\['transformer\.h\.0\.attn\.c_attn\.weight', 'transformer\.h\.0\.attn\.c_attn\.bias'\]"
    with pytest.raises(cl.CurvlensError, match=f"params={fused}"):
        cl.Problem(gpt2(reference()), data, loss, params=params, heads=3)


def test_parameters_are_chosen_by_own_names() -> None:
    data, loss = {"input_ids": torch.randint(7, (3, 5))}, cl.losses.CausalLM()
    own = {"mine": ["h.0.mlp.up", "h.1.norm1"]}
    problem = cl.Problem(gpt2(reference()), data, loss, params="mine", blocks=own)
    assert list(problem.blocks) == ["mine"]
    assert len(problem.layout.names) == 4


@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.wte.weight"])
def test_a_frozen_tensor_is_refused_by_any_of_its_names(name: str) -> None:
    model: Any = gpt2(reference())
    model.lm_head.weight = model.transformer.wte.weight
    model.transformer.wte.weight.requires_grad_(False)
    data = {"input_ids": torch.randint(7, (3, 5))}
    with pytest.raises(cl.CurvlensError, match=f"'{name}' is frozen"):
        cl.Problem(model, data, cl.losses.CausalLM(), params=[name, "transformer.ln_f.weight"])


def test_the_map_as_text() -> None:
    text = str(on_tokens(gpt2(reference())).blocks)
    assert "family GPT-2" in text
    assert "transformer.h.0.attn.c_attn.weight.view(6, 3, 2, 3)[:, 0]" in text


# Adapters


@pytest.mark.parametrize("base", ["GPT-2", "reference"])
def test_low_rank_adapters(base: str) -> None:
    """The factors of LoRA are blocks beside the weights they change; the frozen weights are out."""
    import peft

    like: Any = gpt2(reference()) if base == "GPT-2" else reference()
    targets = ["c_attn"] if base == "GPT-2" else ["q", "v"]
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=base == "GPT-2", lora_dropout=0.0)
    make: Any = peft.get_peft_model
    model: nn.Module = make(like, config).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zero at the start, where nothing depends on the other factor
                p.normal_(generator=torch.Generator().manual_seed(0))
    problem = on_tokens(model)
    roles = ["qkv"] if base == "GPT-2" else ["q", "v"]
    assert list(problem.blocks) == [f"h.{i}.attn.{role}.lora" for i in range(2) for role in roles]
    assert problem.blocks.family == ("GPT-2" if base == "GPT-2" else "reference GPT")
    assert not problem.blocks.unmapped
    name = f"h.1.attn.{roles[-1]}.lora"
    block, width = problem.blocks[name], 18 if base == "GPT-2" else 6
    assert [part.in_math() for part in block.parts] == [(6, 2), (2, width)]
    # A → A S, B → S⁻¹ B changes nothing: the directions (A S, −S B) are flat.
    S = small.direction(4).view(2, 2)
    A, B = torch.split(block.to_math(problem.blocks.split(problem.theta)[name]), [12, 2 * width])
    flat = block.from_math(torch.cat([(A.view(6, 2) @ S).reshape(-1), -(S @ B.view(2, width)).reshape(-1)]))
    G = cl.ggn(problem)[name]
    steep = block.from_math(torch.cat([(A.view(6, 2) @ S).reshape(-1), (S @ B.view(2, width)).reshape(-1)]))
    assert float((G @ flat).norm()) < 1e-12 * float((G @ steep).norm())


def test_experts_that_are_modules() -> None:
    """One module an expert, as in Qwen-MoE: experts are the heads of a block."""

    def expert() -> Holder:
        return Holder(**{f"{role}_proj": nn.Linear(4, 4, bias=False) for role in ("gate", "up", "down")})

    mlp = Holder(experts=nn.ModuleList(expert() for _ in range(3)), gate=nn.Linear(4, 3, bias=False))
    model = Holder(layers=nn.ModuleList([Holder(mlp=mlp)]))
    blocks = map_blocks(model)
    assert list(blocks) == ["h.0.mlp.gate", "h.0.mlp.up", "h.0.mlp.down", "h.0.mlp.router"]
    assert blocks["h.0.mlp.up"].n_heads == 3
    assert blocks.by("head")["h.0.mlp.up.1"].parameters == ("layers.0.mlp.experts.1.up_proj.weight",)


def test_mixtral_experts_are_heads() -> None:
    case = next(case for case in FAMILY_CASES if case.name == "mixtral")
    problem = setting(case).problem
    assert problem.blocks["h.0.mlp.up"].n_heads == problem.blocks["h.0.mlp.down"].n_heads == 3
    assert problem.blocks["h.0.mlp.router"].n_heads == 0
    one = problem.blocks.by("head")["h.0.mlp.down.2"]
    assert one.parts[0].in_math() == (10, 8)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = reference()
    assert "h.0.attn.q" in map_blocks(model)
    with pytest.raises(cl.CurvlensError, match="meta device"):
        cl.Problem(model, torch.ones(1, 5).long(), cl.losses.CausalLM())


def test_many_heads_are_told_apart_quickly() -> None:
    """Overlaps of parts of one view are counted without looking at the tensor."""
    part = [Part("w", (10**6, 10**6), (10**6, 10**3, 10**3), (None, j)) for j in range(3)]
    assert overlap(part[0], part[1]) == 0
    assert overlap(part[2], part[2]) == part[2].size == 10**9
    assert union([*part, part[1]]) == part
