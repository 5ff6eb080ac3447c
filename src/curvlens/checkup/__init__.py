"""Checks before a long computation: `doctor` returns a `Report` of `Finding`s that would make a curvature wrong."""

from curvlens.checkup.examine import doctor
from curvlens.checkup.finding import Finding
from curvlens.checkup.report import Report

__all__ = ["Finding", "Report", "doctor"]
