"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
