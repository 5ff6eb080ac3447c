"""The experiments of the slides, against automatic differentiation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvlens.papers.draws import Draws
from curvlens.papers.first_paper.differentiated import flat_hessian, functional_part
from curvlens.papers.slides import gauss_newton
from curvlens.papers.slides.scalar_layer import scalar_layer


@pytest.mark.parametrize("network", gauss_newton.NETWORKS)
def test_the_top_of_hessian_and_gauss_newton_matrix_by_differentiation(network: str) -> None:
    """The largest eigenvalues of every network, with residuals that do not come from its tokens."""
    config = {"network": network, "residual": 10.0, "seed": 3}
    width, draw = 6, Draws(3)
    x = draw(16, 10) if network == "scalar" else draw(16, 10, width)
    if network == "scalar":
        _, q, k, v, _ = scalar_layer(3, width, 1.0)
        weights = [q, k, torch.tensor([v], dtype=x.dtype)]
    else:
        count = {"mlp": 2, "deep mlp": 4, "relu mlp": 2, "gelu mlp": 2}.get(network, 3)
        weights = [draw(width, width, scale=width**-0.5) for _ in range(count)]

    def output(*w: Tensor) -> Tensor:
        out: Tensor = x
        if network == "scalar":
            mixed = ((w[0] @ w[1] / width**0.5) * x[:, :, None] * x[:, None]).softmax(-1) @ x[..., None]
            out = w[2] * mixed.squeeze(-1)
        elif "attention" in network:
            scores = x @ w[0] @ w[1].mT @ x.mT / width**0.5
            out = (scores if network.startswith("linear") else scores.softmax(-1)) @ x @ w[2]
        elif network in gauss_newton.BENT:
            out = getattr(F, gauss_newton.BENT[network])(x @ w[0]) @ w[1]
        else:
            for weight in w:
                out = out @ weight.mT
        return out

    out = output(*weights)
    target = out + 10 * out.std() * Draws(3, "noise")(*out.shape)
    H = flat_hessian(lambda *w: (output(*w) - target).square().mean(), weights)
    ggn = H - functional_part(output, weights, target)
    found = gauss_newton.measure(config)
    for name, matrix in (("hessian", H), ("ggn", ggn)):
        assert found[name] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-9)
