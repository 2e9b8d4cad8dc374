"""The page in a real browser: headless Chromium; skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import CONTRASTS, opened_browser
from sample_reports import HOSTILE, sample_report
from snaprt_replay.report.page import page


@pytest.fixture(scope="module")
def browser() -> Iterator:
    yield from opened_browser()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "one": page([sample_report()]),
        "hostile": page([sample_report(name) for name in HOSTILE[::3]]),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("which", ["one", "hostile"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_and_can_be_read(browser, pages, which, width, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("dialog", lambda dialog: complaints.append(dialog.message))
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(pages[which].as_uri())
    assert complaints == []
    assert requests == [pages[which].as_uri()]
    assert tab.title() != "owned"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    poor = [one for one in tab.evaluate(CONTRASTS) if one[1] < 4.5]
    assert poor == []
    context.close()


def test_the_page_works_without_javascript_and_from_the_keyboard(browser, pages):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(pages["one"].as_uri())
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # the first stop is "Skip to the verdict"
    tab.wait_for_url("**#content")
    summary = tab.locator("summary", has_text="The same in words")
    table = tab.get_by_role("table", name="Instructions around what is at fault")
    assert not table.is_visible()
    summary.focus()
    tab.keyboard.press("Enter")
    assert table.is_visible()
    outline = "e => getComputedStyle(e).outlineStyle"
    assert summary.evaluate(outline) == "solid"
    context.close()


def test_a_screen_reader_finds_landmarks_headings_and_drawings(browser, pages):
    tab = browser.new_page()
    tab.goto(pages["one"].as_uri())
    for role in ("banner", "navigation", "main", "contentinfo"):
        assert tab.get_by_role(role).count() == 1
    assert tab.get_by_role("heading", level=1).count() == 1
    for name in ("ULP distances of loss", "Where loss differs", "NaN and Inf in loss"):
        assert tab.get_by_role("img", name=name).count() == 1
    tab.close()
