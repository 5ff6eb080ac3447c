"""How fast gradient descent and its two momentum rules settle along an eigenvector of the quadratic model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.errors import CurvlensError, a_kind
from curvlens.results import Density, Eigs

Spectrum = Eigs | Density | Tensor | Sequence[float]
ZERO = 1e-12
"""Of the largest: an eigenvalue below this is 0 up to rounding."""
ZERO_NODE = 1e-6
"""The same for nodes of a density, which are known to this."""


def factors(eigenvalues: Tensor, learning_rate: float, momentum: float = 0.0, nesterov: bool = False) -> Tensor:
    """The factor per step of the slowest part along each eigenvector: a spectral radius.

    Gradient descent multiplies by 1 − ηλ. With momentum β a step maps position and buffer by a 2 × 2 matrix with trace
    1 + β − ηλ and determinant β (heavy ball), or (1 + β)(1 − ηλ) and β(1 − ηλ) (torch's Nesterov).

    >>> factors(torch.tensor([1.0, 10.0]), 0.1).tolist()
    [0.8999999761581421, 0.0]
    """
    kept = 1 - learning_rate * eigenvalues
    if not momentum:
        return kept.abs()
    trace, determinant = (1 + momentum) * kept, momentum * kept
    if not nesterov:
        trace, determinant = momentum + kept, torch.full_like(kept, momentum)
    beyond = trace.square() / 4 - determinant
    return torch.where(beyond < 0, determinant.abs().sqrt(), trace.abs() / 2 + beyond.clamp(min=0).sqrt())


@dataclass(frozen=True)
class Known:
    """Eigenvalues that are not 0, and what they are of."""

    values: Tensor
    zeros: int
    subspace: str

    @property
    def negative(self) -> int:
        """How many are below 0."""
        return int((self.values < 0).sum())


def known(spectrum: Spectrum) -> Known:
    """The eigenvalues of a result, or plain numbers. Those that are 0 up to their error are taken out."""
    if isinstance(spectrum, Eigs):
        values, error = spectrum.values[spectrum.converged].double(), spectrum.residuals[spectrum.converged].double()
        subspace = f"the {len(values)} eigenvectors that were computed ({spectrum.ends})"
    elif isinstance(spectrum, Density):
        values = spectrum.nodes.double()
        error = ZERO_NODE * values.abs().max().expand(len(values))
        subspace = f"the density of {spectrum.n} eigenvalues"
    else:
        try:
            values = torch.as_tensor(spectrum, dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as problem:
            raise CurvlensError(
                f"The spectrum is {a_kind(spectrum)}, expected eigenvalues: numbers, the result of cl.eigs or of "
                "cl.density, or a dict of those by step."
            ) from problem
        error, subspace = torch.zeros_like(values), f"the {values.numel()} given eigenvalues"
    if values.ndim != 1 or not len(values):
        raise CurvlensError(f"The spectrum has shape {tuple(values.shape)}, expected one eigenvalue or more in a row.")
    if not bool(values.isfinite().all()):
        raise CurvlensError("The spectrum has a number that is NaN or infinite. Give finite eigenvalues.")
    nonzero = values.abs() > torch.maximum(error, ZERO * values.abs().max())
    if not bool(nonzero.any()):
        raise CurvlensError(
            "All eigenvalues are 0 up to their error: they say nothing of a rate. Ask cl.eigs for both ends of the "
            "spectrum, or for a block where the loss is curved."
        )
    return Known(values[nonzero], int((~nonzero).sum()), subspace)
