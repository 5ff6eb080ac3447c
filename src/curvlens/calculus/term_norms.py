"""Norms of sums of terms, without building the block.

‖Σ_n u_n ⊗ w_n ⊗ P_n‖² = Σ_nm (u_n·u_m)(w_n·w_m)⟨P_n, P_m⟩: three Gram matrices of the tokens. With more tokens than the
block has rows, it is less work to build the block in panels of rows and keep none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.linalg import vector_norm

from curvlens.calculus.magnitude import largest
from curvlens.calculus.terms import Diagonal, Factored, Given, Pair, Term, Tokens, merged

CANCELLED = 1e-5
"""If tokens cancel to less than this, their inner products are only rounding, and the block is built in panels."""
ROUNDING = 1e3
"""The same in units of rounding of a lower dtype: the products are then computed again in float64."""
BELOW_RANDOM = 0.1
"""In a lower dtype also if tokens cancel to less than this share of a random sum: rounding is systematic then."""
CHUNK = 1 << 22
"""Numbers in one chunk of pairs of tokens: 32 MB in float64."""


TINY, LARGE = 1e-280, 1e280
"""Squares outside of this range may have lost digits in float64, or all of them."""


def norm(terms: Sequence[Term], shape: tuple[int, int, int, int]) -> float:
    """‖Σ terms‖_F without the block. If squares leave the range of float64, from panels of the scaled block."""
    try:
        square = squared_norm(terms, shape)
    except OverflowError:
        square = math.inf
    if TINY < square < LARGE or not terms:
        return math.sqrt(max(square, 0.0))
    terms = merged(gathered(terms))
    if (
        square < LARGE
        and not any(isinstance(term, Given) for term in terms)
        and not any(bool(_sizes(term).any()) for term in terms)
    ):
        return 0.0
    found = [_frobenius(panel) for panel in _panels(terms, shape)]
    return math.hypot(*found)


def _frobenius(matrix: Tensor) -> float:
    """The Frobenius norm for entries of any size: they are scaled first."""
    most = largest(matrix)
    return most * float(vector_norm(matrix.double() / most)) if 0 < most < math.inf else most


def _panels(terms: Sequence[Term], shape: tuple[int, int, int, int]) -> Iterator[Tensor]:
    """The block, some rows at a time."""
    step = max(1, CHUNK // max(1, shape[1] * shape[2] * shape[3]))
    for start in range(0, shape[0], step):
        part = slice(start, min(start + step, shape[0]))
        yield sum((term.rows(part).dense() for term in terms[1:]), terms[0].rows(part).dense())


def squared_norm(terms: Sequence[Term], shape: tuple[int, int, int, int]) -> float:
    """‖Σ terms‖²_F without the block: by inner products of the terms, or by panels of rows if that is less work."""
    terms = merged(gathered(terms))
    if not terms:
        return 0.0
    block = shape[0] * shape[1] * shape[2] * shape[3]
    tokens = [term for term in terms if isinstance(term, Tokens)]
    assembled = sum(term.u.shape[0] for term in tokens) * block
    pairwise = sum(
        first.u.shape[0]
        * second.u.shape[0]
        * max(math.prod(first.given.shape[1:]), math.prod(second.given.shape[1:]))
        * (1 if first.axes == second.axes else 2)
        for i, first in enumerate(tokens)
        for second in tokens[i:]
    )
    diagonals = [term for term in terms if isinstance(term, Diagonal)]
    alone = len(diagonals) == len(terms) and len({term.axes for term in diagonals}) == 1
    if alone or (pairwise <= assembled and not any(isinstance(term, (Given, Diagonal)) for term in terms)):
        square = sum(
            (1 if i == j else 2) * inner_product(terms[i], terms[j])
            for i in range(len(terms))
            for j in range(i, len(terms))
        )
        dtype, sizes = _dtype(terms[0]), torch.cat([_sizes(term) for term in terms])
        least = max(CANCELLED, ROUNDING * torch.finfo(dtype).eps) * float(sizes.sum()) ** 2
        if dtype != torch.float64:  # tokens in random directions would give the sum of squared sizes
            least = max(least, BELOW_RANDOM * float(sizes.square().sum()))
        if square >= least or not math.isfinite(square):
            return square
        if dtype != torch.float64:
            return squared_norm([_double(term) for term in terms], shape)
    return sum(float(panel.double().square().sum()) for panel in _panels(terms, shape))


def _dtype(term: Term) -> torch.dtype:
    assert not isinstance(term, Given)
    return term.first.dtype if isinstance(term, Pair) else term.u.dtype


def _double(term: Term) -> Term:
    """The term in float64."""
    if isinstance(term, Pair):
        return replace(term, first=term.first.double(), second=None if term.second is None else term.second.double())
    assert not isinstance(term, Given)
    u = term.u.double()
    w = u if term.w is term.u else term.w.double()
    if isinstance(term, Diagonal):
        return replace(term, u=u, w=w, v=term.v.double())
    given = term.given
    matrix = Factored(given.left.double(), given.right.double()) if isinstance(given, Factored) else given.double()
    return replace(term, u=u, w=w, given=matrix)


def _sizes(term: Term) -> Tensor:
    """‖u_n‖ ‖w_n‖ ‖P_n‖, (N,) or (1,); their sum bounds the norm of the term."""
    if isinstance(term, Tokens):
        given = term.given
        u, w = (vector_norm(t, dim=1, dtype=torch.float64) for t in (term.u, term.w))
        of_matrix = (
            given.sizes() if isinstance(given, Factored) else vector_norm(given.flatten(1), dim=1, dtype=torch.float64)
        )
        each: Tensor = u * w * of_matrix
        return each
    if isinstance(term, Diagonal):
        sizes = (vector_norm(t, dim=1, dtype=torch.float64) for t in (term.u, term.w, term.v))
        return torch.stack(list(sizes)).prod(0)
    assert isinstance(term, Pair)
    both = (vector_norm(matrix, dtype=torch.float64) for matrix in (term.first, term.matrix))
    return torch.stack(list(both)).prod().reshape(1)


def gathered(terms: Sequence[Term]) -> list[Term]:
    """The same terms with one token for all that have equal vectors: the first words of texts are often equal."""
    groups: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor] | None] = {}
    result: list[Term] = []
    for term in terms:
        if isinstance(term, Tokens):
            key = (id(term.u), id(term.w))
            if key not in groups:
                groups[key] = _groups(term.u, term.w)
            found = groups[key]
            if found is not None:
                u, w, place = found
                matrix = torch.zeros(len(u), *term.given.shape[1:], dtype=u.dtype, device=u.device)
                for some, matrices in term.chunks():
                    matrix.index_add_(0, place[some], matrices)
                result.append(replace(term, u=u, w=w, given=matrix))
                continue
        result.append(term)
    return result


def _groups(u: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Distinct pairs of vectors and the index of every token among them; None if all are distinct."""
    vectors = u if u is w else torch.cat([u, w], 1)
    place = _row_numbers(vectors)
    first: dict[int, int] = {}
    for i, name in enumerate(place):
        first.setdefault(name, i)
    if len(first) == len(place):
        return None
    some = list(first.values())
    distinct = u[some]
    return distinct, distinct if u is w else w[some], torch.tensor(place, device=u.device)


def inner_product(first: Term, second: Term) -> float:
    """⟨first, second⟩: the sum of the products of all entries of two terms of one block."""
    if isinstance(first, Tokens) and isinstance(second, Tokens):
        return _tokens(first, second)
    if isinstance(first, Diagonal) and isinstance(second, Diagonal):
        pairs = ((first.u, second.u), (first.w, second.w), (first.v, second.v))
        return float(torch.stack([a.double() @ b.double().T for a, b in pairs]).prod(0).sum())
    if isinstance(first, Pair) and isinstance(second, Pair):
        return _pairs(first, second)
    if isinstance(first, Pair):
        first, second = second, first
    assert isinstance(first, Tokens)
    assert isinstance(second, Pair)
    return _tokens_and_pair(first, second)


def _pairs(first: Pair, second: Pair) -> float:
    """⟨M ⊗ N, M' ⊗ N'⟩; two matrices at a time, so that no larger tensor is held."""
    m, n = (first.on_first, first.first.double()), (first.on_second, first.matrix.double())
    a, b = (second.on_first, second.first.double()), (second.on_second, second.matrix.double())
    if set(m[0]) == set(b[0]):
        a, b = b, a
    if set(m[0]) == set(a[0]):
        return _sum(m, a) * _sum(n, b)
    left = "".join(sorted(set(m[0]) ^ set(a[0])))  # M and M' share an axis, and so do N and N'
    return _sum((left, _product(m, a, left)), (left, _product(n, b, left)))


def _tokens_and_pair(tokens: Tokens, pair: Pair) -> float:
    """Σ_n ⟨u_n w_n P_n, M ⊗ N⟩; vectors first, so that no tensor larger than P is held."""
    m, n = (pair.on_first, pair.first.double()), (pair.on_second, pair.matrix.double())
    (on_u, u), (on_w, w) = (tokens.on_u, tokens.u.double()), (tokens.on_w, tokens.w.double())
    p = tokens.matrix.double()
    if set(n[0]) == {on_u, on_w}:
        m, n = n, m
    if set(m[0]) == {on_u, on_w}:
        weight = torch.einsum(f"n{on_w},n{on_w}->n", torch.einsum(f"n{on_u},{m[0]}->n{on_w}", u, m[1]), w)
        return float(weight @ torch.einsum(f"n{tokens.on_matrix},{n[0]}->n", p, n[1]))
    if on_u not in m[0]:
        m, n = n, m
    other_u, other_w = m[0].replace(on_u, ""), n[0].replace(on_w, "")
    seen_u = torch.einsum(f"n{on_u},{m[0]}->n{other_u}", u, m[1])
    seen_w = torch.einsum(f"n{on_w},{n[0]}->n{other_w}", w, n[1])
    half = torch.einsum(f"n{tokens.on_matrix},n{other_u}->n{other_w}", p, seen_u)
    return float((half * seen_w).sum())


def _product(first: tuple[str, Tensor], second: tuple[str, Tensor], onto: str) -> Tensor:
    return torch.einsum(f"{first[0]},{second[0]}->{onto}", first[1], second[1])


def _sum(first: tuple[str, Tensor], second: tuple[str, Tensor]) -> float:
    """The sum of the products of two matrices' entries on the same two axes."""
    return float((first[1] * (second[1] if first[0] == second[0] else second[1].T)).sum())


def _tokens(first: Tokens, second: Tokens) -> float:
    """Σ_nm of the inner products of token n of the first with token m of the second term."""
    one, power = _scaled(first)
    other, also = (one, power) if second is first else _scaled(second)
    found = _sums(one, other)
    try:
        return math.ldexp(found, power + also)
    except OverflowError:
        return math.copysign(math.inf, found)


def _sums(first: Tokens, second: Tokens) -> float:
    if first.axes == second.axes:
        same = first is second
        if first.symmetric and second.symmetric:
            packed = _packed(first)
            first, second = packed, packed if same else _packed(second)
        count = first.u.shape[0]
        step = max(1, CHUNK // second.u.shape[0])
        step = min(step, max(1, count // 8)) if same else step
        total = 0.0
        for start in range(0, count, step):
            some = slice(start, start + step)
            if same:  # symmetric: the part left of the diagonal equals the part right of it
                after = slice(start + step, count)
                total += _gram(first, some, second, some) + 2 * _gram(first, some, second, after)
            else:
                total += _gram(first, some, second, slice(None))
        return total
    # one vector axis is shared; the other vector of each term lies on an axis of the other term's matrix
    shared = ({first.on_u, first.on_w} & {second.on_u, second.on_w}).pop()
    u1, a = (first.u, first.on_u) if first.on_w == shared else (first.w, first.on_w)
    u2, b = (second.u, second.on_u) if second.on_w == shared else (second.w, second.on_w)
    s1 = first.u if first.on_u == shared else first.w
    s2 = second.u if second.on_u == shared else second.w
    common = (set(first.on_matrix) & set(second.on_matrix)).pop()
    step = max(1, CHUNK // max(1, second.u.shape[0] * second.matrix.shape[1]))
    total = 0.0
    for start in range(0, first.u.shape[0], step):
        some = slice(start, start + step)
        left = torch.einsum(f"n{first.on_matrix},m{b}->nm{common}", first.matrix[some], u2)
        right = torch.einsum(f"m{second.on_matrix},n{a}->nm{common}", second.matrix, u1[some])
        total += float(((s1[some] @ s2.T).double() * (left * right).sum(-1).double()).sum())
    return total


def _packed(term: Tokens) -> Tokens:
    """P_n as its upper triangle, scaled to give the same inner products."""
    count, size, _ = term.given.shape
    rows, columns = torch.triu_indices(size, size, device=term.u.device)
    places = rows * size + columns
    triangle = torch.empty(count, len(places), dtype=term.u.dtype, device=term.u.device)
    for some, matrices in term.chunks():
        torch.index_select(matrices.flatten(1), 1, places, out=triangle[some])
    triangle *= (2.0 - (rows == columns).to(triangle.dtype)).sqrt()
    return replace(term, given=triangle[..., None])


def _gram(first: Tokens, some: slice, second: Tokens, others: slice) -> float:
    """Σ (u_n·u_m)(w_n·w_m)⟨P_n, P_m⟩ over some tokens n of the first and others m of the second."""
    on_u, on_w = first.u[some] @ second.u[others].T, first.w[some] @ second.w[others].T
    on_matrix = first.matrix[some].flatten(1) @ second.matrix[others].flatten(1).T
    return float((on_u.double() * on_w.double() * on_matrix.double()).sum())


def _scaled(term: Tokens) -> tuple[Tokens, int]:
    """The term scaled to entries of size 1, and the power of two that was taken out, if squares would overflow."""
    given = term.given
    parts = {"u": term.u, "w": term.w} | (
        {"left": given.left, "right": given.right} if isinstance(given, Factored) else {"given": given}
    )
    powers = {name: math.frexp(largest(part))[1] for name, part in parts.items()}
    most = 160 if term.u.dtype == torch.float64 else 40  # three squares of 2^160 are a float64, of 2^40 a float32
    of_matrix = sum(power for name, power in powers.items() if name not in ("u", "w"))
    if term.u.dtype != torch.float16 and max(abs(powers["u"]), abs(powers["w"]), abs(of_matrix)) <= most:
        return term, 0
    one = {name: _over(part, powers[name]) for name, part in parts.items()}
    w = one["u"] if term.w is term.u else one["w"]
    matrix = one["given"] if "given" in one else Factored(one["left"], one["right"])
    return replace(term, u=one["u"], w=w, given=matrix), powers["u"] + powers["w"] + of_matrix


def _over(part: Tensor, power: int) -> Tensor:
    """A tensor divided by a power of two, in two steps: a single step may overflow."""
    half = power // 2
    return part * 2.0**-half * 2.0 ** (half - power)


def _row_numbers(rows: Tensor) -> list[int]:
    """A number for every row (n, ·), counted from 0 in order of first appearance. Equal rows have the same number."""
    seen: dict[bytes, int] = {}
    plain = rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # works for one column of any stride
    return [seen.setdefault(row.tobytes(), len(seen)) for row in plain.cpu().numpy()]
