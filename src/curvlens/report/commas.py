"""Records as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from curvlens.errors import printable


def commas(records: list[dict[str, Any]]) -> str:
    """Records of the same fields as CSV, names as they are shown.

    What is not known is empty, and so is a last column, for the seal.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [*records[0], ""], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: printable(x) if isinstance(x, str) else x for key, x in one.items()} for one in records)
    return text.getvalue()
