"""Render the pictures of the README anew: ``python docs/pictures/render.py``.

Runs the demo, and takes a picture of its report page in Chromium, which must be installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent


def main() -> None:
    """Write ``nan.png`` beside this file."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        subprocess.run([sys.executable, "-m", "snaprt", "demo"], cwd=folder, check=True)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto((Path(folder) / "snaprt-demo/nan/nan.html").as_uri())
        page.screenshot(path=HERE / "nan.png")
        browser.close()


if __name__ == "__main__":
    main()
