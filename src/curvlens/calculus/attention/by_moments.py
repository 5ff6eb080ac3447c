"""Products of the Hessian with vectors, from the moments: about 22 N d² operations for any number of keys.

W_Q and W_K act only through their product. So one direction Ω̇ = Q̇ W_Kᵀ + W_Q K̇ᵀ goes in, and one gradient by the
product comes out. A product of small matrices takes microseconds: everything that does not depend on the vector is
prepared, and each matrix product is one call of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvlens.calculus.attention.state import State
from curvlens.calculus.curvature import applied, is_zero
from curvlens.calculus.form import SplitPart


class ByMoments:
    """H v for one part, for directions (H, ·, ·) of the weights, or (·, ·) for one head."""

    def __init__(self, state: State, part: SplitPart) -> None:
        layer, phi = state.layer, state.potential
        one = layer.heads == 1

        def bare(tensor: Tensor) -> Tensor:  # a matrix product costs a third of a batched one with batch size 1
            return tensor[0] if one else tensor

        self.times: Callable[[Tensor, Tensor], Tensor] = torch.mm if one else torch.bmm
        self.plus: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.addmm if one else torch.baddbmm
        self.one, self.functional = one, part != "outer"
        curvature = state.total if part == "total" else state.outer if part == "outer" else state.rest
        scale = curvature if isinstance(curvature, float) else 1.0  # multiplied into the weights: saves one pass
        self.curvature = None if isinstance(curvature, float) else curvature
        self.curved = not is_zero(curvature)
        self.x, self.g = bare(state.x.expand(layer.heads, -1, -1)), bare(state.g.expand(layer.heads, -1, -1))
        self.m, wv = bare(phi.mean), bare(layer.WV)
        self.m_scaled, self.wv_scaled, self.wv_t = scale * self.m, scale * wv, wv.mT
        self.wq, self.down = bare(layer.WQ), bare(layer.down)
        self.wk = None if layer.WK is None else bare(layer.WK)
        self.up = None if layer.up is None else bare(layer.up)
        self.x_t, self.m_t = self.x.mT, self.m.mT
        self.wk_t = self.wv_t if self.wk is None else self.wk.mT
        self.second = phi.second("X", "X").flatten(0, 1)
        third = self.functional and phi.has_third
        self.third = phi.third("X", "X").flatten(0, 1) if third else None
        b = bare(state.tau * state.B)
        self.b, self.b_t = b, b.mT
        self.by_value = self.m_t @ self.g if self.up is not None else b
        """The gradient by W_V."""
        self.column, self.shape = (*self.second.shape[:2], 1), phi.mean.shape[1:] if one else phi.mean.shape
        weights = {"Q": self.wq, "K": self.wk, "V": self.down, "O": self.up}
        self.zeros = {letter: torch.zeros_like(w) for letter, w in weights.items() if w is not None}

    def __call__(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """H v by letter; a missing letter is zero."""
        if not self.curved and not self.functional:
            return {letter: torch.zeros_like(zero) for letter, zero in self.zeros.items()}
        if len(v) < len(self.zeros):
            v = {**self.zeros, **v}
        times, plus, second = self.times, self.plus, self.second
        # forward: the tangents of κ/τ, m = ∇Φ(κ) and f
        omega = v["Q"] if self.wk is None else plus(times(v["Q"], self.wk_t), self.wq, v["K"].mT)
        kappa = times(self.x, omega).view(self.column)
        md = torch.bmm(second, kappa).view(self.shape)
        value = v["V"] if self.up is None else plus(times(v["V"], self.up), self.down, v["O"])
        gd = None
        if self.curved:
            gd = plus(times(md, self.wv_scaled), self.m_scaled, value)
            if not self.one:
                gd = gd.sum(0)
            if self.curvature is not None:
                gd = applied(self.curvature, gd)
            assert gd is not None
            gd = gd if self.one else gd.expand(self.x.shape[0], -1, -1)
        # backward: the tangents of u = W_V g, of p = ∇²Φ u, and of the gradients
        if gd is None:
            ud = times(self.g, value.mT)
        else:
            ud = times(gd, self.wv_t)
            ud = plus(ud, self.g, value.mT) if self.functional else ud
        pd = torch.bmm(second, ud.view(self.column))
        pd = (pd if self.third is None else pd.baddbmm_(self.third, kappa)).view(self.shape)
        by_omega = times(self.x_t, pd)
        if self.wk is None:
            result = {"Q": by_omega}
        else:
            result = {"Q": times(by_omega, self.wk), "K": times(by_omega.mT, self.wq)}
            if self.functional:
                result = {"Q": plus(result["Q"], self.b, v["K"]), "K": plus(result["K"], self.b_t, v["Q"])}
        if gd is None:
            total = times(md.mT, self.g)
        else:
            total = times(self.m_t, gd)
            total = plus(total, md.mT, self.g) if self.functional else total
        if self.up is None:
            return {**result, "V": total}
        down, up = times(total, self.up.mT), times(self.down.mT, total)
        if self.functional:
            down, up = plus(down, self.by_value, v["O"].mT), plus(up, v["V"].mT, self.by_value)
        return {**result, "V": down, "O": up}
