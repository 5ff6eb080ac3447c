"""Results: frozen numbers with their errors, status and provenance, saved as JSON and safetensors."""

from curvlens.results.attribution import Attribution
from curvlens.results.base import Result, claim, load
from curvlens.results.by_block import ByBlock
from curvlens.results.convergence import Convergence
from curvlens.results.data_size import DataSize
from curvlens.results.density import Density
from curvlens.results.eigs import Eigs
from curvlens.results.estimate import Estimate
from curvlens.results.forecast import Forecast
from curvlens.results.landscape import Landscape
from curvlens.results.laws import Gain, LossLaw, Power
from curvlens.results.line import Line
from curvlens.results.noise import Noise
from curvlens.results.profile import COLUMNS, DIGITS, OWN, Portion, Profile, Row, aligned
from curvlens.results.propagation import Amount, Level, Propagation
from curvlens.results.scaling import Scaling
from curvlens.results.solution import Solution
from curvlens.results.stability import Stability, Update
from curvlens.results.status import Status

__all__ = [
    "COLUMNS",
    "DIGITS",
    "OWN",
    "Amount",
    "Attribution",
    "ByBlock",
    "Convergence",
    "DataSize",
    "Density",
    "Eigs",
    "Estimate",
    "Forecast",
    "Gain",
    "Landscape",
    "Level",
    "Line",
    "LossLaw",
    "Noise",
    "Portion",
    "Power",
    "Profile",
    "Propagation",
    "Result",
    "Row",
    "Scaling",
    "Solution",
    "Stability",
    "Status",
    "Update",
    "aligned",
    "claim",
    "load",
]
