"""A process that is forked early, before there are threads or devices, and from which others are.

Importing JAX takes a second of each new process; what is forked has it already. Only Linux tells of
the end of a process through a file descriptor, so other systems have no nursery.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from snaprt import jaxapi

Serve = Callable[[int], None]
"""Serves at one end of a socket, given its descriptor, until the other end is gone."""

_STATUS: Final = struct.Struct("<i")
_FORK: Final = b"f"


class ForkedProcess:
    """A process that a nursery has forked, as `subprocess.Popen` shows one.

    Args:
        pidfd: Its descriptor, to be closed by this.
        ended: Where its status is read once it has ended, to be closed by this.
    """

    def __init__(self, pidfd: int, ended: int) -> None:
        self._pidfd = pidfd
        self._ended = ended
        self._status: int | None = None
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End it, if it has not ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Return its exit status once it has ended; negative for a signal."""
        if self._status is None:
            told = os.read(self._ended, _STATUS.size)
            with self._lock:
                # A nursery that is gone tells nothing.
                self._status = _STATUS.unpack(told)[0] if told else -signal.SIGKILL
                os.close(self._pidfd)
                os.close(self._ended)
        assert self._status is not None
        return self._status


class Nursery:
    """Forks processes that all serve in the same way.

    Args:
        serve: What each of them does.
    """

    def __init__(self, serve: Serve) -> None:
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or what it holds would be written by both
        self._process = os.fork()
        if not self._process:
            self._requests.close()
            _leave_after(lambda: _tend(theirs, serve))
        theirs.close()

    def fork(self, connection: int, log: int) -> ForkedProcess | None:
        """Return a new process; None if it cannot be made here and now.

        Args:
            connection: Descriptor of the socket at which it serves.
            log: Descriptor of the file that takes its output.
        """
        if dict(os.environ) != self._environment:
            return None
        ended, tells = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._requests, [_FORK], [connection, log, tells])
                _, (pidfd,), _, _ = socket.recv_fds(self._requests, len(_FORK), 1)
        except (OSError, ValueError):  # the nursery is gone
            os.close(ended)
            return None
        finally:
            os.close(tells)
        return ForkedProcess(pidfd, ended)

    def close(self) -> None:
        """End the nursery; what it has forked lives on."""
        self._requests.close()
        os.waitpid(self._process, 0)


_open: Nursery | None = None


@contextlib.contextmanager
def opened(serve: Serve) -> Iterator[None]:
    """Fork processes that serve in this way from a nursery, where one can still be made.

    That is where this process has neither threads nor devices yet.
    """
    global _open
    is_early = len(sys._current_frames()) == 1 and not jaxapi.backends_are_initialized()
    if not is_early or not _tells_of_ends():
        yield
        return
    before, _open = _open, Nursery(serve)
    try:
        yield
    finally:
        _open.close()
        _open = before


def fork(connection: int, log: int) -> ForkedProcess | None:
    """Return a process of the open nursery, see `Nursery.fork`; None if there is none."""
    return None if _open is None else _open.fork(connection, log)


def _tells_of_ends() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or an old kernel
        return False
    return True


# --- in the nursery ---


def _tend(requests: socket.socket, serve: Serve) -> None:
    """Fork what is asked for, and tell of each end, until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides what to end
    children: dict[int, tuple[int, int]] = {}  # pidfd -> process, where to tell of its end
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj in children:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, *children.pop(key.fd))
                    continue
                _, given, _, _ = socket.recv_fds(requests, len(_FORK), 3)
                if not given:
                    return
                connection, log, tells = given
                process = os.fork()
                if not process:
                    for inherited in (selector, requests):
                        inherited.close()
                    for descriptor in (tells, *children, *(told for _, told in children.values())):
                        os.close(descriptor)
                    _serve(serve, connection, log)
                os.close(connection)
                os.close(log)
                pidfd = os.pidfd_open(process)
                children[pidfd] = (process, tells)
                selector.register(pidfd, selectors.EVENT_READ)
                socket.send_fds(requests, [_FORK], [pidfd])


def _tell_end(pidfd: int, process: int, tells: int) -> None:
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(tells, _STATUS.pack(os.waitstatus_to_exitcode(status)))
    os.close(tells)
    os.close(pidfd)


def _serve(serve: Serve, connection: int, log: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    _leave_after(lambda: serve(connection))


def _leave_after(work: Callable[[], None]) -> NoReturn:
    """Leave this process after some work, without what the first one does at its exit."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
