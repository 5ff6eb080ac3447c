"""What would make a curvature wrong, found before it is computed: `doctor` looks, a `Report` of `Finding`s says."""

from curvlens.doctor.examine import doctor
from curvlens.doctor.finding import Finding
from curvlens.doctor.report import Report

__all__ = ["Finding", "Report", "doctor"]
