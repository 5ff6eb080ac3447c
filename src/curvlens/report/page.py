"""One frame for all pages: a header with provenance, contents, sections, data. One file from which no request leaves.

>>> page = Page("Curvature", [Section("first", "First", body=[Prose("<b> is text.")])])
>>> "&lt;b&gt; is text." in page.html()
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from curvlens.errors import CurvlensError
from curvlens.report.assets import Assets
from curvlens.report.content import LONG_WORD, Content, Facts, Fold, Prose, Words, line, text

FEW = 3
"""Number of sections whose links fit into one line. With more, the contents are beside the page."""


@dataclass(frozen=True)
class Section:
    """A part of a page, listed in the contents. ``#id`` links to it."""

    id: str
    title: str
    lead: Words = ""
    """One sentence that says what the section shows."""
    body: Sequence[Content] = ()
    folded: bool = False

    def html(self, assets: Assets) -> str:
        """A section. A link to it opens a folded one."""
        lead = Prose(self.lead, "faint").html(assets) if self.lead else ""
        inner = lead + "".join(content.html(assets) for content in self.body)
        head = f'<h2 id="{text(self.id)}-title">{text(self.title)}</h2>'
        if self.folded:
            inner = f'<details><summary>{head}</summary><div class="inside">{inner}</div></details>'
        else:
            inner = f"{head}\n{inner}"
        named = f'id="{text(self.id)}" aria-labelledby="{text(self.id)}-title" tabindex="-1"'
        return f"<section {named}>\n{inner}</section>\n"


@dataclass(frozen=True)
class Page:
    """A page: `html` is all of it."""

    title: str
    sections: Sequence[Section] = ()
    lead: Sequence[Content] = ()
    """Below the title, before all sections."""
    banner: Words = ""
    """A notice at the top, such as incomplete data."""
    provenance: Mapping[str, object] = field(default_factory=dict)
    filtered: str = ""
    """What the filter searches, such as "claims". If empty, there is no filter."""

    def html(self) -> str:
        """The page. The same contents give the same bytes."""
        ids = [section.id for section in self.sections]
        if len({*ids, "data", "main", "provenance"}) < len(ids) + 3:
            raise CurvlensError(f"Sections of a page need ids of their own, got {ids}.")
        assets = Assets()
        lead = "".join(content.html(assets) for content in self.lead)
        sections = "".join(section.html(assets) for section in self.sections)
        about = _readable(self.provenance)
        origin = Fold("Provenance", [Facts(about)], "provenance").html(assets) if about else ""
        banner = f'<div id="banner" role="note">{line(self.banner)}</div>\n' if self.banner else ""
        data = assets.data(title=self.title, provenance=about)
        scripts = "".join(f"<script>{script}</script>\n" for script in assets.scripts)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{assets.policy()}">
<meta name="generator" content="curvlens">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{text(self.title)}</title>
<style>{assets.style}</style>
</head>
<body>
<a id="skip" href="#main">Skip to the content</a>
<header>
<div id="tools"></div>
<h1{_whole(self.title)}>{text(self.title)}</h1>
{banner}{lead}</header>
<div id="frame" class="{self._width()}">
{self._contents()}<main id="main" tabindex="-1">
{sections}{origin}<p class="faint made">curvlens {text(version("curvlens"))}</p>
</main>
</div>
<script id="data" type="application/json">{data}</script>
{scripts}</body>
</html>
"""

    def _width(self) -> str:
        """The class of the page: a single section needs no heading, and many sections are listed beside the page."""
        return "single" if len(self.sections) < 2 else "wide" if len(self.sections) > FEW else "few"

    def _contents(self) -> str:
        """Links to all sections, and the place of the filter."""
        search = f'<div id="filter" data-what="{text(self.filtered)}"></div>' if self.filtered else ""
        links = "".join(f'<li><a href="#{text(each.id)}">{text(each.title)}</a></li>' for each in self.sections)
        if len(self.sections) < 2:
            return search
        return f'<nav id="contents" aria-label="contents">{search}<ul>{links}</ul></nav>\n'


def _whole(title: str) -> str:
    """A long title is cut by the style of the page, and whole here."""
    return f' title="{text(title)}"' if len(title) > LONG_WORD else ""


def _readable(provenance: Mapping[str, object]) -> dict[str, object]:
    """Plain texts and numbers; nested ones as JSON."""
    return {
        str(key): value if isinstance(value, (str, int, bool)) else json.dumps(value, default=str)
        for key, value in provenance.items()
    }
