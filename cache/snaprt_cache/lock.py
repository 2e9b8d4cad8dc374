"""One process compiles a program while the others that want it wait: a lock of the system per key.

A lock dies with its process, so nobody waits for the dead; nobody waits longer than a bound either,
and no file system trouble is raised. Also here: what must happen around ``os.fork``, for a child
inherits every lock as it was, those of threads that it does not have included.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from snaprt_cache.errors import LOGGER, CacheError
from snaprt_cache.folder import PRIVATE, Access, Folder, try_lock

#: The folder of the lock files, in the cache's folder.
FLIGHT_FOLDER: Final = "flight"

WAIT: Final = "PersistentCacheWait"
WAIT_SECONDS: Final = "PersistentCacheWaitSeconds"

DEFAULT_WAIT_SECONDS: Final = 600.0
REPORT_AFTER_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 0.05

# What a leader leaves in its lock file when those who wait do so in vain: its program cannot be
# compiled, or not be stored. Without it they would lead and fail one after the other.
_IN_VAIN: Final = b"nothing stored\n"


@dataclass
class LockRole:
    """What a caller is to do about a program that was not in the cache."""

    # Whether the caller compiles while others wait for it. If not, the entry may be in the cache by
    # now; where it is not, the caller compiles for itself.
    leader: bool
    waited_seconds: float = 0.0  # how long it waited for another process or thread
    # For a leader to set: whether the entry was stored. Those who wait take it from the cache then;
    # else each compiles for itself.
    stored: bool = False


class Flight:
    """The locks of one cache; safe for threads, processes and forks. Makes no file before its use.

    Args:
        folder: The cache's folder, in which the lock files get one of their own.
        wait_seconds: How long to wait at most for another process; 0 for not at all.
        on_event: Called when a wait ends, with ``PersistentCacheWait`` and 1, and with
            ``PersistentCacheWaitSeconds`` and the seconds.
        access: The permissions of the lock files, for a directory that users share.
        report_after_seconds: When to tell the user of a wait.
    """

    def __init__(
        self,
        folder: Path,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
        on_event: Callable[[str, float], None] | None = None,
        *,
        access: Access = PRIVATE,
        report_after_seconds: float = REPORT_AFTER_SECONDS,
    ) -> None:
        self._folder = Folder(folder.parent, (folder.name, FLIGHT_FOLDER), access)
        self._wait_seconds = wait_seconds
        self._report_after = report_after_seconds
        self._on_event = on_event
        self._locks: set[int] = set()
        watch_forks(self)

    @contextlib.contextmanager
    def lead(self, digest: str, is_stored: Callable[[], bool]) -> Iterator[LockRole]:
        """Enter as the leader of a key, or when there is nothing more to wait for.

        Args:
            digest: The key's digest.
            is_stored: Returns whether the entry is there. It is asked often: it should be cheap.
        """
        role, lock = self.join(digest, is_stored)
        in_vain = True
        try:
            yield role
            in_vain = not role.stored
        except Exception:
            raise
        except BaseException:  # Ctrl-C says nothing about the program: another may lead.
            in_vain = False
            raise
        finally:
            self.leave(digest, lock, in_vain=in_vain)

    def join(self, digest: str, is_stored: Callable[[], bool]) -> tuple[LockRole, int | None]:
        """Return the caller's role, and the lock to hand to ``leave`` when it has compiled.

        As ``lead``, for callers that compile elsewhere than inside a ``with`` statement.
        """
        if self._wait_seconds <= 0:
            return LockRole(leader=False), None
        wait = _Wait(digest, self._wait_seconds, self._report_after)
        try:
            lock = self._acquire(digest, wait, is_stored)
        except (OSError, CacheError) as error:
            LOGGER.info("compiling without waiting for other processes: %s", error)
            lock = None
        is_leader = False
        try:
            is_leader = lock is not None and not is_stored()
        finally:
            if not is_leader:
                # It came while the lock was taken, and loading it needs no lock. Or Ctrl-C came:
                # this process would wait for itself the next time.
                self.leave(digest, lock, in_vain=False)
                lock = None
        seconds = wait.seconds() if wait.has_waited else 0.0
        if wait.has_waited and self._on_event is not None:
            self._on_event(WAIT, 1)
            self._on_event(WAIT_SECONDS, seconds)
        return LockRole(leader=is_leader, waited_seconds=seconds), lock

    def leave(self, digest: str, lock: int | None, *, in_vain: bool) -> None:
        """Let the others go on.

        Args:
            digest: The key's digest.
            lock: What ``join`` returned.
            in_vain: Whether those who wait will not find the entry, and had better not wait for
                each other either.
        """
        if lock is None or lock not in self._locks:
            return
        self._locks.discard(lock)
        try:
            with contextlib.suppress(OSError, CacheError):
                if in_vain:
                    os.write(lock, _IN_VAIN)
                # While it is locked: whoever opens the name from now on makes a file of its own.
                self._folder.remove(digest)
        finally:  # after Ctrl-C, too
            with contextlib.suppress(OSError):
                # Not only closed: a child that forked just now may hold the file open.
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _acquire(self, digest: str, wait: _Wait, is_stored: Callable[[], bool]) -> int | None:
        """Return the lock; None where there is nothing to wait for, or no more time."""
        while True:
            descriptor = self._folder.open(digest, os.O_RDWR | os.O_CREAT, make=True)
            try:
                while not try_lock(descriptor):
                    if is_stored() or not wait.pause():
                        return None
                if wait.has_waited and (is_stored() or _is_in_vain(descriptor)):
                    return None
                status = self._folder.status(digest)
                # Is it still the file that others would open by its name?
                if status is not None and os.path.samestat(status, os.fstat(descriptor)):
                    os.ftruncate(descriptor, 0)  # what a leader left that was killed as it left
                    self._locks.add(descriptor)
                    lock, descriptor = descriptor, -1
                    return lock
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def before_fork(self) -> None:
        """Locks are the system's: there is nothing to keep still."""

    def after_fork_in_parent(self) -> None:
        """Go on; the locks are still held."""

    def after_fork_in_child(self) -> None:
        """Close the parent's locks, which would outlive the parent here."""
        for lock in self._locks:
            with contextlib.suppress(OSError):
                os.close(lock)
        self._locks = set()


class _Wait:
    """One caller's wait: bounded, and reported once."""

    def __init__(self, digest: str, limit: float, report_after: float) -> None:
        self.has_waited = False
        self._digest = digest[:12]
        self._began = time.monotonic()
        self._limit = limit
        self._report_after = report_after
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def pause(self) -> bool:
        """Sleep a little; return False, and say so, when the wait has been long enough."""
        self.has_waited = True
        waited = self.seconds()
        if waited >= self._limit:
            LOGGER.warning(
                "Compiling program %s in this process too: another process has not finished in "
                "%.0f s (SNAPRT_CACHE_WAIT).",
                *(self._digest, waited),
            )
            return False
        if waited >= self._report_after:
            self._report_after = float("inf")
            LOGGER.warning(
                "Waiting for another process that compiles the same program (%s), up to %.0f s. "
                "SNAPRT_CACHE_WAIT sets this limit; 0 disables waiting.",
                *(self._digest, self._limit),
            )
        time.sleep(min(self._pause_seconds, self._limit - waited))
        self._pause_seconds = min(1.5 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return True


def _is_in_vain(descriptor: int) -> bool:
    return os.pread(descriptor, len(_IN_VAIN), 0) == _IN_VAIN


# Forks.


class ForkAware(Protocol):
    """What must know of forks."""

    def before_fork(self) -> None:
        """Let no other thread be inside anything that a child could not continue."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Take nothing over that belongs to the parent: connections, locks, counts."""


_watching: Final[weakref.WeakSet[ForkAware]] = weakref.WeakSet()
# Those told of the fork in progress: none is collected or added before they are told of its end.
_notified: Final[list[ForkAware]] = []
# Two threads may fork at once.
_one_at_a_time: Final = threading.Lock()


def watch_forks(watcher: ForkAware) -> None:
    """Tell ``watcher`` of every fork for as long as it lives."""
    _watching.add(watcher)


def _before() -> None:
    _one_at_a_time.acquire()
    _notified.extend(_watching)
    for watcher in _notified:
        watcher.before_fork()


def _after_in_parent() -> None:
    while _notified:
        _notified.pop().after_fork_in_parent()
    _one_at_a_time.release()


def _after_in_child() -> None:
    while _notified:
        _notified.pop().after_fork_in_child()
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
