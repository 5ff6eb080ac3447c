"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.motion.conditioning import CONDITIONING
from curvlens.papers.motion.critical_batch import CRITICAL_BATCH
from curvlens.papers.motion.data_convergence import DATA_CONVERGENCE
from curvlens.papers.motion.scaling_laws import SCALING
from curvlens.papers.motion.second_order import SECOND_ORDER
from curvlens.papers.motion.spectrum_size import SPECTRUM_SIZE

EXPERIMENTS: tuple[Experiment, ...] = (
    DATA_CONVERGENCE,
    SECOND_ORDER,
    CRITICAL_BATCH,
    SCALING,
    CONDITIONING,
    SPECTRUM_SIZE,
)
