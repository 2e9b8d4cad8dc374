"""Decides whether, where and what of an execution is recorded; must not know files or arrays.

Recording is on while ``SNAPRT_DUMP_DIR`` names a directory, or XLA_FLAGS has
``--xla_dump_hlo_snapshots --xla_dump_to=DIR``; both may change at any time. While it is on, a
callback says for each execution and device what to write.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snaprt import metrics, settings
from snaprt.errors import SnaprtError
from snaprt.snapshot.flags import check_flags, compiler_overrides, dump_folder_of, take_over

__all__ = [
    "Callback",
    "check_flags",
    "compiler_overrides",
    "decide",
    "dump_folder",
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


# `os.environ.get` takes half a microsecond for a variable that is not set, and every execution
# asks for two: CPython keeps the variables, encoded, in a dictionary, and changes it in place.
_variables: Any = getattr(os.environ, "_data", os.environ)
_FLAGS_KEY: Any = os.environ.encodekey("XLA_FLAGS") if _variables is not os.environ else "XLA_FLAGS"
_DUMP_KEY: Any = (
    os.environ.encodekey("SNAPRT_DUMP_DIR") if _variables is not os.environ else "SNAPRT_DUMP_DIR"
)

_seen: tuple[Any, Any, Path | None] = (None, None, None)  # both variables, what follows of them


def dump_folder() -> Path | None:
    """Return the directory to record into, or None while recording is off.

    Takes 0.2 us while the environment is as it was at the last call. A setting that cannot be
    used is logged once and counts as off.
    """
    global _seen
    flags, dump = _variables.get(_FLAGS_KEY), _variables.get(_DUMP_KEY)
    seen = _seen
    if flags == seen[0] and dump == seen[1]:
        return seen[2]
    folder: Path | None = None
    try:
        chosen = settings.get("SNAPRT_DUMP_DIR")
        if chosen is None:
            folder = dump_folder_of(os.environ.get("XLA_FLAGS", ""))
        else:
            folder = chosen.absolute()
    except SnaprtError as error:
        _log.error("nothing is recorded: %s", error)
    _seen = (flags, dump, folder)
    return folder
