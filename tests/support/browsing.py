"""Opens pages in headless Chromium, driven by Playwright; skips where there is none.

pip install playwright && playwright install chromium      # or any Chromium on PATH
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The contrast of each element that has text of its own (WCAG 2.2, success criterion 1.4.3).
CONTRASTS = r"""() => {
  const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const numbers = text => text.match(/[\d.]+/g).map(Number);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = numbers(getComputedStyle(element).backgroundColor);
      if (color.length == 3 || color[3]) return color;
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


def opened_browser() -> Iterator[Any]:
    """Yield a browser, and close it after that."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
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
