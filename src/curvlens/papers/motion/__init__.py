"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.motion.conditioning import CONDITIONING
from curvlens.papers.motion.scaling_laws import SCALING
from curvlens.papers.motion.spectrum_size import SPECTRUM_SIZE

EXPERIMENTS: tuple[Experiment, ...] = (SCALING, CONDITIONING, SPECTRUM_SIZE)
