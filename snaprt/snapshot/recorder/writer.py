"""The thread that writes snapshots while the program goes on.

The queue is bounded: a program that records faster than its disk can write waits, and the wait is
counted. What is queued is written before the process ends; a forked child starts with an empty
queue and a thread of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from snaprt import jaxapi, metrics
from snaprt.host.interruptions import raise_if_interrupted
from snaprt.host.memory import available_bytes
from snaprt.host.whole_files import remove_leftovers
from snaprt.snapshot.format.schema import Contents
from snaprt.snapshot.format.store import store_for
from snaprt.snapshot.format.write import Written, write_file, write_parts

QUEUE_BYTES = 2 << 30
"""How many bytes of arrays may wait to be written, if nothing else is asked for; and more ..."""
MEMORY_SHARE = 0.25
"""... while they are at most this share of the memory that is free."""
QUEUE_FILES = 16_384
"""How many files may wait: small ones, whose arrays weigh less than what else is held of them."""
SECONDS_TO_END = 5.0
"""How long a process that is told to end goes on writing."""

_log = logging.getLogger("snaprt.snapshot")
_Result = TypeVar("_Result", int, Written)


class _HasThread(Protocol):
    def start_afresh(self) -> None: ...


def afresh_in_children(part: _HasThread) -> None:
    """Let a part start afresh in forked children, which have none of its threads."""
    this = weakref.ref(part)

    def after_fork() -> None:
        alive = this()
        if alive is not None:
            alive.start_afresh()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=after_fork)


def _free_bytes(device: jaxapi.Device | None) -> int:
    """Return how many bytes are free on the host, and on a device whose memory JAX knows."""
    statistics = (device.memory_stats() if device is not None else None) or {}
    free = available_bytes()
    if "bytes_limit" in statistics and "peak_bytes_in_use" in statistics:
        # What the program has used once, it uses again.
        free = min(free, statistics["bytes_limit"] - statistics["peak_bytes_in_use"])
    return free


class SnapshotWriter:
    """Writes snapshots one after the other in a thread of its own.

    Attributes:
        queue_bytes: How many bytes of arrays may wait; a larger single snapshot waits alone. None
            for `QUEUE_BYTES`, or more where there is memory.
    """

    def __init__(self, queue_bytes: int | None = None, queue_files: int = QUEUE_FILES) -> None:
        self.queue_bytes = queue_bytes
        self._queue_files = queue_files
        self._logged: set[object] = set()
        self._cleaned: set[Path] = set()
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Queue nothing, with no thread."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()  # with their bytes
        self._bytes = 0  # of what waits and what is being written
        self._unfinished = 0
        self._awaiting_room = 0  # threads
        self._awaiting_end = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call(
        self, work: Callable[[], object], nbytes: int = 0, device: jaxapi.Device | None = None
    ) -> None:
        """Queue ``work`` for the writer's thread; wait only while the queue is full.

        Called in that thread, it is done at once.

        Args:
            work: Called once, with no arguments.
            nbytes: About how many bytes of arrays it keeps alive.
            device: Where these may lie, if not in the memory of the host.
        """
        if threading.current_thread() is self._thread:  # which must not wait for itself
            self._do(work)
            return
        with self._lock:  # which takes a third of what the condition takes
            if self._is_full(nbytes, device):
                started = time.perf_counter_ns()
                self._awaiting_room += 1
                try:
                    while self._is_full(nbytes, device):
                        self._changed.wait()
                finally:
                    self._awaiting_room -= 1
                metrics.metric_add("SnapshotQueueWait", time.perf_counter_ns() - started)
            if self._has_thread():
                self._jobs.append((work, nbytes))
                self._bytes += nbytes
                self._unfinished += 1
                if len(self._jobs) == 1:  # else the thread is not waiting
                    self._changed.notify_all()
                return
        work()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is written, at most ``timeout`` seconds; did it end?"""
        with self._changed:
            self._awaiting_end += 1
            try:
                return self._changed.wait_for(lambda: not self._unfinished, timeout)
            finally:
                self._awaiting_end -= 1

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for what is being written."""
        return bool(self._awaiting_room or self._awaiting_end)

    def _is_full(self, nbytes: int, device: jaxapi.Device | None) -> bool:
        if len(self._jobs) >= self._queue_files:
            return True
        queued = self._bytes + nbytes
        if not self._bytes:
            return False
        if self.queue_bytes is not None:
            return queued > self.queue_bytes
        return queued > QUEUE_BYTES and queued > MEMORY_SHARE * _free_bytes(device)

    def end(self, seconds: float = SECONDS_TO_END) -> None:
        """Write what is queued, but not for longer; drop the rest, count it, and say so.

        For a process that is told to end, and killed if it does not.
        """
        if not self.flush(seconds):
            self._drop(f"the process was told to end, and {seconds:g} s were not enough")

    def _drop(self, why: str) -> None:
        with self._changed:
            dropped = list(self._jobs)
            self._jobs.clear()
            self._bytes -= sum(nbytes for _, nbytes in dropped)
            self._unfinished -= len(dropped)
            self._changed.notify_all()
        if dropped:
            metrics.counter_add("SnapshotDropped", len(dropped))
            _log.error(
                "dropping %d snapshots that were waiting to be written: %s. They are counted "
                "(SnapshotDropped).",
                len(dropped),
                why,
            )

    def sum_up(self) -> None:
        """Say how many snapshots were lost, where more were than `complain` has shown."""
        lost = int(metrics.counter_value("SnapshotWriteError") or 0)
        if lost > len(self._logged):
            _log.error("%d snapshots were lost in all (SnapshotWriteError)", lost)

    def complain(self, error: Exception, what: str = "") -> None:
        """Count a snapshot that could not be made; log it if it is the first for its cause."""
        raise_if_interrupted(error)
        metrics.counter_add("SnapshotWriteError")
        system_error = error if isinstance(error, OSError) else error.__cause__
        cause = (type(error), getattr(system_error, "errno", None))
        if cause in self._logged:
            return
        self._logged.add(cause)
        _log.error(
            "lost a snapshot; the program continues: %s%s\nShown once per cause; the counter "
            "SnapshotWriteError counts all.",
            f"{what}: " if what and what not in str(error) else "",
            error if str(error) else type(error).__name__,
            # An error of ours says what to do, and the device's what it could not compute; of any
            # other, only the traceback helps.
            exc_info=None
            if system_error
            or hasattr(error, "hint")
            or isinstance(error, jax.errors.JaxRuntimeError)
            else error,
        )

    def _has_thread(self) -> bool:
        """Start the thread if there is none; while Python shuts down, none takes new work."""
        if self._is_closed:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="snaprt-snapshot-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
            # Now, not at import: what is registered later runs earlier, and JAX must be alive.
            atexit.register(self._close)
        return True

    def _close(self) -> None:
        """Write what is queued, and leave nothing to the thread from here on.

        A thread that is inside JAX when Python ends takes the whole process down.
        """
        self._is_closed = True
        try:
            self.flush()
        except KeyboardInterrupt:  # the user does not want to wait; what has begun soon ends
            self._drop("Ctrl-C was pressed while the process waited for them at its end")
            self.flush()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.complain(error)

    def _work(self) -> None:
        lock, changed = self._lock, self._changed
        while True:
            with lock:
                while not self._jobs:
                    changed.wait()
                work, nbytes = self._jobs.popleft()
            self._do(work)
            del work  # and with it the arrays, before anybody is told that there is room
            with lock:
                self._bytes -= nbytes
                self._unfinished -= 1
                # Who waits for the last one is not woken for each: it would stop this thread.
                if not self._unfinished or self._awaiting_room:
                    changed.notify_all()

    def write(self, path: Path, contents: Callable[[], Contents]) -> Written | None:
        """Write a snapshot now, in this thread; return None where that went wrong."""
        folder = path.parent
        return self._written(
            folder, path.name, lambda: write_file(path, contents(), store_for(folder))
        )

    def write_parts(self, folder: Path, name: str, parts: Callable[[], Sequence[Any]]) -> bool:
        """Write a snapshot that is given in parts now; return whether that went well."""
        return bool(self._written(folder, name, lambda: write_parts(str(folder), name, parts())))

    def _written(self, folder: Path, name: str, write: Callable[[], _Result]) -> _Result | None:
        try:
            if folder not in self._cleaned:
                self._cleaned.add(folder)
                remove_leftovers(folder)
            started = time.perf_counter_ns()
            with jaxapi.span("record", file=name):
                result = write()
            metrics.metric_add("SnapshotWriteTime", time.perf_counter_ns() - started)
            length = result if isinstance(result, int) else result.length
            metrics.metric_add("SnapshotBytes", length)
            metrics.counter_add("SnapshotsWritten")
        except Exception as error:
            self.complain(error, name)
            return None
        return result
