"""Runs a model: parameters, data, graphs, sums. Internal: operators, profiler and doctor get it from a `Problem`."""
