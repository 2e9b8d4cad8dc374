"""A line on a terminal that says that a command is still at work, and how far it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.live import Live
from rich.spinner import Spinner

from snaprt.cli import output

#: A command that is done sooner shows nothing.
AFTER_SECONDS: Final = 2.0


class ProgressLine:
    """What the line says.

    Args:
        what: What the command does, such as ``packing``.
    """

    def __init__(self, what: str) -> None:
        self.text = what
        self._what = what
        self._began = time.monotonic()
        self._spinner = Spinner("dots")

    def done(self, count: int, total: int | None = None) -> None:
        """Say how many things are done, of how many where that is known."""
        self.text = f"{self._what}: {count:,}" + ("" if total is None else f" of {total:,}")

    def __rich__(self) -> RenderableType:
        """Return the line as it is now."""
        self._spinner.update(text=f"{self.text} ({time.monotonic() - self._began:.0f} s)")
        return self._spinner


@contextlib.contextmanager
def showing(what: str) -> Iterator[ProgressLine]:
    """Show a line on stderr for as long as this lasts, once it has lasted two seconds.

    Where stderr is no terminal, nothing is shown. Lines printed meanwhile stay above it.

    Args:
        what: What the command does, such as ``packing``.
    """
    progress = ProgressLine(what)
    if not output.log.is_terminal:
        yield progress
        return
    # Data goes to stdout as it is, also while the line is there.
    live = Live(
        progress,
        console=output.log,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    ended = threading.Event()

    def show() -> None:
        if not ended.wait(AFTER_SECONDS):
            with live:
                ended.wait()

    thread = threading.Thread(target=show, name="snaprt-progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()
