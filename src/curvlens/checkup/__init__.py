"""What would make a curvature wrong, found before it is computed: `doctor` looks, a `Report` of `Finding`s says."""

from curvlens.checkup.examine import doctor
from curvlens.checkup.finding import Finding
from curvlens.checkup.report import Report

__all__ = ["Finding", "Report", "doctor"]
