"""A process that is forked before there are threads or devices, and that forks other processes.

Importing JAX takes each new process a second; a forked process has it already. Only Linux signals
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
"""Takes the descriptor of one end of a socket, and serves until the other end is closed."""

_STATUS: Final = struct.Struct("<i")
_FORK: Final = b"f"


class ForkedProcess:
    """A process that a nursery forked, with the interface of `subprocess.Popen`.

    Args:
        pidfd: Its descriptor; closed by this object.
        ended: The pipe from which to read its status after it has ended; closed by this object.
    """

    def __init__(self, pidfd: int, ended: int) -> None:
        self._pidfd = pidfd
        self._ended = ended
        self._status: int | None = None
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the process ends and return its exit status; negative for a signal."""
        if self._status is None:
            content = os.read(self._ended, _STATUS.size)
            with self._lock:
                # A nursery that is gone writes nothing.
                self._status = _STATUS.unpack(content)[0] if content else -signal.SIGKILL
                os.close(self._pidfd)
                os.close(self._ended)
        assert self._status is not None
        return self._status


class Nursery:
    """Forks processes that all run the same function.

    Args:
        serve: The function that each process runs.
    """

    def __init__(self, serve: Serve) -> None:
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise both processes would write the buffered output
        self._process = os.fork()
        if not self._process:
            self._requests.close()
            _leave_after(lambda: _tend(theirs, serve))
        theirs.close()

    def fork(self, connection: int, log: int) -> ForkedProcess | None:
        """Return a new process; None if it cannot be forked.

        Args:
            connection: Descriptor of the socket at which it serves.
            log: Descriptor of the file that takes its output.
        """
        if dict(os.environ) != self._environment:
            return None
        end_reader, end_writer = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._requests, [_FORK], [connection, log, end_writer])
                _, (pidfd,), _, _ = socket.recv_fds(self._requests, len(_FORK), 1)
        except (OSError, ValueError):  # the nursery is gone
            os.close(end_reader)
            return None
        finally:
            os.close(end_writer)
        return ForkedProcess(pidfd, end_reader)

    def close(self) -> None:
        """End the nursery; the processes that it forked continue."""
        self._requests.close()
        os.waitpid(self._process, 0)


_open: Nursery | None = None


@contextlib.contextmanager
def opened(serve: Serve) -> Iterator[None]:
    """Fork processes that run ``serve`` from a nursery, if one can still be made.

    It can be made as long as this process has neither threads nor devices.
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
    """Fork a process for each request, and report when each one ends, until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requesting process decides what to end
    children: dict[int, tuple[int, int]] = {}  # pidfd -> process, pipe to report its end to
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj in children:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, *children.pop(key.fd))
                    continue
                _, descriptors, _, _ = socket.recv_fds(requests, len(_FORK), 3)
                if not descriptors:
                    return
                connection, log, end_writer = descriptors
                process = os.fork()
                if not process:
                    for inherited in (selector, requests):
                        inherited.close()
                    for descriptor in (
                        end_writer,
                        *children,
                        *(pipe for _, pipe in children.values()),
                    ):
                        os.close(descriptor)
                    _serve(serve, connection, log)
                os.close(connection)
                os.close(log)
                pidfd = os.pidfd_open(process)
                children[pidfd] = (process, end_writer)
                selector.register(pidfd, selectors.EVENT_READ)
                socket.send_fds(requests, [_FORK], [pidfd])


def _tell_end(pidfd: int, process: int, end_writer: int) -> None:
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(end_writer, _STATUS.pack(os.waitstatus_to_exitcode(status)))
    os.close(end_writer)
    os.close(pidfd)


def _serve(serve: Serve, connection: int, log: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    _leave_after(lambda: serve(connection))


def _leave_after(work: Callable[[], None]) -> NoReturn:
    """Do some work and leave this process, without running the parent's exit handlers."""
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
