"""What a search needs of memory: announced, kept to, and advised where it is too little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import curvlens as cl
import small
from curvlens._evaluation.cache import Cache
from curvlens.linalg import needs
from spectra import matrix, spectra


def test_plans_do_not_depend_on_the_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for products_before in (0, 1):
        problem = small.problem()
        H, cache = cl.hessian(problem), problem._evaluation.cache
        for _ in range(products_before):
            H @ torch.ones(H.shape[1], dtype=H.dtype)

        def free(device: torch.device, cache: Cache = cache) -> int:
            return 1_000_000 - cache.kept_bytes - cache.point_bytes

        monkeypatch.setattr(needs, "available_bytes", free)
        result = cl.eigs(H, 2, max_products=30, tol=0.1)
        found.append((result.memory, result.provenance["basis"]))
    assert found[0] == found[1]
    assert found[0][0] > cache.kept_bytes + cache.point_bytes + found[0][1] * H.shape[1] * 8


def test_short_memory_is_used_before_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    A = matrix(spectra()["triples over a bulk"])
    vector = 8 * len(A)
    for vectors, basis in ((200, 47), (18, 5), (10, 4), (8, 4)):
        monkeypatch.setattr(needs, "available_bytes", lambda device, size=vectors * vector: size)
        assert cl.eigs(A, 1, max_products=40, tol=1e-2).provenance["basis"] == basis
    monkeypatch.setattr(needs, "available_bytes", lambda device: 7 * vector)
    with pytest.raises(cl.CurvlensError, match="numbers need"):
        cl.eigs(A, 1)


def test_advice_helps(tmp_path: Path) -> None:
    A = matrix(spectra()["triples over a bulk"])
    with pytest.raises(cl.CurvlensError, match="numbers need") as refusal:
        cl.eigs(A, 4, memory=9 * 8 * len(A))
    text = str(refusal.value)
    said = re.search(r"give memory='(\w+)'", text)
    assert said is not None
    cl.eigs(A, 4, memory=said[1], tol=1e-2)
    assert "k=1" in text
    cl.eigs(A, 1, memory=9 * 8 * len(A), tol=1e-2)
    assert "bfloat16" not in text  # the vectors that come back are too many already
    assert "store=" not in text
    with pytest.raises(cl.CurvlensError, match="numbers need") as refusal:
        cl.eigs(A, 1, memory=6 * 8 * len(A))
    assert "store=" in str(refusal.value)
    cl.eigs(A, 1, memory=6 * 8 * len(A), store=tmp_path, tol=1e-2)
    assert "bfloat16" in str(refusal.value)
    cl.eigs(A, 1, memory=6 * 8 * len(A), store_dtype=torch.bfloat16, tol=0.1)


def test_graphs_are_named_where_they_are_in_the_way() -> None:
    """Where several pieces of the data have graphs; one is needed in any case, and a smaller budget is no advice."""
    H = cl.hessian(small.problem(micro_batch=1))
    with pytest.raises(cl.CurvlensError, match=r"for the graphs of products.*keep smaller graphs"):
        cl.eigs(H, 1, memory=24 * 8 * H.shape[1])
    with pytest.raises(cl.CurvlensError, match=r"One eigenvector.*for the graphs of products") as error:
        cl.eigs(cl.hessian(small.problem()), 1, memory=8 * 8 * H.shape[1])
    assert "smaller graphs" not in str(error.value)
