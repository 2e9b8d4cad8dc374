"""Shows snaprt's log where XLA's variables ask for it, as XLA shows its own; knows not who logs.

snaprt logs through `logging`, to loggers below ``snaprt``; a program may set these up as any. Only
where TF_CPP_MIN_LOG_LEVEL or TF_CPP_VMODULE ask for more than warnings, or SNAPRT_LOG_FILE for a
file, is there a handler.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from snaprt import settings
from snaprt.host.whole_files import going_on_without_room, refused, writing

_ROOT: Final = Path(__file__).parent.parent
_LETTERS: Final = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
#: What a verbosity of XLA's is here; a higher one is as the highest.
_LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)

#: Modules of PyTorch/XLA that the guides name, and the loggers that say here what those say there.
_TAUGHT: Final = {
    "tensor": ("operations", "execution"),
    "xla_graph_executor": ("compile", "execution"),
    "computation_client": ("compile",),
    "pjrt_computation_client": ("compile",),
}


# What a program logs of its own, it may want at INFO: not each compilation of ours as well. Who
# does want that sets this logger's level.
if logging.getLogger("snaprt").level == logging.NOTSET:
    logging.getLogger("snaprt").setLevel(logging.WARNING)


def follow_environment() -> None:
    """Log what the variables ask for now, and no more what they asked for before.

    Raises:
        UsageError: A variable has a text that it does not allow, or the file cannot be opened.
    """
    verbosities = dict(settings.get("TF_CPP_VMODULE"))
    path = settings.get("SNAPRT_LOG_FILE")
    asks_for_info = settings.get("TF_CPP_MIN_LOG_LEVEL") == 0 or (path and not verbosities)
    formatter = _Formatter(with_thread=settings.get("TF_CPP_LOG_THREAD_ID"))
    _forget()
    if not verbosities and not asks_for_info:
        return
    handler = logging.StreamHandler() if path is None else _file_handler(settings.for_rank(path))
    handler.setFormatter(formatter)
    logging.getLogger("snaprt").addHandler(handler)
    _asked.handler = handler
    if asks_for_info:
        _set_level("snaprt", logging.INFO)
    for name, verbosity in verbosities.items():
        level = _LEVELS[min(verbosity, len(_LEVELS) - 1)]
        for logger in _TAUGHT.get(name, (name,)):
            _set_level(f"snaprt.{logger}", level)


def _file_handler(path: Path) -> logging.Handler:
    elsewhere = "set SNAPRT_LOG_FILE to a file in an existing directory"
    file = _LogFile(path)
    with writing(f"write the log to {path}", elsewhere), going_on_without_room(file.complain):
        file.open()
    return file


class _LogFile(logging.FileHandler):
    """A log file; once it cannot be written to any more, that is said once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)

    def open(self) -> None:
        """Open the file; else the first line of the log does."""
        self.stream = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, and open the file before where there was no room for it until now."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Say what the system refused, in place of a traceback for each line of the log."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.complain(error)
        else:
            super().handleError(record)

    def complain(self, error: OSError) -> None:
        """Say once what the system refused."""
        if self.baseFilename not in _asked.complaints:
            _asked.complaints.add(self.baseFilename)
            with contextlib.suppress(Exception):  # standard error may be closed or full too
                print(refused("SNAPRT_LOG_FILE", self.baseFilename, error, "file"), file=sys.stderr)

    def close(self) -> None:
        """Close the file, even where what it still holds cannot be written."""
        with contextlib.suppress(OSError):
            super().close()


@dataclass
class _Asked:
    """What was set up because the variables asked for it: the handler, and each logger's level."""

    handler: logging.Handler | None = None
    levels: dict[str, int] = field(default_factory=dict)
    complaints: set[str] = field(default_factory=set)  # the files that were said to be refused


_asked: Final = _Asked()


def _set_level(name: str, level: int) -> None:
    logger = logging.getLogger(name)
    _asked.levels.setdefault(name, logger.level)
    logger.setLevel(level)


def _forget() -> None:
    for name, level in _asked.levels.items():
        logging.getLogger(name).setLevel(level)
    _asked.levels.clear()
    if _asked.handler is not None:
        logging.getLogger("snaprt").removeHandler(_asked.handler)
        _asked.handler.close()
        _asked.handler = None


class _Formatter(logging.Formatter):
    """Writes lines as TensorFlow's and XLA's logging does: see tsl/platform/default/logging.cc."""

    def __init__(self, *, with_thread: bool) -> None:
        super().__init__()
        self._with_thread = with_thread

    def format(self, record: logging.LogRecord) -> str:
        """Return ``YYYY-MM-DD HH:MM:SS.ffffff: I path.py:line] message``."""
        when = datetime.datetime.fromtimestamp(record.created)
        thread = f" {threading.get_native_id():7}" if self._with_thread else ""
        path = Path(record.pathname)
        where = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
        text = record.getMessage()
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        letter = _LETTERS.get(record.levelno, "I")
        return f"{when:%Y-%m-%d %H:%M:%S.%f}: {letter}{thread} {where}:{record.lineno}] {text}"
