"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.motion.critical_batch import CRITICAL_BATCH
from curvlens.papers.motion.data_convergence import DATA_CONVERGENCE
from curvlens.papers.motion.second_order import SECOND_ORDER

EXPERIMENTS: tuple[Experiment, ...] = (
    DATA_CONVERGENCE,
    SECOND_ORDER,
    CRITICAL_BATCH,
)
