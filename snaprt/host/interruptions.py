"""What signals interrupt: our code and JAX's, by a handler of the program or by Ctrl-C.

Python runs a handler between any two instructions of the main thread. What it raises, such as the
``TimeoutError`` of an alarm, is meant for the program, and says nothing of the code it interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

#: What a command leaves with after Ctrl-C.
STATUS: Final = 130


@contextlib.contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Have Ctrl-C end the process while something is imported, such as JAX.

    An exception inside of it would be lost, look like a missing library, abort the process, or be
    shown as a traceback.

    What Ctrl-C does to who calls a command from a program of its own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(STATUS))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interruption(error: BaseException) -> bool:
    """Return whether ``error`` comes from a signal handler."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def raise_if_interrupted(error: BaseException) -> None:
    """Raise ``error`` again if it comes from a signal handler; else return.

    For code that takes any error for a failure of its own.
    """
    if is_interruption(error):
        raise error


def _code_of(handler: Any) -> CodeType | None:
    while hasattr(handler, "func"):  # a functools.partial
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = getattr(handler, "__call__", None)  # noqa: B004 - its code, not whether it has one
    return getattr(handler, "__code__", None)  # a bound method has that of its function
