"""Files of others and our own: bounded reading, whole writing, and a seal by which we know what we wrote."""

from curvlens.files.reading import parse, read
from curvlens.files.seal import sealed
from curvlens.files.writing import replace, require_ours, write_ours

__all__ = ["parse", "read", "replace", "require_ours", "sealed", "write_ours"]
