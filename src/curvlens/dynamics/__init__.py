"""What curvature means for training: attribution, the loss along a line, the edge of stability, noise, scaling."""

from curvlens.dynamics.attribute import attribute
from curvlens.dynamics.convergence import convergence
from curvlens.dynamics.data_size import data_size
from curvlens.dynamics.fits import curvature_gain, loss_law, power_law
from curvlens.dynamics.forecast import forecast
from curvlens.dynamics.landscape import landscape
from curvlens.dynamics.line import line
from curvlens.dynamics.noise import noise
from curvlens.dynamics.rules import SGD, Adam, AdamW, Preconditioned
from curvlens.dynamics.scaling import scaling
from curvlens.dynamics.stability import stability
from curvlens.dynamics.update import next_step

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Preconditioned",
    "attribute",
    "convergence",
    "curvature_gain",
    "data_size",
    "forecast",
    "landscape",
    "line",
    "loss_law",
    "next_step",
    "noise",
    "power_law",
    "scaling",
    "stability",
]
