"""The page in a real browser: headless Chromium, driven by Playwright; skipped where there is none.

pip install playwright && playwright install chromium      # or any Chromium on PATH
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_reports import HOSTILE, sample_report
from snaprt_replay.report.page import page

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The contrast of each element that has text of its own (WCAG 2.2, success criterion 1.4.3).
CONTRASTS = r"""() => {
  const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const numbers = text => text.match(/[\d.]+/g).map(Number);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length == 3 || colour[3]) return colour;
    }
    return [255, 255, 255];
  };
  const hasText = element => !element.closest('svg') && element.checkVisibility()
    && [...element.childNodes].some(node => node.nodeType == 3 && node.data.trim());
  return [...document.body.querySelectorAll('*')].filter(hasText).map(element => {
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))];
    return [element.className || element.tagName, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)];
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    # Chromium's sandbox does not start as root, as in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        try:
            opened = driver.chromium.launch(executable_path=found, args=arguments)
        except playwright.Error:
            pytest.skip("there is no Chromium, neither on PATH nor Playwright's own")
        yield opened
        opened.close()


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
    assert tab.url.endswith("#content")
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
    for name in ("Distances in ULP of loss", "Where loss differs", "NaN and Inf in loss"):
        assert tab.get_by_role("img", name=name).count() == 1
    tab.close()
