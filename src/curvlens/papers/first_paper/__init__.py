"""The figures, the table and the other claims of *What does it mean to be a Transformer?*"""

from curvlens.papers.experiment import Experiment
from curvlens.papers.first_paper.bulk import BULK_SPECTRUM
from curvlens.papers.first_paper.deep import FIG6
from curvlens.papers.first_paper.dispersion import DISPERSION
from curvlens.papers.first_paper.entries import FIG1, FIG4
from curvlens.papers.first_paper.equation5 import FIG3A
from curvlens.papers.first_paper.heads import HEADS
from curvlens.papers.first_paper.key_size import KEY_SIZE
from curvlens.papers.first_paper.layer_growth import LAYER
from curvlens.papers.first_paper.linear_attention import FIG7
from curvlens.papers.first_paper.linear_axes import FIG5
from curvlens.papers.first_paper.linear_mlp import FIG8
from curvlens.papers.first_paper.linear_networks import TABLE1
from curvlens.papers.first_paper.moments import MOMENTS
from curvlens.papers.first_paper.pre_ln import FIG3B
from curvlens.papers.first_paper.published import PUBLISHED
from curvlens.papers.first_paper.published_deep import PUBLISHED_DEEP
from curvlens.papers.first_paper.single_matrix import SINGLE_MATRIX
from curvlens.papers.first_paper.step_sizes import STEP_SIZES
from curvlens.papers.first_paper.temperature import TEMPERATURE
from curvlens.papers.first_paper.tying import TYING
from curvlens.papers.first_paper.value_factors import VALUE_FACTORS
from curvlens.papers.first_paper.value_functional import VALUE_FUNCTIONAL
from curvlens.papers.first_paper.weights import WEIGHTS

EXPERIMENTS: tuple[Experiment, ...] = (
    FIG1,
    FIG3A,
    FIG3B,
    FIG4,
    FIG5,
    FIG6,
    FIG7,
    FIG8,
    PUBLISHED,
    PUBLISHED_DEEP,
    TYING,
    TABLE1,
    LAYER,
    WEIGHTS,
    MOMENTS,
    DISPERSION,
    TEMPERATURE,
    SINGLE_MATRIX,
    BULK_SPECTRUM,
    KEY_SIZE,
    HEADS,
    VALUE_FUNCTIONAL,
    VALUE_FACTORS,
    STEP_SIZES,
)
