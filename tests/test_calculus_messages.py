"""What the smaller closed forms say to bad input, and where they were once silently wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from curvlens.calculus import scalar_attention

D = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def said(imports: str, setup: str, calls: dict[str, str]) -> None:
    """Each call is an error with these words. In a process of its own: here annotations are checked first."""
    script = f"import torch, curvlens as cl\nfrom curvlens.calculus import {imports}\n{setup}\n"
    script += f"for call in {list(calls)!r}:\n    try:\n        print('no error:', eval(call))\n"
    script += "    except cl.CurvlensError as error:\n        print(str(error).replace('\\n', ' '))\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, (call, words) in zip(done.stdout.splitlines(), calls.items(), strict=True):
        assert words in line, (call, line)


# Scalar attention


@pytest.mark.parametrize("sink", [1.3, -0.7])
def test_a_sink_is_a_bias_in_float64(sink: float) -> None:
    x, y, w_q, w_k = draw(2, 6), draw(2, 6, seed=1), draw(3, seed=2), draw(3, seed=3)
    bias = torch.zeros(6, 6, dtype=D)
    bias[:, 0] = sink
    by_sink = scalar_attention.spectrum(x, w_q, w_k, 0.7, y, sink=sink)
    by_bias = scalar_attention.spectrum(x, w_q, w_k, 0.7, y, bias=bias)
    torch.testing.assert_close(by_sink.eigenvalues, by_bias.eigenvalues, rtol=1e-15, atol=1e-15)
    assert by_sink.loss == pytest.approx(by_bias.loss, rel=1e-15)


def test_a_bias_of_minus_infinity_is_a_mask() -> None:
    x, y, w = draw(5), draw(5, seed=1), draw(3, seed=2)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first token attends to nothing
    bias = torch.zeros(5, 5, dtype=D).masked_fill(~allowed, -torch.inf)
    by_bias = scalar_attention.spectrum(x, w, w.flip(0), 0.7, y, bias=bias).eigenvalues
    by_mask = scalar_attention.spectrum(x, w, w.flip(0), 0.7, y, mask=allowed).eigenvalues
    torch.testing.assert_close(by_bias, by_mask, rtol=0, atol=0)


def test_messages_of_scalar_attention() -> None:
    said(
        "scalar_attention",
        "x, w = torch.ones(4), torch.ones(3)\nf = scalar_attention.spectrum",
        {
            "f(x, w, w, 1.0, x, mask=torch.ones(4, 4))": "A float mask that is added to the scores goes into bias=",
            "f(x, w, w, 1.0, x, mask=torch.ones(3, 4, dtype=torch.bool))": "expected a boolean tensor of shape (4, 4)",
            "f(x, w, w, 1.0, x, mask='all')": "mask='all'",
            "f(x, w, w, 1.0, x, mask=3)": "mask=3",
            "f(x.double(), w, w, 1.0, x.double())": "bring them to one dtype",
            "f(x, w, w, 1.0, x, bias=torch.ones(4, 4).double())": "bias is torch.float64",
            "f(x, w, w, 1.0, x, bias=torch.ones(4))": "bias has shape (4,), expected a tensor of shape (4, 4)",
            "f(x, w, w, 1.0, x, bias=1.0)": "bias has type float",
            "f(x, w[:, None], w[:, None], 1.0, x)": "Give w_Q.flatten()",
            "f(x, w, w[:2], 1.0, x)": "w_Q has 3 entries, w_K has 2",
            "f(x, w, w, 1.0, x[:3])": "y has shape (3,), x has (4,)",
            "f(x[0], w, w, 1.0, x[0])": "give x[None]",
            "f(x, w, w, w, x)": "w_V=",
            "f(x, w, w, 1.0, x, sink='first')": "sink='first', expected one finite number",
        },
    )
