"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.motion.scaling_laws import SCALING

EXPERIMENTS: tuple[Experiment, ...] = (SCALING,)
