"""Data, scripts and styles of a page, each once, and the policy that allows no others."""

from __future__ import annotations

import base64
import json
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from curvlens.errors import CurvlensError

SCHEMA = 1
"""Version of the data block of a page. Raise it when a name or a meaning in it changes."""


class Assets:
    """Collects what the contents of one page need."""

    def __init__(self) -> None:
        self._data: dict[str, list[Any]] = {}
        self._named = {"page.css": asset("page.css")}, {"page.js": asset("page.js")}
        self._vega = False

    def keep(self, kind: str, value: Any) -> int:
        """Put a value into the data of the page. Returns its index among values of its kind."""
        self._data.setdefault(kind, []).append(value)
        return len(self._data[kind]) - 1

    def needs(self, *names: str) -> None:
        """Add ``.css`` and ``.js`` files of this folder to the page."""
        for name in names:
            self._named[name.endswith(".js")].setdefault(name, asset(name))

    def needs_vega(self) -> None:
        """Add Vega to the page, 0.9 MB."""
        self._vega = True
        self.needs("charts.css", "charts.js")

    @property
    def style(self) -> str:
        """All styles."""
        return "".join(self._named[0].values())

    @property
    def scripts(self) -> list[str]:
        """All scripts: Vega first, then ours as one script."""
        ours = "".join(f"{{\n{text}}}\n" for text in self._named[1].values())
        return [*([vega()] if self._vega else []), f'"use strict";\n{ours}']

    def data(self, **about: Any) -> str:
        """The data of the page as JSON. "<" is escaped, since it could end the script element."""
        document = {"schema": SCHEMA, "generator": "curvlens", **about, **self._data}
        # Everything except ASCII is escaped too, so lone surrogates can be written.
        said = json.dumps(document, allow_nan=False, separators=(",", ":"))
        return said.replace("<", "\\u003c")

    def policy(self) -> str:
        """Allow the scripts and styles of this page by their hashes, embedded images, and no request."""
        scripts = " ".join(map(_hash, self.scripts))
        return (
            f"default-src 'none'; script-src {scripts}; style-src {_hash(self.style)}; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        )


def asset(name: str) -> str:
    """A file of this folder."""
    return files("curvlens.report").joinpath(name).read_text(encoding="utf-8")


@cache
def vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script: bundled once, which takes seconds."""
    try:
        import vl_convert
    except ImportError as error:
        raise CurvlensError("Charts on pages need vl-convert. Install it: pip install 'curvlens[report]'.") from error
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")


def _hash(content: str) -> str:
    digest = base64.b64encode(sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
