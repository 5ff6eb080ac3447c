"""Growth rates of the blocks of the attention Hessian: predicted by theory, and fitted to a measured curve.

Theory (Equation 5, Section 4.1; `docs/explanation/math.md`, "Growth rates"): a block is a product of a number of
tokens, weights and moments. In the size σ of the tokens it is a power law for small σ. Beyond σ ≈ 1 attention
saturates, and the law no longer holds. So `fit` looks for the widest window in which the local slopes of a measured
curve agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from curvlens.errors import CurvlensError, CurvlensWarning, a_kind, nearest

Residual = Literal["constant", "scaling"]
Kind = Literal["softmax", "linear"]

FEW = 4
"""The fewest points in a window."""


@dataclass(frozen=True)
class Growth:
    """The powers with which a block grows. The effect of the weights on the attention matrix is not included.

    ``data`` is None for a block that is zero.
    """

    data: int | None
    """The power of the tokens for small tokens; None for a block that is zero."""
    weights: Mapping[str, int]
    """Powers of W_Q, W_K and W_V."""
    moments: tuple[int, ...]
    """Attention moments in the block: (1, 2) is M1 M2. Empty for linear attention."""


def _growth(data: int | None, weights: str, moments: tuple[int, ...] = ()) -> Growth:
    return Growth(data, {letter: weights.count(letter) for letter in "QKV" if letter in weights}, moments)


_SOFTMAX = {
    ("outer", "QQ"): _growth(6, "KKVV", (2, 2)),
    ("outer", "KK"): _growth(6, "QQVV", (2, 2)),
    ("outer", "QK"): _growth(6, "QKVV", (2, 2)),
    ("outer", "VQ"): _growth(4, "KV", (1, 2)),
    ("outer", "VK"): _growth(4, "QV", (1, 2)),
    ("outer", "VV"): _growth(2, "", (1, 1)),
    ("functional", "QQ"): _growth(5, "KKV", (3,)),
    ("functional", "KK"): _growth(5, "QQV", (3,)),
    ("functional", "QK"): _growth(3, "V", (2,)),  # plus a term X⁵ W_Q W_K W_V M3, which is smaller for small tokens
    ("functional", "VQ"): _growth(3, "K", (2,)),
    ("functional", "VK"): _growth(3, "Q", (2,)),
    ("functional", "VV"): _growth(None, ""),
}
_LINEAR = {
    ("outer", "QQ"): _growth(6, "KKVV"),
    ("outer", "KK"): _growth(6, "QQVV"),
    ("outer", "QK"): _growth(6, "QKVV"),
    ("outer", "VQ"): _growth(6, "QKKV"),
    ("outer", "VK"): _growth(6, "QQKV"),
    ("outer", "VV"): _growth(6, "QQKK"),
    ("functional", "QQ"): _growth(None, ""),
    ("functional", "KK"): _growth(None, ""),
    ("functional", "QK"): _growth(3, "V"),
    ("functional", "VQ"): _growth(3, "K"),
    ("functional", "VK"): _growth(3, "Q"),
    ("functional", "VV"): _growth(None, ""),
}


def predicted(
    part: Literal["outer", "functional"],
    block: str | tuple[str, str],
    *,
    kind: Kind = "softmax",
    residual: Residual = "constant",
) -> Growth:
    """The growth of a block of one layer, ``"QK"`` or ``("Q", "K")``.

    ``residual`` describes F − Y. "constant": it tends to a constant as σ → 0 (labels that do not scale with the
    tokens). "scaling": it scales with σ (Y ∝ σ, or Y = 0), and the functional part has one more power of the data.

    >>> predicted("functional", "QQ").data, predicted("functional", "QQ", residual="scaling").data
    (5, 6)
    """
    table = {"softmax": _SOFTMAX, "linear": _LINEAR}.get(kind)
    if table is None or residual not in ("constant", "scaling"):
        raise CurvlensError(
            f"kind={kind!r}, residual={residual!r}; expected 'softmax' or 'linear', and 'constant' or 'scaling'."
        )
    _known_part(part)
    name = "".join(block) if isinstance(block, (str, tuple, list)) and all(isinstance(b, str) for b in block) else ""
    found = table.get((part, name)) or table.get((part, name[::-1]))
    if found is None:
        blocks = [b for p, b in table if p == part]
        raise CurvlensError(f"There is no growth rate of {part!r} {name or block!r}. {nearest(name, blocks)}")
    if part == "outer" or found.data is None or residual == "constant":
        return found
    return Growth(found.data + 1, found.weights, found.moments)


def _known_part(part: str) -> None:
    if part not in ("outer", "functional"):
        raise CurvlensError(f"part={part!r}, expected 'outer' or 'functional'.")


def predicted_depth(
    depth: int,
    layer: int,
    part: Literal["outer", "functional"] = "outer",
    *,
    network: Literal["attention", "mlp"] = "attention",
    residual: Residual = "constant",
) -> int | None:
    """The power of the data in the diagonal blocks of layer ``layer`` (from 1) of ``depth`` linear layers.

    The output of linear attention is a product of 3^depth tokens. So the outer blocks grow with the power 2·3^depth,
    and the functional blocks of earlier layers with 3^depth if the residual is constant, and 2·3^depth if it is the
    output itself. A linear MLP has power 2 (outer) and zero blocks (functional) at any depth.

    >>> predicted_depth(3, 1), predicted_depth(3, 1, "functional"), predicted_depth(3, 3, "functional")
    (54, 27, None)
    """
    _known_part(part)
    if network not in ("attention", "mlp") or residual not in ("constant", "scaling"):
        raise CurvlensError(
            f"network={network!r}, residual={residual!r}; expected 'attention' or 'mlp', and 'constant' or 'scaling'."
        )
    if not isinstance(depth, int) or not isinstance(layer, int) or not 1 <= layer <= depth:
        raise CurvlensError(f"layer={layer!r} of depth={depth!r}; layers are whole numbers from 1 to the depth.")
    if network == "mlp":
        return 2 if part == "outer" else None
    if part == "outer":
        return int(2 * 3**depth)
    if layer == depth:
        return None
    return int(3**depth if residual == "constant" else 2 * 3**depth)


@dataclass(frozen=True)
class PowerLaw:
    """A power law, and where it holds."""

    slope: float
    interval: tuple[float, float]
    """The confidence interval of the slope."""
    prefactor: float
    """The value at σ = 1 of the fitted line."""
    window: tuple[float, float]
    """The σ between which the law was fitted."""
    points: int
    local: tuple[float, ...]
    """Slopes between neighbouring points of the whole curve."""
    level: float

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"σ^{self.slope:.4g} ({low:.4g} … {high:.4g} at {self.level:.0%}) for σ in [{self.window[0]:.3g}, "
            f"{self.window[1]:.3g}], {self.points} points"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "slope": self.slope,
            "interval": list(self.interval),
            "prefactor": self.prefactor,
            "window": list(self.window),
            "points": self.points,
            "local": list(self.local),
            "level": self.level,
        }


def fit(
    sigma: Any,
    values: Any,
    *,
    tolerance: float = 0.05,
    window: tuple[float, float] | None = None,
    level: float = 0.95,
) -> PowerLaw:
    """Fit a power law to a measured curve in the widest window where it holds.

    The interval is statistical only: it contains the scatter of the points (or of the repeats) about the line. It does
    not contain the systematic bend of a curve that is only nearly a power law in the window; ``tolerance`` bounds that.

    Args:
        sigma: Sizes (n,), positive and ascending: a tensor, an array or a list.
        values: The curve (…, n), positive; or repeats of it, one in each row. The interval then comes from the
            repeats' slopes, otherwise from the regression.
        tolerance: Local slopes in the window differ from their mean by this much at most.
        window: Use this window instead of searching for one.
        level: The level of the confidence interval.

    >>> s = torch.logspace(-3, 1, 17, dtype=torch.float64)
    >>> law = fit(s, 2 * s**5 / (1 + s) ** 3)
    >>> round(law.slope, 2), law.window[0] == 1e-3, law.window[1] < 0.05
    (4.98, True, True)
    """
    sigma, values = _numbers("sigma", sigma), _numbers("values", values)
    if sigma.ndim != 1 or not values.ndim or values.shape[-1] != len(sigma) or len(sigma) < 3 or not values.numel():
        raise CurvlensError(
            f"sigma has shape {tuple(sigma.shape)}, values {tuple(values.shape)}: one value a σ, three at least."
        )
    curve = values.reshape(-1, len(sigma))
    if not bool((sigma > 0).all() and (sigma.diff() > 0).all()):
        raise CurvlensError("sigma must be positive and ascending.")
    if not bool((curve > 0).all() and curve.isfinite().all()):
        raise CurvlensError("A power law needs positive, finite values; a block that is exactly zero has no slope.")
    x, y = sigma.log(), curve.log()
    local = y.mean(0).diff() / x.diff()
    first, last = _widest(local, tolerance) if window is None else _inside(sigma, window)
    if window is None and last - first + 1 < min(FEW, len(sigma)):
        warnings.warn(
            f"In no window of {FEW} points are the local slopes within tolerance={tolerance:g} of their mean; the "
            f"widest has {last - first + 1} of {len(sigma)}. The curve is noisy (raise tolerance=, or give repeats "
            "of it or window=), or it is not a power law.",
            CurvlensWarning,
            stacklevel=2,
        )
    x, y = x[first : last + 1], y[:, first : last + 1]
    centred = x - x.mean()
    slopes = y @ centred / centred.square().sum()
    slope, n = float(slopes.mean()), len(x)
    if len(slopes) > 1:
        spread, dof = float(slopes.std()) / len(slopes) ** 0.5, len(slopes) - 1
    else:
        residuals = y[0] - y[0].mean() - slope * centred
        dof = n - 2
        spread = float((residuals.square().sum() / dof / centred.square().sum()).sqrt()) if dof else math.inf
    half = student(level, dof) * spread if dof else math.inf
    return PowerLaw(
        slope,
        (slope - half, slope + half),
        math.exp(float(y.mean() - slope * x.mean())),
        (float(sigma[first]), float(sigma[last])),
        n,
        tuple(local.tolist()),
        level,
    )


def _numbers(name: str, given: Any) -> Float[Tensor, "*shape"]:
    """A tensor, an array or nested lists of numbers in float64."""
    try:
        numbers = torch.as_tensor(given)
        if numbers.is_complex():
            raise TypeError("complex numbers")
        if not isinstance(given, Tensor):
            numbers = torch.as_tensor(given, dtype=torch.float64)  # without dtype a list would become float32
    except (TypeError, ValueError, RuntimeError) as error:
        raise CurvlensError(
            f"{name} is {a_kind(given)} that cannot be converted to real numbers ({error}): give a tensor, an array "
            "or a list of numbers."
        ) from error
    return numbers.detach().double()


def _widest(local: Tensor, tolerance: float) -> tuple[int, int]:
    """First and last point of the longest run of local slopes that agree; of equally long runs, the most even one."""
    best = (0, 0.0, 0, 1)
    for start in range(len(local)):
        for end in range(start + 1, len(local) + 1):
            run = local[start:end]
            spread = float((run - run.mean()).abs().max())
            if spread > tolerance:
                continue  # a longer run has another mean and may agree again
            best = max(best, (end - start, -spread, start, end), key=lambda found: found[:2])
    return best[2], best[3]


def _inside(sigma: Tensor, window: tuple[float, float]) -> tuple[int, int]:
    low, high = window[0] * (1 - 1e-12), window[1] * (1 + 1e-12)
    inside = ((sigma >= low) & (sigma <= high)).nonzero()[:, 0]
    if len(inside) < 2:
        raise CurvlensError(f"window={window} holds {len(inside)} of the points, a slope needs two.")
    return int(inside[0]), int(inside[-1])


def student(level: float, dof: int) -> float:
    """The t with P(|T| ≤ t) = level for Student's distribution, by its finite sums for whole degrees of freedom."""

    def inside(t: float) -> float:
        angle = math.atan(t / dof**0.5)
        cosine, term, total = math.cos(angle), 1.0, 0.0
        if dof % 2:
            term = cosine
            for k in range(1, dof - 1, 2):
                total += term
                term *= cosine * cosine * (k + 1) / (k + 2)
            return 2 / math.pi * (angle + math.sin(angle) * total)
        for k in range(0, dof, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        return math.sin(angle) * total

    if not 0 < level < 1:
        raise CurvlensError(f"level={level}; it lies between 0 and 1.")
    low, high = 0.0, 1.0
    while inside(high) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return (low + high) / 2
