"""The frame of all pages: what it holds, what it lets out, and that names of users are text."""

from __future__ import annotations

import base64
import html
import json
import re
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import curvlens as cl
from curvlens.report import assets
from curvlens.report.content import Column, Content, Facts, Fold, Link, Mark, Number, Prose, Svg, Table, VegaChart
from curvlens.report.page import Page, Section

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"quoted\" 'twice' & `once`",
    "two\nlines\r\tand \x1b[31m",
    "right-to-left \u202eback",
    "half a surrogate \ud83d",
    "x" * 10_000,
    "' onmouseover='alert(1)",
    "<!-- <script> -->",
)
SPEC = {"mark": "point", "data": {"values": [{"a": 1}]}, "encoding": {"x": {"field": "a", "type": "quantitative"}}}


class Reader(HTMLParser):
    """What a browser makes of a page: elements, attributes, texts, inline scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self._open: tuple[str, str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.inline:
            self._open = (tag, dict(attrs).get("type") or "")
            self.inline[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[0]:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inline[self._open[0]][-1] += data
        else:
            self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def page_of(*body: Content, **more: Any) -> str:
    return Page("Title", [Section("first", "First", "What is seen.", body)], **more).html()


def policy(page: str) -> dict[str, list[str]]:
    (content,) = (a["content"] for tag, a in read(page).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert content is not None
    return {name: values for name, *values in (rule.split() for rule in content.split(";"))}


def hashed(content: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}'"


TABLE = Table([Column("name"), Column("size", numbers=True)], [["a", Number("1.0", "0.1", 1.04)]])
EVERYTHING = (
    Prose(("A ", Mark("strong"), " word, ", Link("a link", "first"), ".")),
    Facts({"seed": 0}),
    TABLE,
    Svg("<svg xmlns='http://www.w3.org/2000/svg'/>", "a picture", "A caption."),
    Fold("More", [Prose("inside"), Fold("Deeper", [TABLE], "deep")], "more", ["aside"], filtered=True),
)


@pytest.mark.parametrize("chart", [False, True])
def test_the_policy_allows_our_scripts_and_styles_and_nothing_else(chart: bool) -> None:
    page = page_of(*EVERYTHING, *([VegaChart(SPEC, "a chart")] if chart else []), filtered="rows")
    allowed, reader = policy(page), read(page)
    assert allowed["default-src"] == ["'none'"]
    assert allowed["base-uri"] == allowed["form-action"] == ["'none'"]
    assert allowed["img-src"] == ["data:"]
    assert set(allowed) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    data, *scripts = reader.inline["script"]
    assert json.loads(data)["schema"] == assets.SCHEMA
    assert len(scripts) == 1 + chart
    assert allowed["script-src"] == [hashed(script) for script in scripts]
    assert allowed["style-src"] == [hashed(style) for style in reader.inline["style"]]
    assert "unsafe" not in str(allowed)
    # The policy refuses attributes with styles and handlers: there must be none.
    assert not [a for _, a in reader.elements if any(name == "style" or name.startswith("on") for name in a)]


def test_nothing_is_fetched_and_no_address_is_on_the_page() -> None:
    page = page_of(*EVERYTHING, provenance={"seed": 0})
    assert "http:" not in page
    assert "https:" not in page
    assert not re.search(r"@import|url\(", page)
    for tag, attributes in read(page).elements:
        assert tag not in ("link", "iframe", "object", "embed", "form", "base")
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or "#").startswith("#")


def test_a_page_with_charts_has_vega_and_one_without_has_not() -> None:
    without, with_chart = page_of(*EVERYTHING), page_of(VegaChart(SPEC, "a chart"), VegaChart(SPEC, "another"))
    assert len(without.encode()) < 40_000
    assert 800_000 < len(with_chart.encode()) < 1_200_000
    assert "vegaEmbed" not in without
    assert data_of(with_chart)["charts"] == [SPEC, SPEC]
    assert "ast: true" in with_chart
    assert "icicle" not in with_chart.replace(assets.vega(), "")


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_stand(name: str) -> None:
    body: list[Content] = [
        Prose((name, Mark(name, "code"), Link(name, name), Number(name, name))),
        Facts({name: name}),
        Table([Column(name, group=name), Column(name, numbers=True)], [[name, name]], name),
        Svg(f"<svg>{html.escape(name)}</svg>", name, name),
        Fold(name, [Prose(name)], name, [name], filtered=True),
        VegaChart({"data": {"values": [{"name": name}]}}, name),
    ]
    made = Page(name, [Section("a", name, name, body)], [Prose(name)], name, {name: name}, name).html()
    plain = page_of(*EVERYTHING, VegaChart(SPEC, "a chart"))
    page, other = read(made), read(plain)
    known = {tag for tag, _ in other.elements} | {"code", "noscript"}
    assert {tag for tag, _ in page.elements} <= known
    assert len(page.inline["script"]) == len(other.inline["script"]) == 3
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [each for each in names if each.startswith("on") or each in ("style", "x")]
    assert data_of(made)["charts"][0]["data"]["values"][0]["name"] == name
    assert data_of(made)["title"] == name
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", made.replace(assets.vega(), ""))
    made.encode()  # half a surrogate is written out
    if name.isprintable() and "\ud83d" not in name:
        assert name in page.texts


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        page_of(VegaChart({"data": {"values": [{"a": float("nan")}]}}, "a chart"))


def test_the_structure_of_a_page() -> None:
    sections = [Section(f"s{i}", f"Section {i}", body=[Prose("text")], folded=i == 3) for i in range(5)]
    made = Page("Title", sections, banner="41 of 816 cells are not measured.", provenance={"seed": 7}).html()
    reader = read(made)
    ids = [a["id"] for _, a in reader.elements if a.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for tag, a in reader.elements if tag == "a"]
    assert targets == ["#main", *(f"#s{i}" for i in range(5))]  # the skip link is the first thing to be reached
    assert all(target is not None and target[1:] in ids for target in targets)
    assert made.index('id="skip"') < made.index("<header>") < made.index('id="contents"') < made.index('id="main"')
    assert '<div id="banner" role="note">41 of 816' in made
    assert [tag for tag, _ in reader.elements].count("details") == 2  # the folded section and the provenance
    assert data_of(made)["provenance"] == {"seed": 7}
    assert 'lang="en"' in made
    assert [tag for tag, _ in reader.elements].count("h1") == 1


def test_one_section_has_no_contents_and_no_banner_where_there_is_nothing_to_say() -> None:
    made = page_of(Prose("text"))
    assert 'id="contents"' not in made
    assert 'id="banner"' not in made
    assert 'id="filter"' not in made


def test_ids_of_sections_are_their_own() -> None:
    for twice in (["a", "a"], ["data"]):
        with pytest.raises(cl.CurvlensError, match="ids of their own"):
            Page("Title", [Section(each, each) for each in twice]).html()


def test_tables_have_numbers_at_the_right_and_exact_values() -> None:
    made = page_of(TABLE)
    assert '<th scope="col" class="number">size</th>' in made
    assert '<td class="number" data-value="1.04">1.0 <span class="faint">± 0.1</span></td>' in made


def test_headings_of_groups_span_their_columns() -> None:
    columns = [Column("name"), *(Column(which, True, group) for group in ("trace", "share") for which in ("a", "b"))]
    made = page_of(Table(columns, [["x", "1", "2", "3", "4"]]))
    assert '<th colspan="1"></th><th colspan="2">trace</th><th colspan="2">share</th>' in made


def test_the_same_contents_are_the_same_bytes() -> None:
    assert page_of(*EVERYTHING) == page_of(*EVERYTHING)


def test_pages_of_all_kinds_have_one_frame(tmp_path: Any) -> None:
    import small
    from curvlens.papers import Effort
    from curvlens.papers.page_html import html as papers

    cl.profile(small.problem(), samples=4).plot(tmp_path / "profile.html")
    cl.eigs(torch.diag(torch.arange(9.0, dtype=torch.float64)), 2).plot(tmp_path / "eigs.html")
    made = [(tmp_path / f"{name}.html").read_text() for name in ("profile", "eigs")]
    for page in (*made, papers([], Effort(), {})):
        assert page.startswith("<!doctype html>\n")
        assert policy(page)["default-src"] == ["'none'"]
        assert data_of(page)["generator"] == "curvlens"
        assert assets.asset("page.css") in page
    assert len(made[0].encode()) < 150_000  # without Vega
