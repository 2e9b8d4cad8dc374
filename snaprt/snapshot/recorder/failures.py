"""Learns of what ends a program: its uncaught errors, and the signals it is sent.

Whoever had asked for them before still is asked. Only the main thread can set handlers of signals:
where the recorder begins in another, signals are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

_MARK: Final = "_snaprt_recorded"


def mark_recorded(error: BaseException) -> None:
    """Remember that an error has led to a snapshot, so that it does not lead to another."""
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _MARK, True)


def is_recorded(error: BaseException) -> bool:
    """Return whether an error, or one that it came of, has led to a snapshot."""
    visited: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in visited:
        if getattr(following, _MARK, False):
            return True
        visited.add(id(following))
        following = following.__cause__ or following.__context__
    return False


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked = False


def listen_for_uncaught_errors(listener: Any) -> None:
    """Call ``listener.program_failed(error)`` for what ends the program or a thread."""
    global _hooked
    _listeners.add(listener)
    if _hooked:
        return
    _hooked = True
    program_hook, thread_hook = sys.excepthook, threading.excepthook

    def of_program(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        _tell_listeners(error)
        program_hook(kind, error, traceback)

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            _tell_listeners(arguments.exc_value)
        thread_hook(arguments)

    sys.excepthook, threading.excepthook = of_program, of_thread


def _tell_listeners(error: BaseException) -> None:
    for listener in list(_listeners):
        listener.program_failed(error)


_flushes: list[Callable[[], object]] = []
_unfinished: list[Callable[[], bool]] = []
_SECONDS_TO_FINISH: Final = 4.0
_POLL_SECONDS: Final = 0.05
_dumps: list[Callable[[], object]] = []
_stops: list[Callable[[], None]] = []


def before_terminated(
    flush: Callable[[], object], is_unfinished: Callable[[], bool] = lambda: False
) -> bool:
    """Call ``flush`` when SIGTERM comes, before the process ends by it or its own handler runs.

    Args:
        flush: What to call.
        is_unfinished: Whether the program has to go on a little, so that ``flush`` has all to
            flush. It may, for some seconds; a second SIGTERM ends it at once.

    Returns:
        Whether that could be arranged: only in the main thread.
    """
    if not _can_set_handlers():
        return False
    if not _flushes:
        _set_handler(signal.SIGTERM, lambda: [flush() for flush in _flushes], waits=_is_unfinished)
    _flushes.append(flush)
    _unfinished.append(is_unfinished)
    return True


def before_replaced(flush: Callable[[], object]) -> None:
    """Call ``flush`` before ``os.exec*`` and ``os._exit``, where Python calls no exit handlers."""
    for name in ("execv", "execve", "_exit"):  # the other six call one of these
        setattr(os, name, _after(flush, getattr(os, name)))


def _after(flush: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def flush_and_call(*args: Any, **kwargs: Any) -> Any:
        flush()
        return function(*args, **kwargs)

    return flush_and_call


def _is_unfinished() -> bool:
    return any(is_unfinished() for is_unfinished in _unfinished)


def _signal_when_finished(number: int) -> None:
    end = time.monotonic() + _SECONDS_TO_FINISH
    while _is_unfinished() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), number)


def on_user_signal(dump: Callable[[], object]) -> None:
    """Call ``dump`` in a thread when SIGUSR1 comes, even while the main thread waits for a device.

    Python runs handlers between two of the main thread's instructions. Where it hangs in a
    collective there is none, and that is when a flight recorder is asked: so the signal's number
    is taken from the file descriptor that the interpreter writes it to at once.
    """
    if not hasattr(signal, "SIGUSR1") or not _can_set_handlers():
        return
    is_first = not _dumps
    _dumps.append(dump)
    if not is_first:
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if previous != -1:  # an event loop's
        signal.set_wakeup_fd(previous)
        _set_handler(signal.SIGUSR1, _dump, ends=False)
        return
    _set_handler(signal.SIGUSR1, lambda: None, ends=False)
    listener = threading.Thread(
        target=_listen, args=(receiver,), name="snaprt-snapshot-signals", daemon=True
    )
    listener.start()
    own = os.getpid()

    def stop() -> None:
        if os.getpid() == own:  # a forked child shares the socket
            signal.set_wakeup_fd(-1)
            sender.shutdown(socket.SHUT_WR)
            listener.join()

    _stops.append(stop)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def stop_listening() -> None:
    """Wait until what signals have asked for is done, and let no other signal ask; in the end.

    A thread that is still at work when Python ends may take the process down with it.
    """
    while _stops:
        _stops.pop()()


def _listen(receiver: socket.socket) -> None:
    while received := receiver.recv(4096):
        if signal.SIGUSR1 in received:
            _dump()


def _dump() -> None:
    for dump in _dumps:
        dump()


def _can_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set_handler(
    number: signal.Signals,
    act: Callable[[], Any],
    *,
    ends: bool = True,
    waits: Callable[[], bool] = lambda: False,
) -> None:
    """Set a handler that acts, and then does what would have been done without it.

    Args:
        number: The signal. If it is ignored, it stays so; if its handler is not Python's, too.
        act: What to do first.
        ends: Whether the signal ends the process where the program has no handler of its own.
        waits: Whether the first signal of this kind is to wait for something.
    """
    before = signal.getsignal(number)
    if before is None or before is signal.SIG_IGN:
        return

    is_waiting = False

    def handle(received: int, frame: FrameType | None) -> None:
        nonlocal is_waiting
        if not is_waiting and waits():
            is_waiting = True
            threading.Thread(target=_signal_when_finished, args=(received,), daemon=True).start()
            return
        act()
        if callable(before):
            before(received, frame)
        elif ends:
            # As without us: the parent sees a process that the signal has ended.
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, handle)
