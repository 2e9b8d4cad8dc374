"""Asks the user's callback what of an execution is recorded; must not know files or arrays.

While recording is on (see ``plan.py``), and its conditions hold, a callback says for each execution
and device what to write.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from snaprt import metrics
from snaprt.snapshot.recorder.flags import check_flags, compiler_overrides, take_over

__all__ = [
    "Callback",
    "check_flags",
    "compiler_overrides",
    "decide",
    "register_hlo_snapshot_callback",
    "take_over",
]

Callback = Callable[[str, int, int], str]
"""``callback(name, addressable_device_index, execution_count)`` returns what to write."""

_log = logging.getLogger("snaprt.snapshot")
_NOTHING: frozenset[str] = frozenset()
_ROLES = frozenset(("inputs", "outputs"))


def _record_all(name: str, addressable_device_index: int, execution_count: int) -> str:
    """Record both the inputs and the outputs of every execution: the default callback."""
    return "inputs outputs"


_lock = threading.Lock()
_callback: Callback = _record_all
_complained = False  # about the callback that is registered now


def register_hlo_snapshot_callback(callback: Callback | None) -> Callback:
    """Let ``callback`` decide what is recorded of each execution, while recording is on.

    It is called before each execution, once for each of its addressable devices, as
    ``callback(name, addressable_device_index, execution_count)``: the graph's name, the device's
    place among the executable's addressable devices, and how many executions this executable has
    had on that device before, so 0 at the first.

    It returns a string of words: ``inputs``, ``outputs``, both, or ``''`` to skip the execution.
    If it raises or returns anything else, the execution is not recorded; the first time that is
    logged (logger ``snaprt.snapshot``), every time it is counted (``SnapshotCallbackError``).

    Args:
        callback: The function, or None for the default, which records everything.

    Returns:
        The callback that it replaces.
    """
    global _callback, _complained
    with _lock:
        before = _callback
        _callback = _record_all if callback is None else callback
        _complained = False
    return before


def records_all() -> bool:
    """Return whether the callback is the default one, so that it need not be asked."""
    return _callback is _record_all


def decide(name: str, device_index: int, count: int) -> frozenset[str]:
    """Ask the callback what to write of an execution on one device: ``inputs``, ``outputs``."""
    callback = _callback
    try:
        answer = callback(name, device_index, count)
    except Exception as error:
        _complain(callback, "failed", error)
        return _NOTHING
    words = frozenset(answer.split()) if isinstance(answer, str) else None
    if words is not None and words <= _ROLES:
        return words
    _complain(callback, f"returned {answer!r:.200}", None)
    return _NOTHING


def _complain(callback: Callback, what: str, error: Exception | None) -> None:
    global _complained
    metrics.counter_add("SnapshotCallbackError")
    with _lock:
        if _complained:
            return
        _complained = True
    _log.error(
        "the snapshot callback %r %s; this execution is not recorded. It should return '', "
        "'inputs', 'outputs' or 'inputs outputs'. This is said once.",
        callback,
        what,
        exc_info=error,
    )
