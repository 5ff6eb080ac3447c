"""How a model is run. Internal: a `Problem` hands it to operators, the profiler and the doctor."""
