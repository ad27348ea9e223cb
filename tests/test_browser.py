"""The report in a real browser. Skipped, with the reason, where there is none."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest

from ponderttt import report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SHOWN = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page made from a small project."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("page")
    os.chdir(folder)
    try:
        view = pages.small_view(examples=24)
        pages.build(view)
        report.make(view)
    finally:
        os.chdir(before)
    return (folder / report.OUT).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


class Visit:
    """An open page, what it said and what it asked for."""

    def __init__(
        self, browser: Any, address: str, width: int = 1280, scheme: str = "light"
    ) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def listed(self) -> list[str]:
        return self.page.locator("#list li").all_inner_texts()

    def chosen(self) -> int:
        items = self.page.locator("#list li")
        marks = [items.nth(i).get_attribute("aria-selected") for i in range(items.count())]
        assert marks.count("true") == 1
        return marks.index("true")


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Visit]:
    opened = Visit(browser, address)
    yield opened
    opened.context.close()


def test_no_errors_and_no_requests(visit: Visit, address: str) -> None:
    visit.page.locator("#f-language").select_option("go")
    visit.page.locator("#theme").click()
    assert visit.said == []
    assert visit.asked == [address]


def test_filters(visit: Visit) -> None:
    everything = visit.listed()
    assert len(everything) == 48
    visit.page.locator("#f-language").select_option("go")
    assert len(visit.listed()) == 24
    assert all("go ·" in words for words in visit.listed())
    visit.page.locator("#f-decision").select_option("skip")
    skipped = visit.listed()
    assert 0 < len(skipped) < 24
    assert all("skip ·" in words for words in skipped)
    assert visit.page.locator("#shown").inner_text() == f"{len(skipped)} of 48 chunks"
    parts = []
    for verdict in ("agrees", "missed", "needless"):
        visit.page.locator("#f-oracle").select_option(verdict)
        parts += visit.listed()
        if verdict == "missed":
            assert visit.listed()
            assert "the oracle updates it" in visit.page.locator("#about").inner_text()
    assert sorted(parts) == sorted(skipped)


def test_filters_that_nothing_fits(visit: Visit) -> None:
    visit.page.locator("#f-decision").select_option("skip")
    visit.page.locator("#f-oracle").select_option("needless")
    assert visit.listed() == []
    assert "No chunk fits" in visit.page.locator("#about").inner_text()
    visit.page.locator("#list").focus()
    visit.page.keyboard.press("j")
    visit.page.keyboard.press("ArrowRight")
    assert visit.said == []


def test_keyboard(visit: Visit) -> None:
    page = visit.page
    page.locator("#list").focus()
    for key in ("j", "ArrowDown", "ArrowDown", "k"):
        page.keyboard.press(key)
    assert visit.chosen() == 2
    assert page.locator("#list").get_attribute("aria-activedescendant") == "chunk-2"
    page.keyboard.press("End")
    assert visit.chosen() == 47
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "code"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Home")
    assert "nothing predicts the first token" in page.locator("#readout").inner_text()
    page.keyboard.press("ArrowRight")
    words = page.locator("#readout").inner_text()
    assert "token 2 of 18" in words
    assert all(arm in words for arm in ("base ", "skip ", "update "))


def test_readout_has_the_losses_of_the_table(visit: Visit, address: str) -> None:
    rows = pages.read_tokens(address, "python")
    visit.page.locator("#code").focus()
    visit.page.keyboard.press("Home")
    visit.page.keyboard.press("ArrowRight")
    words = visit.page.locator("#readout").inner_text()
    for arm in ("base", "skip", "update"):
        shown = float(words.split(f"{arm} ")[1].split(",")[0].split(" ")[0])
        assert shown == pytest.approx(rows[0][f"nll_{arm}"][1], abs=0.02)


def test_hostile_text_is_shown_as_text(visit: Visit) -> None:
    words = visit.page.locator("#code").inner_text()
    assert "</script><script>alert(1)</script>" in words
    assert "日本語 🎉" in words
    assert "U+202E" in words
    assert "␀␇␛␡" in words
    assert "<b>python</b>/0.py" in visit.page.locator("#about h3").inner_text()
    assert visit.page.locator("#explorer b").count() == 1  # the readout's own
    assert visit.said == []


def test_shades_follow_the_reference(visit: Visit) -> None:
    shades = "[...document.querySelectorAll('#code span')].map(s => s.className).join()"
    before = visit.page.evaluate(shades)
    assert "help" in before
    assert "harm" in before
    visit.page.locator("#f-reference").select_option("base")
    assert visit.page.evaluate(shades) != before


def test_dark_and_light(browser: Any, address: str) -> None:
    dark = Visit(browser, address, scheme="dark")
    light = Visit(browser, address)
    colours = [visit.page.evaluate(SHOWN) for visit in (dark, light)]
    assert colours[0] != colours[1]
    dark.page.locator("#theme").click()
    assert dark.page.evaluate(SHOWN) == colours[1]
    dark.page.locator("#theme").click()
    assert dark.page.evaluate(SHOWN) == colours[0]
    for visit in (dark, light):
        visit.context.close()


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_sideways_scrolling_of_the_page(browser: Any, address: str, width: int) -> None:
    visit = Visit(browser, address, width=width)
    visit.page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.context.close()


def test_prints(visit: Visit) -> None:
    visit.page.emulate_media(media="print")
    assert not visit.page.locator("nav").is_visible()
    assert visit.page.locator("#t-main").is_visible()
    assert len(visit.page.pdf()) > 10_000
