"""What curvature means for training: attribution, the loss along a line, the edge of stability, gradient noise,
scaling."""

from curvlens.dynamics.attribute import attribute
from curvlens.dynamics.data_size import data_size
from curvlens.dynamics.fits import curvature_gain, loss_law, power_law
from curvlens.dynamics.forecast import forecast
from curvlens.dynamics.landscape import landscape
from curvlens.dynamics.line import line
from curvlens.dynamics.noise import noise
from curvlens.dynamics.rules import SGD, Adam, AdamW
from curvlens.dynamics.scaling import scaling
from curvlens.dynamics.stability import stability

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "attribute",
    "curvature_gain",
    "data_size",
    "forecast",
    "landscape",
    "line",
    "loss_law",
    "noise",
    "power_law",
    "scaling",
    "stability",
]
