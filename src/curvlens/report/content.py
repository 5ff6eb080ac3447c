"""What a page is made of: paragraphs, tables, pictures and folds, as small frozen values.

Every one of them gives its HTML. All texts are escaped here, so that names of users are text and nothing else.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, Protocol

from curvlens.errors import printable_lines
from curvlens.report.assets import Assets

Tone = Literal["", "strong", "em", "code", "faint", "good", "warn", "bad"]


def text(words: object) -> str:
    """Any text as HTML. Markup, control and invisible characters are escaped."""
    said = printable_lines(str(words))
    return escape(said.encode(errors="backslashreplace").decode())


LONG_WORD, LONG = 80, 2000
"""Characters of a word or a text above which a line shows its beginning only, and all of it as a title."""


def clipped(words: object) -> str:
    """A text as HTML; names that are too long for a line are cut by the style of the page and whole in their title."""
    said = str(words)
    if len(said) <= LONG_WORD:
        return text(said)
    if len(said) > LONG:
        return _clip(said)
    return "".join(_clip(part) if len(part) > LONG_WORD else text(part) for part in re.split(r"(\s+)", said))


def _clip(said: str) -> str:
    whole = text(said)
    return f'<span class="clip" title="{whole}">{whole}</span>'


class Content(Protocol):
    """Something that a section shows. A new kind of content needs only this method."""

    def html(self, assets: Assets) -> str:
        """Its HTML. Data, scripts and styles go into ``assets``."""
        ...


@dataclass(frozen=True)
class Mark:
    """Some words with a tone."""

    words: str
    tone: Tone = "strong"


@dataclass(frozen=True)
class Link:
    """A link to a place of the same page, by its id."""

    words: str
    target: str


@dataclass(frozen=True)
class Number:
    """A number with its error in a lighter tone. ``value`` is used for sorting and copying."""

    shown: str
    error: str = ""
    value: float | None = None


Words = str | Mark | Link | Number | Sequence[str | Mark | Link | Number]
"""A text, or a line of texts, marks and links."""
_TAGS = {"strong": "strong", "em": "em", "code": "code"}


def line(words: Words) -> str:
    """Words as HTML."""
    if isinstance(words, str):
        return clipped(words)
    if isinstance(words, Mark):
        tag = _TAGS.get(words.tone, "span")
        tone = f' class="{words.tone}"' if tag == "span" and words.tone else ""
        return f"<{tag}{tone}>{clipped(words.words)}</{tag}>"
    if isinstance(words, Link):
        return f'<a href="#{text(words.target)}">{clipped(words.words)}</a>'
    if isinstance(words, Number):
        error = f' <span class="faint">± {text(words.error)}</span>' if words.error else ""
        return f"{text(words.shown)}{error}"
    return "".join(map(line, words))


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    words: Words
    tone: Tone = ""

    def html(self, assets: Assets) -> str:
        """A paragraph."""
        tone = f' class="{self.tone}"' if self.tone else ""
        return f"<p{tone}>{line(self.words)}</p>\n"


@dataclass(frozen=True)
class Facts:
    """Names and values, as the provenance of a result."""

    facts: Mapping[str, object]

    def html(self, assets: Assets) -> str:
        """A list of definitions."""
        items = (f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in self.facts.items())
        return f"<dl>{''.join(items)}</dl>\n"


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers are right-aligned. Columns of one ``group`` share a heading above."""

    title: str
    numbers: bool = False
    group: str = ""


@dataclass(frozen=True)
class Table:
    """A table that can be sorted by its headings, filtered, and copied as CSV. The first cell of a row names it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Words]]
    name: str = "table"
    """For whoever does not see it."""
    filtered: bool = True
    """Whether the filter of the page may hide its rows."""

    def html(self, assets: Assets) -> str:
        """The table. It can be read without scripts."""
        grouped = any(column.group for column in self.columns)
        heads = "".join(self._head(column) for column in self.columns)
        above = f'<tr class="groups">{self._groups()}</tr>' if grouped else ""
        rows = "".join(f"<tr>{self._row(row)}</tr>\n" for row in self.rows)
        kind = "table" if self.filtered else "table kept"
        return (
            f'<div class="{kind}"><div class="scroll" tabindex="0" role="region" aria-label="{text(self.name)}">'
            f"<table><thead>{above}<tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div></div>\n"
        )

    def _head(self, column: Column) -> str:
        kind = ' class="number"' if column.numbers else ""
        group = f' data-group="{text(column.group)}"' if column.group else ""
        return f'<th scope="col"{kind}{group}>{text(column.title)}</th>'

    def _groups(self) -> str:
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if column.group and found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return "".join(f'<th colspan="{count}">{text(name)}</th>' for name, count in found)

    def _row(self, row: Sequence[Words]) -> str:
        cells = []
        for place, (cell, column) in enumerate(zip(row, self.columns, strict=True)):
            if not place:
                cells.append(f"<th>{line(cell)}</th>")
                continue
            kind = ' class="number"' if column.numbers else ""
            value = cell.value if isinstance(cell, Number) else None
            exact = f' data-value="{value!r}"' if value is not None and math.isfinite(value) else ""
            cells.append(f"<td{kind}{exact}>{line(cell)}</td>")
        return "".join(cells)


@dataclass(frozen=True)
class Svg:
    """A finished picture. It is embedded as an image, so its scripts cannot run and its ids cannot collide."""

    picture: str
    alt: str
    caption: str = ""

    def html(self, assets: Assets) -> str:
        """A figure."""
        coded = base64.b64encode(self.picture.encode(errors="backslashreplace")).decode()
        below = f"<figcaption>{text(self.caption)}</figcaption>" if self.caption else ""
        image = f'<img alt="{text(self.alt)}" src="data:image/svg+xml;base64,{coded}">'
        return f"<figure>{image}{below}</figure>\n"


@dataclass(frozen=True)
class VegaChart:
    """A chart of Vega-Lite, drawn by the page in the colours of its theme. Only pages with one carry Vega."""

    spec: Mapping[str, Any]
    label: str
    """For whoever does not see it."""

    def html(self, assets: Assets) -> str:
        """The place of the chart; its specification is data of the page."""
        place = assets.keep("charts", dict(self.spec))
        assets.needs_vega()
        return (
            f'<div class="chart scroll" data-chart="{place}" role="img" tabindex="0" aria-label="{text(self.label)}">'
            "<noscript><p>The chart is drawn by a script.</p></noscript></div>\n"
        )


@dataclass(frozen=True)
class Fold:
    """Details that open on a click on one line, or by a link to ``id``. ``aside`` is at the end of the line."""

    summary: Words
    body: Sequence[Content]
    id: str = ""
    aside: Sequence[Words] = ()
    filtered: bool = False
    """Whether the filter of the page may hide it."""

    def html(self, assets: Assets) -> str:
        """A ``details`` element."""
        named = f' id="{text(self.id)}"' if self.id else ""
        kind = ' class="item"' if self.filtered else ""
        aside = "".join(f'<span class="aside">{line(words)}</span>' for words in self.aside)
        summary = f'<span class="what">{line(self.summary)}</span>{aside}' if aside else line(self.summary)
        inner = "".join(content.html(assets) for content in self.body)
        return f'<details{named}{kind}><summary>{summary}</summary><div class="inside">{inner}</div></details>\n'
