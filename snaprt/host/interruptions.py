"""Errors that the program's own signal handlers raise while our code or JAX's runs.

Python runs a handler between any two instructions of the main thread. What it raises, such as the
``TimeoutError`` of an alarm, is meant for the program, and says nothing of the code it interrupted.
"""

from __future__ import annotations

import signal
import traceback
from types import CodeType
from typing import Any


def raise_if_interrupted(error: BaseException) -> None:
    """Raise ``error`` again if it comes from a signal handler; else return.

    For code that takes any error for a failure of its own.
    """
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


def _code_of(handler: Any) -> CodeType | None:
    while hasattr(handler, "func"):  # a functools.partial
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = getattr(handler, "__call__", None)  # noqa: B004 - its code, not whether it has one
    return getattr(handler, "__code__", None)  # a bound method has that of its function
