"""What the papers and the literature say of curvature in motion: data, steps, training and size."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.motion.adam_edge import ADAM_EDGE_EXPERIMENT
from curvlens.papers.motion.block_heterogeneity import BLOCK_HETEROGENEITY
from curvlens.papers.motion.block_order import BLOCK_ORDER_EXPERIMENT
from curvlens.papers.motion.conditioning import CONDITIONING
from curvlens.papers.motion.convergence_rate import CONVERGENCE_RATE
from curvlens.papers.motion.critical_batch import CRITICAL_BATCH
from curvlens.papers.motion.data_convergence import DATA_CONVERGENCE
from curvlens.papers.motion.forecast_departure import FORECAST_DEPARTURE
from curvlens.papers.motion.ggn_top_training import GGN_TOP_TRAINING
from curvlens.papers.motion.recommendations import RECOMMENDATIONS
from curvlens.papers.motion.scaling_laws import SCALING
from curvlens.papers.motion.second_order import SECOND_ORDER
from curvlens.papers.motion.spectrum_size import SPECTRUM_SIZE
from curvlens.papers.motion.step_edge import STEP_EDGE

EXPERIMENTS: tuple[Experiment, ...] = (
    DATA_CONVERGENCE,
    SECOND_ORDER,
    CRITICAL_BATCH,
    SCALING,
    CONDITIONING,
    SPECTRUM_SIZE,
    STEP_EDGE,
    ADAM_EDGE_EXPERIMENT,
    RECOMMENDATIONS,
    BLOCK_ORDER_EXPERIMENT,
    BLOCK_HETEROGENEITY,
    FORECAST_DEPARTURE,
    GGN_TOP_TRAINING,
    CONVERGENCE_RATE,
)
