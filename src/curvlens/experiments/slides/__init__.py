"""The claims of the slides: the spectrum of scalar attention, the Gauss–Newton matrix at its top, attention sinks."""

from curvlens.experiments.experiment import Experiment
from curvlens.experiments.slides.gauss_newton import GGN_TOP
from curvlens.experiments.slides.sink import SINK
from curvlens.experiments.slides.sink_gpt import SINK_GPT
from curvlens.experiments.slides.spectrum import SCALAR

EXPERIMENTS: tuple[Experiment, ...] = (SCALAR, GGN_TOP, SINK, SINK_GPT)
