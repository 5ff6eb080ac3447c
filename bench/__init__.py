"""Cost, memory and correctness of curvlens and its peers, side by side: ``make bench``."""
