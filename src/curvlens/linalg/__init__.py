"""Spectra, estimates and solutions for any operator: ours, a tensor, scipy's, another library's."""

from curvlens.linalg.density import density
from curvlens.linalg.eigs import eigs
from curvlens.linalg.estimators import diagonal, frobenius, trace
from curvlens.linalg.solve import solve

__all__ = ["density", "diagonal", "eigs", "frobenius", "solve", "trace"]
