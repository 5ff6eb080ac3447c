"""Reading foreign files with bounds, writing our own files as a whole, and a seal that marks files as ours."""

from curvlens.files.reading import parse, read
from curvlens.files.writing import require_ours, set_aside, sync_folder, write

__all__ = ["parse", "read", "require_ours", "set_aside", "sync_folder", "write"]
