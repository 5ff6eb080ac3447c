"""``result.plot()``: a picture of each kind of result, as an Altair chart.

One colour for one part on every picture: H ink, G blue, F orange. Sizes are on a logarithm. Numbers of both signs are
on one that is mirrored at 0. What is uncertain looks so: bands, whiskers, marks in cells.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from curvlens import files
from curvlens.errors import CurvlensError, a_kind
from curvlens.report.plots import curves, dynamics, heat, laws, modules, spectrum
from curvlens.report.plots.frame import styled
from curvlens.report.plots.writing import KINDS, content
from curvlens.report.profile_page import icicle
from curvlens.results import (
    Attribution,
    ByBlock,
    Convergence,
    Density,
    Eigs,
    Estimate,
    Forecast,
    Gain,
    Landscape,
    Line,
    LossLaw,
    Power,
    Profile,
    Propagation,
    Result,
    Scaling,
    Solution,
    Stability,
)

_DRAWN: dict[type[Result], Callable[..., Any]] = {
    ByBlock: heat.blocks,
    Attribution: heat.attribution,
    Eigs: spectrum.eigenvalues,
    Density: spectrum.density,
    Propagation: curves.propagation,
    Solution: curves.residuals,
    Line: dynamics.line,
    Forecast: dynamics.forecast,
    Convergence: dynamics.convergence,
    Landscape: dynamics.landscape,
    Scaling: dynamics.scaling,
    Power: laws.power,
    LossLaw: laws.loss,
    Gain: laws.gain,
    Stability: dynamics.stability,
    Profile: modules.modules,
    Estimate: curves.histogram,
}


def plot(result: Result, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """A picture of a result, an ``altair.Chart``; also written to a file if a path is given.

    Blocks: a heat map, layer × role, or layer × head for ``by="head"``. An attribution:
    by block; ``what="modules"``, ``what="pairs"``. Eigenvalues and densities: histogram,
    sorted, cumulative. Of `Eigs`, ``what="mass"`` shows in which blocks the vectors live. Propagation: curves over
    the layers; ``quantity`` is trace, frobenius, top or bottom. A line: the loss and its quadratic model. A
    forecast: true loss and quadratic model over the steps; ``what="distance"`` the way. Convergence: ‖g‖ with the
    rates seen and predicted; ``what="curvature"`` along the path, ``what="condition"`` the numbers. A scaling: one
    number, ``what="lambda_max"``, over one setting. A power law: models, law and interval. A loss law: models and
    law over the samples, or ``over="parameters"``. A gain: errors with curvature over those without. Stability: the
    fraction of the edge, by parameter group; ``what="mass"`` by block. A profile written to an ``.html`` file is
    the icicle.
    """
    kind = _kind(path)
    if isinstance(result, Profile) and kind == "html":
        assert path is not None
        files.write(Path(path), icicle(result, **options))
        return None
    for known, draw in _DRAWN.items():
        if isinstance(result, known):
            chart = styled(draw(result, **options))
            if path is not None and kind is not None:
                files.write(Path(path), content(chart, kind, result))
            return chart
    raise CurvlensError(f"There is no picture of {a_kind(result)}.")


def _kind(path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise CurvlensError(f"{os.fspath(path)!r} is no name of a picture: it has to end in .{', .'.join(KINDS)}.")
    if not Path(path).parent.is_dir():
        raise CurvlensError(f"There is no folder {str(Path(path).parent)!r} for {Path(path).name!r}.")
    return kind
