"""Data that need no download."""

from __future__ import annotations

import re

import pytest
import torch

from curvlens import CurvlensError
from curvlens.data import Addition, Characters


def test_addition_adds() -> None:
    task = Addition()
    tokens, labels = task.batch(64, seed=3)
    assert tokens.shape == labels.shape == (64, 17) == (64, task.context)
    assert ((labels != -100).sum(1) == 6).all()
    for row, label in zip(tokens, labels, strict=True):
        line = task.text(torch.cat([row, label[-1:]]))
        found = re.fullmatch(r"(\d{5})\+(\d{5})=(\d{6})", line)
        assert found
        assert int(found[1]) + int(found[2]) == int(found[3])
        assert (label[11:16] == row[12:]).all()
    assert torch.equal(task.batch(4, seed=1)[0], task.batch(4, seed=1)[0])
    assert not torch.equal(task.batch(4, seed=1)[0], task.batch(4, seed=2)[0])


def test_characters() -> None:
    corpus = Characters()
    assert len(corpus.stream) > 100_000
    assert 0 <= int(corpus.stream.min()) <= int(corpus.stream.max()) < corpus.vocab
    batch = corpus.batch(4, 50, seed=0)
    assert batch.shape == (4, 50)
    assert torch.equal(batch, corpus.batch(4, 50, seed=0))
    whole = corpus.text(corpus.stream)
    assert corpus.text(batch[2]) in whole
    assert "class ArgumentParser" in whole
    with pytest.raises(CurvlensError, match="characters of the corpus"):
        corpus.batch(1, 10**9, seed=0)
    with pytest.raises(CurvlensError, match=r"no file nothing\.py"):
        _ = Characters(("nothing.py",)).stream
