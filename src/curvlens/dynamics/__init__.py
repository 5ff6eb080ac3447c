"""What curvature means for training: attribution, the loss along a line, the edge of stability, gradient noise."""

from curvlens.dynamics.attribute import attribute
from curvlens.dynamics.convergence import convergence
from curvlens.dynamics.data_size import data_size
from curvlens.dynamics.forecast import forecast
from curvlens.dynamics.landscape import landscape
from curvlens.dynamics.line import line
from curvlens.dynamics.noise import noise
from curvlens.dynamics.rules import SGD, Adam, AdamW, Preconditioned
from curvlens.dynamics.stability import stability
from curvlens.dynamics.update import next_step

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Preconditioned",
    "attribute",
    "convergence",
    "data_size",
    "forecast",
    "landscape",
    "line",
    "next_step",
    "noise",
    "stability",
]
