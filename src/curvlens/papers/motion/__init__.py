"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.motion.convergence_rate import CONVERGENCE_RATE
from curvlens.papers.motion.critical_batch import CRITICAL_BATCH

EXPERIMENTS: tuple[Experiment, ...] = (CRITICAL_BATCH, CONVERGENCE_RATE)
