"""The page of SNAPRT_TRACE in a real browser: headless Chromium; skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from browsing import CONTRASTS, opened_browser

import snaprt


@pytest.fixture(scope="module")
def browser() -> Iterator:
    yield from opened_browser()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "trace"
    with pytest.MonkeyPatch.context() as patch, snaprt.lazy():
        patch.delenv("RANK", raising=False)
        patch.setenv("SNAPRT_TRACE", str(folder))
        x = jnp.linspace(0.0, 1.0, 30).reshape(5, 6)
        for _ in range(3):
            x = jnp.tanh(x @ jnp.ones((6, 6))) + x.sum(1, keepdims=True)
            snaprt.mark_step()
        float(x.sum())
    return folder


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_and_can_be_read(browser, folder, width, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    tab = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    page = (folder / "index.html").as_uri()
    tab.goto(page)
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert complaints == []
    assert requests == [page]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert [one for one in tab.evaluate(CONTRASTS) if one[1] < 4.5] == []
    assert tab.get_by_role("img", name="Graph 1").is_visible()
    context.close()


def test_the_page_works_without_javascript_and_from_the_keyboard(browser, folder):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto((folder / "index.html").as_uri())
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # the first stop is "Skip to the graphs"
    assert tab.url.endswith("#content")
    summary, drawing = tab.locator("summary").first, tab.get_by_role("img", name="Graph 1")
    assert not drawing.is_visible()
    summary.focus()
    tab.keyboard.press("Enter")
    assert drawing.is_visible()
    assert summary.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    context.close()


def test_a_drawing_is_shown_with_its_colors(browser, folder):
    tab = browser.new_page()
    tab.goto(next(folder.glob("0001-*/graph.svg")).as_uri())
    color = "e => getComputedStyle(e).fill"
    assert tab.locator(".operation rect, .output rect").first.evaluate(color) != "rgb(0, 0, 0)"
    assert tab.locator("text.name").first.is_visible()
    tab.close()
