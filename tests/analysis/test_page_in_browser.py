"""The page of an analysis in a browser: it draws, answers, prints, and lets nothing out."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import documents
from curvlens.analysis.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "<img src=x onerror=alert(1)> \"'& $& \u202e\n" + "x" * 10_000
DRAWN = "[...document.querySelectorAll('[data-chart]')].every((place) => place.querySelector('svg'))"


def missing(why: str) -> None:
    """Skip these tests, or fail them where a browser must be there."""
    text = f"{why} To run these tests: pip install -e '.[dev]', and install Chromium (apt-get install chromium)."
    if os.environ.get("CURVLENS_BROWSER") == "required":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        missing("playwright is not installed.")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing(f"No browser found among {', '.join(BROWSERS)}.")
    with playwright.sync_playwright() as running:
        # --no-sandbox: Chromium refuses to start as root without it, and the page is our own.
        quiet = ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage")
        flags = ["--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in quiet)]
        started = running.chromium.launch(executable_path=path, args=flags)
        yield started
        started.close()


class Seen:
    """A page in a tab, with everything it logged and asked for."""

    def __init__(self, browser: Any, file: Path, place: str = "", **settings: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **settings})
        self.tab = self.context.new_page()
        self.logged: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.logged.append(message.text))
        self.tab.on("pageerror", lambda error: self.logged.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.on("dialog", lambda dialog: self.logged.append(f"dialog {dialog.message}"))
        self.tab.goto(f"{file.as_uri()}{place}")

    def drawn(self) -> Seen:
        return self.until(DRAWN)

    def until(self, condition: str) -> Seen:
        """Waits for a condition. Asked from here: the policy of the page lets nothing be evaluated inside."""
        for _ in range(200):
            if self.tab.evaluate(condition):
                return self
            self.tab.wait_for_timeout(50)
        raise AssertionError(f"{condition} is not true after 10 s; the page logged {self.logged}")

    def cell(self, name: str) -> Any:
        return self.tab.locator(f'.heat .map .cell[aria-label^="{name}:"]')

    def colour(self, selector: str, what: str = "backgroundColor") -> str:
        colour: str = self.tab.evaluate(f"(s) => getComputedStyle(document.querySelector(s)).{what}", selector)
        return colour

    def width(self) -> int:
        width: int = self.tab.evaluate("document.documentElement.scrollWidth")
        return width


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    contents = {
        "plain": documents.document(),
        "large": documents.document(n_layer=38, spectra=True),
        "hostile": documents.document(name=HOSTILE, block=HOSTILE, token=HOSTILE),
    }
    for name, content in contents.items():
        (folder / f"{name}.html").write_text(page(content))
    return {name: folder / f"{name}.html" for name in contents}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    """Opens a page. Whatever a test does with it, nothing is logged and no request leaves."""
    seen: list[Seen] = []

    def open_page(name: str = "plain", place: str = "", **settings: Any) -> Seen:
        seen.append(Seen(browser, files[name], place, **settings))
        return seen[-1]

    yield open_page
    for each in seen:
        asked = [url for url in each.asked if not url.startswith(("file:", "data:"))]
        each.context.close()
        assert each.logged == []
        assert asked == []


def test_every_chart_is_drawn_and_none_is_wider_than_the_page(opened: Any) -> None:
    seen = opened().drawn()
    assert seen.tab.locator("[data-chart]").count() == 15
    assert seen.tab.locator("[data-chart] svg path").count() > 100
    assert seen.width() == 1400


@pytest.mark.parametrize("name", ["plain", "large", "hostile"])
def test_a_narrow_page_does_not_scroll_sideways(opened: Any, name: str) -> None:
    seen = opened(name, viewport={"width": 400, "height": 800}).drawn()
    seen.tab.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    assert seen.width() == 400


def test_the_heat_map_switches_operator_and_quantity(opened: Any) -> None:
    seen = opened()
    words = seen.tab.locator(".heat .words")

    def press(name: str) -> None:
        seen.tab.locator(f".heat button[data-value='{name}']").click()

    assert words.inner_text().startswith("Gauss–Newton part: trace")
    before = seen.cell("embed").evaluate("(cell) => cell.style.backgroundColor")
    press("H")
    assert "18 of 19 cells measured" in words.inner_text()
    assert seen.cell("embed").evaluate("(cell) => cell.style.backgroundColor") == before  # one scale
    assert "missing" in seen.cell("unembed").get_attribute("class")
    press("F")
    assert seen.cell("embed").evaluate("(cell) => cell.style.backgroundColor") != before
    assert seen.tab.locator(".heat button[data-value='norm']").is_enabled()
    press("bottom")  # only H has it
    assert words.inner_text().startswith("Hessian: λ_min")
    assert seen.tab.locator(".heat button[data-value='G']").is_disabled()
    title = seen.cell("h.0.attn.q").get_attribute("title")
    assert 'cl.eigs(cl.hessian(problem)["h.0.attn.q"], ends="smallest")' in title


def test_errors_are_seen_on_cells(opened: Any) -> None:
    seen = opened()
    kinds = [seen.cell(f"h.0.{role}").get_attribute("class") for role in ("norm1", "attn.q", "attn.k")]
    assert kinds == ["cell", "cell unsure", "cell guess"]
    assert "(exact)" in seen.cell("embed").get_attribute("aria-label")


def test_arrow_keys_walk_and_enter_opens(opened: Any) -> None:
    seen = opened()
    name_here = "document.activeElement.getAttribute('aria-label')?.split(':')[0]"
    seen.cell("h.0.attn.q").focus()
    walked = []
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowLeft", "ArrowLeft"):
        seen.tab.keyboard.press(key)
        walked.append(seen.tab.evaluate(name_here))
    assert walked == ["h.1.attn.q", "h.1.attn.k", "h.0.attn.k", "h.0.attn.q", "embed", "embed"]
    seen.tab.keyboard.press("Enter")
    assert seen.tab.locator(".drawer h3").inner_text() == "embed, 100 parameters"
    seen.tab.keyboard.press("Escape")
    assert seen.tab.locator(".drawer h3").count() == 0
    assert seen.tab.locator(".heat .map .cell[tabindex='0']").count() == 1


def test_a_link_opens_the_drawer_of_a_block_and_a_click_changes_the_address(opened: Any) -> None:
    seen = opened(place="#h.0.attn.q;theme=dark")
    drawer = seen.tab.locator(".drawer")
    assert drawer.locator("h3").inner_text() == "h.0.attn.q, 100 parameters"
    assert 'cl.trace(cl.ggn(problem)["h.0.attn.q"])' in drawer.inner_text()
    assert "Trace of G by head" in drawer.inner_text()
    seen.cell("h.1.mlp.up").click()
    assert seen.tab.url.endswith("#h.1.mlp.up;theme=dark")
    seen.cell("h.1.mlp.up").click()
    assert drawer.inner_text() == ""
    seen.tab.evaluate("location.hash = '#h.0.norm1'")
    seen.until("document.querySelector('.drawer h3')?.textContent.startsWith('h.0.norm1')")


@pytest.mark.parametrize("place", ["#100%", "#%ff", "#no.such.block", "#"])
def test_an_unknown_place_is_no_error(opened: Any, place: str) -> None:
    assert opened(place=place).tab.locator(".drawer h3").count() == 0


def test_links_open_folds(opened: Any) -> None:
    seen = opened(place="#cost")
    assert seen.tab.locator("#cost > details").get_attribute("open") is not None
    assert seen.tab.locator("#noise > details").get_attribute("open") is None
    seen.tab.locator("#start a[href='#spectrum']").click()
    assert seen.tab.evaluate("Math.abs(document.getElementById('spectrum').getBoundingClientRect().top) < 120")
    seen.tab.locator("#contents a[href='#noise']").click()
    seen.until("document.querySelector('#noise > details').open")


def test_the_filter_dims_cells_and_hides_rows_of_blocks_only(opened: Any) -> None:
    seen = opened()
    seen.tab.locator("#filter input").fill("attn.q")
    assert seen.tab.locator(".heat .map .cell.out").count() == 17
    assert seen.tab.locator(".heat .map .cell:not(.out)").count() == 2
    assert seen.tab.locator("#cells tbody tr:visible").count() == 2
    assert seen.tab.locator("#cost tbody tr[hidden]").count() == 0
    seen.tab.locator(".heat button[data-value='H']").click()
    assert seen.tab.locator(".heat .map .cell.out").count() == 17
    seen.tab.locator("#filter input").fill("")
    assert seen.tab.locator(".heat .map .cell.out").count() == 0


def test_tables_are_copied_as_csv_and_sorted(opened: Any) -> None:
    seen = opened(permissions=["clipboard-read", "clipboard-write"])
    seen.tab.locator("#cells > summary").click()
    seen.tab.locator("#cells thead tr:last-child button").nth(1).click()
    seen.tab.locator("#cells .copy").click()
    seen.until("document.querySelector('#cells .copy').textContent === 'Copied'")
    copied = seen.tab.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[0].startswith("block,trace H,trace G,trace F,Frobenius norm H")
    assert copied[1].startswith("embed,3.0,3.0,")
    assert len(copied) == 1 + 19


def test_the_theme_changes_page_and_charts(opened: Any) -> None:
    seen = opened(color_scheme="light").drawn()
    ink = "[data-chart] text[fill='#3b4252']"
    light = seen.colour("body"), seen.colour(ink, "fill")
    seen.tab.locator("#tools button", has_text="Dark").click()
    dark = seen.colour("body"), seen.colour(ink, "fill")
    assert light == ("rgb(255, 255, 255)", "rgb(59, 66, 82)")
    assert dark == ("rgb(21, 23, 27)", "rgb(213, 218, 227)")
    assert seen.tab.url.endswith(";theme=dark")


def test_a_dark_page_prints_light_with_all_folds_open(opened: Any) -> None:
    seen = opened(place="#;theme=dark", color_scheme="dark").drawn()
    assert seen.colour("body") == "rgb(21, 23, 27)"
    seen.tab.emulate_media(media="print")
    assert seen.colour("body") == "rgb(255, 255, 255)"
    assert seen.colour("[data-chart] text[fill='#3b4252']", "fill") == "rgb(59, 66, 82)"
    assert not seen.tab.locator("#contents").is_visible()
    seen.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.tab.locator("details:not([open])").count() == 0
    assert seen.tab.locator("#cost table").is_visible()
    seen.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.tab.locator("#cost > details").get_attribute("open") is None
    assert len(seen.tab.pdf()) > 10_000


def test_the_icicle_is_no_taller_than_a_window_and_prints_no_label_that_its_cell_cuts(opened: Any) -> None:
    seen = opened().drawn()
    seen.tab.set_viewport_size({"width": 1400, "height": 5000})
    assert seen.tab.locator(".icicle .panes").bounding_box()["height"] <= 640
    seen.tab.emulate_media(media="print")
    cut = """[...document.querySelectorAll(".icicle .cell > .first")].filter((label) => {
        const cell = label.parentElement.getBoundingClientRect();
        return label.checkVisibility() && (cell.height < label.offsetHeight || cell.width < 56);
    }).length"""
    for width in (1400, 700, 500):
        seen.tab.set_viewport_size({"width": width, "height": 900})
        assert seen.tab.evaluate(cut) == 0


def test_hostile_names_are_text_and_leave_the_layout(opened: Any) -> None:
    seen = opened("hostile").drawn()
    assert seen.tab.locator("img").count() == 0
    assert seen.width() == 1400
    assert seen.tab.locator("h1").bounding_box()["height"] < 100
    first = seen.tab.locator(".heat .map .cell").first
    assert "<img src=x onerror=alert(1)>" in first.get_attribute("aria-label")
    first.click()
    assert seen.tab.locator(".drawer h3").bounding_box()["height"] < 120
    lines = seen.tab.locator(".drawer code").all_inner_texts()
    assert len(lines) > 3
    assert [line for line in lines if "by=" not in line and "<img src=x" not in line] == []
    assert seen.tab.locator(".drawer").bounding_box()["height"] < 1500
    seen.tab.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    assert max(row.bounding_box()["height"] for row in seen.tab.locator("#cells tbody tr").all()) < 100
    assert seen.tab.evaluate("document.documentElement.scrollHeight") < 20_000


def test_the_drawer_has_spectrum_profile_heads_and_a_line_for_each(opened: Any) -> None:
    seen = opened(place="#h.0.attn.q")
    drawer = seen.tab.locator(".drawer")
    parts = drawer.locator(".part")
    assert parts.locator("h4").all_inner_texts() == [
        "Spectrum of H", "Trace of G by head", "Functional part of its modules",
    ]  # fmt: skip
    assert parts.nth(1).locator("svg path.line").get_attribute("d").count("H") == 64
    assert "Effective rank (Σ|λ|)²/Σλ² 17.2, negative share of Σ|λ| 12 %" in parts.nth(1).inner_text()
    widths = [bar.bounding_box()["width"] for bar in parts.nth(2).locator("li i").all()]
    assert widths[1] / widths[0] == pytest.approx(0.2 / 0.3, abs=0.01)
    assert "h.0.attn (Attention)" in parts.nth(3).inner_text()
    assert "4 ± 1 %" in parts.nth(3).inner_text()
    assert parts.locator("code").all_inner_texts() == [
        'cl.density(cl.hessian(problem)["h.0.attn.q"])',
        'cl.trace(cl.ggn(problem), by="head")',
        'cl.profile(problem)["h.0.attn.q"]',
    ]
    seen.cell("h.0.norm1").click()  # has neither spectrum nor heads
    assert parts.locator("h4").all_inner_texts() == ["Functional part of its modules"]


def test_every_number_of_a_drawer_has_its_line(opened: Any) -> None:
    seen = opened(place="#h.0.attn.q")
    lines = seen.tab.locator(".drawer .lines code")
    cells = documents.document()["cells"]
    for letter, of in (("H", "hessian"), ("G", "ggn"), ("F", "functional")):
        seen.tab.locator(f".heat button[data-value='{letter}']").click()
        found = lines.all_inner_texts()
        assert len(found) == len(cells[letter])
        assert all(f'cl.{of}(problem)["h.0.attn.q"]' in line for line in found)
        assert f'cl.trace(cl.{of}(problem)["h.0.attn.q"]) / 100' in found
    seen.tab.locator(".heat button[data-value='mean']").click()
    assert lines.first.inner_text().endswith("/ 100")  # the chosen quantity comes first


def test_labels_of_a_drawer_are_words_on_a_narrow_page(opened: Any) -> None:
    seen = opened(place="#h.0.attn.q", viewport={"width": 400, "height": 800})
    labels = seen.tab.locator(".drawer tr > th:first-child").all()
    assert min(label.bounding_box()["width"] for label in labels) > 70
    assert seen.width() == 400


def test_three_hundred_blocks_open_quickly(opened: Any) -> None:
    seen = opened("large")
    assert seen.tab.locator(".heat .map .cell").count() == 307
    loaded = seen.tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert loaded < 5000  # milliseconds, on a busy machine; 600 on a quiet one
    seen.drawn()
    assert seen.width() == 1400
