"""Files of others and our own: bounded reading, whole writing, and a seal by which we know what we wrote."""

from curvlens.files.reading import parse, read
from curvlens.files.writing import require_ours, set_aside, sync_folder, write

__all__ = ["parse", "read", "require_ours", "set_aside", "sync_folder", "write"]
