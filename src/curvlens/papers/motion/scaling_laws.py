from curvlens.papers.experiment import Experiment, Report
from curvlens.papers.motion.size_sweep import measure, points

SCALING = Experiment("scaling", "", "", points, measure, lambda r: Report())
