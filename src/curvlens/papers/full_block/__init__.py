"""The claims of *Closing the curvature gap* and of the article on the full block."""

from curvlens.papers.experiment import Experiment
from curvlens.papers.full_block.bounds import BOUNDS
from curvlens.papers.full_block.depth import DEPTH
from curvlens.papers.full_block.feedforward import FEEDFORWARD
from curvlens.papers.full_block.layer_coupling import LAYER_COUPLING
from curvlens.papers.full_block.layernorm import LAYERNORM
from curvlens.papers.full_block.tokens import TOKENS
from curvlens.papers.full_block.training import TRAINING
from curvlens.papers.full_block.within_block import WITHIN_BLOCK

EXPERIMENTS: tuple[Experiment, ...] = (
    DEPTH,
    BOUNDS,
    LAYERNORM,
    FEEDFORWARD,
    LAYER_COUPLING,
    TOKENS,
    TRAINING,
    WITHIN_BLOCK,
)
