"""The claims of the slides: the spectrum of scalar attention, the Gauss–Newton matrix at its top, attention sinks."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.slides.gauss_newton import GGN_TOP
from curvlens.papers.slides.sink import SINK
from curvlens.papers.slides.sink_gpt import SINK_GPT
from curvlens.papers.slides.spectrum import SCALAR

EXPERIMENTS: tuple[Experiment, ...] = (SCALAR, GGN_TOP, SINK, SINK_GPT)
