"""Errors that leave JAX, and what raised them; must not know what is done about them."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax._src import core as _core
from jax._src import traceback_util as _traceback_util
from jax._src.api_util import InternalFloatingPointError as _InternalFloatingPointError


@dataclass(frozen=True)
class BoundOperation:
    """A primitive with what it was bound to."""

    primitive: Any
    operands: Sequence[Any]
    params: Mapping[str, Any]


_watch_errors_lock = threading.Lock()
_watched_errors: list[Callable[[BaseException], None]] = []


def watch_errors(seen: Callable[[BaseException], None]) -> None:
    """Call ``seen`` with each error that leaves JAX, before JAX cuts its traceback down.

    Checked with jax 0.10.2 and 0.12.0: ``filter_traceback`` is called by the outermost of JAX's own
    functions that an error passes, unless JAX_TRACEBACK_FILTERING is ``off`` or ``tracebackhide``.
    """
    with _watch_errors_lock:
        if seen in _watched_errors:
            return
        _watched_errors.append(seen)
        if len(_watched_errors) > 1:
            return
        original = _traceback_util.filter_traceback

        @functools.wraps(original)
        def filter_traceback(tb: Any) -> Any:
            error = sys.exc_info()[1]
            if error is not None and error.__traceback__ is tb:
                for one in _watched_errors:
                    one(error)
            return original(tb)

        _traceback_util.filter_traceback = filter_traceback


def failed_operation(error: BaseException) -> BoundOperation | None:
    """Return the innermost primitive that was being bound when an error was raised."""
    found = None
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is _core.Primitive.bind_with_trace.__code__:
            found = at.tb_frame
        at = at.tb_next
    if found is None:
        return None
    names = found.f_locals
    return BoundOperation(names["self"], tuple(names["args"]), dict(names["params"]))


def forbidden_value(error: BaseException) -> str | None:
    """Return ``nan`` or ``inf`` where an error says that JAX's settings forbid such a value.

    Checked with jax 0.10.2 and 0.12.0.
    """
    return error.args[1] if isinstance(error, _InternalFloatingPointError) else None


def raised_inside(error: BaseException) -> bool:
    """Return whether JAX's own code raised an error, not what the user wrote."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] == "jax"
