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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snaprt import metrics
from snaprt.snapshot.format.leftovers import remove_leftovers
from snaprt.snapshot.format.schema import Contents
from snaprt.snapshot.format.store import store_for
from snaprt.snapshot.format.write import write_snapshot

QUEUE_BYTES = 2 << 30
"""How many bytes of arrays may wait to be written; a larger single snapshot waits alone."""
QUEUE_FILES = 16_384
"""How many files may wait: small ones, whose arrays weigh less than what else is held of them."""
SECONDS_TO_END = 5.0
"""How long a process that is told to end goes on writing."""

_log = logging.getLogger("snaprt.snapshot")


@dataclass(frozen=True)
class _Job:
    run: Callable[[], object]
    nbytes: int


class SnapshotWriter:
    """Writes snapshots one after the other in a thread of its own.

    Args:
        queue_bytes: How many bytes may wait before ``submit`` does.
        queue_files: How many files may.
    """

    def __init__(self, queue_bytes: int = QUEUE_BYTES, queue_files: int = QUEUE_FILES) -> None:
        self._queue_bytes = queue_bytes
        self._queue_files = queue_files
        self._logged: set[object] = set()
        self._cleaned: set[Path] = set()
        self._start_afresh()
        this = weakref.ref(self)

        def after_fork() -> None:
            writer = this()
            if writer is not None:
                writer._start_afresh()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=after_fork)

    def _start_afresh(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._bytes = 0  # of what waits and what is being written
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, path: Path, contents: Callable[[], Contents], nbytes: int) -> None:
        """Queue a snapshot to be written; wait only while the queue is full.

        Args:
            path: The file.
            contents: Called in the writer's thread, once.
            nbytes: About how many bytes of arrays it keeps alive.
        """
        self.call(lambda: self.write(path, contents), nbytes)

    def call(self, work: Callable[[], object], nbytes: int = 0) -> None:
        """Queue ``work`` for the writer's thread; wait only while the queue is full.

        Args:
            work: Called once, with no arguments.
            nbytes: About how many bytes of arrays it keeps alive.
        """
        job = _Job(work, nbytes)
        with self._changed:
            # The writer's own thread must not wait for itself.
            may_wait = threading.current_thread() is not self._thread
            if may_wait and self._is_full(nbytes):
                started = time.perf_counter_ns()
                while self._is_full(nbytes):
                    self._changed.wait()
                metrics.metric_add("SnapshotQueueWait", time.perf_counter_ns() - started)
            if self._has_thread():
                self._jobs.append(job)
                self._bytes += nbytes
                self._unfinished += 1
                self._changed.notify_all()
                return
        job.run()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is written.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether it is.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout)

    def _is_full(self, nbytes: int) -> bool:
        too_large = self._bytes and self._bytes + nbytes > self._queue_bytes
        return bool(too_large) or len(self._jobs) >= self._queue_files

    def end(self, seconds: float = SECONDS_TO_END) -> None:
        """Write what is queued, but not for longer; drop the rest, count it, and say so.

        For a process that is told to end, and killed if it does not.
        """
        if self.flush(seconds):
            return
        with self._changed:
            dropped = list(self._jobs)
            self._jobs.clear()
            self._bytes -= sum(job.nbytes for job in dropped)
            self._unfinished -= len(dropped)
            self._changed.notify_all()
        if dropped:
            metrics.counter_add("SnapshotDropped", len(dropped))
            _log.error(
                "%d snapshots that waited to be written are dropped: the process is told to end, "
                "and %g s were not enough. They are counted (SnapshotDropped).",
                len(dropped),
                seconds,
            )

    def complain(self, error: Exception, what: str = "") -> None:
        """Count a snapshot that could not be made; log it if it is the first for its cause.

        Args:
            error: What was raised.
            what: Which snapshot it is, where that is known.
        """
        metrics.counter_add("SnapshotWriteError")
        system_error = error if isinstance(error, OSError) else error.__cause__
        cause = (type(error), getattr(system_error, "errno", None))
        if cause in self._logged:
            return
        self._logged.add(cause)
        _log.error(
            "a snapshot is lost, the program goes on: %s%s\nThis is said once for each cause; "
            "the counter SnapshotWriteError counts all.",
            f"{what}: " if what and what not in str(error) else "",
            error if str(error) else type(error).__name__,
            # An error of ours says what to do; of any other, only the traceback helps.
            exc_info=None if system_error or hasattr(error, "hint") else error,
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
        self.flush()

    def _work(self) -> None:
        changed = self._changed
        while True:
            with changed:
                changed.wait_for(lambda: bool(self._jobs))
                job = self._jobs.popleft()
            try:
                job.run()
            except Exception as error:
                self.complain(error)
            nbytes = job.nbytes
            del job  # and with it the arrays, before anybody is told that there is room
            with changed:
                self._bytes -= nbytes
                self._unfinished -= 1
                changed.notify_all()

    def write(self, path: Path, contents: Callable[[], Contents]) -> bool:
        """Write a snapshot now, in this thread; return whether that went well."""
        try:
            folder = path.parent
            if folder not in self._cleaned:
                self._cleaned.add(folder)
                remove_leftovers(folder)
            started = time.perf_counter_ns()
            write_snapshot(path, contents(), store_for(folder))
            metrics.metric_add("SnapshotWriteTime", time.perf_counter_ns() - started)
            metrics.metric_add("SnapshotBytes", path.stat().st_size)
            metrics.counter_add("SnapshotsWritten")
        except Exception as error:
            self.complain(error, path.name)
            return False
        return True
