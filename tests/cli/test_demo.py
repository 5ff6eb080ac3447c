"""``curvlens demo``."""

from __future__ import annotations

import math
import re

from typer.testing import CliRunner

from curvlens.cli import app


def test_demo() -> None:
    """Short of training; the tables are complete, and H = G + F where the logits are linear."""
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--sequences", "1", "--samples", "4"])
    assert result.exit_code == 0, result.output
    assert "loss" in result.output
    assert "the same samples, so the errors in its columns are correlated" in " ".join(result.output.split())
    rows = re.findall(r"│ (\S+) +│ +(\S+)[^│]*│ +(\S+)[^│]*│ +(\S+)[^│]*│", result.output)
    rows = [row for row in rows if row[0] not in "HGF"]
    names = [row[0] for row in rows]
    assert len(names) == 3 * 20
    assert names[:20] == names[20:40] == names[40:]
    for name, _, g, f in rows:
        assert math.isfinite(float(g))
        if name in ("unembed", "final_norm"):
            assert float(f) == 0  # the logits are linear in each of these
